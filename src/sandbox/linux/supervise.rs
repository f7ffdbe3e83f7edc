//! Watches one run from the caller's thread: drains its output, samples what it uses, and ends it at a limit.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{SendFlags, Shutdown};
use rustix::process::Signal;

use super::cgroup::Leaf;
use super::pool::Place;
use super::usage::{self, Most, Processes, Usage};
use super::wire::{self, Report, Size};
use super::{copy, explain, workdir};
use crate::sandbox::limits::OUTPUT_FACTOR;
use crate::sandbox::output::HeadAndTail;
use crate::sandbox::{Accounting, Limits, LimitsHit, Mechanisms, RunResult, RunVerdict, Snapshot, Tier, TreeSource};

/// A run that was just launched: our ends of its socket and pipes.
pub struct Launched {
    /// When its set-up began.
    pub since: Instant,
    pub control: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub evidence: Option<OwnedFd>,
    /// Tier B: the run's directory on the machine, whose size we must watch ourselves, and what it may grow to.
    pub directory: Option<(PathBuf, Size)>,
    /// Where the working directory's tree comes from, and whose a copy would be.
    pub tree: Option<(Snapshot, Option<u32>)>,
    pub tree_source: TreeSource,
    pub cgroup: Option<Leaf>,
    /// The program is able to end its keeper.
    pub keeper_in_reach: bool,
}

/// Evidence is a short line per test; more is not evidence.
const EVIDENCE_BYTES: u64 = 1 << 20;
/// For everything before the program starts, on a machine that is busy with others.
const SET_UP: Duration = Duration::from_secs(60);
/// Between asking the keeper to end the run and doing so ourselves, and again before giving up.
const GRACE: Duration = Duration::from_secs(3);
/// How often we end what a keeper without a namespace has not ended, before giving up: on a crowded machine a sweep takes long.
const SWEEPS: u32 = 20;
/// Dense at first, when a bomb goes off, then sparse; most runs end before the first sample.
const FIRST_SAMPLES: Duration = Duration::from_millis(8);
const DENSE: Duration = Duration::from_millis(250);
const SAMPLES: Duration = Duration::from_millis(20);
/// Walking a directory costs more than reading /proc; so does looking where the kernel keeps the limits of memory and processes.
const DIRECTORY_SAMPLES: Duration = Duration::from_millis(100);
/// Runs that may be looked at so often. Beyond, each is looked at less often, or a crowd would be kept from running by our looks.
const CROWD: u32 = 16;

/// Runs that are being watched in this process.
static WATCHED: AtomicU32 = AtomicU32::new(0);

/// Watches to the end. The evidence comes back with the result. `starting`, the right to set up, is given back when the program
/// has started.
pub fn supervise(launched: Launched, limits: &Limits, tier: Tier, starting: Option<Place<'_>>) -> (RunResult, Vec<u8>) {
    WATCHED.fetch_add(1, Ordering::Relaxed);
    let ended = Run::new(launched, limits, tier, starting).watch();
    WATCHED.fetch_sub(1, Ordering::Relaxed);
    ended
}

struct Run<'a> {
    limits: &'a Limits,
    starting: Option<Place<'a>>,
    tier: Tier,
    control: OwnedFd,
    directory: Option<(PathBuf, Size)>,
    tree_to_copy: Option<(Snapshot, Option<u32>)>,
    tree_source: TreeSource,
    cgroup: Option<Leaf>,
    keeper_in_reach: bool,
    streams: [Stream; 3],
    keeper: Option<OwnedFd>,
    own_proc: bool,
    processes: Option<Processes>,
    /// The writable tree, where the keeper does not look itself whether it is full.
    tree: Option<OwnedFd>,
    set_up_cpu_seconds: f64,
    launched: Instant,
    started: Option<Instant>,
    next_sample: Instant,
    next_directory_sample: Instant,
    peak: Usage,
    hit: LimitsHit,
    /// The limit that ended the run, and when we next become more insistent.
    stopped: Option<(RunVerdict, Instant)>,
    /// How often we have been insistent.
    insisted: u32,
    disk_full: bool,
    end: Option<End>,
}

/// One of standard output, standard error, evidence.
struct Stream {
    pipe: Option<OwnedFd>,
    kept: HeadAndTail,
}

enum End {
    Finished { status: i32, cpu_seconds: f64, peak_bytes: u64, seconds: f64 },
    Broken(String),
}

impl<'a> Run<'a> {
    fn new(launched: Launched, limits: &'a Limits, tier: Tier, starting: Option<Place<'a>>) -> Run<'a> {
        let now = Instant::now();
        let stream = |pipe, capacity| Stream { pipe, kept: HeadAndTail::new(capacity) };
        Run {
            limits,
            starting,
            tier,
            control: launched.control,
            directory: launched.directory,
            tree_to_copy: launched.tree,
            tree_source: launched.tree_source,
            cgroup: launched.cgroup,
            keeper_in_reach: launched.keeper_in_reach,
            streams: [
                stream(Some(launched.stdout), limits.output_bytes),
                stream(Some(launched.stderr), limits.output_bytes),
                stream(launched.evidence, EVIDENCE_BYTES),
            ],
            keeper: None,
            own_proc: false,
            processes: None,
            tree: None,
            set_up_cpu_seconds: 0.0,
            launched: launched.since,
            started: None,
            next_sample: now + FIRST_SAMPLES,
            next_directory_sample: now + DIRECTORY_SAMPLES,
            peak: Usage::default(),
            hit: LimitsHit::default(),
            stopped: None,
            insisted: 0,
            disk_full: false,
            end: None,
        }
    }

    fn watch(mut self) -> (RunResult, Vec<u8>) {
        while self.end.is_none() {
            self.wait_and_drain();
            self.check_time();
            self.check_output();
            self.check_usage();
        }
        // Nothing of the run is left, so every pipe is at its end or about to be.
        let deadline = Instant::now() + Duration::from_millis(500);
        while self.streams.iter().any(|stream| stream.pipe.is_some()) && Instant::now() < deadline {
            self.wait_and_drain();
        }
        if matches!(self.end, Some(End::Broken(_))) {
            self.kill_keeper(); // whatever it is still doing is of no further use
        }
        self.result()
    }

    /// Waits for the next event or the next moment something is due, and takes in what has come.
    fn wait_and_drain(&mut self) {
        let due = match (&self.stopped, self.started) {
            (Some((_, insist)), _) => *insist,
            (None, None) => self.launched + SET_UP,
            (None, Some(started)) => self.next_sample.min(started + Duration::from_secs_f64(self.limits.wall_seconds)),
        };
        let wait = due.saturating_duration_since(Instant::now()).min(Duration::from_millis(500));
        // Rounded up: waking just before a moment would spin until it has come.
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut ready = [false; 4];
        {
            let mut waiting = Vec::with_capacity(4);
            let mut places = Vec::with_capacity(4);
            if self.end.is_none() {
                waiting.push(PollFd::new(&self.control, PollFlags::IN));
                places.push(3);
            }
            for (place, stream) in self.streams.iter().enumerate() {
                if let Some(pipe) = &stream.pipe {
                    waiting.push(PollFd::new(pipe, PollFlags::IN));
                    places.push(place);
                }
            }
            if rustix::event::poll(&mut waiting, Some(&wait)).is_err() {
                return; // interrupted by a signal: the loop comes back
            }
            for (poll, &place) in waiting.iter().zip(&places) {
                ready[place] = !poll.revents().is_empty();
            }
        }
        for (stream, _) in self.streams.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
            stream.drain();
        }
        if ready[3] {
            self.hear();
        }
    }

    /// Takes a report from the keeper.
    fn hear(&mut self) {
        match wire::receive::<Report>(&self.control) {
            Ok(Some((Report::Kept, descriptors))) => self.keeper = descriptors.into_iter().next(),
            Ok(Some((Report::CopyTree, descriptors))) => self.copy_tree(descriptors),
            Ok(Some((Report::Ready, _))) => {} // the word of a session, which no run is
            Ok(Some((Report::Started { own_proc, cpu_seconds }, descriptors))) => {
                self.set_up_cpu_seconds = cpu_seconds;
                self.begin(own_proc, descriptors);
            }
            Ok(Some((Report::Finished { status, cpu_seconds, peak_bytes, processes, disk_full }, _))) => {
                let seconds = self.started.map_or(0.0, |started| started.elapsed().as_secs_f64());
                self.peak.tasks = self.peak.tasks.max(processes);
                self.disk_full |= disk_full || self.tree.as_ref().is_some_and(usage::is_full);
                let cpu_seconds = (cpu_seconds - self.set_up_cpu_seconds).max(0.0);
                self.end = Some(match self.started {
                    Some(_) => End::Finished { status, cpu_seconds, peak_bytes, seconds },
                    None => End::Broken("the set-up ended before the program started".to_string()),
                });
            }
            Ok(Some((Report::SetUp { step, errno }, _))) => {
                self.end = Some(End::Broken(explain::failed_step(&step, errno)));
            }
            // The program can have done that, and must not be able to choose to be no run at all. It ends with its keeper, by
            // the signal that it gets when its parent dies.
            Ok(None) | Err(_) if self.keeper_in_reach && self.insisted == 0 && self.started.is_some() => {
                let seconds = self.started.map_or(0.0, |started| started.elapsed().as_secs_f64());
                self.end = Some(End::Finished { status: libc::SIGKILL, cpu_seconds: 0.0, peak_bytes: 0, seconds });
            }
            Ok(None) | Err(_) => {
                let reason = match self.started {
                    _ if self.insisted > 0 => "the run could not be ended in time".to_string(),
                    Some(_) => "the process that kept the run has died".to_string(),
                    None => "the helper ended before the program started".to_string(),
                };
                self.end = Some(End::Broken(reason));
            }
        }
    }

    /// Fills the working directory for a keeper that could not have an overlay.
    fn copy_tree(&mut self, descriptors: Vec<OwnedFd>) {
        self.tree_source = TreeSource::Copy;
        let tree = self.tree_to_copy.as_ref().map(|(tree, owner)| (tree, *owner));
        if let Err(reason) = answer_with_copy(&self.control, tree, descriptors) {
            self.end = Some(End::Broken(reason));
        }
    }

    fn begin(&mut self, own_proc: bool, descriptors: Vec<OwnedFd>) {
        self.own_proc = own_proc;
        self.starting = None;
        let now = Instant::now();
        self.started = Some(now);
        self.next_sample = now + FIRST_SAMPLES;
        let mut descriptors = descriptors.into_iter();
        self.keeper = descriptors.next().or(self.keeper.take());
        self.processes = match (own_proc, descriptors.next()) {
            (true, Some(proc)) => Some(Processes::Namespace(proc)),
            _ => self.keeper.as_ref().and_then(|keeper| usage::pid_of(keeper).ok()).map(Processes::DescendantsOf),
        };
        self.tree = descriptors.next();
    }

    fn check_time(&mut self) {
        let now = Instant::now();
        if let Some((_, insist)) = &self.stopped {
            if now < *insist || self.end.is_some() {
                return;
            }
            let most = if self.tier == Tier::A { 1 } else { SWEEPS };
            if self.insisted < most {
                self.insist();
            } else {
                self.end = Some(End::Broken("the run could not be ended".to_string()));
            }
            return;
        }
        match self.started {
            Some(started) if now >= started + Duration::from_secs_f64(self.limits.wall_seconds) => {
                self.stop(RunVerdict::WallTimeout)
            }
            None if now >= self.launched + SET_UP => {
                self.insist();
                self.end = Some(End::Broken(format!("the set-up took longer than {} seconds", SET_UP.as_secs())));
            }
            _ => {}
        }
    }

    fn check_output(&mut self) {
        let most = self.limits.output_bytes.saturating_mul(OUTPUT_FACTOR);
        if self.streams[..2].iter().any(|stream| stream.kept.total() > most) {
            self.stop(RunVerdict::OutputLimit);
        }
    }

    fn check_usage(&mut self) {
        let now = Instant::now();
        let Some(started) = self.started.filter(|_| self.end.is_none() && now >= self.next_sample) else { return };
        let exact = self
            .cgroup
            .as_ref()
            .is_some_and(|group| group.memory() != Accounting::Sampled && group.processes() != Accounting::Sampled);
        let usual = match now < started + DENSE {
            _ if exact => DIRECTORY_SAMPLES,
            true => FIRST_SAMPLES,
            false => SAMPLES,
        };
        self.next_sample = now + usual * (WATCHED.load(Ordering::Relaxed) / CROWD).max(1);
        // A control group that has memory counts it itself, and all of it.
        let counted = self.cgroup.as_ref().is_some_and(|group| group.memory() != Accounting::Sampled);
        if let Some(processes) = &self.processes {
            let bytes = if counted { u64::MAX } else { self.limits.memory_bytes };
            let usage = processes.usage(Most { tasks: self.limits.processes, bytes });
            self.peak.tasks = self.peak.tasks.max(usage.tasks);
            self.peak.bytes = self.peak.bytes.max(usage.bytes);
            self.peak.cpu_seconds = self.peak.cpu_seconds.max(usage.cpu_seconds - self.set_up_cpu_seconds);
        }
        if self.peak.tasks > self.limits.processes {
            self.stop(RunVerdict::ProcessLimit);
        }
        if let Some(group) = &mut self.cgroup {
            let (memory, processes) = group.refused();
            self.hit.memory |= memory;
            self.hit.processes |= processes;
        }
        self.hit.memory |= !counted && self.peak.bytes > self.limits.memory_bytes;
        if self.hit.memory {
            self.stop(RunVerdict::MemoryLimit);
        }
        if self.hit.processes {
            self.stop(RunVerdict::ProcessLimit);
        }
        if self.peak.cpu_seconds > self.limits.cpu_seconds {
            self.stop(RunVerdict::CpuTimeout);
        }
        if let Some((directory, most)) = &self.directory
            && now >= self.next_directory_sample
        {
            self.next_directory_sample = now + DIRECTORY_SAMPLES;
            let unlinked = self.processes.as_ref().map_or(0, Processes::unlinked_bytes);
            if workdir::exceeds(directory, *most, unlinked) {
                self.disk_full = true;
                self.stop(RunVerdict::DiskLimit);
            }
        }
    }

    /// Asks the keeper to end the run; the first reason counts.
    fn stop(&mut self, verdict: RunVerdict) {
        if self.stopped.is_none() && self.end.is_none() {
            // Closing our direction is the word for it, as our death would be. If the keeper has gone we shall hear of it.
            let _ = rustix::net::shutdown(&self.control, Shutdown::Write);
            if let Some(group) = &self.cgroup {
                group.kill();
            }
            self.stopped = Some((verdict, Instant::now() + GRACE));
        }
    }

    /// Ends the keeper itself where it is process 1: with it everything in its namespace goes. Elsewhere what it keeps would
    /// outlive it, so it stays, to reap, and is helped.
    fn insist(&mut self) {
        self.insisted += 1;
        match (self.tier, self.keeper.as_ref().map(usage::pid_of)) {
            (Tier::B, Some(Ok(keeper))) => usage::kill_descendants(keeper),
            _ => self.kill_keeper(),
        }
        if let Some((_, insist)) = &mut self.stopped {
            *insist = Instant::now() + GRACE;
        }
    }

    fn kill_keeper(&self) {
        if let Some(keeper) = &self.keeper {
            let _ = rustix::process::pidfd_send_signal(keeper, Signal::KILL); // fails only if it has gone
        }
    }

    fn result(mut self) -> (RunResult, Vec<u8>) {
        let (status, cpu_seconds, peak_bytes, seconds) = match &self.end {
            Some(End::Finished { status, cpu_seconds, peak_bytes, seconds }) => {
                (Some(*status), cpu_seconds.max(self.peak.cpu_seconds), *peak_bytes, *seconds)
            }
            _ => (None, self.peak.cpu_seconds, 0, self.started.map_or(0.0, |started| started.elapsed().as_secs_f64())),
        };
        let exit_code = status.filter(|&status| libc::WIFEXITED(status)).map(|status| libc::WEXITSTATUS(status));
        let signal = status.filter(|&status| libc::WIFSIGNALED(status)).map(|status| libc::WTERMSIG(status));
        let (mut peak_bytes, mut cpu_seconds) = (peak_bytes.max(self.peak.bytes), cpu_seconds);
        if let Some(group) = &mut self.cgroup {
            let (memory, processes) = group.refused();
            self.hit.memory |= memory;
            self.hit.processes |= processes;
            peak_bytes = group.peak_bytes().unwrap_or(peak_bytes);
            cpu_seconds = cpu_seconds.max(group.cpu_seconds());
        }
        self.hit.cpu = cpu_seconds > self.limits.cpu_seconds || signal == Some(libc::SIGXCPU);
        self.hit.processes |= self.peak.tasks > self.limits.processes;
        self.hit.disk = self.disk_full || signal == Some(libc::SIGXFSZ);
        let stopped = self.stopped.map(|(verdict, _)| verdict);
        self.hit.wall = stopped == Some(RunVerdict::WallTimeout);
        self.hit.output = stopped == Some(RunVerdict::OutputLimit);
        let verdict = match (self.end, stopped) {
            // Found by the keeper, too late for the supervisor: what was left of a fork bomb slept until the time was up.
            (_, Some(RunVerdict::WallTimeout)) if self.hit.processes => RunVerdict::ProcessLimit,
            // However the end went: a program that reached a limit and then could not be ended has reached that limit.
            (_, Some(verdict)) => verdict,
            (Some(End::Broken(reason)), None) => RunVerdict::Infrastructure(reason),
            _ if self.hit.cpu => RunVerdict::CpuTimeout,
            _ if self.hit.memory => RunVerdict::MemoryLimit,
            _ if self.hit.processes => RunVerdict::ProcessLimit,
            _ if signal == Some(libc::SIGXFSZ) || (self.disk_full && exit_code != Some(0)) => RunVerdict::DiskLimit,
            _ if signal.is_some() => RunVerdict::Signaled,
            _ => RunVerdict::Exited,
        };
        let counted = |group: &Option<Leaf>, of: fn(&Leaf) -> Accounting| group.as_ref().map_or(Accounting::Sampled, of);
        let mechanisms = Mechanisms {
            memory: counted(&self.cgroup, Leaf::memory),
            processes: counted(&self.cgroup, Leaf::processes),
            tree: self.tree_source,
            own_procfs: self.own_proc,
        };
        let set_up_seconds = self.started.unwrap_or_else(Instant::now).duration_since(self.launched).as_secs_f64();
        let [stdout, stderr, evidence] = self.streams.map(|stream| stream.kept);
        let result = RunResult {
            exit_code,
            signal,
            wall_seconds: seconds,
            cpu_seconds,
            peak_bytes,
            stdout_total: stdout.total(),
            stderr_total: stderr.total(),
            truncated: stdout.truncated() || stderr.truncated(),
            stdout: stdout.into_bytes(),
            stderr: stderr.into_bytes(),
            limits_hit: self.hit,
            set_up_seconds,
            mechanisms,
            ..RunResult::empty(self.tier, verdict)
        };
        let evidence = if evidence.truncated() { Vec::new() } else { evidence.into_bytes() };
        (result, evidence)
    }
}

/// Copies a tree into the directory that a keeper has sent, and tells it so.
pub fn answer_with_copy(
    control: &OwnedFd,
    tree: Option<(&Snapshot, Option<u32>)>,
    descriptors: Vec<OwnedFd>,
) -> Result<(), String> {
    let (Some((tree, owner)), Some(work)) = (tree, descriptors.first()) else {
        return Err("a copy of a tree was asked for, and there is none".to_string());
    };
    copy::copy_tree(tree.path(), format!("/proc/self/fd/{}", work.as_raw_fd()).as_ref(), owner)?;
    // If the keeper has gone we shall hear of it.
    let _ = rustix::net::send(control, b"c", SendFlags::NOSIGNAL);
    Ok(())
}

impl Stream {
    /// Takes what is there, at most one pipe's worth, so that a fast writer cannot keep us from our clocks.
    fn drain(&mut self) {
        let mut buffer = [0; 65536];
        let Some(pipe) = self.pipe.as_ref().map(AsFd::as_fd) else { return };
        match read(pipe, &mut buffer) {
            Some(0) => self.pipe = None,
            Some(length) => self.kept.push(&buffer[..length]),
            None => {}
        }
    }
}

/// Bytes read; 0 at the end, also for a pipe that cannot be read any more.
fn read(pipe: BorrowedFd<'_>, buffer: &mut [u8]) -> Option<usize> {
    match rustix::io::read(pipe, buffer) {
        Ok(length) => Some(length),
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => None,
        Err(_) => Some(0),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    /// The verdict of a run whose keeper says that the program has started, stays for `patience` and then is gone.
    fn without_a_keeper(keeper_in_reach: bool, patience: Duration, limits: &Limits) -> RunVerdict {
        let (control, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let nothing = || OwnedFd::from(File::open("/dev/null").unwrap());
        let (stdout, stderr) = (nothing(), nothing());
        let launched = Launched {
            since: Instant::now(),
            control,
            stdout,
            stderr,
            evidence: None,
            directory: None,
            tree: None,
            tree_source: TreeSource::Empty,
            cgroup: None,
            keeper_in_reach,
        };
        wire::send(&theirs, &Report::Started { own_proc: false, cpu_seconds: 0.0 }, &[]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(patience);
                drop(theirs);
            });
            supervise(launched, limits, Tier::B, None).0.verdict
        })
    }

    #[test]
    fn no_program_can_choose_an_infrastructure_fault() {
        let (limits, now) = (Limits::default(), Duration::ZERO);
        assert_eq!(without_a_keeper(true, now, &limits), RunVerdict::Signaled);
        assert!(without_a_keeper(false, now, &limits).infrastructure());
        // The time is up, and the keeper goes without having ended the run.
        let short = Limits { wall_seconds: 0.001, ..Limits::default() };
        assert_eq!(without_a_keeper(false, Duration::from_millis(300), &short), RunVerdict::WallTimeout);
    }
}
