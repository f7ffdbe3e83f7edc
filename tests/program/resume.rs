//! A run killed at any moment, or stopped by a signal, goes on to the same end.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use learner::types::{Key, Purpose};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::harness::{learner, result, run, succeed, text};

const SHORT: [&str; 8] =
    ["--set", "rft.steps=60", "--set", "rl.steps=4", "--set", "rft.candidates=120", "--set", "evaluate.tasks=6"];

/// Besides: a rollout ahead, refills, several updates of a rollout, and weights to stay near to.
const AHEAD: [&str; 8] = [
    "rl.steps_ahead=1",
    "rl.sequences_per_update=5",
    "rl.filter.groups='reward'",
    "rl.reward.overlong_penalty={ token_limit = 300, buffer_tokens = 300 }",
    "rl.dynamic_sampling={ tasks_per_batch = 4 }",
    "rl.loss.kl.coefficient=0.1",
    "rl.loss.correction={ weight = { upper = 1.5 } }",
    "rl.loss.objective='cispo'",
];

fn arguments(path: &Path, more: &[&str]) -> Vec<String> {
    let mut arguments: Vec<String> = ["--recipe", "smoke", "--out"].map(String::from).to_vec();
    arguments.push(path.display().to_string());
    arguments.extend(SHORT.map(String::from));
    arguments.extend(more.iter().flat_map(|setting| ["--set".to_owned(), setting.to_string()]));
    arguments
}

fn start(path: &Path, more: &[&str], resume: bool) -> Child {
    let arguments = arguments(path, more);
    let mut command = learner(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    if resume {
        command.arg("--resume");
    }
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts")
}

fn reference(path: &Path, more: &[&str]) -> Duration {
    let started = Instant::now();
    succeed(&arguments(path, more).iter().map(String::as_str).collect::<Vec<_>>());
    started.elapsed()
}

#[test]
fn killed_at_random_moments_and_resumed_it_ends_the_same() {
    kill_and_resume(&[]);
}

#[test]
fn so_it_does_one_step_ahead_with_refills_and_a_reference() {
    kill_and_resume(&AHEAD);
}

fn kill_and_resume(more: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let duration = reference(&whole, more);
    let mut key = Key::new(Purpose::Bootstrap, &[20]);
    let mut resumed = false;
    for _ in 0..6 {
        let mut child = start(&killed, more, resumed);
        sleep(duration.mul_f64(key.uniform() * 0.6));
        child.kill().expect("SIGKILL is sent");
        child.wait().expect("the child is reaped");
        resumed = true;
    }
    let mut last: Vec<String> = arguments(&killed, more);
    last.push("--resume".into());
    succeed(&last.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(result(&killed), result(&whole));
    let leftovers = std::fs::read_dir(killed.join("checkpoints")).unwrap().flatten();
    assert!(leftovers.into_iter().all(|entry| entry.path().join("DONE").exists()), "no half-written checkpoint stays");
}

#[test]
fn signals_end_the_step_save_and_say_how_to_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    reference(&whole, &[]);
    for signal in [Signal::INT, Signal::TERM, Signal::USR1] {
        let path = folder.path().join(format!("signal-{}", signal.as_raw()));
        let list = arguments(&path, &[]);
        let mut command = learner(&list.iter().map(String::as_str).collect::<Vec<_>>());
        let child = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts");
        // Once the first step of fine-tuning is noted, work is under way that must not be lost.
        let metrics = path.join("metrics.jsonl");
        let under_way = || std::fs::read_to_string(&metrics).is_ok_and(|text| text.contains("\"kind\":\"rft\""));
        while !under_way() {
            sleep(Duration::from_millis(5));
        }
        // A terminal sends its signal to the whole group: programs in the sandbox must not be hit by it.
        kill_process_group(Pid::from_child(&child), signal).expect("the child is still running");
        let output = child.wait_with_output().expect("the child ends");
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        let said = text(&output.stderr);
        let command = said.split("To go on: ").nth(1).expect("the way to go on is said").trim();
        assert!(std::fs::read_dir(path.join("checkpoints")).unwrap().next().is_some(), "something was saved");
        let words: Vec<&str> = command.split(' ').collect();
        assert_eq!(words[0], "learner");
        let output = run(&words[1..]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(result(&path), result(&whole));
    }
}
