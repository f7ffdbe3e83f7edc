//! The `[rollout]` section of a run file, and the command line that it makes for each server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::algorithm::{Problems, SettingErrors};

/// Which server's way of being started and fed is spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    #[default]
    Vllm,
    Sglang,
}

/// Which nodes sample on servers, and how those are started, watched, fed and stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Nodes given to servers, the last of the job; 0: the built-in engine samples on the nodes that train.
    pub nodes: usize,
    pub server: ServerKind,
    /// GPUs of one server. A node runs as many servers as fit on its GPUs.
    pub tensor_parallel: usize,
    /// Words of the command; empty: the usual one of `server`. `{model}`, `{host}`, `{port}`, `{tensor_parallel}` and `{gpus}` (the
    /// numbers of the server's GPUs, as 0,1) are filled in.
    pub command: Vec<String>,
    /// Port of a node's first server; the others take those that follow.
    pub port: u16,
    /// From the start of a process to its first healthy answer, at most.
    pub start_seconds: f64,
    /// Loading of new weights, at most.
    pub load_seconds: f64,
    /// Health is asked for this often.
    pub health_seconds: f64,
    /// A ready server without a healthy answer for so long is restarted.
    pub unhealthy_seconds: f64,
    /// From SIGTERM to SIGKILL.
    pub stop_seconds: f64,
    /// Restarts of each server over the whole run.
    pub max_restarts: usize,
    /// Bytes of each server's output kept on disk: the newest.
    pub log_bytes: u64,
    /// Added to the environment of every server.
    pub environment: BTreeMap<String, String>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            nodes: 0,
            server: ServerKind::Vllm,
            tensor_parallel: 1,
            command: Vec::new(),
            port: 8100,
            start_seconds: 1800.0,
            load_seconds: 900.0,
            health_seconds: 5.0,
            unhealthy_seconds: 120.0,
            stop_seconds: 15.0,
            max_restarts: 3,
            log_bytes: 64 << 20,
            environment: BTreeMap::new(),
        }
    }
}

/// Tells a server which GPUs are its own; set by us, so that no two servers share one.
pub(super) const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// What `{...}` in a command may name.
const PLACEHOLDERS: [&str; 5] = ["model", "host", "port", "tensor_parallel", "gpus"];

const SHORTEST_SECONDS: f64 = 0.01;
const LONGEST_SECONDS: f64 = 1e6;
const FEWEST_LOG_BYTES: u64 = 1 << 16;

impl Settings {
    /// What can be said without knowing the cluster.
    ///
    /// # Errors
    /// All keys that make no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.tensor_parallel > 0, "tensor_parallel", self.tensor_parallel, "give at least 1");
        problems.unless(self.port > 0, "port", self.port, "give a port from 1 to 65535, since others must know it");
        let remedy = format!("give seconds from {SHORTEST_SECONDS} to {LONGEST_SECONDS}");
        for (key, seconds) in [
            ("start_seconds", self.start_seconds),
            ("load_seconds", self.load_seconds),
            ("health_seconds", self.health_seconds),
            ("unhealthy_seconds", self.unhealthy_seconds),
            ("stop_seconds", self.stop_seconds),
        ] {
            problems.unless((SHORTEST_SECONDS..=LONGEST_SECONDS).contains(&seconds), key, seconds, &remedy);
        }
        let (unhealthy, health) = (self.unhealthy_seconds, self.health_seconds);
        let remedy = format!("give at least twice rollout.health_seconds ({health})");
        // False of a time that is no number, which has been named.
        let too_short = unhealthy < 2.0 * health;
        problems.unless(!too_short, "unhealthy_seconds", unhealthy, &remedy);
        let remedy = format!("give at least {FEWEST_LOG_BYTES}");
        problems.unless(self.log_bytes >= FEWEST_LOG_BYTES, "log_bytes", self.log_bytes, &remedy);
        for name in self.environment.keys().filter(|name| name.is_empty() || name.contains(['=', '\0'])) {
            problems.unless(false, "environment", format!("{name:?}"), "give the name of a variable");
        }
        if let Some(value) = self.environment.get(VISIBLE_DEVICES) {
            let field = format!("environment.{VISIBLE_DEVICES}");
            problems.unless(false, &field, value, "leave it out: it is set for each server by its place");
        }
        self.check_command(&mut problems);
        problems.finish()
    }

    fn check_command(&self, problems: &mut Problems) {
        let Some(program) = self.command.first() else { return };
        let mut wrong = |found: String, remedy: &str| problems.unless(false, "command", found, remedy);
        if program.is_empty() {
            wrong("without a program".into(), "give a first word");
        }
        for word in self.command.iter().filter(|word| word.contains('\0')) {
            wrong(format!("{word:?}"), "leave the zero byte out");
        }
        for word in &self.command {
            for unknown in placeholders(word).filter(|name| !PLACEHOLDERS.contains(name)) {
                wrong(format!("{word:?} with {{{unknown}}}"), &format!("there are {{{}}}", PLACEHOLDERS.join("}, {")));
            }
        }
        for needed in ["model", "port"] {
            if !self.command.iter().any(|word| placeholders(word).any(|name| name == needed)) {
                wrong(format!("without {{{needed}}}"), "give it in some word, or every server would get the same");
            }
        }
    }

    /// What depends on a node's GPUs.
    ///
    /// # Errors
    /// Names the keys and numbers that do not go together.
    pub fn check_node(&self, gpus_per_node: usize) -> Result<(), String> {
        if gpus_per_node == 0 || !gpus_per_node.is_multiple_of(self.tensor_parallel) {
            return Err(format!(
                "rollout.tensor_parallel = {}: must divide the GPUs of a node, of which there are {gpus_per_node} (--gpus-per-node)",
                self.tensor_parallel
            ));
        }
        let servers = self.servers_per_node(gpus_per_node);
        if usize::from(self.port) + servers - 1 > usize::from(u16::MAX) {
            return Err(format!("rollout.port = {}: with {servers} servers the last port would lie above 65535", self.port));
        }
        Ok(())
    }

    /// What depends on the whole job, for one that trains.
    ///
    /// # Errors
    /// Names the keys and numbers that do not go together.
    pub fn check_job(&self, nodes: usize, gpus_per_node: usize) -> Result<(), String> {
        if self.nodes == 0 {
            return Ok(());
        }
        if self.nodes >= nodes {
            return Err(format!(
                "rollout.nodes = {}: must leave at least one of the job's {nodes} nodes (--nodes) to train",
                self.nodes
            ));
        }
        self.check_node(gpus_per_node)
    }

    pub fn servers_per_node(&self, gpus_per_node: usize) -> usize {
        gpus_per_node / self.tensor_parallel
    }

    /// Whether a node of a job runs servers instead of training.
    pub fn serves(&self, node: usize, nodes: usize) -> bool {
        node + self.nodes >= nodes
    }

    /// The words of one server's command.
    pub(super) fn command_for(&self, model: &str, host: &str, port: u16, gpus: &str) -> Vec<String> {
        let words = if self.command.is_empty() {
            self.server.usual_command().iter().map(|word| word.to_string()).collect()
        } else {
            self.command.clone()
        };
        let value = |name: &str| match name {
            "model" => Some(model.to_string()),
            "host" => Some(host.to_string()),
            "port" => Some(port.to_string()),
            "tensor_parallel" => Some(self.tensor_parallel.to_string()),
            "gpus" => Some(gpus.to_string()),
            _ => None,
        };
        words.iter().map(|word| fill(word, value)).collect()
    }

    /// What is set in the environment of every server: what its kind needs, then what the run file adds.
    pub(super) fn environment_for(&self, gpus: &str) -> BTreeMap<String, String> {
        let usual = self.server.usual_environment().iter().map(|&(name, value)| (name.to_string(), value.to_string()));
        let mut environment: BTreeMap<String, String> = usual.collect();
        environment.extend(self.environment.clone());
        environment.insert(VISIBLE_DEVICES.to_string(), gpus.to_string());
        environment
    }
}

impl ServerKind {
    /// Log-probabilities are asked for as they are after the temperature: raw ones are those of another distribution than the tokens were
    /// drawn from.
    fn usual_command(self) -> &'static [&'static str] {
        match self {
            ServerKind::Vllm => &[
                "vllm",
                "serve",
                "{model}",
                "--host",
                "{host}",
                "--port",
                "{port}",
                "--tensor-parallel-size",
                "{tensor_parallel}",
                "--dtype",
                "bfloat16",
                "--logprobs-mode",
                "processed_logprobs",
                "--served-model-name",
                "policy",
            ],
            ServerKind::Sglang => &[
                "python3",
                "-m",
                "sglang.launch_server",
                "--model-path",
                "{model}",
                "--host",
                "{host}",
                "--port",
                "{port}",
                "--tp-size",
                "{tensor_parallel}",
                "--dtype",
                "bfloat16",
                "--served-model-name",
                "policy",
            ],
        }
    }

    fn usual_environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            // Pausing, loading and versions are among vLLM's development endpoints.
            ServerKind::Vllm => &[("VLLM_SERVER_DEV_MODE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")],
            ServerKind::Sglang => &[("HF_HUB_OFFLINE", "1")],
        }
    }
}

/// The names in `{...}` of a word. Braces around anything else, as in JSON, stand for themselves.
fn placeholders(word: &str) -> impl Iterator<Item = &str> {
    let is_name = |name: &&str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    word.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0)).filter(is_name)
}

/// In one pass, so that a value which looks like a placeholder stays as it is.
fn fill(word: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let mut parts = word.split('{');
    let mut filled = parts.next().unwrap_or_default().to_string();
    for part in parts {
        match part.split_once('}').and_then(|(name, after)| Some((value(name)?, after))) {
            Some((value, after)) => filled.extend([value.as_str(), after]),
            None => filled.extend(["{", part]),
        }
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_command(words: &[&str]) -> Settings {
        Settings { command: words.iter().map(|word| word.to_string()).collect(), ..Settings::default() }
    }

    #[test]
    fn words_are_filled_in_once_and_json_stays() {
        let settings = with_command(&["serve", "{model}:{port}", r#"{"level":3,"x":{}}"#, "--tp={tensor_parallel}", "{gpus}{"]);
        assert_eq!(settings.check(), Ok(()));
        let words = settings.command_for("/a/{port}", "h", 8101, "2,3");
        assert_eq!(words, ["serve", "/a/{port}:8101", r#"{"level":3,"x":{}}"#, "--tp=1", "2,3{"]);
    }

    #[test]
    fn usual_commands_say_what_matters() {
        for (server, program) in [(ServerKind::Vllm, "vllm"), (ServerKind::Sglang, "python3")] {
            let settings = Settings { server, tensor_parallel: 4, ..Settings::default() };
            let words = settings.command_for("/m", "node7", 8100, "0,1,2,3");
            assert_eq!(words[0], program);
            assert!(["/m", "node7", "8100", "4"].iter().all(|word| words.iter().any(|found| found == word)), "{words:?}");
            assert!(!words.iter().any(|word| word.contains('{')), "{words:?}");
            assert_eq!(settings.environment_for("0,1,2,3")[VISIBLE_DEVICES], "0,1,2,3");
        }
        assert_eq!(Settings::default().environment_for("0")["VLLM_SERVER_DEV_MODE"], "1");
    }

    #[test]
    fn what_cannot_be_is_named() {
        let named = |settings: Settings, words: &[&str]| {
            let errors = settings.check().expect_err("refused").within("rollout").to_string();
            assert!(errors.lines().any(|line| words.iter().all(|word| line.contains(word))), "{errors}");
        };
        let usual = Settings::default;
        named(Settings { tensor_parallel: 0, ..usual() }, &["rollout.tensor_parallel is 0"]);
        named(Settings { port: 0, ..usual() }, &["rollout.port"]);
        named(Settings { start_seconds: f64::NAN, ..usual() }, &["rollout.start_seconds is NaN", "0.01"]);
        named(Settings { stop_seconds: -1.0, ..usual() }, &["rollout.stop_seconds is -1"]);
        named(Settings { unhealthy_seconds: 6.0, ..usual() }, &["rollout.unhealthy_seconds is 6", "health_seconds (5)"]);
        named(Settings { log_bytes: 9, ..usual() }, &["rollout.log_bytes is 9"]);
        named(with_command(&["vllm", "{model}"]), &["rollout.command", "{port}"]);
        named(with_command(&["vllm", "{model}", "{port}", "{tp}"]), &["{tp}", "{tensor_parallel}"]);
        named(with_command(&["", "{model}", "{port}"]), &["rollout.command", "first word"]);
        let environment = |name: &str| BTreeMap::from([(name.to_string(), "0".to_string())]);
        named(
            Settings { environment: environment("CUDA_VISIBLE_DEVICES"), ..usual() },
            &["CUDA_VISIBLE_DEVICES", "leave it out"],
        );
        named(Settings { environment: environment("A=B"), ..usual() }, &["A=B"]);
    }

    #[test]
    fn nodes_and_gpus_must_go_together() {
        let settings = Settings { nodes: 2, tensor_parallel: 4, ..Settings::default() };
        assert_eq!(settings.check_job(3, 8), Ok(()));
        assert_eq!(settings.servers_per_node(8), 2);
        assert_eq!([0, 1, 2].map(|node| settings.serves(node, 3)), [false, true, true]);
        assert!(settings.check_job(2, 8).unwrap_err().contains("rollout.nodes = 2"));
        assert!(settings.check_job(3, 6).unwrap_err().contains("rollout.tensor_parallel = 4"));
        assert!(settings.check_job(3, 0).unwrap_err().contains("there are 0"));
        let high = Settings { port: 65535, ..settings };
        assert!(high.check_job(3, 8).unwrap_err().contains("rollout.port = 65535"));
        let none = Settings { tensor_parallel: 3, ..Settings::default() };
        assert_eq!((none.check_job(1, 8), none.serves(0, 1)), (Ok(()), false));
    }
}
