//! A process of its own for a test: its descriptors, children, mounts and temporary files are then that test's alone.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::users;

/// Set in a process that was started for one test.
const VARIABLE: &str = "LEARNER_TEST_ALONE";

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum As {
    /// Whoever runs the tests.
    Caller,
    /// An ordinary user of the machine; only root can become one.
    OrdinaryUser,
}

/// Runs `body` as the test named `test`, in a process of its own that does nothing else.
pub fn process(test: &str, user: As, body: impl FnOnce()) {
    if std::env::var_os(VARIABLE).is_some_and(|value| value == test) {
        return body();
    }
    if user == As::OrdinaryUser && !users::is_root() {
        return; // the caller is one, and has a test of his own
    }
    let directory = tempfile::tempdir().unwrap();
    let open = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    let (place, temporary) = (directory.path().join("place"), directory.path().join("temporary"));
    for (path, mode) in [(directory.path(), 0o755), (&place, 0o755), (&temporary, 0o777)] {
        std::fs::create_dir_all(path).unwrap();
        open(path, mode);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    if user == As::OrdinaryUser {
        users::copy_binaries(&place);
        command = Command::new(place.join("tests"));
        command.env(users::HELPER_VARIABLE, place.join("learner")).env("HOME", "/");
    }
    command.args(["--exact", test, "--nocapture", "--include-ignored"]).current_dir("/");
    command.env(VARIABLE, test).env("TMPDIR", &temporary);
    if users::is_root() {
        own_mounts(&mut command, (user == As::OrdinaryUser).then_some(users::NOBODY));
    }
    let output = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{test}:\n{said}");
    let frame = |line: &&str| !line.is_empty() && !line.starts_with("running ") && !line.starts_with("test ");
    said.lines().filter(frame).for_each(|line| println!("{test}: {line}"));
}

/// Gives the process a copy of the mounts that others do not change, and that shows what a sandbox would let out: it is shared.
/// Then it becomes the user.
fn own_mounts(command: &mut Command, user: Option<u32>) {
    let enter = move || {
        use rustix::mount::{MountPropagationFlags as Flags, mount_change};
        // SAFETY: the child is single-threaded between fork and exec; a table of mounts is no memory.
        let own = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) };
        // A root without the right to do so sees the mounts of everyone.
        if own.is_ok() {
            mount_change("/", Flags::PRIVATE | Flags::REC)?;
            mount_change("/", Flags::SHARED | Flags::REC)?;
        }
        if let Some(id) = user {
            let (group, user) = (rustix::thread::Gid::from_raw(id), rustix::thread::Uid::from_raw(id));
            rustix::thread::set_thread_groups(&[])?;
            rustix::thread::set_thread_res_gid(group, group, group)?;
            rustix::thread::set_thread_res_uid(user, user, user)?;
        }
        Ok(())
    };
    // SAFETY: only system calls between fork and exec.
    unsafe { command.pre_exec(enter) };
}
