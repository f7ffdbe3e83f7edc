//! Programs that do not want to be contained, each beside its declared verdict.

use std::time::{Duration, Instant};

use learner::sandbox::{Limits, RunVerdict, Sandbox};

use crate::{TIERS, python, sandbox, shell, stdout, tight};

fn ends_with(sandbox: &Sandbox, name: &str, verdict: RunVerdict, result: learner::sandbox::RunResult) {
    let tier = sandbox.tier();
    assert_eq!(result.verdict, verdict, "{name}, tier {tier}: {}", String::from_utf8_lossy(&result.stderr));
}

/// How long a program of this test process sleeps: a number that no other process sleeps for.
fn seconds(number: u32) -> String {
    format!("{number}.{}", std::process::id())
}

/// No process that sleeps for this long is left.
fn no_sleeper(seconds: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    !processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok()).any(|line| {
        let words: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        words.first().is_some_and(|word| word.ends_with(b"sleep")) && words.get(1) == Some(&seconds.as_bytes())
    })
}

#[test]
fn limits_have_their_verdicts() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let check = |name, verdict, result| ends_with(&sandbox, name, verdict, result);
        let short = || Limits { wall_seconds: 0.5, ..tight() };
        check("honest", RunVerdict::Exited, shell(&sandbox, "echo hi", tight()));
        check(
            "fork bomb",
            RunVerdict::ProcessLimit,
            shell(&sandbox, &format!("f() {{ f | f & }}; f; sleep {}", seconds(300)), tight()),
        );
        let forks = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(60)";
        check("forks in Python", RunVerdict::ProcessLimit, python(&sandbox, forks, tight()));
        let threads = "import threading, time\nfor _ in range(100):\n    threading.Thread(target=time.sleep, args=(60,)).start()";
        check("threads", RunVerdict::ProcessLimit, python(&sandbox, threads, tight()));
        let pages = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20)))";
        check("memory in small pieces", RunVerdict::MemoryLimit, python(&sandbox, pages, tight()));
        check("memory in one piece", RunVerdict::MemoryLimit, python(&sandbox, "b = bytearray(600 << 20)", tight()));
        check("endless output", RunVerdict::OutputLimit, shell(&sandbox, "exec yes", tight()));
        check("endless errors", RunVerdict::OutputLimit, shell(&sandbox, "exec yes >&2", tight()));
        let spin = || Limits { cpu_seconds: 0.5, ..tight() };
        check("spin", RunVerdict::CpuTimeout, shell(&sandbox, "while :; do :; done", spin()));
        let children = "while :; do sh -c 'i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done'; done";
        check("many short children", RunVerdict::CpuTimeout, shell(&sandbox, children, spin()));
        check("sleep", RunVerdict::WallTimeout, shell(&sandbox, &format!("sleep {}", seconds(301)), short()));
        check("stops itself", RunVerdict::WallTimeout, shell(&sandbox, "kill -STOP $$", short()));
        check(
            "closes its output",
            RunVerdict::WallTimeout,
            shell(&sandbox, &format!("exec >&- 2>&-; sleep {}", seconds(302)), short()),
        );
        check(
            "ignores signals",
            RunVerdict::WallTimeout,
            shell(&sandbox, &format!("trap '' TERM INT HUP; sleep {0}; sleep {0}", seconds(303)), short()),
        );
        let fill = "while head -c 1000000 /dev/zero >> $(mktemp ./XXXXXX) && sleep 0.01; do :; done; exit 1";
        check("fills the disk", RunVerdict::DiskLimit, shell(&sandbox, fill, tight()));
        check("own signal", RunVerdict::Signaled, shell(&sandbox, "kill -KILL $$", tight()));
        for number in 300..304 {
            assert!(no_sleeper(&seconds(number)), "sleep {number} is left, tier {}", sandbox.tier());
        }
    }
}

#[test]
fn nothing_of_a_run_stays() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let start = Instant::now();
        let result = shell(&sandbox, &format!("sleep {} & echo hi", seconds(1000)), tight());
        assert_eq!((result.verdict.clone(), stdout(&result).as_str()), (RunVerdict::Exited, "hi\n"));
        assert!(start.elapsed() < Duration::from_secs(15), "returned after {:?}", start.elapsed());
        let daemon = "setsid sh -c 'trap \"\" TERM; sleep SECONDS' > /dev/null 2>&1 & (setsid sleep SECONDS &) ; touch left \"$TMPDIR/left\"";
        let daemon = daemon.replace("SECONDS", &seconds(1001));
        let result = shell(&sandbox, &daemon, tight());
        assert_eq!(result.verdict, RunVerdict::Exited, "{result:?}");
        assert!(no_sleeper(&seconds(1000)) && no_sleeper(&seconds(1001)), "a daemon has survived, tier {}", sandbox.tier());
        let result = shell(&sandbox, "ls -A . \"$TMPDIR\" | grep -v :", tight());
        assert_eq!(stdout(&result).trim(), "", "tier {}", sandbox.tier());
    }
}

#[test]
fn the_machine_is_out_of_reach() {
    let secret = tempfile::Builder::new().prefix("learner-secret").tempfile().unwrap(); // mode 0600
    std::fs::write(secret.path(), "secret").unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok(), "reachable from outside the sandbox");
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let fails = |name: &str, script: &str| {
            let result = shell(&sandbox, script, tight());
            let succeeded = result.succeeded() || result.verdict.infrastructure();
            assert!(!succeeded, "{name} was possible in tier {}: {result:?}", sandbox.tier());
        };
        let attempt = |name: &str, body: &str| {
            let program = format!("import socket, os, ctypes\n{body}\nprint('done')");
            let result = python(&sandbox, &program, tight());
            assert_eq!((result.verdict.clone(), result.exit_code), (RunVerdict::Exited, Some(1)), "{name}: {result:?}");
        };
        assert!(
            shell(&sandbox, "echo x > file && cat file && cat /etc/passwd && ls /usr/bin > $TMPDIR/list", tight()).succeeded()
        );
        fails("reading another's file", &format!("cat {}", secret.path().display()));
        fails("listing root's home", "ls /root/.* /root/* > /dev/null 2>&1 || false; cat /root/.bashrc /root/.profile");
        fails("writing to the system", "echo x > /usr/learner-was-here");
        fails("writing to /etc", "echo x >> /etc/passwd");
        fails("reading shadow", "cat /etc/shadow");
        fails("other environments", "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep CARGO");
        fails("mounting", "mount -t tmpfs none .");
        fails("a further user namespace", "unshare -Ur true");
        attempt("TCP", &format!("socket.create_connection(('127.0.0.1', {port}), 2)"));
        attempt("TCP to outside", "socket.create_connection(('1.1.1.1', 53), 2)");
        attempt("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))");
        attempt("IPv6", "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2606:4700:4700::1111', 53))");
        attempt("DNS", "socket.getaddrinfo('example.com', 80)");
        attempt("netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)");
        attempt("vsock", "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)");
        attempt("io_uring", "assert ctypes.CDLL(None).syscall(425, 1, 0) != -1");
        attempt("ptrace", "assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) != -1");
        attempt(
            "signalling the keeper",
            "os.kill(os.getppid(), 9); import time; time.sleep(0.2); os.kill(os.getppid(), 0); assert False",
        );
    }
}

#[test]
fn nothing_is_inherited() {
    // Descriptors without the close-on-exec flag and secrets in the environment, as a careless caller might have.
    let (reader, writer) = std::io::pipe().unwrap();
    let raw = [std::os::fd::AsRawFd::as_raw_fd(&reader), std::os::fd::AsRawFd::as_raw_fd(&writer)];
    let duplicates: Vec<_> = raw.iter().map(|fd| std::fs::File::open(format!("/proc/self/fd/{fd}"))).collect();
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let look = "import os\nfor fd in range(3, 2000):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)";
        let result = python(&sandbox, look, tight());
        assert_eq!((result.exit_code, stdout(&result).as_str()), (Some(0), ""), "{result:?}");
        let result = shell(&sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '; cat; tty", tight());
        let names = "HOME LANG LC_ALL PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED TERM TMPDIR TZ ";
        assert!(stdout(&result).starts_with(names), "{}", stdout(&result));
    }
    drop(duplicates);
}

#[test]
fn output_is_bytes() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let result = shell(&sandbox, "printf 'a\\000b\\377\\n'; printf '\\303' >&2; exit 7", tight());
        assert_eq!((&result.stdout[..], &result.stderr[..]), (&b"a\0b\xff\n"[..], &b"\xc3"[..]));
        assert_eq!((result.exit_code, result.truncated), (Some(7), false));
        // Twice a pipe's size to both streams at once, which blocks whoever does not drain both.
        let result = shell(&sandbox, "head -c 200000 /dev/zero & head -c 200000 /dev/zero >&2; wait", tight());
        assert_eq!(
            (result.stdout_total, result.stderr_total, result.truncated),
            (200_000, 200_000, true),
            "{:?}",
            result.verdict
        );
        assert!(result.succeeded());
        let result = sandbox.run(&learner::sandbox::Request { argv: vec!["no-such-program".into()], ..Default::default() });
        assert_eq!((result.verdict, result.exit_code), (RunVerdict::Exited, Some(127)));
    }
}

#[test]
fn many_at_once_do_not_disturb_each_other() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        std::thread::scope(|scope| {
            let bomb = scope.spawn(|| shell(&sandbox, "f() { f | f & }; f; sleep 300", tight()));
            let honest: Vec<_> = (0..6)
                .map(|number| {
                    let sandbox = &sandbox;
                    scope.spawn(move || stdout(&shell(sandbox, &format!("echo {number} > mine; (cat mine)"), tight())))
                })
                .collect();
            for (number, run) in honest.into_iter().enumerate() {
                assert_eq!(run.join().unwrap(), format!("{number}\n"));
            }
            assert_eq!(bomb.join().unwrap().verdict, RunVerdict::ProcessLimit);
        });
    }
}

#[test]
fn as_an_ordinary_user() {
    for test in ["limits_have_their_verdicts", "nothing_of_a_run_stays", "the_machine_is_out_of_reach"] {
        crate::users::repeat_as_an_ordinary_user(&format!("hostile::{test}"));
    }
}
