//! The keeper of one run: a single-threaded process of ours that stands between the supervisor and the program.
//!
//! ```text
//! zygote
//!   ├ keeper        process 1 of the run's namespaces (tier B: a child subreaper); reaps, reports
//!   │   └ program   contained, then executed
//!   └ keeper        of a session: holds the tree
//!       └ keeper    process 1 of one command's namespaces
//!           └ program
//! ```
//! The supervisor speaks to the keeper over one socket. If the socket closes, the keeper ends the run; with process 1 goes
//! everything in its namespace.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};

use super::root::{self, INSIDE_ID, WORK};
use super::wire::{self, Job, Order, Report, Role, SetUpError, Step};
use super::{contain, lay, usage, zygote};
use crate::sandbox::Tier;

/// The descriptors of a job, by purpose.
pub struct Streams {
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub evidence: Option<OwnedFd>,
    pub landlock: Option<OwnedFd>,
    /// Through which a process enters control groups by writing 0.
    pub cgroups: Vec<OwnedFd>,
    /// For the warm interpreter: where it gets its requests. For a session's command: the keeper's end of its control socket.
    pub other: Option<OwnedFd>,
}

/// What a keeper needs to know of its place.
#[derive(Clone, Copy)]
struct Place {
    tier: Tier,
    /// The program's user id on the machine, if it is not the caller's.
    host_id: Option<u32>,
    /// A fresh /proc can be had.
    own_proc: bool,
}

/// Sorts out the descriptors of a job; `None` if there are too few.
fn streams_of(job: &Job, descriptors: Vec<OwnedFd>) -> Option<Streams> {
    let mut descriptors = descriptors.into_iter();
    Some(Streams {
        stdout: descriptors.next()?,
        stderr: descriptors.next()?,
        evidence: if job.evidence { Some(descriptors.next()?) } else { None },
        landlock: if job.landlock { Some(descriptors.next()?) } else { None },
        cgroups: descriptors.by_ref().take(job.cgroups).collect(),
        other: descriptors.next(),
    })
}

/// The next job; `None` when the supervisor has gone.
fn receive_job(control: &OwnedFd) -> Result<Option<(Job, Streams)>, SetUpError> {
    let Some((job, descriptors)) = wire::receive::<Job>(control).step("receive a job")? else { return Ok(None) };
    let incomplete = || io::Error::from_raw_os_error(libc::EPROTO);
    let streams = streams_of(&job, descriptors).ok_or_else(incomplete).step("receive a job's descriptors")?;
    Ok(Some((job, streams)))
}

pub fn report_failure(control: &OwnedFd, error: &SetUpError) {
    // If the supervisor is gone there is nobody left to tell.
    let _ = wire::send(control, &error.report(), &[]);
}

/// The first word to the supervisor: how to end this keeper.
fn introduce(control: &OwnedFd) -> Result<(), SetUpError> {
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).step("pidfd_open")?;
    wire::send(control, &Report::Kept, &[own.as_fd()]).step("report")
}

/// For a process whose end leaves nothing behind: in tier A with process 1 of a PID namespace everything in it dies.
fn die_with_parent() -> Result<(), SetUpError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("set parent death signal")
}

/// A program of the same user id may neither look into a keeper nor write its files in /proc. What executes a program is open again.
fn keep_out_of_reach() -> Result<(), SetUpError> {
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable).step("close /proc of the keeper")
}

/// Tier B: keeps a run, or becomes the interpreter, in the zygote's own namespaces. It outlives the zygote: when learner dies it is
/// this process that has to end the others of its run.
pub fn in_this_process(role: Role, host_id: Option<u32>, control: &OwnedFd) -> Result<(), SetUpError> {
    introduce(control)?;
    keep_out_of_reach()?;
    let Some((job, streams)) = receive_job(control)? else { return Ok(()) };
    if role == Role::Serve {
        die_with_parent()?; // its own keepers stay and end their runs
        return Err(serve(&job, streams));
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).step("become child subreaper")?;
    run(&job, control, streams, Place { tier: Tier::B, host_id, own_proc: false })
}

/// Tier A: process 1 of a fresh PID namespace, in a fresh user namespace whose ids are mapped. `tree` is what lies below the
/// working directory, or why it could not be had.
pub fn in_namespaces(
    order: &Order,
    control: &OwnedFd,
    tree: Option<Result<OwnedFd, SetUpError>>,
    own_proc: bool,
) -> Result<(), SetUpError> {
    die_with_parent()?;
    introduce(control)?;
    if order.host_id.is_some() {
        rustix::thread::set_thread_groups(&[]).step("drop supplementary groups")?;
    }
    contain::change_id(if order.role == Role::Serve { 0 } else { INSIDE_ID })?;
    keep_out_of_reach()?;
    die_with_parent()?; // changing ids has cleared it
    zygote::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWNET)
        .step("create mount, IPC and network namespaces (unshare)")?;
    contain::bring_up_loopback().step("bring up the loopback interface")?;
    // Only now, so that the supervisor makes a control group while the namespaces are made.
    let Some((job, streams)) = receive_job(control)? else { return Ok(()) };
    let place = Place { tier: Tier::A, host_id: order.host_id, own_proc };
    if order.role == Role::Serve {
        mount_proc(place)?;
        return Err(serve(&job, streams));
    }
    let changes = root::mount_box(&job.limits)?;
    let changes = match tree.map(|tree| tree.and_then(|tree| root::mount_overlay(&tree))) {
        None => changes,
        Some(Ok(upper)) => upper,
        Some(Err(refused)) => {
            let Some(size) = job.copy else { return Err(refused) };
            root::enlarge_box(&job.limits, size)?;
            if !filled_by_supervisor(control, &changes)? {
                return Ok(());
            }
            changes
        }
    };
    match order.role {
        Role::Session => {
            drop(streams);
            keep_session(&job, control, &changes, place)
        }
        _ => {
            drop(changes);
            mount_proc(place)?;
            run(&job, control, streams, place)
        }
    }
}

/// The zygote's /proc shows all runs; over it comes one that shows this run alone.
fn mount_proc(place: Place) -> Result<(), SetUpError> {
    if place.own_proc { root::mount_proc("/proc").step("mount a fresh /proc") } else { Ok(()) }
}

/// Has the working directory filled with a copy of the tree. False if the supervisor has gone.
fn filled_by_supervisor(control: &OwnedFd, work: &OwnedFd) -> Result<bool, SetUpError> {
    wire::send(control, &Report::CopyTree, &[work.as_fd()]).step("report")?;
    let answer = rustix::io::retry_on_intr(|| rustix::io::read(control, &mut [0u8; 1][..]));
    Ok(answer.step("wait for the copy of the tree")? == 1)
}

/// Holds a tree and forks a keeper for each command that comes, until the supervisor closes the socket.
fn keep_session(job: &Job, control: &OwnedFd, changes: &OwnedFd, place: Place) -> Result<(), SetUpError> {
    lay::files(WORK.as_ref(), &job.files)?;
    zygote::ignore_children(true);
    wire::send(control, &Report::Ready, &[changes.as_fd()]).step("report")?;
    while let Some((job, mut streams)) = receive_job(control)? {
        let Some(own) = streams.other.take() else { continue };
        let namespaces = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC;
        match zygote::clone(namespaces).step("create PID, mount and IPC namespaces (clone)") {
            Ok(None) => {
                zygote::ignore_children(false);
                let keep = || {
                    die_with_parent()?;
                    introduce(&own)?;
                    mount_proc(place)?;
                    run(&job, &own, streams, place)
                };
                std::process::exit(match keep() {
                    Ok(()) => 0,
                    Err(error) => {
                        report_failure(&own, &error);
                        1
                    }
                })
            }
            Ok(Some(_)) => {}
            Err(error) => report_failure(&own, &error),
        }
    }
    Ok(())
}

/// Becomes the warm interpreter, whose standard input is the socket of its requests. Returns only on failure.
fn serve(job: &Job, streams: Streams) -> SetUpError {
    contain::fix_addresses();
    let (Some(requests), [program, arguments @ ..]) = (streams.other, &job.argv[..]) else {
        return SetUpError {
            step: "start the interpreter: incomplete job".into(),
            source: io::Error::from_raw_os_error(libc::EINVAL),
        };
    };
    let source = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(job.environment.iter().map(|(name, value)| (name, value)))
        .stdin(requests)
        .stdout(streams.stdout)
        .stderr(streams.stderr)
        .current_dir("/")
        .exec();
    SetUpError { step: format!("start {program}"), source }
}

/// Starts the program and keeps it: reaps, ends it when told to, reports.
fn run(job: &Job, control: &OwnedFd, streams: Streams, place: Place) -> Result<(), SetUpError> {
    let keeper = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).step("pidfd_open")?;
    let proc = if place.own_proc {
        Some(rustix::fs::open("/proc", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).step("open /proc")?)
    } else {
        None
    };
    // SAFETY: the process has a single thread, so the child may go on as if nothing happened.
    let program = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()).step("fork"),
        0 => {
            std::process::exit(contain::become_program(job, place.tier, place.host_id, control, streams, &keeper, proc.as_ref()))
        }
        pid => pid,
    };
    drop(streams);
    let Some(program) = Pid::from_raw(program) else { return Ok(()) };
    let mut children = Children { program, ended: None, most_at_once: 0 };
    watch(control, &mut children, job.limits.processes).step("watch the program")?;
    let left_over = if children.reap() { usage::count(proc.as_ref()) } else { 0 };
    let processes = left_over.max(children.most_at_once);
    sweep(place, &mut children);
    let (cpu_seconds, peak_bytes) = usage::of_reaped_children();
    let status = children.ended.map_or(0, WaitStatus::as_raw);
    let disk_full = place.tier == Tier::A && std::fs::File::open(WORK).is_ok_and(usage::is_full);
    wire::send(control, &Report::Finished { status, cpu_seconds, peak_bytes, processes, disk_full }, &[]).step("report")
}

/// Reaps until the program has ended, the supervisor asks for the end or has gone, or more than `most` processes were there at
/// once. The last is the supervisor's to find; but on a busy machine a fork bomb can reach the kernel's limit and die of its
/// failing forks between two of its looks. Its dead then all wait here to be reaped.
fn watch(control: &OwnedFd, children: &mut Children, most: u64) -> io::Result<()> {
    let handle = rustix::process::pidfd_open(children.program, PidfdFlags::empty())?;
    // Orphans become our children without any event on `handle`; the timeout is how long their zombies may stay.
    let patience = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    loop {
        let mut waiting = [PollFd::new(&handle, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
        match rustix::event::poll(&mut waiting, Some(&patience)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let asked = !waiting[1].revents().is_empty();
        children.reap();
        if asked || children.ended.is_some() || children.most_at_once > most {
            return Ok(());
        }
    }
}

/// The program and the orphans that became the keeper's children.
struct Children {
    program: Pid,
    /// Status of the program, once it has ended.
    ended: Option<WaitStatus>,
    /// The most that had ended and were reaped together. Until then each of them counts as a process.
    most_at_once: u64,
}

impl Children {
    /// Reaps what has ended. False if no child is left at all.
    fn reap(&mut self) -> bool {
        let mut reaped = 0;
        let left = loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    reaped += 1;
                    if pid == self.program {
                        self.ended = Some(status);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Ok(None) => break true,
                Err(_) => break false,
            }
        };
        self.most_at_once = self.most_at_once.max(reaped);
        left
    }
}

/// Ends every process of the run and returns when all of them are reaped.
fn sweep(place: Place, children: &mut Children) {
    while children.reap() {
        match (place.tier, place.host_id) {
            // SAFETY: kill takes no pointers; for process 1 of a PID namespace, -1 means everything in that namespace.
            (Tier::A, _) if rustix::process::getpid().is_init() => drop(unsafe { libc::kill(-1, libc::SIGKILL) }),
            (Tier::B, Some(id)) => kill_all_of(id),
            _ => usage::kill_descendants(rustix::process::getpid()),
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

/// A process with the run's own user id can end all others that have it in one call, however fast they multiply.
fn kill_all_of(id: u32) {
    // Its end is reaped by the sweep; if it could not start, the sweep tries again.
    // SAFETY: the process has a single thread; the child changes its id, sends one signal and ends.
    if unsafe { libc::fork() } == 0 {
        if contain::change_id(id).is_ok() {
            // SAFETY: kill takes no pointers; without root's rights -1 means every process of the same user.
            unsafe { libc::kill(-1, libc::SIGKILL) };
        }
        std::process::exit(0)
    }
}
