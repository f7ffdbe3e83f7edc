//! Python tests, warm and cold: what counts as passed, and that no run sees another.

use learner::sandbox::{Limits, RunVerdict, Sandbox, TestRequest, TestRun};
use learner::types::Workspace;

use crate::{TIERS, sandbox, tight};

fn run(sandbox: &Sandbox, files: &[(&str, &str)], tests: &[&str]) -> TestRun {
    run_within(sandbox, files, tests, tight())
}

fn run_within(sandbox: &Sandbox, files: &[(&str, &str)], tests: &[&str], limits: Limits) -> TestRun {
    let files: Workspace = files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    let tests = tests.iter().map(|test| test.to_string()).collect();
    sandbox.run_python_tests(&TestRequest { files, tests, limits: Some(limits), ..TestRequest::default() })
}

fn every_kind() -> impl Iterator<Item = Sandbox> {
    TIERS.into_iter().flat_map(|tier| [true, false].map(|warm| (tier, warm))).filter_map(|(tier, warm)| sandbox(tier, warm))
}

#[test]
fn outcomes_of_named_tests() {
    let code = ("pack/code.py", "def double(x):\n    return 2 * x\n");
    let tests = (
        "tests/test_code.py",
        "from pack.code import double\n\
         def test_right():\n    assert double(2) == 4\n\
         def test_wrong():\n    assert double(2) == 5, 'not five'\n\
         def test_not_named():\n    raise SystemExit(3)\n\
         async def test_coroutine():\n    assert False\n\
         def test_exit():\n    raise SystemExit(0)\n\
         def test_after():\n    pass\n",
    );
    for sandbox in every_kind() {
        let names = ["right", "wrong", "coroutine", "exit", "after"].map(|name| format!("tests/test_code.py::test_{name}"));
        let run = run(&sandbox, &[code, tests], &names.each_ref().map(String::as_str));
        assert_eq!(names.each_ref().map(|name| run.passed(name)), [true, false, false, false, true], "{run:?}");
        assert_eq!((&run.result.verdict, run.result.exit_code), (&RunVerdict::Exited, Some(1)));
        let said = String::from_utf8_lossy(&run.result.stderr).into_owned();
        assert!(said.contains("FAILED tests/test_code.py::test_wrong") && said.contains("not five"), "{said}");
        assert!(!said.contains("run_tests"), "our own frames are none of the program's business: {said}");
    }
}

#[test]
fn only_positive_evidence_counts() {
    let test = "import code_under_test\ndef test_a():\n    assert code_under_test.f() == 1\n";
    let attacks = [
        ("exits at import", "import os\nos._exit(0)"),
        ("raises SystemExit at import", "raise SystemExit(0)"),
        ("does not compile", "def f(:"),
        ("prints evidence", "print('0 1'); print('t.py::test_a PASSED')\ndef f(): return 0"),
        (
            "writes to every descriptor",
            "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'0 0 1\\n')\n    except OSError: pass\ndef f(): return 0",
        ),
        ("kills itself", "import os\nos.kill(os.getpid(), 9)\ndef f(): return 1"),
        ("leaves a child that outlives it", "import os, time\nif os.fork() == 0:\n    time.sleep(300)\nos._exit(0)"),
        ("replaces the test file", "open('t.py', 'w').write('def test_a(): pass')\ndef f(): return 0"),
        ("shadows a module of the runner", "import sys, types\nsys.modules['os'] = types.ModuleType('os')\ndef f(): return 0"),
    ];
    for sandbox in every_kind() {
        for (name, code) in attacks {
            let run = run(&sandbox, &[("code_under_test.py", code), ("t.py", test)], &["t.py::test_a", "t.py::test_b"]);
            assert!(!run.passed("t.py::test_a") && !run.passed("t.py::test_b"), "{name}: {run:?}");
            assert!(!run.result.verdict.infrastructure(), "{name}: {run:?}");
        }
        let honest = run(&sandbox, &[("code_under_test.py", "def f(): return 1"), ("t.py", test)], &["t.py::test_a"]);
        assert!(honest.passed("t.py::test_a"), "{honest:?}");
    }
}

#[test]
fn limits_hold_warm_and_cold() {
    let cases = [
        ("def test_a():\n    while True: pass", RunVerdict::CpuTimeout),
        ("import time\ndef test_a():\n    time.sleep(300)", RunVerdict::WallTimeout),
        ("def test_a():\n    kept = []\n    while True: kept.append(bytearray(b'x' * (1 << 20)))", RunVerdict::MemoryLimit),
        ("def test_a():\n    while True: print('x' * 10000)", RunVerdict::OutputLimit),
        (
            "import os, time\ndef test_a():\n    while True:\n        try: os.fork()\n        except OSError: time.sleep(60)",
            RunVerdict::ProcessLimit,
        ),
        (
            "import signal, time\ndef test_a():\n    for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n    time.sleep(300)",
            RunVerdict::WallTimeout,
        ),
    ];
    for sandbox in every_kind() {
        for (test, verdict) in &cases {
            let mut limits = Limits { cpu_seconds: 2.0, ..tight() };
            if *verdict == RunVerdict::WallTimeout {
                limits.wall_seconds = 0.5;
            }
            let run = run_within(&sandbox, &[("t.py", test)], &["t.py::test_a"], limits);
            assert_eq!(&run.result.verdict, verdict, "{test}: {run:?}");
            assert!(!run.passed("t.py::test_a"));
        }
    }
}

#[test]
fn no_run_sees_another() {
    let leave = "import os, subprocess, sys, json\n\
        def test_leave():\n\
        \x20   json.left = True\n\
        \x20   os.environ['LEFT'] = '1'\n\
        \x20   open('left', 'w').close()\n\
        \x20   open(os.environ['TMPDIR'] + '/left', 'w').close()\n\
        \x20   if os.fork() == 0:\n\
        \x20       os.setsid()\n\
        \x20       os.execvp('sleep', ['sleep', '1003'])\n";
    let look = "import os, json, socket\n\
        def test_look():\n\
        \x20   assert not hasattr(json, 'left')\n\
        \x20   assert 'LEFT' not in os.environ\n\
        \x20   assert os.listdir('.') == ['look.py'], os.listdir('.')\n\
        \x20   assert os.listdir(os.environ['TMPDIR']) == []\n\
        \x20   try: processes = [name for name in os.listdir('/proc') if name.isdigit()]\n\
        \x20   except PermissionError: return\n\
        \x20   assert len(processes) <= 2, processes\n\
        def test_rights():\n\
        \x20   for attempt in (lambda: open('/usr/left', 'w'), lambda: open('/etc/shadow'), lambda: os.listdir('/root/.ssh')):\n\
        \x20       try: attempt()\n\
        \x20       except OSError: continue\n\
        \x20       assert False\n\
        \x20   try: socket.create_connection(('1.1.1.1', 53), 2)\n\
        \x20   except OSError: return\n\
        \x20   assert False\n\
        def test_descriptors():\n\
        \x20   for fd in range(4, 1000):\n\
        \x20       try: os.fstat(fd)\n\
        \x20       except OSError: continue\n\
        \x20       assert False, fd\n";
    for sandbox in every_kind() {
        for _ in 0..3 {
            let left = run(&sandbox, &[("leave.py", leave)], &["leave.py::test_leave"]);
            assert!(left.passed("leave.py::test_leave"), "{left:?}");
            let names = ["look.py::test_look", "look.py::test_rights", "look.py::test_descriptors"];
            let looked = run(&sandbox, &[("look.py", look)], &names);
            let said = String::from_utf8_lossy(&looked.result.stderr).into_owned();
            assert!(names.iter().all(|name| looked.passed(name)), "tier {}: {said} {looked:?}", sandbox.tier());
        }
    }
}

#[test]
fn same_results_from_many_threads() {
    for sandbox in every_kind() {
        std::thread::scope(|scope| {
            for number in 0..4 {
                let sandbox = &sandbox;
                scope.spawn(move || {
                    for round in 0..5 {
                        let code = format!("def f():\n    return {}\n", number * 10 + round);
                        let test = format!("from code_here import f\ndef test_a():\n    assert f() == {}\n", number * 10 + round);
                        let run = run(sandbox, &[("code_here.py", &code), ("t.py", &test)], &["t.py::test_a"]);
                        assert!(run.passed("t.py::test_a"), "{run:?}");
                    }
                });
            }
        });
    }
}

/// The live descendants of this thread's children: numbers in the machine's /proc.
fn helpers() -> Vec<u32> {
    let children = |path: String| -> Vec<u32> {
        let list = std::fs::read_to_string(path).unwrap_or_default();
        list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    };
    let mut found = children("/proc/thread-self/children".to_string());
    let mut next = 0;
    while let Some(pid) = found.get(next).copied() {
        found.extend(children(format!("/proc/{pid}/task/{pid}/children")));
        next += 1;
    }
    found
}

/// State and process group of a process that is not gone.
fn state_and_group(pid: u32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    Some((fields[0].to_string(), fields[2].parse().ok()?))
}

#[test]
fn a_warm_interpreter_that_died_is_replaced() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, true)) {
        for _ in 0..2 {
            let passing = run(&sandbox, &[("t.py", "def test_a():\n    pass\n")], &["t.py::test_a"]);
            assert!(passing.passed("t.py::test_a"), "{passing:?}");
            let helpers = helpers();
            let groups: Vec<u32> = helpers.iter().filter_map(|&pid| state_and_group(pid)).map(|(_, group)| group).collect();
            assert!(!groups.is_empty() && groups.iter().all(|group| *group == helpers[0]), "Ctrl-C spares them: {groups:?}");
            assert!(std::process::Command::new("kill").args(["-KILL", &helpers[0].to_string()]).status().unwrap().success());
            while helpers.iter().any(|&pid| state_and_group(pid).is_some_and(|(state, _)| state != "Z")) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn as_an_ordinary_user() {
    for test in ["outcomes_of_named_tests", "only_positive_evidence_counts", "limits_hold_warm_and_cold", "no_run_sees_another"] {
        crate::users::repeat_as_an_ordinary_user(&format!("tests_of_python::{test}"));
    }
}

/// `cargo test --release --test sandbox -- --ignored --nocapture speed`: runs per second, by tier and callers.
#[test]
#[ignore = "a measurement, for a quiet machine"]
fn speed() {
    let files =
        [("code.py", "def f(x):\n    return x + 1\n"), ("t.py", "from code import f\ndef test_a():\n    assert f(1) == 2\n")];
    for sandbox in every_kind() {
        let first = run(&sandbox, &files, &["t.py::test_a"]);
        let count = if first.started_warm { 400 } else { 40 };
        for threads in [1, 2, 4] {
            let start = std::time::Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        for _ in 0..count / threads {
                            assert!(run(&sandbox, &files, &["t.py::test_a"]).passed("t.py::test_a"));
                        }
                    });
                }
            });
            let rate = count as f64 / start.elapsed().as_secs_f64();
            println!("tier {} warm {} callers {threads}: {rate:.0} runs/s", sandbox.tier(), first.started_warm);
        }
    }
}
