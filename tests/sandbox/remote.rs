//! Runners elsewhere: the same results, a lost runner's work done again, strangers refused.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use learner::sandbox::{Request, RunVerdict, Sandbox, SandboxError, SessionRequest, Settings, Snapshot, TestRequest};
use learner::types::Workspace;

const TOKEN: &str = "the runners of the tests know this";

/// `learner sandbox serve` as a process of its own, killed when dropped.
struct Runner {
    process: Child,
    address: SocketAddr,
}

impl Runner {
    fn start(arguments: &[&str], token: &std::path::Path) -> Runner {
        let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let process = Command::new(env!("CARGO_BIN_EXE_learner"))
            .args(["sandbox", "serve", "--listen", &port.to_string(), "--token-file"])
            .arg(token)
            .args(arguments)
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        Runner { process, address: port }
    }

    /// Waits for it to listen.
    fn ready(mut self) -> Runner {
        for _ in 0..1500 {
            if std::net::TcpStream::connect(self.address).is_ok() {
                return self;
            }
            assert_eq!(self.process.try_wait().expect("a child"), None, "the runner ended");
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the runner does not listen");
    }

    fn kill(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("reaped");
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn token_file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("token");
    std::fs::write(&path, text).expect("written");
    (folder, path)
}

fn settings(runners: &[&Runner], token: &std::path::Path, local: bool) -> Settings {
    let runners = runners.iter().map(|runner| runner.address.to_string()).collect();
    Settings { runners, local, token_file: Some(token.to_path_buf()), ..Settings::default() }
}

fn shell(script: &str) -> Request {
    Request { argv: ["/bin/sh", "-c", script].map(str::to_string).to_vec(), ..Request::default() }
}

#[test]
fn a_runner_elsewhere_gives_what_this_machine_gives() {
    learner::sandbox::set_helper(crate::users::helper());
    let (_folder, token) = token_file(TOKEN);
    let trees = tempfile::tempdir().expect("a folder");
    std::fs::write(trees.path().join("there.txt"), "of the tree\n").expect("written");
    let runner = Runner::start(&["--parallel", "4", "--trees", &trees.path().display().to_string()], &token).ready();
    let there = Sandbox::start(&settings(&[&runner], &token, false)).expect("the runner");
    let here = Sandbox::start(&Settings::default()).expect("a sandbox");
    assert_eq!((there.parallel(), there.tier()), (4, here.tier()));

    for script in ["echo out; echo err >&2; exit 3", "kill -9 $$", "cat file", "printf '\\377\\000'"] {
        let request = Request { files: Workspace::from([("file".into(), "laid\n".into())]), ..shell(script) };
        let (one, other) = (here.run(&request), there.run(&request));
        assert_eq!((one.verdict, one.exit_code, one.signal), (other.verdict, other.exit_code, other.signal), "{script}");
        assert_eq!((one.stdout, one.stderr), (other.stdout, other.stderr), "{script}");
    }
    let tests = TestRequest {
        files: Workspace::from([("t.py".into(), "def test_a():\n    pass\ndef test_b():\n    assert False\n".into())]),
        tests: ["t.py::test_a", "t.py::test_b"].map(str::to_string).to_vec(),
        ..TestRequest::default()
    };
    assert_eq!(here.run_python_tests(&tests).outcomes, there.run_python_tests(&tests).outcomes);

    let tree = Some(Snapshot::of_directory(trees.path()).expect("a tree"));
    let result = there.run(&Request { tree: tree.clone(), ..shell("cat there.txt") });
    assert_eq!((result.verdict, result.stdout.as_slice()), (RunVerdict::Exited, &b"of the tree\n"[..]));
    let elsewhere = tempfile::tempdir().expect("a folder");
    let result = there.run(&Request { tree: Some(Snapshot::of_directory(elsewhere.path()).expect("a tree")), ..shell("true") });
    assert!(matches!(result.verdict, RunVerdict::Infrastructure(reason) if reason.contains("--trees")), "a tree outside");

    let mut session = there.session(&SessionRequest { tree, ..SessionRequest::default() }).expect("a session");
    assert!(session.run(&shell("echo more >> there.txt; echo new > new.txt")).succeeded());
    assert_eq!(session.run(&shell("cat there.txt")).stdout, b"of the tree\nmore\n");
    let mut names: Vec<_> = session.read_changes(1 << 20).expect("changes").into_iter().map(|change| change.name).collect();
    names.sort();
    assert_eq!(names, [b"new.txt".to_vec(), b"there.txt".to_vec()]);
}

#[test]
fn the_work_of_a_lost_runner_is_done_again() {
    learner::sandbox::set_helper(crate::users::helper());
    let (_folder, token) = token_file(TOKEN);
    let mut first = Runner::start(&["--parallel", "8"], &token).ready();
    let second = Runner::start(&["--parallel", "8"], &token).ready();
    let sandbox = Sandbox::start(&settings(&[&first, &second], &token, false)).expect("two runners");
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..8).map(|_| scope.spawn(|| sandbox.run(&shell("sleep 2; echo done")))).collect();
        std::thread::sleep(Duration::from_millis(700));
        first.kill();
        for run in runs {
            let result = run.join().expect("no panic");
            assert_eq!((result.verdict, result.stdout.as_slice()), (RunVerdict::Exited, &b"done\n"[..]));
        }
    });
    assert!(sandbox.run(&shell("true")).succeeded());
    assert!(sandbox.guarantees().iter().any(|(_, what)| what.ends_with("lost")), "{:?}", sandbox.guarantees());
    drop(second);
    let result = sandbox.run(&shell("true"));
    assert!(matches!(&result.verdict, RunVerdict::Infrastructure(reason) if reason.contains("runner")), "{:?}", result.verdict);
}

#[test]
fn strangers_and_absent_runners_are_one_line() {
    learner::sandbox::set_helper(crate::users::helper());
    let (_folder, token) = token_file(TOKEN);
    let (_other_folder, other_token) = token_file("this is another secret");
    let runner = Runner::start(&[], &token).ready();
    let line = |settings: &Settings| Sandbox::start(settings).err().map(|error| error.to_string()).expect("refused");
    let said = line(&settings(&[&runner], &other_token, false));
    assert!(said.contains("another token") && !said.contains('\n'), "{said}");
    let said = line(&Settings { runners: vec!["127.0.0.1:1".into()], token_file: Some(token.clone()), ..Settings::default() });
    assert!(said.contains("127.0.0.1:1") && said.contains("sandbox serve"), "{said}");
    let said = line(&Settings { local: false, ..Settings::default() });
    assert!(said.contains("sandbox.local"), "{said}");
    let (_short_folder, short) = token_file("short");
    let error = Sandbox::start(&settings(&[&runner], &short, false)).err().expect("refused");
    assert!(matches!(error, SandboxError::Settings { ref field, .. } if field == "token_file"), "{error}");
    // Garbage does not disturb it.
    use std::io::Write;
    std::net::TcpStream::connect(runner.address).expect("a connection").write_all(b"GET / HTTP/1.1\r\n\r\n").expect("written");
    assert!(Sandbox::start(&settings(&[&runner], &token, true)).expect("both").run(&shell("true")).succeeded());
}
