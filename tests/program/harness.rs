//! Starting the program and reading what it leaves behind.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

pub fn learner(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_learner"));
    command.args(arguments).env_remove("RUST_BACKTRACE");
    command
}

/// Runs to the end and returns what was printed, whatever the exit code.
pub fn run(arguments: &[&str]) -> Output {
    learner(arguments).output().expect("the program starts")
}

/// Runs to the end and expects success.
pub fn succeed(arguments: &[&str]) -> Output {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}\n{}\n{}", output.status, text(&output.stdout), text(&output.stderr));
    output
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn json(path: &Path) -> Value {
    let content = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&content).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Everything a run found, without the times: equal runs have equal results.
pub fn result(directory: &Path) -> (Value, Vec<Value>) {
    let mut summary = json(&directory.join("summary.json"));
    remove_times(&mut summary);
    let metrics = std::fs::read_to_string(directory.join("metrics.jsonl")).expect("the run wrote metrics");
    let metrics = metrics
        .lines()
        .map(|line| {
            let mut value = serde_json::from_str(line).expect("a line of metrics is JSON");
            remove_times(&mut value);
            value
        })
        .collect();
    (summary, metrics)
}

fn remove_times(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("seconds");
            fields.remove("speed");
            fields.values_mut().for_each(remove_times);
        }
        Value::Array(values) => values.iter_mut().for_each(remove_times),
        _ => {}
    }
}
