//! The keeper of one run: a single-threaded process of ours that stands between the supervisor and the program.
//!
//! ```text
//! supervisor (a thread of learner)
//!   └ helper            writes the id maps, waits                     tier A only
//!       └ keeper        process 1 of the namespaces, reaps, reports   tier B: the helper itself, a child subreaper
//!           └ program   contained, then executed
//! ```
//! The supervisor speaks to the keeper over one socket. If the socket closes, the keeper ends the run; if the helper dies,
//! so does the keeper, and with process 1 goes everything in its namespace.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};

use super::contain;
use super::root::{INSIDE_ID, WORK};
use super::usage;
use super::wire::{self, Job, Report, Role, SetUpError, Step};
use crate::sandbox::Tier;

/// The descriptors of a job, by purpose.
pub struct Streams {
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub evidence: Option<OwnedFd>,
    pub landlock: Option<OwnedFd>,
    /// For the warm interpreter: where it gets its requests.
    pub requests: Option<OwnedFd>,
}

/// Entry of the helper process; its standard input is the control socket.
pub fn helper_main() -> ExitCode {
    let Ok(control) = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 100) else { return ExitCode::from(2) };
    close_on_execution();
    // Number 3 is the program's place for evidence: occupied until then, so that no descriptor of ours comes to lie there.
    let Ok(_place) = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return ExitCode::from(2);
    };
    let (job, streams) = match wire::receive::<Job>(&control) {
        Ok(Some((job, descriptors))) => match streams_of(&job, descriptors) {
            Some(streams) => (job, streams),
            None => return ExitCode::from(2),
        },
        _ => return ExitCode::from(2),
    };
    let outcome = match job.tier {
        Tier::A => in_namespaces(&job, &control, streams),
        Tier::B => in_this_process(&job, &control, streams),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_failure(&control, &error);
            ExitCode::FAILURE
        }
    }
}

/// Whatever descriptors the helper was born with end with it: no program of ours or of others gets to see them.
fn close_on_execution() {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: takes numbers only. Before Linux 5.11 it fails, and descriptors that learner itself was given without the
    // close-on-exec flag stay open.
    unsafe { libc::syscall(libc::SYS_close_range, 3 as libc::c_uint, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
}

fn streams_of(job: &Job, descriptors: Vec<OwnedFd>) -> Option<Streams> {
    let mut descriptors = descriptors.into_iter();
    Some(Streams {
        stdout: descriptors.next()?,
        stderr: descriptors.next()?,
        evidence: if job.evidence { Some(descriptors.next()?) } else { None },
        landlock: if job.landlock { Some(descriptors.next()?) } else { None },
        requests: if job.role == Role::Serve { Some(descriptors.next()?) } else { None },
    })
}

pub fn report_failure(control: &OwnedFd, error: &SetUpError) {
    let errno = error.source.raw_os_error().unwrap_or(0);
    // If the supervisor is gone there is nobody left to tell.
    let _ = wire::send(control, &Report::SetUp { step: error.step.clone(), errno }, &[]);
}

/// Tier B: this process keeps the run itself.
fn in_this_process(job: &Job, control: &OwnedFd, streams: Streams) -> Result<(), SetUpError> {
    match job.role {
        Role::Serve => Err(serve(job, streams)),
        Role::Run => {
            rustix::process::set_child_subreaper(Some(rustix::process::getpid())).step("become child subreaper")?;
            run(job, control, streams, false)
        }
    }
}

/// Tier A: clones a keeper into fresh namespaces, maps its ids from outside, and waits for it.
fn in_namespaces(job: &Job, control: &OwnedFd, streams: Streams) -> Result<(), SetUpError> {
    let (ready, announce) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).step("pipe")?;
    match clone_into_namespaces().step("create user, mount, PID, IPC, UTS and network namespaces (clone)")? {
        None => {
            drop(announce);
            let code = match keep_inside(job, control, streams, &ready) {
                Ok(()) => 0,
                Err(error) => {
                    report_failure(control, &error);
                    1
                }
            };
            std::process::exit(code);
        }
        Some(keeper) => {
            drop(streams);
            match map_ids(job, keeper) {
                Ok(()) => drop(rustix::io::write(&announce, b"m")),
                // The keeper sees the pipe close and ends.
                Err(error) => report_failure(control, &error),
            }
            drop(announce);
            wait_for(keeper).step("wait for the keeper")?;
            Ok(())
        }
    }
}

/// Like fork, but the child is process 1 of new namespaces. `None` in the child.
fn clone_into_namespaces() -> io::Result<Option<Pid>> {
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWNET
        | libc::SIGCHLD;
    // SAFETY: without CLONE_VM and with no new stack this is fork; the helper has a single thread, so the child's copy of
    // memory (locks, allocator) is consistent.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags as libc::c_long, 0, 0, 0, 0) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Pid::from_raw(pid as i32))
}

/// Writes what the keeper's ids are on the machine. A run has one id; the warm interpreter has ids for all its runs.
fn map_ids(job: &Job, keeper: Pid) -> Result<(), SetUpError> {
    let keeper = keeper.as_raw_nonzero();
    let inside = if job.role == Role::Serve { 0 } else { INSIDE_ID };
    let (user, group, count) = match job.host_id {
        Some(id) => (id, id, job.host_ids),
        None => (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw(), 1),
    };
    let write = |file: &str, text: String| {
        std::fs::write(format!("/proc/{keeper}/{file}"), &text).step(format!("write {file} ({})", text.trim_end()))
    };
    if job.host_id.is_none() {
        write("setgroups", "deny".to_string())?;
    }
    write("uid_map", format!("{inside} {user} {count}\n"))?;
    write("gid_map", format!("{inside} {group} {count}\n"))
}

/// In the fresh namespaces: waits for the id maps, enters the own root, then keeps the run or becomes the interpreter.
fn keep_inside(job: &Job, control: &OwnedFd, streams: Streams, ready: &OwnedFd) -> Result<(), SetUpError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("set parent death signal")?;
    let mut byte = [0];
    if !matches!(rustix::io::read(ready, &mut byte), Ok(1)) {
        return Ok(()); // the helper failed and has said why
    }
    let sources = job.root.open()?;
    if job.host_id.is_some() {
        rustix::thread::set_thread_groups(&[]).step("drop supplementary groups")?;
    }
    contain::change_id(if job.role == Role::Serve { 0 } else { INSIDE_ID })?;
    let writable = (job.role == Role::Run).then_some(&job.limits);
    let own_proc = job.root.enter(&sources, writable)?;
    drop(sources);
    set_host_name("sandbox").step("set host name")?;
    // Changing ids has cleared it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("set parent death signal")?;
    match job.role {
        Role::Run => run(job, control, streams, own_proc),
        Role::Serve => Err(serve(job, streams)),
    }
}

fn set_host_name(name: &str) -> io::Result<()> {
    // SAFETY: the kernel reads `len` bytes of a string that is alive here.
    let result = unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Becomes the warm interpreter, whose standard input is the socket of its requests. Returns only on failure.
fn serve(job: &Job, streams: Streams) -> SetUpError {
    contain::fix_addresses();
    let (Some(requests), [program, arguments @ ..]) = (streams.requests, &job.argv[..]) else {
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
fn run(job: &Job, control: &OwnedFd, streams: Streams, own_proc: bool) -> Result<(), SetUpError> {
    let keeper = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).step("pidfd_open")?;
    let proc = if own_proc {
        Some(rustix::fs::open("/proc", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).step("open /proc")?)
    } else {
        None
    };
    // SAFETY: the process has a single thread, so the child may go on as if nothing happened.
    let program = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()).step("fork"),
        0 => std::process::exit(contain::become_program(job, control, streams, &keeper, proc.as_ref())),
        pid => pid,
    };
    drop(streams);
    let Some(program) = Pid::from_raw(program) else { return Ok(()) };
    let mut children = Children { program, ended: None, most_at_once: 0 };
    watch(control, &mut children, job.limits.processes).step("watch the program")?;
    let left_over = if children.reap() { usage::count(proc.as_ref()) } else { 0 };
    let processes = left_over.max(children.most_at_once);
    sweep(job, &mut children);
    let (cpu_seconds, peak_bytes) = usage::of_reaped_children();
    let status = children.ended.map_or(0, WaitStatus::as_raw);
    let disk_full = job.tier == Tier::A && std::fs::File::open(WORK).is_ok_and(usage::is_full);
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
fn sweep(job: &Job, children: &mut Children) {
    while children.reap() {
        match (job.tier, job.host_id) {
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

fn wait_for(child: Pid) -> io::Result<()> {
    loop {
        match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
