//! What we read out of a tree in which a hostile program has worked (items 50 to 56, 59 and 61).

use std::collections::BTreeMap;
use std::path::Path;

use learner::sandbox::{Limits, Now, Request, RunResult, Sandbox, Session, SessionRequest, Snapshot};

use crate::alone::{As, process};
use crate::catalogue::limits;
use crate::host::Watch;
use crate::{TIERS, sandbox_for};

/// A file of the machine that anybody may read, and that no run may.
struct Secret {
    directory: tempfile::TempDir,
}

const SECRET: &str = "secret of the machine";

impl Secret {
    fn lay() -> Secret {
        let directory = tempfile::Builder::new().prefix("secret").tempdir().unwrap();
        std::fs::write(directory.path().join("file"), SECRET).unwrap();
        open_to_all(directory.path());
        Secret { directory }
    }

    fn path(&self) -> String {
        self.directory.path().join("file").display().to_string()
    }
}

fn open_to_all(path: &Path) {
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

/// A small repository that sessions start from.
fn repository() -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("repository").tempdir().unwrap();
    open_to_all(directory.path());
    std::fs::create_dir(directory.path().join("package")).unwrap();
    open_to_all(&directory.path().join("package"));
    for name in ["code.py", "notes.txt", "package/inner.py"] {
        std::fs::write(directory.path().join(name), format!("original {name}\n")).unwrap();
        open_to_all(&directory.path().join(name));
    }
    directory
}

fn unchanged(directory: &Path) {
    for name in ["code.py", "notes.txt", "package/inner.py"] {
        assert_eq!(std::fs::read_to_string(directory.join(name)).unwrap(), format!("original {name}\n"));
    }
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), 3);
}

fn session(sandbox: &Sandbox, tree: Option<&Path>, limits: Limits) -> Session {
    let tree = tree.map(|path| Snapshot::of_directory(path).unwrap());
    sandbox.session(&SessionRequest { tree, limits: Some(limits), ..SessionRequest::default() }).unwrap()
}

fn run(session: &mut Session, script: &str) -> RunResult {
    let argv = ["sh", "-c", script].map(str::to_string).to_vec();
    let result = session.run(&Request { argv, ..Request::default() });
    assert!(result.succeeded(), "{result:?}: {}", String::from_utf8_lossy(&result.stderr));
    result
}

fn python(session: &mut Session, program: &str) {
    let argv = ["python3", "-c", program].map(str::to_string).to_vec();
    let result = session.run(&Request { argv, ..Request::default() });
    assert!(result.succeeded(), "{result:?}: {}", String::from_utf8_lossy(&result.stderr));
}

fn changes(session: &mut Session) -> BTreeMap<Vec<u8>, Now> {
    let changes = session.read_changes(1 << 20).unwrap();
    changes.into_iter().map(|change| (change.name, change.now)).collect()
}

/// In each tier, in a process of its own, with a look at the machine before and after.
fn in_each_tier(test: &str, body: impl Fn(&Sandbox, &Path)) {
    process(test, As::Caller, || {
        for sandbox in TIERS.into_iter().filter_map(|tier| sandbox_for(tier, 2)) {
            let repository = repository();
            let watch = Watch::begin(&sandbox);
            body(&sandbox, repository.path());
            unchanged(repository.path());
            let changes = watch.changes();
            assert!(changes.is_empty(), "tier {}: {}", sandbox.tier(), changes.join("\n"));
        }
    });
}

#[test]
fn links_are_not_followed() {
    in_each_tier("collector::links_are_not_followed", |sandbox, repository| {
        let secret = Secret::lay();
        let mut session = session(sandbox, Some(repository), limits());
        let script =
            format!("rm -r code.py package; ln -s {0} code.py; ln -s {0} new; ln -s / package; ln -s .. up", secret.path());
        run(&mut session, &script);
        let found = changes(&mut session);
        let link = |target: &str| Some(Now::Link { target: target.as_bytes().to_vec() });
        for (name, target) in [("code.py", secret.path().as_str()), ("new", &secret.path()), ("package", "/"), ("up", "..")] {
            assert_eq!(found.get(name.as_bytes()).cloned(), link(target), "{name}");
        }
        assert!(found.keys().all(|name| !name.starts_with(b"up/")), "{found:?}");
        // A file that we lay goes where its name says, not where a link leads.
        let files = [("package/inner.py".to_string(), "laid".to_string())].into();
        let argv = ["cat", "package/inner.py"].map(str::to_string).to_vec();
        let result = session.run(&Request { argv, files, ..Request::default() });
        assert_eq!(result.stdout, b"laid", "{result:?}");
        assert!(
            matches!(changes(&mut session).get(&b"package/inner.py"[..]), Some(Now::File { contents, .. }) if contents == b"laid")
        );
    });
}

#[test]
fn nothing_moves_while_it_is_read() {
    in_each_tier("collector::nothing_moves_while_it_is_read", |sandbox, repository| {
        let mut session = session(sandbox, Some(repository), limits());
        let swap =
            "(while :; do mv package aside; ln -s /etc package; rm package; mv aside package; done) > /dev/null 2>&1 & sleep 0.1";
        run(&mut session, swap);
        let (first, second) = (changes(&mut session), changes(&mut session));
        assert_eq!(first, second);
        assert!(first.keys().all(|name| !name.ends_with(b"passwd")), "{first:?}");
    });
}

#[test]
fn a_hard_link_leaves_the_snapshot_alone() {
    in_each_tier("collector::a_hard_link_leaves_the_snapshot_alone", |sandbox, repository| {
        let mut session = session(sandbox, Some(repository), limits());
        run(
            &mut session,
            "ln code.py hard && echo changed > hard && chmod 755 package/inner.py && echo more >> package/inner.py",
        );
        let found = changes(&mut session);
        let file = |contents: &[u8], executable| Some(Now::File { contents: contents.to_vec(), executable });
        assert_eq!(found.get(&b"hard"[..]).cloned(), file(b"changed\n", false));
        assert_eq!(found.get(&b"package/inner.py"[..]).cloned(), file(b"original package/inner.py\nmore\n", true));
    });
}

#[test]
fn what_is_no_file_is_not_opened() {
    in_each_tier("collector::what_is_no_file_is_not_opened", |sandbox, repository| {
        let mut session = session(sandbox, Some(repository), Limits { file_bytes: 1 << 42, ..limits() });
        run(&mut session, "rm code.py && mkfifo code.py pipe && truncate -s 1T sparse && head -c 2000000 /dev/zero > large");
        let found = changes(&mut session);
        assert_eq!((found.get(&b"code.py"[..]), found.get(&b"pipe"[..])), (Some(&Now::Other), Some(&Now::Other)));
        for (name, bytes) in [("sparse", 1u64 << 40), ("large", 2_000_000)] {
            let now = found.get(name.as_bytes());
            assert!(matches!(now, Some(Now::Unread { apparent_bytes, .. }) if *apparent_bytes == bytes), "{name}: {now:?}");
        }
    });
}

#[test]
fn deep_and_closed_trees_are_read_and_removed() {
    in_each_tier("collector::deep_and_closed_trees_are_read_and_removed", |sandbox, repository| {
        let mut session = session(sandbox, Some(repository), Limits { workspace_bytes: 64 << 20, ..limits() });
        python(&mut session, "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').close()");
        run(&mut session, "mkdir -p closed/inner && echo x > closed/inner/file && chmod 0 closed/inner/file closed/inner closed");
        run(&mut session, "rm notes.txt");
        let found = changes(&mut session);
        assert_eq!(found.get(&b"notes.txt"[..]), Some(&Now::Removed));
        assert!(found.contains_key(&b"closed"[..]) && found.contains_key(&b"d"[..]), "{:?}", found.keys().take(5));
    });
}

#[test]
fn names_are_bytes() {
    in_each_tier("collector::names_are_bytes", |sandbox, repository| {
        let mut session = session(sandbox, Some(repository), limits());
        python(
            &mut session,
            "for name in [b'new\\nline', b'-rf', b'x' * 255, b'\\xff\\xfe', b'Case', b'case', b'dots...', b' ']: open(name, 'wb').write(name)",
        );
        let found = changes(&mut session);
        let long = [b'x'; 255];
        let names: [&[u8]; 8] = [b"new\nline", b"-rf", &long, b"\xff\xfe", b"Case", b"case", b"dots...", b" "];
        assert_eq!(found.len(), names.len(), "{found:?}");
        for name in names {
            assert!(matches!(found.get(name), Some(Now::File { contents, .. }) if contents == name), "{name:?}");
        }
    });
}

/// Item 59. A repository's configuration names programs that git starts; we start no git over a tree, so none is.
#[test]
fn a_poisoned_repository_runs_nothing_of_ours() {
    in_each_tier("collector::a_poisoned_repository_runs_nothing_of_ours", |sandbox, repository| {
        let place = tempfile::tempdir().unwrap();
        std::fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let mut session = session(sandbox, Some(repository), limits());
        let command = format!("touch {}/reached", place.path().display());
        let poison = format!(
            "mkdir -p .git/hooks .git/objects .git/refs && echo 'ref: refs/heads/main' > .git/HEAD && \
             printf '[core]\\n\\trepositoryformatversion = 0\\n\\tfsmonitor = {command}\\n\\tpager = {command}\\n[diff]\\n\\texternal = \
             {command}\\n[filter \"x\"]\\n\\tclean = {command}\\n\\tsmudge = {command}\\n' > .git/config && \
             echo '* filter=x diff=x' > .gitattributes && for hook in post-checkout pre-commit post-index-change; do \
             printf '#!/bin/sh\\n{command}\\n' > .git/hooks/$hook && chmod +x .git/hooks/$hook; done && echo changed > code.py"
        );
        run(&mut session, &poison);
        let found = changes(&mut session);
        assert!(found.contains_key(&b".git/config"[..]) && found.contains_key(&b"code.py"[..]), "{:?}", found.keys());
        drop(session);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "something of the repository's was run");
    });
}

/// Item 61: a tree that deletes itself is a list of what is gone.
#[test]
fn a_deleted_tree_is_a_change_like_others() {
    in_each_tier("collector::a_deleted_tree_is_a_change_like_others", |sandbox, repository| {
        let mut session = session(sandbox, Some(repository), limits());
        run(&mut session, "rm -rf ./* && ls -A | wc -l");
        let found = changes(&mut session);
        let names: Vec<&[u8]> = found.keys().map(Vec::as_slice).collect();
        assert_eq!(names, [&b"code.py"[..], b"notes.txt", b"package", b"package/inner.py"], "{found:?}");
        assert!(found.values().all(|now| *now == Now::Removed));
    });
}
