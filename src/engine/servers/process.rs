//! The learner's side of one running server: its keeper, held by a pipe.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use super::keeper::{Ended, Job, KEEPER_ARGUMENT, KILL};

/// A server and its keeper. Dropping it ends both.
pub(super) struct Process {
    keeper: Child,
    /// Closing it tells the keeper to end the server.
    control: Option<ChildStdin>,
    /// The keeper ends a server in this time.
    patience: Duration,
    ended: Option<String>,
}

impl Process {
    /// `program` is the learner.
    pub(super) fn start(program: &Path, job: &Job) -> std::io::Result<Process> {
        let mut keeper = Command::new(program)
            .arg(KEEPER_ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut control = keeper.stdin.take();
        let patience = Duration::from_secs_f64(job.stop_seconds) + KILL + Duration::from_secs(5);
        if let Some(control) = &mut control {
            let line = serde_json::to_string(job)? + "\n";
            // A keeper that has died at once says so below.
            let _ = control.write_all(line.as_bytes());
        }
        Ok(Process { keeper, control, patience, ended: None })
    }

    /// How it ended, once it has.
    pub(super) fn ended(&mut self) -> Option<&str> {
        if self.ended.is_none()
            && let Ok(Some(status)) = self.keeper.try_wait()
        {
            let mut word = String::new();
            // The keeper alone could write here, and it has gone: this does not wait.
            if let Some(stdout) = &mut self.keeper.stdout {
                let _ = stdout.read_to_string(&mut word);
            }
            self.ended = Some(match (serde_json::from_str::<Ended>(&word), status.signal()) {
                (Ok(ended), _) => ended.to_string(),
                (Err(_), Some(signal)) => format!("its keeper was ended by signal {signal}"),
                (Err(_), None) => "its keeper ended without a word".to_string(),
            });
        }
        self.ended.as_deref()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.control = None;
        let deadline = Instant::now() + self.patience;
        while self.ended().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        // With the keeper the server goes.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
