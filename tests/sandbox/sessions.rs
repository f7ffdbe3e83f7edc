//! Snapshots that many share, sessions of many commands, and what they changed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use learner::sandbox::{
    Limits, Now, Request, RunResult, RunVerdict, Sandbox, Session, SessionRequest, Snapshot, Tier, TreeSource,
};
use learner::types::Workspace;

use crate::{TIERS, sandbox, shell, stdout, tight};

/// A small repository, binary file and links included, that anybody may read.
fn repository() -> (tempfile::TempDir, Snapshot) {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = |name: &str, contents: &[u8]| {
        let path = place.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    };
    file("readme", b"hello\n");
    file("src/a.py", b"a = 1\n");
    file("src/b.py", b"b = 1\n");
    file("old/deep/file", b"old\n");
    file("data.bin", &[0, 255, 254, 10]);
    symlink("readme", place.path().join("link")).unwrap();
    let snapshot = Snapshot::of_directory(place.path()).unwrap();
    (place, snapshot)
}

/// Every name below a directory with what it is, to see that nothing has changed.
fn state(directory: &Path) -> BTreeMap<String, (u32, u64, i64, Vec<u8>)> {
    let (mut state, mut waiting) = (BTreeMap::new(), vec![directory.to_path_buf()]);
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let found = fs::symlink_metadata(&path).unwrap();
            let contents = if found.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            state.insert(path.display().to_string(), (found.mode(), found.ino(), found.mtime(), contents));
            if found.is_dir() {
                waiting.push(path);
            }
        }
    }
    state
}

fn command(script: &str) -> Request {
    Request { argv: ["sh", "-c", script].map(str::to_string).to_vec(), ..Request::default() }
}

fn in_session(session: &mut Session, script: &str) -> RunResult {
    let result = session.run(&command(script));
    assert!(result.succeeded(), "{script}: {result:?} {}", String::from_utf8_lossy(&result.stderr));
    result
}

fn session(sandbox: &Sandbox, tree: &Snapshot) -> Session {
    let limits = Limits { file_bytes: 1 << 42, ..tight() };
    sandbox.session(&SessionRequest { tree: Some(tree.clone()), limits: Some(limits), ..SessionRequest::default() }).unwrap()
}

#[test]
fn a_snapshot_is_shared_and_stays_as_it_is() {
    let (place, tree) = repository();
    let before = state(place.path());
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let files = Workspace::from([("src/a.py".to_string(), "laid\n".to_string())]);
        let script = "cat readme src/a.py src/b.py; cmp data.bin - < data.bin && test -L link && cat link; \
                      rm -r old && echo changed > src/b.py && echo new > new && chmod 700 readme";
        let request = Request { tree: Some(tree.clone()), files, limits: Some(tight()), ..command(script) };
        for _ in 0..2 {
            let result = sandbox.run(&request);
            assert!(result.succeeded(), "{result:?} {}", String::from_utf8_lossy(&result.stderr));
            assert_eq!(stdout(&result), "hello\nlaid\nb = 1\nhello\n", "tier {}", sandbox.tier());
            let expected = if sandbox.tier() == Tier::A { TreeSource::Overlay } else { TreeSource::Copy };
            assert_eq!(result.mechanisms.tree, expected);
        }
        // The layers of the overlay are out of reach.
        let result =
            sandbox.run(&Request { tree: Some(tree.clone()), ..command("ls -A /box/layers 2> /dev/null; umount /box/layers") });
        assert_eq!((stdout(&result).as_str(), result.succeeded()), ("", false));
        assert_eq!(state(place.path()), before, "tier {}", sandbox.tier());
    }
}

#[test]
fn nothing_but_files_outlives_a_command() {
    let (_place, tree) = repository();
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let mut session = session(&sandbox, &tree);
        in_session(
            &mut session,
            "echo one > kept; cd src; export X=1; (setsid sleep 1000 > /dev/null 2>&1 &); sleep 1000 & true",
        );
        let result = in_session(&mut session, "cat kept; pwd | tail -c 5; echo \"[$X]\"; pgrep sleep | wc -l; echo two >> kept");
        assert_eq!(stdout(&result), "one\nwork\n[]\n0\n", "tier {}", sandbox.tier());
        // A limit ends one command, and the next goes on with the tree.
        let limits = Limits { wall_seconds: 0.3, ..tight() };
        let result = session.run(&Request { limits: Some(limits), ..command("echo three >> kept; sleep 1000") });
        assert_eq!(result.verdict, RunVerdict::WallTimeout);
        assert!(result.limits_hit.wall);
        assert_eq!(stdout(&in_session(&mut session, "cat kept")), "one\ntwo\nthree\n");
        // Another session over the same tree sees nothing of it.
        let mut other = self::session(&sandbox, &tree);
        assert_eq!(stdout(&in_session(&mut other, "ls")), "data.bin\nlink\nold\nreadme\nsrc\n");
    }
}

#[test]
fn changes_are_read_without_following_anything() {
    let (_place, tree) = repository();
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let mut session = session(&sandbox, &tree);
        assert_eq!(session.read_changes(1 << 20).unwrap(), []);
        let script = "echo more >> readme; rm -r old; rm src/b.py; mkdir -p made/empty; printf '\\000\\377' > made/raw; chmod 755 made/raw
            ln -s /etc/shadow secret; ln -sfn / src/out; mkfifo pipe; truncate -s 1T sparse; rm link; mkdir link; echo in > link/in
            echo closed > closed; chmod 000 closed; mkdir locked; echo in > locked/in; chmod 000 locked
            mkdir again && rm -r src/../again; echo odd > \"$(printf 'a\\377\\nb')\"; echo big > big; head -c 100000 /dev/zero >> big";
        in_session(&mut session, script);
        let changes = session.read_changes(50_000).unwrap();
        let now: BTreeMap<&[u8], &Now> = changes.iter().map(|change| (&change.name[..], &change.now)).collect();
        let file = |contents: &[u8], executable| Now::File { contents: contents.to_vec(), executable };
        let expected: Vec<(&[u8], Now)> = vec![
            (b"a\xff\nb", file(b"odd\n", false)),
            (b"closed", file(b"closed\n", false)),
            (b"link", Now::Directory),
            (b"link/in", file(b"in\n", false)),
            (b"locked", Now::Directory),
            (b"locked/in", file(b"in\n", false)),
            (b"made", Now::Directory),
            (b"made/empty", Now::Directory),
            (b"made/raw", file(b"\0\xff", true)),
            (b"old", Now::Removed),
            (b"old/deep", Now::Removed),
            (b"old/deep/file", Now::Removed),
            (b"pipe", Now::Other),
            (b"readme", file(b"hello\nmore\n", false)),
            (b"secret", Now::Link { target: b"/etc/shadow".to_vec() }),
            (b"src/b.py", Now::Removed),
            (b"src/out", Now::Link { target: b"/".to_vec() }),
        ];
        for (name, expected) in &expected {
            assert_eq!(now.get(name), Some(&expected), "{}, tier {}", String::from_utf8_lossy(name), sandbox.tier());
        }
        assert!(
            matches!(now[&b"sparse"[..]], Now::Unread { apparent_bytes: 1_099_511_627_776, allocated_bytes } if *allocated_bytes < 1 << 20)
        );
        assert!(matches!(now[&b"big"[..]], Now::Unread { apparent_bytes: 100_004, .. }));
        assert_eq!(
            now.len(),
            expected.len() + 2,
            "{:?}",
            now.keys().map(|name| String::from_utf8_lossy(name)).collect::<Vec<_>>()
        );
        // Reading has changed nothing. (In tier B an ordinary user's closed directories may be open for a moment at any time.)
        if sandbox.tier() == Tier::B && !crate::users::is_root() {
            continue;
        }
        assert_eq!(stdout(&in_session(&mut session, "stat -c %a closed locked")), "0\n0\n");
    }
}

#[test]
fn laid_files_win_in_a_session() {
    let (_place, tree) = repository();
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().join("target");
    fs::write(&target, "untouched").unwrap();
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let mut session = session(&sandbox, &tree);
        let plant = format!(
            "ln -sfn {0} readme; rm -r src; ln -s {1} src; mkdir -p test.py/x",
            target.display(),
            outside.path().display()
        );
        in_session(&mut session, &plant);
        let files: Workspace =
            ["readme", "src/target", "test.py"].iter().map(|name| (name.to_string(), format!("{name}\n"))).collect();
        let result = session.run(&Request { files, ..command("cat readme src/target test.py") });
        assert_eq!((result.succeeded(), stdout(&result).as_str()), (true, "readme\nsrc/target\ntest.py\n"), "{result:?}");
        assert_eq!(fs::read_to_string(&target).unwrap(), "untouched");
    }
}

#[test]
fn a_dropped_session_leaves_nothing() {
    let (_place, tree) = repository();
    let ours = format!("learner-run-{}-", std::process::id());
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let mut session = session(&sandbox, &tree);
        let work = stdout(&in_session(&mut session, "pwd; mkdir -p a/b; chmod 000 a"));
        drop(session);
        assert!(!Path::new(work.trim()).exists(), "{work} of {ours}");
        assert_eq!(stdout(&shell(&sandbox, "ls -A", tight())), "");
    }
}

#[test]
fn many_sessions_live_beside_each_other() {
    let (_place, tree) = repository();
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        // More than there are places: between commands a session holds none.
        let mut sessions: Vec<Session> = (0..20).map(|_| session(&sandbox, &tree)).collect();
        std::thread::scope(|scope| {
            for (number, session) in sessions.iter_mut().enumerate() {
                scope.spawn(move || in_session(session, &format!("echo {number} > mine")));
            }
        });
        for (number, session) in sessions.iter_mut().enumerate() {
            assert_eq!(stdout(&in_session(session, "cat mine")), format!("{number}\n"));
        }
    }
}

/// What this program's copy does until it is killed: runs that would go on for long, and sessions between commands.
#[test]
#[ignore = "the body of a killed learner, started by the test below"]
fn many_that_are_killed() {
    let (_place, tree) = repository();
    let sandboxes: Vec<Sandbox> = TIERS.into_iter().filter_map(|tier| sandbox(tier, false)).collect();
    let _sessions: Vec<Session> = sandboxes.iter().map(|sandbox| session(sandbox, &tree)).collect();
    let script = format!("sleep {}", std::env::var("LEARNER_TEST_SECONDS").unwrap());
    std::thread::scope(|scope| {
        for sandbox in &sandboxes {
            for _ in 0..4 {
                scope.spawn(|| shell(sandbox, &script, tight()));
            }
        }
    });
}

#[test]
fn a_killed_learner_takes_all_with_it_and_is_swept() {
    let seconds = format!("900.{}", std::process::id());
    let sleepers = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        lines
            .filter(|line| line.starts_with(b"sleep\0") && line.windows(seconds.len()).any(|part| part == seconds.as_bytes()))
            .count()
    };
    let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sessions::many_that_are_killed", "--ignored"])
        .env("LEARNER_TEST_SECONDS", &seconds)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let tiers = TIERS.into_iter().filter_map(|tier| sandbox(tier, false)).count();
    let wait = std::time::Duration::from_millis(5);
    while sleepers() < 4 * tiers {
        assert!(victim.try_wait().unwrap().is_none(), "the victim has ended by itself");
        std::thread::sleep(wait);
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    while sleepers() > 0 {
        std::thread::sleep(wait); // if one stays, this test does not end
    }
    // The next start removes directories that are left; those of tests that run beside this one stay.
    let left = || {
        let prefix = format!("learner-run-{}-", victim.id());
        let names =
            fs::read_dir(std::env::temp_dir()).unwrap().flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.starts_with(&prefix)).count()
    };
    while left() > 0 {
        let _ = sandbox(Tier::B, false); // the last of the victim's processes may hold its lease for a moment
        std::thread::sleep(wait);
    }
}

#[test]
fn as_an_ordinary_user() {
    let tests = [
        "a_snapshot_is_shared_and_stays_as_it_is",
        "nothing_but_files_outlives_a_command",
        "changes_are_read_without_following_anything",
    ];
    for test in tests {
        crate::users::repeat_as_an_ordinary_user(&format!("sessions::{test}"));
    }
}
