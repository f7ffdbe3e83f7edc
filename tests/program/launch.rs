//! Runs of several processes: how they meet, whom they refuse, and how they end when one is lost. All on this host's loopback;
//! `tests/hosts.sh` does the same on hosts of their own.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::harness::{learner, result, text};

/// Longer than anything here takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// A run that goes through all stages in little time.
const SHORT: [&str; 11] = [
    "rft.candidates=24",
    "rft.steps=6",
    "rl.steps=1",
    "rl.tasks_per_step=2",
    "rl.group_size=2",
    "evaluate.tasks=2",
    "evaluate.samples=1",
    "evaluate.structure_tasks=0",
    "sandbox.parallel=1",
    "checkpoint.every_rft_steps=1",
    "parallel.rendezvous_seconds=200",
];

/// A port so that this many from it on are free, below those that the system hands out by itself and away from other tests'.
fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = (std::process::id() % 37) as u16 * 30;
    for _ in 0..1000 {
        let first = 31_000 + (own + NEXT.fetch_add(count, Ordering::Relaxed)) % 1_500;
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}

/// One node of a job on this host.
struct Job<'a> {
    nodes: usize,
    port: u16,
    out: &'a Path,
}

impl Job<'_> {
    fn command(&self, rank: usize, more: &[&str]) -> Command {
        let mut command = learner(&["--recipe", "smoke"]);
        SHORT.iter().for_each(|setting| {
            command.args(["--set", setting]);
        });
        command.args(["--nodes", &self.nodes.to_string(), "--node-rank", &rank.to_string()]);
        command.args(["--coordinator", &format!("127.0.0.1:{}", self.port), "--out"]).arg(self.out).args(more);
        command.env("LEARNER_TOKEN", "the token of the tests").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, rank: usize, more: &[&str]) -> Running {
        Running(Some(self.command(rank, more).spawn().expect("the program starts")))
    }
}

/// A process that does not outlive its test.
struct Running(Option<Child>);

impl Running {
    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it has not been waited for")
    }

    /// Waits for its end; it is killed, and the test fails, if it does not come.
    fn end(mut self) -> Output {
        let deadline = Instant::now() + PATIENCE;
        while self.child().try_wait().expect("it can be looked at").is_none() {
            assert!(Instant::now() < deadline, "a process does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.0.take().expect("it has not been waited for").wait_with_output().expect("its output")
    }

    /// Its exit code and its one line on standard error.
    fn line(self) -> (Option<i32>, String) {
        let output = self.end();
        let said = text(&output.stderr);
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
        (output.status.code(), said.trim_end().to_owned())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Also when a test has failed, and when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_open(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// Throws bytes at a port and waits until it hangs up.
fn throw(port: u16, bytes: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("an open port");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    // The port may hang up at any byte.
    let _ = stream.write_all(bytes);
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn strangers_get_a_line_each_and_two_processes_end_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let (out, other) = (folder.path().join("run"), folder.path().join("other"));
    let port = free_ports(4);
    let job = Job { nodes: 2, port, out: &out };
    let mut first = job.start(0, &[]);
    wait_until("the coordinator", || is_open(port));
    assert!(first.child().try_wait().expect("it can be looked at").is_none());

    throw(port, b"GET / HTTP/1.1\r\nHost: node-0\r\n\r\n");
    throw(port, &[&b"LEARNER\0"[..], &99u32.to_le_bytes(), &[7; 32]].concat());
    // A second job: its node 0 finds the port taken, its node 1 another job behind it.
    let second = Job { nodes: 2, port, out: &other };
    let (code, line) = second.start(0, &[]).line();
    assert_eq!(code, Some(2), "{line}");
    assert!(line.starts_with(&format!("learner: port {port} of this host cannot be opened for rank 0")), "{line}");
    let (code, line) = second.start(1, &[]).line();
    assert_eq!(code, Some(2), "{line}");
    assert!(line.contains("this port belongs to run") && line.contains("give each job a port of its own"), "{line}");
    let mut stranger = job.command(1, &[]);
    let (code, line) = Running(Some(stranger.env("LEARNER_TOKEN", "a token that is guessed").spawn().unwrap())).line();
    assert_eq!(code, Some(2), "{line}");
    assert!(line.contains("another token than rank 1"), "{line}");
    let (code, line) = Job { nodes: 3, ..job }.start(1, &[]).line();
    assert_eq!(code, Some(2), "{line}");
    assert!(line.contains("it counts 3 ranks, the coordinator 2"), "{line}");

    let (first, last) = (first, job.start(1, &[]));
    let (first, last) = (first.end(), last.end());
    assert!(first.status.success() && last.status.success(), "{}{}", text(&first.stderr), text(&last.stderr));
    assert_eq!((text(&last.stdout), text(&last.stderr)), (String::new(), String::new()), "only rank 0 is heard");
    assert!(text(&first.stdout).contains("2 ranks on 1 hosts"), "{}", text(&first.stdout));
    let said = text(&first.stderr);
    assert!(said.lines().all(|line| line.starts_with("learner: rank 0: ")), "{said}");
    for words in
        ["does not speak this program's protocol", "it speaks version 99", "belongs to run", "another token", "counts 3 ranks"]
    {
        assert_eq!(said.matches(words).count(), 1, "{words}: {said}");
    }
    assert!(out.join("summary.json").is_file() && !other.exists());
}

#[test]
fn who_is_missing_is_named_after_a_bounded_wait() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let job = Job { nodes: 3, port: free_ports(3), out: &out };
    let soon = ["--set", "parallel.rendezvous_seconds=4"];
    for (code, line) in [job.start(0, &soon), job.start(1, &soon)].map(Running::line) {
        assert_eq!(code, Some(3), "{line}");
        assert!(
            line.contains("of 3 ranks, 1 did not come to 127.0.0.1:") && line.contains("rank 2; came: rank 0 (host"),
            "{line}"
        );
    }
    assert!(!out.exists());
}

/// Starts both, of which rank 1 is changed, and returns the line that both must say.
fn disagree(job: &Job, change: impl FnOnce(&mut Command)) -> String {
    let first = job.start(0, &[]);
    let mut second = job.command(1, &[]);
    change(&mut second);
    let second = Running(Some(second.spawn().expect("the program starts")));
    let ((code, line), other) = (first.line(), second.line());
    assert_eq!((code, &line), (Some(2), &other.1));
    assert_eq!(other.0, Some(2));
    line
}

#[test]
fn ranks_that_are_not_alike_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let job = || Job { nodes: 2, port: free_ports(2), out: &out };
    let line = disagree(&job(), |second| {
        second.args(["--set", "rl.steps=3"]);
    });
    assert!(line.contains("rank 1 (host ") && line.contains(" has rl.steps = 3, rank 0 "), "{line}");
    assert!(!out.exists(), "nothing was begun");

    // The same version number, but another program.
    let build = folder.path().join("learner");
    std::fs::copy(env!("CARGO_BIN_EXE_learner"), &build).unwrap();
    std::fs::OpenOptions::new().append(true).open(&build).unwrap().write_all(b"\n").unwrap();
    let line = disagree(&job(), |second| {
        let mut other = Command::new(&build);
        other.args(second.get_args()).env("LEARNER_TOKEN", "the token of the tests");
        other.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        *second = other;
    });
    assert!(line.contains("a program with SHA-256") && line.contains("the same build on all nodes"), "{line}");

    // The same command in folders of their own: no shared file system.
    let here = |name: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let apart = Job { nodes: 2, port: free_ports(2), out: Path::new("run") };
    let soon = ["--set", "parallel.rendezvous_seconds=30"];
    let [first, second] = [(0, here("a")), (1, here("b"))]
        .map(|(rank, path)| Running(Some(apart.command(rank, &soon).current_dir(path).spawn().expect("the program starts"))));
    let ((code, line), other) = (first.line(), second.line());
    assert_eq!((code, &line), (Some(2), &other.1));
    assert!(line.contains("rank 1 (host ") && line.contains("does not see run/run.toml"), "{line}");
}

/// The child that a process has started.
fn child_of(process: u32) -> Option<i32> {
    std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).ok()?.split_whitespace().next()?.parse().ok()
}

fn kill(process: i32) {
    let sent = Command::new("kill").args(["-9", &process.to_string()]).status();
    assert!(sent.expect("kill runs").success());
}

fn has_a_checkpoint(out: &Path) -> bool {
    let entries = std::fs::read_dir(out.join("checkpoints")).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.path().join("DONE").exists())
}

#[test]
fn a_rank_that_is_killed_is_named_and_the_run_is_resumed_by_one_rank_or_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    let long = ["--set", "rft.steps=40"];
    let (killed, restarted) = (path("killed"), path("restarted"));

    let job = Job { nodes: 2, port: free_ports(2), out: &killed };
    let (first, mut last) = (job.start(0, &long), job.start(1, &long));
    wait_until("a checkpoint", || has_a_checkpoint(&killed));
    last.child().kill().expect("SIGKILL is sent");
    let (code, line) = first.line();
    assert_eq!(code, Some(3), "{line}");
    assert!(line.starts_with("learner: rank 1 (host ") && line.contains(") is gone: its process ended"), "{line}");
    drop(last);
    let output = learner(&["--resume", "--quiet", "--out", killed.to_str().unwrap()]).output().expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));

    let job = Job { nodes: 2, port: free_ports(2), out: &restarted };
    let by_itself = [&long[..], &["--max-restarts", "2"]].concat();
    let (first, mut last) = (job.start(0, &by_itself), job.start(1, &by_itself));
    wait_until("a checkpoint", || has_a_checkpoint(&restarted));
    kill(child_of(last.child().id()).expect("a child that trains"));
    for output in [first.end(), last.end()] {
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("learner: starting again with --resume (restart 1 of 2)"), "{said}");
    }
    // Both had the same steps: the metrics differ in times and in how floats were grouped at most.
    let steps =
        |path: &Path| result(path).1.iter().map(|line| [&line["kind"], &line["step"]].map(Clone::clone)).collect::<Vec<_>>();
    assert_eq!(steps(&killed), steps(&restarted));
}

#[test]
fn what_cannot_be_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let refused = |arguments: &[&str], words: &[&str]| {
        let mut command = learner(&["--recipe", "smoke", "--out", out.to_str().unwrap()]);
        let output = command.args(arguments).env_remove("LEARNER_TOKEN").output().expect("the program starts");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{arguments:?}: {said}");
        assert!(!out.exists(), "{arguments:?} left something behind");
    };
    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [&["--nodes", "2", "--node-rank", "0", "--coordinator", "127.0.0.1:31000"], more].concat()
    }
    refused(&["--nodes", "2"], &["which of them this one is", "--node-rank R"]);
    refused(&["--nodes", "0"], &["--nodes"]);
    refused(&["--nodes", "2", "--node-rank", "2", "--coordinator", "a:1"], &["node rank 2", "ranks count from 0"]);
    refused(&with(&[]), &["2 nodes and no token", "--token-file FILE or LEARNER_TOKEN"]);
    refused(&with(&["--token-file", "/nonexistent"]), &["--token-file /nonexistent"]);
    refused(&with(&["--set", "parallel.context=3"]), &["parallel.context = 3", "does not divide the 2 ranks"]);
    refused(
        &with(&["--set", "parallel.dead_after_seconds=1"]),
        &["parallel.dead_after_seconds", "three times heartbeat_seconds"],
    );
    refused(&["--gpus-per-node", "3", "--device", "emulated:2"], &["--gpus-per-node 3", "emulated:3"]);
    let token = folder.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    refused(&with(&["--token-file", token.to_str().unwrap()]), &["the token has 6 characters, at least 16 are needed"]);
    std::fs::write(&token, "a secret of the tests\n").unwrap();
    let far = ["--nodes", "2", "--node-rank", "0", "--coordinator", "127.0.0.1:65535", "--token-file", token.to_str().unwrap()];
    refused(&far, &["passes 65535"]);
}

/// Flags in a file of `deploy/` that are the program's, with their values.
fn flags(deployment: &str, begins: impl Fn(&str) -> bool, strip: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(deployment);
    let content = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = content.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    let lines = lines.skip_while(|line| !begins(line)).map(|line| line.trim_end_matches('\\').trim());
    let flags: Vec<String> =
        lines.filter_map(|line| line.strip_prefix(strip)).filter(|line| line.starts_with("--")).map(String::from).collect();
    assert!(flags.len() >= 7, "{deployment}: {flags:?}");
    flags
}

/// Values of variables of the shell that starts it, so that a flag's value is one word.
fn words(flags: &[String]) -> Vec<String> {
    flags
        .iter()
        .flat_map(|flag| flag.split([' ', '=']).map(|word| word.trim_matches('"').replace('$', "")).collect::<Vec<_>>())
        .collect()
}

#[test]
fn files_of_deploy_name_flags_that_exist_and_say_where_a_node_stands() {
    let slurm = words(&flags("slurm.sbatch", |line| line.starts_with("\"$LEARNER\" train"), ""));
    let kubernetes = words(&flags("kubernetes/learner.yaml", |line| line == "args:", "- "));
    let help = text(&learner(&["train", "--help"]).output().expect("the program starts").stdout);
    for flag in slurm.iter().chain(&kubernetes).filter(|word| word.starts_with("--")) {
        assert!(help.split([' ', '\n', ',']).any(|word| word == flag), "{flag} is no flag of learner train");
    }

    let says = |flags: &[String], variables: &[(&str, &str)], expected: &[(&str, &str)]| {
        let launch: Vec<&str> = ["--nodes", "--gpus-per-node"]
            .iter()
            .filter_map(|name| Some((flags.iter().position(|word| word == name)?, name)))
            .flat_map(|(at, name)| [*name, flags[at + 1].as_str()])
            .collect();
        let mut command = learner(&["doctor", "--launch", "--json"]);
        let output = command.args(&launch).envs(variables.iter().copied()).output().expect("the program starts");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        for (name, value) in expected {
            let told = found.as_array().unwrap().iter().find(|told| told["name"] == *name).expect("a value of that name");
            assert_eq!(told["value"], *value, "{found}");
        }
    };
    let job = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_NUM_NODES", "16"),
        ("SLURM_STEP_NUM_TASKS", "16"),
        ("SLURM_STEP_NODELIST", "gpu[01-16]"),
        ("SLURM_NODEID", "5"),
        ("SLURM_GPUS_ON_NODE", "8"),
        ("LEARNER_TOKEN", "the token of the tests"),
    ];
    let expected = [
        ("launcher", "Slurm"),
        ("nodes", "16"),
        ("node rank", "5"),
        ("coordinator", "gpu01:29600"),
        ("GPUs per node", "8"),
        ("token", "given"),
    ];
    says(&slurm, &job, &expected);
    let pod = [
        ("JOB_COMPLETION_INDEX", "5"),
        ("LEARNER_COORDINATOR", "learner-ranks-0-0.learner"),
        ("LEARNER_TOKEN", "the token of the tests"),
    ];
    let coordinator = ("coordinator", "learner-ranks-0-0.learner:29600");
    says(
        &kubernetes,
        &pod,
        &[("launcher", "Kubernetes"), ("nodes", "16"), ("node rank", "5"), coordinator, ("GPUs per node", "8")],
    );
}
