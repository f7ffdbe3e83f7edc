//! Other users of the machine: the same tests again, without root's rights.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const NOBODY: u32 = 65534;

/// Where the ordinary user finds the program under test.
pub const HELPER_VARIABLE: &str = "LEARNER_TEST_HELPER";

pub fn helper() -> PathBuf {
    std::env::var_os(HELPER_VARIABLE).map_or_else(|| env!("CARGO_BIN_EXE_learner").into(), PathBuf::from)
}

pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

/// Runs one test of this binary again as an ordinary user, with copies of the binaries that he can reach.
pub fn repeat_as_an_ordinary_user(test: &str) {
    if !is_root() {
        return; // the test itself has run as one
    }
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    copy_binaries(place.path());
    let output = Command::new(place.path().join("tests"))
        .args(["--exact", test, "--nocapture"])
        .env(HELPER_VARIABLE, place.path().join("learner"))
        .env("HOME", "/")
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "as uid {NOBODY}:\n{said}");
    for line in said.lines().filter(|line| line.starts_with("left out")) {
        println!("as uid {NOBODY}: {line}");
    }
}

/// Lays this test binary and the program under test where an ordinary user can reach them, as `tests` and `learner`.
pub fn copy_binaries(place: &Path) {
    for (from, name) in [(std::env::current_exe().unwrap(), "tests"), (env!("CARGO_BIN_EXE_learner").into(), "learner")] {
        let to = place.join(name);
        std::fs::copy(from, &to).unwrap();
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
}
