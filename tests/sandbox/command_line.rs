//! `learner sandbox`.

use std::process::{Command, Output};

fn learner(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_learner")).arg("sandbox").args(arguments).output().unwrap()
}

#[test]
fn passes_output_on() {
    let output = learner(&["--", "sh", "-c", "sleep 1000 & echo hi; echo ho >&2"]);
    assert_eq!((output.status.code(), &output.stdout[..], &output.stderr[..]), (Some(0), &b"hi\n"[..], &b"ho\n"[..]));
    let output = learner(&["--", "sh", "-c", "exit 3"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "learner: sandbox: the command exited with 3\n");
}

#[test]
fn prints_one_object() {
    let output = learner(&["--json", "--wall-seconds", "0.3", "--", "sleep", "100"]);
    assert_eq!(output.status.code(), Some(1));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["verdict"], "wall_timeout");
    assert_eq!((&object["exit_code"], &object["signal"]), (&serde_json::Value::Null, &9.into()));
    for key in ["wall_seconds", "cpu_seconds", "peak_bytes", "stdout", "stderr", "truncated", "tier"] {
        assert!(!object[key].is_null(), "{key}");
    }
}

#[test]
fn refuses_limits_that_are_none() {
    let output = learner(&["--cpu-seconds", "0", "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr).starts_with("learner: sandbox.limits.cpu_seconds is 0: give a number above 0")
    );
}
