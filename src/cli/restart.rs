//! `--max-restarts K`: this process starts itself again as a child, and starts another one when a rank of the run was lost.
//!
//! Every node's launcher does the same, so all that are left meet again at the rendezvous; a node that does not come back within
//! `parallel.rendezvous_seconds` ends the run, which then is resumed by hand on fewer.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::CliError;

/// Set for the child to its parent's process id: it trains, and tells its parent that a rank was lost by an exit code of its own.
const SUPERVISED: &str = "LEARNER_SUPERVISED";

/// The exit code of a child that another one may go on for; people never see it.
const LOST: u8 = 75;

/// How often the parent looks after its child and for signals.
const LOOK: Duration = Duration::from_millis(50);

/// The exit code that says to whoever started this process that a rank was lost.
pub fn lost_code() -> u8 {
    if supervised() { LOST } else { 3 }
}

fn supervised() -> bool {
    std::env::var_os(SUPERVISED).is_some()
}

/// Trains in children, `most` times again after a rank was lost. None: this process itself shall train.
pub fn supervise(most: usize) -> Option<Result<(), CliError>> {
    if most == 0 {
        return None;
    }
    if supervised() {
        return end_with_the_parent().err().map(Err);
    }
    Some(supervise_children(most))
}

fn supervise_children(most: usize) -> Result<(), CliError> {
    let failed = |error: std::io::Error| CliError::Failed(format!("--max-restarts: this program cannot start itself: {error}"));
    let program = std::env::current_exe().map_err(failed)?;
    let signals = Signals::listen()?;
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut restarts = 0;
    loop {
        let mut command = Command::new(&program);
        // A terminal's Ctrl-C must reach this process alone, which hands it on once: a second one would end the child at once.
        command.args(&arguments).env(SUPERVISED, std::process::id().to_string()).process_group(0);
        let (status, stopped) = command.spawn().and_then(|child| attend(child, &signals)).map_err(failed)?;
        let lost = match status.code() {
            Some(0) => return Ok(()),
            Some(code) => code == i32::from(LOST),
            // Killed: the others count this rank as lost, and come back.
            None => true,
        };
        if !lost || stopped || restarts == most {
            return Err(CliError::Ended(exit_code(status)));
        }
        restarts += 1;
        eprintln!("learner: starting again with --resume (restart {restarts} of {most})");
        if !arguments.iter().any(|argument| argument == "--resume") {
            arguments.push("--resume".into());
        }
    }
}

/// What this process ends with when its last child has ended so.
fn exit_code(status: ExitStatus) -> u8 {
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(LOST) | None => 3,
        Some(code) => code,
    }
}

/// Waits for the end of a child and hands signals on to it; whether there were any.
fn attend(mut child: Child, signals: &Signals) -> std::io::Result<(ExitStatus, bool)> {
    let mut stopped = false;
    loop {
        stopped |= signals.hand_on(&child);
        if let Some(status) = child.try_wait()? {
            return Ok((status, stopped));
        }
        std::thread::sleep(LOOK);
    }
}

/// The signals that stop a run, noted since they were last handed on.
struct Signals([(Signal, Arc<AtomicBool>); 3]);

impl Signals {
    fn listen() -> Result<Signals, CliError> {
        let signals = Signals([Signal::INT, Signal::TERM, Signal::USR1].map(|signal| (signal, Arc::default())));
        for (signal, flag) in &signals.0 {
            signal_hook::flag::register(signal.as_raw(), flag.clone())
                .map_err(|error| CliError::Failed(format!("cannot listen for signals: {error}")))?;
        }
        Ok(signals)
    }

    fn hand_on(&self, child: &Child) -> bool {
        let mut any = false;
        for (signal, _) in self.0.iter().filter(|(_, flag)| flag.swap(false, Ordering::Relaxed)) {
            any = true;
            // One that has just ended needs it no more.
            let _ = kill_process(Pid::from_child(child), *signal);
        }
        any
    }
}

/// A child whose parent is killed is told to save and stop: nobody would hand signals on to it anymore.
#[cfg(target_os = "linux")]
fn end_with_the_parent() -> Result<(), CliError> {
    // If it cannot be had the child goes on alone, as one that was started by hand.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    // No signal comes for a parent that was killed before.
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if std::env::var(SUPERVISED).ok() != parent {
        return Err(CliError::Interrupted("the process that started this one has ended: nothing was begun".into()));
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn end_with_the_parent() -> Result<(), CliError> {
    Ok(())
}
