//! The sandbox on Linux.
//!
//! ```text
//! mod        probes tiers, admits runs, lets them start cold or warm
//! pool       admission by places and memory
//! launch     cold: a fork of the zygote      warm: a fork of the one interpreter
//! session    many commands over one tree, and what they changed in it (changes)
//! supervise  drains output, watches limits, gives the verdict       (in the caller's thread)
//! zygote     forks keepers, with the root of all runs prepared      (own process, this binary again)
//! keeper     keeps one run: namespaces, reaping, the report         (fork of the zygote)
//! contain    what a process does to itself before it becomes the program
//! examination  what a run of tests is told; plain.py, separate.py and runner.py run them
//! root, room, landlock, seccomp, cgroup, usage, workdir, copy, lay, lease, host_ids, python, wire, explain
//! ```

mod cgroup;
mod changes;
mod contain;
mod copy;
mod examination;
mod explain;
mod host_ids;
mod keeper;
mod landlock;
mod launch;
mod lay;
mod lease;
mod pool;
mod python;
mod room;
mod root;
mod seccomp;
mod session;
mod supervise;
mod usage;
mod wire;
mod workdir;
mod zygote;

use std::collections::{BTreeMap, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use examination::Examination;
use launch::{Command, Launcher, Start};
use pool::{Number, Numbers, Place, Pool};
use python::Python;
pub use session::Session;
pub use usage::kill_descendants;
pub use zygote::helper_main;

use super::{HELPER, Limits, Request, RunResult, RunVerdict, SandboxError, Settings, TestRequest, TestRun, Tier};
use crate::types::Workspace;

/// What every program finds in its environment, beside PATH, HOME and TMPDIR. The hash seed is fixed so that orders repeat.
const ENVIRONMENT: [(&str, &str); 7] = [
    ("LANG", "C.UTF-8"),
    ("LC_ALL", "C.UTF-8"),
    ("TZ", "UTC"),
    ("TERM", "dumb"),
    ("PYTHONHASHSEED", "0"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    // The machine's settings for git are none of a run's business; where they may not be read, git would not start at all.
    ("GIT_CONFIG_NOSYSTEM", "1"),
];

/// Runs at once, at most.
const MOST_PARALLEL: usize = 1000;
/// Set-ups at once: they wait for each other in the kernel rather than for the processor.
const STARTS_PER_CORE: usize = 4;
/// Runs and sessions at once, at most: one user id each.
const MOST_NUMBERS: u32 = host_ids::BLOCK - 1;

pub struct Engine {
    limits: Limits,
    tier: Tier,
    warm: bool,
    pool: Pool,
    /// Set-ups at once, few: a crowd that starts together is started in turns, and no set-up waits for its time to run out.
    starts: Pool,
    numbers: Arc<Numbers>,
    parallel: usize,
    launcher: Launcher,
    python: Result<Python, SandboxError>,
}

impl Engine {
    pub fn start(settings: &Settings) -> Result<Engine, SandboxError> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let parallel = if settings.parallel == 0 { cores + cores / 2 } else { settings.parallel }.min(MOST_PARALLEL);
        room::for_open_files(parallel)?;
        let helper = match HELPER.get() {
            Some(path) => path.clone(),
            None => std::env::current_exe().map_err(|error| SandboxError::Broken(format!("own program file: {error}")))?,
        };
        let mut launcher = Launcher::new(helper, settings.copy_trees)?;
        let tier = choose_tier(settings, &mut launcher)?;
        let mut engine = Engine {
            limits: settings.limits.clone(),
            tier,
            parallel,
            warm: settings.warm_interpreter,
            pool: Pool::new(parallel, room::memory_for_runs(settings)?),
            starts: Pool::new(cores * STARTS_PER_CORE, u64::MAX),
            numbers: Numbers::new(MOST_NUMBERS),
            launcher,
            python: Err(SandboxError::Python("not looked for".to_string())),
        };
        engine.python = engine.find_python(settings.python.as_deref());
        Ok(engine)
    }

    pub fn tier(&self) -> Tier {
        self.tier
    }

    pub fn parallel(&self) -> usize {
        self.parallel
    }

    pub fn python(&self) -> Result<(PathBuf, String), SandboxError> {
        self.python.as_ref().map(|python| (python.executable.clone(), python.version.clone())).map_err(SandboxError::clone)
    }

    pub fn guarantees(&self) -> Vec<(String, String)> {
        let own_id = match &self.launcher.host_ids {
            Some(ids) => format!("an unprivileged user id of its own per run, from {} up", ids.first + 1),
            None => "the caller's user id".to_string(),
        };
        let landlock = ::std::format!("Landlock, interface version {}", landlock::supported());
        let signals = if landlock::supported() >= 6 { "Landlock signal scope" } else { "user id only" };
        let rows: [(&str, &str, &str); 5] = [
            ("files", "own read-only root, one size-capped tmpfs", &landlock),
            ("processes", "own PID namespace; ends with its process 1", "child subreaper, swept until none is left"),
            ("signals", "own PID namespace", signals),
            ("network", "own network namespace with nothing but loopback", "no sockets (seccomp)"),
            ("system calls", "seccomp deny list, no new privileges, no capabilities", "seccomp deny list, no new privileges"),
        ];
        let how = |row: &(&str, &str, &str)| if self.tier == Tier::A { row.1.to_string() } else { row.2.to_string() };
        let mut guarantees: Vec<(String, String)> = rows.iter().map(|row| (row.0.to_string(), how(row))).collect();
        let (memory, processes) = self.launcher.groups.describe();
        let cap = if self.tier == Tier::A { ", tmpfs cap" } else { "" };
        guarantees.push(("memory".to_string(), format!("{memory}, RLIMIT_DATA{cap}")));
        guarantees.push(("process limit".to_string(), format!("{processes}, RLIMIT_NPROC")));
        guarantees.push(("user".to_string(), own_id));
        guarantees
    }

    pub fn run(&self, request: &Request) -> RunResult {
        let limits = request.limits.as_ref().unwrap_or(&self.limits);
        if let Err(reason) = check(&request.files, limits) {
            return RunResult::infrastructure(self.tier, reason);
        }
        let broken = |reason| RunResult::infrastructure(self.tier, reason);
        let queued = Instant::now();
        let (_place, starting, number) = match self.admit(limits) {
            Ok(admitted) => admitted,
            Err(reason) => return broken(reason),
        };
        let since = Instant::now();
        let queue_seconds = (since - queued).as_secs_f64();
        let (files, tree) = (&request.files, request.tree.as_ref());
        let start = Start { tier: self.tier, since, number: number.value, limits, files, tree };
        let command = Command { argv: &request.argv, environment: &request.environment, evidence: false };
        match self.launcher.cold(&start, command) {
            Ok((launched, _directory)) => {
                RunResult { queue_seconds, ..supervise::supervise(launched, limits, self.tier, Some(starting)).0 }
            }
            Err(reason) => broken(reason),
        }
    }

    /// Waits for a place and then for the right to set up.
    fn admit(&self, limits: &Limits) -> Result<(Place<'_>, Place<'_>, Number), String> {
        let place = self.pool.enter(limits.memory_bytes)?;
        Ok((place, self.starts.enter(0)?, self.number()?))
    }

    pub fn run_python_tests(&self, request: &TestRequest) -> TestRun {
        let limits = request.limits.as_ref().unwrap_or(&self.limits);
        // The warm interpreter lays files only; where a whole tree lies below, one more start is not what a run costs.
        let warm = self.warm && request.tree.is_none();
        let failed = |reason| TestRun {
            result: RunResult::infrastructure(self.tier, reason),
            outcomes: BTreeMap::new(),
            started_warm: warm,
        };
        let python = match &self.python {
            Ok(python) => python,
            Err(error) => return failed(error.to_string()),
        };
        if let Err(reason) = check(&request.files, limits).and_then(|()| check(&request.test_files, limits)) {
            return failed(reason);
        }
        let nonce = nonce();
        let examination = Examination { request, nonce: &nonce };
        if examination.hides_files() && landlock::supported() < 1 {
            return failed(
                "data files of tests cannot be kept from the code under test: this kernel has no Landlock".to_string(),
            );
        }
        let queued = Instant::now();
        let (_place, starting, number) = match self.admit(limits) {
            Ok(admitted) => admitted,
            Err(reason) => return failed(reason),
        };
        let since = Instant::now();
        let queue_seconds = (since - queued).as_secs_f64();
        let (files, tree) = (&request.files, request.tree.as_ref());
        let start = Start { tier: self.tier, since, number: number.value, limits, files, tree };
        let launched = if warm {
            self.launcher.warm(&start, python, &examination)
        } else {
            self.launcher.cold_tests(&start, python, &examination)
        };
        match launched {
            Ok((launched, _directory)) => {
                let (mut result, evidence) = supervise::supervise(launched, limits, self.tier, Some(starting));
                if let Some(reason) = unprepared(&evidence, &nonce) {
                    result.verdict = RunVerdict::Infrastructure(format!("a process for the code under test: {reason}"));
                }
                let outcomes = read_evidence(&evidence, &nonce, &request.tests);
                TestRun { result: RunResult { queue_seconds, ..result }, outcomes, started_warm: warm }
            }
            Err(reason) => failed(reason),
        }
    }

    /// A number for a run or a session, from which its user id follows.
    fn number(&self) -> Result<Number, String> {
        self.numbers.take().ok_or_else(|| format!("more than {MOST_NUMBERS} runs and sessions at once"))
    }

    /// The first interpreter that really runs in the sandbox; it becomes part of the root.
    fn find_python(&mut self, named: Option<&Path>) -> Result<Python, SandboxError> {
        let mut reasons = Vec::new();
        let system = self.launcher.root.clone();
        for candidate in python::candidates(named)? {
            self.launcher.root = system.clone().with(&candidate.prefix);
            self.launcher.python_directory = candidate.executable.parent().map(Path::to_path_buf);
            let executable = candidate.executable.to_string_lossy().into_owned();
            let mut argv = vec![executable.clone()];
            argv.extend(python::FLAGS.map(str::to_string));
            argv.extend(["-c".to_string(), "import ctypes, json, resource, select, socket".to_string()]);
            let result = self.run(&Request { argv, limits: Some(Limits::default()), ..Request::default() });
            if result.succeeded() {
                return Ok(candidate);
            }
            reasons.push(format!("{executable} does not run in the sandbox: {}", why(&result)));
        }
        self.launcher.root = system;
        self.launcher.python_directory = None;
        Err(SandboxError::Python(reasons.join("; ")))
    }
}

/// Runs a command through each tier that is allowed, strongest first.
fn choose_tier(settings: &Settings, launcher: &mut Launcher) -> Result<Tier, SandboxError> {
    if let Some(tier) = settings.tier.filter(|tier| !tier.meets(settings.minimum_tier)) {
        return Err(SandboxError::Settings {
            field: "tier".to_string(),
            found: format!("{tier} is weaker than sandbox.minimum_tier {}", settings.minimum_tier),
            remedy: "lower the minimum or take tier A".to_string(),
        });
    }
    let allowed = |tier: &Tier| settings.tier.map_or(tier.meets(settings.minimum_tier), |forced| forced == *tier);
    let mut reasons = Vec::new();
    for tier in [Tier::A, Tier::B].into_iter().filter(allowed) {
        match probe(tier, launcher) {
            Ok(()) => return Ok(tier),
            Err(reason) => reasons.push(format!("tier {tier}: {reason}")),
        }
    }
    let wanted = match settings.tier {
        Some(tier) => format!("tier {tier}"),
        None => format!("a tier of at least {}", settings.minimum_tier),
    };
    let remedy = if settings.tier.or(Some(settings.minimum_tier)) == Some(Tier::A) {
        "allow user namespaces (kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, or a \
         container with CAP_SYS_ADMIN), or accept sandbox.minimum_tier = \"B\""
    } else {
        "use a kernel with Landlock (5.13 or later), or allow user namespaces"
    };
    Err(SandboxError::Unavailable { wanted, reasons: reasons.join("; "), remedy: remedy.to_string() })
}

fn probe(tier: Tier, launcher: &Launcher) -> Result<(), String> {
    let limits = Limits { wall_seconds: 20.0, ..Limits::default() };
    let files = Workspace::from([("probe".to_string(), "written\n".to_string())]);
    let start = Start { tier, since: Instant::now(), number: 0, limits: &limits, files: &files, tree: None };
    let argv = ["/bin/sh", "-c", "read word < probe && echo \"$word\" > copy && echo ready"].map(str::to_string);
    let environment = BTreeMap::new();
    let command = Command { argv: &argv, environment: &environment, evidence: false };
    let (launched, _directory) = launcher.cold(&start, command)?;
    let (result, _) = supervise::supervise(launched, &limits, tier, None);
    if result.succeeded() && result.stdout == b"ready\n" { Ok(()) } else { Err(why(&result)) }
}

/// In a few words, why a run did not go well.
fn why(result: &RunResult) -> String {
    let words = String::from_utf8_lossy(&result.stderr);
    let words = words.lines().last().unwrap_or("").trim();
    match &result.verdict {
        RunVerdict::Infrastructure(reason) => reason.clone(),
        RunVerdict::Exited => format!("exit code {} ({words})", result.exit_code.unwrap_or(-1)),
        verdict => format!("{} ({words})", verdict.name()),
    }
}

/// File names must stay in the working directory, limits must be such.
fn check(files: &Workspace, limits: &Limits) -> Result<(), String> {
    limits.check().map_err(|errors| SandboxError::from(errors).to_string())?;
    for name in files.keys() {
        let path = Path::new(name);
        let plain = path.components().all(|component| matches!(component, Component::Normal(_)));
        if name.is_empty() || name.ends_with('/') || name.contains('\0') || !plain {
            return Err(format!("file name {name:?} is not a relative path inside the working directory"));
        }
    }
    Ok(())
}

/// A number that the tests cannot have known beforehand. (The standard hasher's keys come from the operating system.)
fn nonce() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}

/// Lines `nonce index outcome`; whatever else is there was not written by our runner. The first word on a test counts.
fn read_evidence(evidence: &[u8], nonce: &str, tests: &[String]) -> BTreeMap<String, bool> {
    let mut outcomes = BTreeMap::new();
    let mut seen = HashSet::new();
    for line in evidence.split(|&byte| byte == b'\n') {
        let Ok(line) = std::str::from_utf8(line) else { continue };
        let words: Vec<&str> = line.split(' ').collect();
        let [word, index, outcome] = words[..] else { continue };
        if word != nonce || !matches!(outcome, "0" | "1") {
            continue;
        }
        let Some((index, test)) = index.parse::<usize>().ok().and_then(|index| Some((index, tests.get(index)?))) else {
            continue;
        };
        if seen.insert(index) {
            // A name given twice has passed only if both have.
            let passed = outcome == "1" && outcomes.get(test).copied().unwrap_or(true);
            outcomes.insert(test.clone(), passed);
        }
    }
    outcomes
}

/// What kept the process for the code under test from starting. It is said before any of that code is loaded.
fn unprepared(evidence: &[u8], nonce: &str) -> Option<String> {
    let text = String::from_utf8_lossy(evidence);
    Some(text.strip_prefix(nonce)?.strip_prefix(" unprepared ")?.trim_end().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_needs_the_nonce() {
        let tests = ["t.py::test_a", "t.py::test_b", "t.py::test_c"].map(str::to_string);
        let text = b"abc 0 1\nforged 1 1\nabc 1 0\nabc 1 1\nabc 7 1\nabc 2 x\n\xff\nabc 2";
        let outcomes = read_evidence(text, "abc", &tests);
        assert_eq!(outcomes, BTreeMap::from([(tests[0].clone(), true), (tests[1].clone(), false)]));
        assert_eq!(unprepared(b"abc unprepared no room\n", "abc").as_deref(), Some("no room"));
        assert_eq!(unprepared(b"abc 0 1\nabc unprepared x\n", "abc"), None);
        assert_eq!(unprepared(b"forged unprepared x\n", "abc"), None);
    }

    #[test]
    fn file_names_stay_inside() {
        let with = |name: &str| check(&Workspace::from([(name.to_string(), String::new())]), &Limits::default());
        for name in ["a.py", "a/b.py", "-x", "a b"] {
            assert!(with(name).is_ok(), "{name}");
        }
        for name in ["", "/etc/passwd", "../x", "a/../../x", "a/", "./a", "a\0b"] {
            assert!(with(name).is_err(), "{name}");
        }
    }
}
