//! The keeper of one server: a small process of ours between the learner and the server, so that no server outlives the learner.
//!
//! ```text
//! learner
//!   └ keeper          this program again, in a session of its own; takes the output, reaps, and ends the server
//!       └ server      vLLM or SGLang, in a session and process group of its own, with its workers below it
//! ```
//! The learner holds the keeper's standard input. When it closes, because the learner wants the server to end or because the learner has
//! died of whatever, the keeper sends SIGTERM to the server's group, waits, and kills what is left. Workers that have lost their
//! parent come to the keeper (it is a child subreaper), so none escapes. If the keeper itself is killed, the server gets SIGKILL with it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, PipeReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use serde::{Deserialize, Serialize};

/// Hidden first arguments: the keeper, and what the keeper starts to become the server.
pub(super) const KEEPER_ARGUMENT: &str = "server-keeper";
const SERVER_ARGUMENT: &str = "become-server";

/// How often the keeper looks for ended processes.
const TICK: Duration = Duration::from_millis(50);
/// Killed processes are waited for, at most. One in the middle of a system call ends only after it.
pub(super) const KILL: Duration = Duration::from_secs(10);
/// Begins what one process has written in a log.
const HEADING: &str = "--- process ";
/// As a shell says of a program that cannot be started.
const NOT_STARTED: i32 = 127;

/// One server to be kept, sent to the keeper as one line of JSON.
#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) command: Vec<String>,
    /// Set in the server's environment.
    pub(super) environment: BTreeMap<String, String>,
    /// Removed from it.
    pub(super) without: Vec<String>,
    pub(super) log: PathBuf,
    pub(super) log_bytes: u64,
    pub(super) stop_seconds: f64,
}

/// How a server ended: the keeper's last word, as one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ended {
    Exited(i32),
    Killed(i32),
    /// The keeper could not start it.
    NotStarted(String),
    /// Not even SIGKILL ended it in time.
    Lingers,
}

impl std::fmt::Display for Ended {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Exited(NOT_STARTED) => write!(formatter, "exit status {NOT_STARTED}, could not be started"),
            Ended::Exited(status) => write!(formatter, "exit status {status}"),
            Ended::Killed(signal) => write!(formatter, "signal {signal}"),
            Ended::NotStarted(reason) => write!(formatter, "could not be started: {reason}"),
            Ended::Lingers => write!(formatter, "still there after SIGKILL"),
        }
    }
}

/// The program that understands these arguments, where the caller is it. Its file may have been replaced since it was started.
pub fn own_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok(PathBuf::from("/proc/self/exe")) } else { std::env::current_exe() }
}

/// To be called first thing in `main`: acts as a keeper, or becomes a server, if this process was started for that.
pub fn keeper_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next()?.to_str()? {
        KEEPER_ARGUMENT => Some(keeper_main()),
        SERVER_ARGUMENT => Some(become_server(arguments)),
        _ => None,
    }
}

fn keeper_main() -> ExitCode {
    let ended = keep().unwrap_or_else(|error| Ended::NotStarted(error.to_string()));
    // Nobody reads it if the learner has gone.
    let _ = serde_json::to_writer(io::stdout(), &ended);
    ExitCode::SUCCESS
}

/// Takes a session of its own, asks for SIGKILL when the keeper dies, and executes the server's command.
fn become_server(mut arguments: impl Iterator<Item = std::ffi::OsString>) -> ExitCode {
    let keeper = arguments.next().and_then(|pid| pid.to_str()?.parse().ok());
    let Some(program) = arguments.next() else { return ExitCode::from(2) };
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // It may have died before it was watched.
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != keeper {
        return ExitCode::from(2);
    }
    let _ = rustix::process::setsid();
    let error = Command::new(&program).args(arguments).exec();
    eprintln!("{}: {error}", program.display());
    ExitCode::from(NOT_STARTED as u8)
}

/// From the job to the end of the server and of everything it has started.
fn keep() -> io::Result<Ended> {
    // Away from the learner's terminal and group: Ctrl-C is for the learner, which then closes our standard input.
    rustix::process::setsid()?;
    #[cfg(target_os = "linux")]
    {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        // So that whoever ends all processes named as the learner leaves its keepers to do their work.
        rustix::thread::set_name(c"server-keeper")?;
    }
    let mut line = String::new();
    BufReader::new(io::stdin()).read_line(&mut line)?;
    let job: Job = serde_json::from_str(&line)?;
    let mut log = Log::open(&job.log, job.log_bytes)?;
    let (output, server) = start(&job)?;
    log.write(format!("{HEADING}{}: {}\n", server.as_raw_nonzero(), job.command.join(" ")).as_bytes());
    let mut keeper = Keeper { server, status: None, output: Some(output), log };
    Ok(keeper.run(Duration::from_secs_f64(job.stop_seconds)))
}

fn start(job: &Job) -> io::Result<(PipeReader, Pid)> {
    let (output, theirs) = io::pipe()?;
    let mut command = Command::new(own_program()?);
    command.arg(SERVER_ARGUMENT).arg(std::process::id().to_string()).args(&job.command);
    for name in &job.without {
        command.env_remove(name);
    }
    command.envs(&job.environment).stdin(Stdio::null()).stdout(theirs.try_clone()?).stderr(theirs);
    let child = command.spawn()?;
    // Reaped below together with orphans, so the handle is not needed.
    let server = Pid::from_raw(child.id() as i32).ok_or(io::ErrorKind::NotFound)?;
    Ok((output, server))
}

struct Keeper {
    server: Pid,
    /// Once the server has ended.
    status: Option<Ended>,
    output: Option<PipeReader>,
    log: Log,
}

/// What the keeper is about.
enum Phase {
    Keeping,
    /// SIGTERM was sent; SIGKILL follows then.
    Asked(Instant),
    /// SIGKILL is sent again and again until none is left, at most until then.
    Killing(Instant),
}

impl Keeper {
    fn run(&mut self, patience: Duration) -> Ended {
        let mut phase = Phase::Keeping;
        loop {
            let asked_to_end = self.wait(matches!(phase, Phase::Keeping));
            let left = self.reap();
            let now = Instant::now();
            phase = match phase {
                // Its workers have nothing to live for.
                Phase::Keeping if self.status.is_some() => Phase::Killing(now + KILL),
                Phase::Keeping if asked_to_end => {
                    let _ = rustix::process::kill_process_group(self.server, Signal::TERM);
                    // It may not be the head of its group yet.
                    let _ = rustix::process::kill_process(self.server, Signal::TERM);
                    Phase::Asked(now + patience)
                }
                Phase::Asked(until) if left && now >= until => Phase::Killing(now + KILL),
                phase => phase,
            };
            match phase {
                Phase::Asked(_) | Phase::Killing(_) if !left => break,
                Phase::Killing(until) if now >= until => return Ended::Lingers,
                Phase::Killing(_) => self.kill(),
                _ => {}
            }
        }
        self.drain();
        self.status.clone().unwrap_or(Ended::Lingers)
    }

    /// Takes output, and returns after a moment at the latest; whether standard input has closed.
    fn wait(&mut self, listens: bool) -> bool {
        let tick = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
        let input = io::stdin();
        let (mut closed, mut readable) = (false, false);
        {
            let mut waiting = Vec::with_capacity(2);
            if listens {
                waiting.push(PollFd::new(&input, PollFlags::IN));
            }
            if let Some(output) = &self.output {
                waiting.push(PollFd::new(output, PollFlags::IN));
            }
            // An error is an interruption by a signal: the loop comes back.
            if rustix::event::poll(&mut waiting, Some(&tick)).is_ok() {
                let ready: Vec<bool> = waiting.iter().map(|poll| !poll.revents().is_empty()).collect();
                closed = listens && ready[0];
                readable = self.output.is_some() && ready[usize::from(listens)];
            }
        }
        if readable {
            self.take();
        }
        // The learner sends nothing after the job: whatever there is to read is the end.
        closed
    }

    /// One pipe's worth, so that a flood cannot keep us from looking elsewhere.
    fn take(&mut self) {
        let mut buffer = [0; 64 << 10];
        let Some(output) = &mut self.output else { return };
        match output.read(&mut buffer) {
            Ok(0) => self.output = None,
            Ok(length) => self.log.write(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.output = None,
        }
    }

    /// What is left in the pipe when no process is.
    fn drain(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        while let Some(output) = &self.output {
            let ready = rustix::event::poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&now));
            if !matches!(ready, Ok(count) if count > 0) {
                return;
            }
            self.take();
        }
    }

    /// Waits for all that have ended, orphans included; whether any process is left.
    fn reap(&mut self) -> bool {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.server => self.status = Some(ended(status)),
                Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
                Ok(None) => return true,
                // No children.
                Err(_) => return false,
            }
        }
    }

    fn kill(&self) {
        if self.status.is_none() {
            let _ = rustix::process::kill_process_group(self.server, Signal::KILL);
        }
        #[cfg(target_os = "linux")]
        crate::sandbox::kill_descendants(rustix::process::getpid());
    }
}

fn ended(status: WaitStatus) -> Ended {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(status), _) => Ended::Exited(status),
        (None, signal) => Ended::Killed(signal.unwrap_or_default()),
    }
}

/// The newest output of a server, in `PATH` and, the half before it, `PATH.1`.
struct Log {
    path: PathBuf,
    file: Option<File>,
    written: u64,
    /// Of both files together.
    most: u64,
}

impl Log {
    fn open(path: &Path, most: u64) -> io::Result<Log> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let written = file.metadata()?.len();
        Ok(Log { path: path.to_path_buf(), file: Some(file), written, most })
    }

    /// A full disk loses output, and must not stop the server.
    fn write(&mut self, mut bytes: &[u8]) {
        let half = self.most / 2;
        while !bytes.is_empty() {
            if self.written >= half {
                let _ = std::fs::rename(&self.path, older(&self.path));
                self.file = File::create(&self.path).ok();
                self.written = 0;
            }
            let (now, later) = bytes.split_at(bytes.len().min((half - self.written) as usize));
            if let Some(file) = &mut self.file {
                let _ = file.write_all(now);
            }
            self.written += now.len() as u64;
            bytes = later;
        }
    }
}

/// The file that holds what came before.
fn older(log: &Path) -> PathBuf {
    let mut name = log.as_os_str().to_os_string();
    name.push(".1");
    PathBuf::from(name)
}

/// The last lines of a server's newest process, in one line, for messages.
pub(super) fn last_words(log: &Path, most_lines: usize) -> String {
    const BYTES: usize = 400;
    let read = |path: &Path| end_of(path, 4 * BYTES as u64).unwrap_or_default();
    let mut text = read(log);
    if text.len() < BYTES {
        text = read(&older(log)) + &text;
    }
    // Of the last process alone.
    let text = match text.rsplit_once(HEADING) {
        Some((_, of_process)) => of_process.split_once('\n').map_or("", |(_, output)| output),
        None => &text,
    };
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let joined = lines[lines.len().saturating_sub(most_lines)..].join(" | ");
    let printable: String = joined.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let start = printable.char_indices().rev().nth(BYTES - 1).map_or(0, |(start, _)| start);
    if start > 0 { format!("...{}", &printable[start..]) } else { printable }
}

fn end_of(path: &Path, bytes: u64) -> io::Result<String> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::open(path)?;
    let start = file.metadata()?.len().saturating_sub(bytes);
    file.seek(SeekFrom::Start(start))?;
    let mut content = Vec::new();
    file.take(bytes).read_to_end(&mut content)?;
    Ok(String::from_utf8_lossy(&content).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_the_newest_and_never_more_than_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0-8100.log");
        for start in [0, 1] {
            let mut log = Log::open(&path, 1000).unwrap();
            for line in start * 1000..(start + 1) * 1000 {
                log.write(format!("line {line}\n").as_bytes());
            }
            log.write(&[b'x'; 1234]);
            log.write(b"\nthe last \x1b[1mone\n\n");
        }
        let size = |path: &Path| std::fs::metadata(path).unwrap().len();
        assert!(size(&path) <= 500 && size(&older(&path)) <= 500);
        assert!(last_words(&path, 3).ends_with("x | the last  [1mone"), "{}", last_words(&path, 3));
        assert!(last_words(&path, 3).len() < 500);
        assert_eq!(last_words(&folder.path().join("none"), 3), "");
        Log::open(&path, 1000).unwrap().write(b"--- process 7: false\n");
        assert_eq!(last_words(&path, 3), "", "it has said nothing");
    }
}
