//! What a process does to itself to become a contained program.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};

use super::keeper::{Streams, report_failure};
use super::lay;
use super::root::WORK;
use super::seccomp::Filter;
use super::wire::{self, Job, Report, SetUpError, Step};
use crate::sandbox::{Limits, Tier};

/// As shells do: the program was found but could not be started, and was not found.
const CANNOT_START: i32 = 126;
const NOT_FOUND: i32 = 127;

/// Contains this process and executes the program in it. Returns an exit code only if that failed.
pub fn become_program(
    job: &Job,
    tier: Tier,
    host_id: Option<u32>,
    control: &OwnedFd,
    streams: Streams,
    keeper: &OwnedFd,
    proc: Option<&OwnedFd>,
) -> i32 {
    match contain(job, tier, host_id, control, streams, keeper, proc) {
        Ok(()) => execute(job),
        Err(error) => {
            report_failure(control, &error);
            CANNOT_START
        }
    }
}

/// From least to most final: ids, files, streams, limits, privileges, and last the filter.
fn contain(
    job: &Job,
    tier: Tier,
    host_id: Option<u32>,
    control: &OwnedFd,
    streams: Streams,
    keeper: &OwnedFd,
    proc: Option<&OwnedFd>,
) -> Result<(), SetUpError> {
    rustix::process::setsid().step("setsid")?;
    for group in &streams.cgroups {
        // 0 stands for the writing process; a process that moves itself needs no lock that others wait for.
        rustix::io::write(group, b"0").step("enter the control group")?;
    }
    if let (Tier::B, Some(id)) = (tier, host_id) {
        rustix::thread::set_thread_groups(&[]).step("drop supplementary groups")?;
        change_id(id)?;
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("set parent death signal")?;
    let work = match &job.directory {
        Some(directory) => directory.join("work"),
        None => WORK.into(),
    };
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    rustix::process::chdir(&work).step(format!("chdir to {}", work.display()))?;
    lay::files(&work, &job.files)?;
    connect(&streams)?;
    volunteer_for_the_oom_killer();
    fix_addresses();
    limit(&job.limits, job.process_rlimit)?;
    if tier == Tier::A || host_id.is_some() {
        drop_capabilities()?;
    }
    rustix::thread::set_no_new_privs(true).step("no_new_privs")?;
    if let Some(ruleset) = &streams.landlock {
        restrict_by_landlock(ruleset).step("landlock_restrict_self")?;
    }
    Filter::new(tier).install()?;
    let mut handles = vec![keeper.as_fd()];
    handles.extend(proc.map(AsFd::as_fd));
    wire::send(control, &Report::Started { own_proc: proc.is_some(), cpu_seconds: 0.0 }, &handles).step("report the start")
}

/// Brings up the loopback interface of a fresh network namespace, for servers that a program starts for itself.
pub fn bring_up_loopback() -> io::Result<()> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: ifreq is plain numbers and characters, for which zero is a value.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, &letter) in interface.ifr_name.iter_mut().zip(b"lo") {
        *place = letter as libc::c_char;
    }
    interface.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: the kernel reads a `struct ifreq` that is alive here.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const interface) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// All three user ids and all three group ids, keeping capabilities for what is still to be set up.
pub fn change_id(id: u32) -> Result<(), SetUpError> {
    let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_res_gid(group, group, group).step(format!("change group id to {id}"))?;
    rustix::thread::set_thread_res_uid(user, user, user).step(format!("change user id to {id}"))
}

/// Nothing as standard input, then output and error, evidence as 3, and nothing else that survives execution.
fn connect(streams: &Streams) -> Result<(), SetUpError> {
    let stdin = OwnedFd::from(std::fs::File::open("/dev/null").step("open /dev/null")?);
    let places = [Some(&stdin), Some(&streams.stdout), Some(&streams.stderr), streams.evidence.as_ref()];
    // Lifted out of the way first, so that no source is overwritten before it is used.
    let mut lifted = Vec::new();
    for source in places.into_iter().flatten() {
        lifted.push(rustix::io::fcntl_dupfd_cloexec(source, 64).step("duplicate a descriptor")?);
    }
    for (place, source) in lifted.iter().enumerate() {
        // SAFETY: dup2 takes no pointers, and no `OwnedFd` of this process has a number up to 3 (see `zygote::helper_main`).
        if unsafe { libc::dup2(source.as_raw_fd(), place as i32) } < 0 {
            return Err(io::Error::last_os_error()).step("connect standard streams");
        }
    }
    Ok(())
}

/// If the machine runs out of memory, a sandboxed program should go before anything else.
fn volunteer_for_the_oom_killer() {
    // After a change of ids the file belongs to nobody until this process may be looked into again, as a program may anyway.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable);
    // Not possible without /proc; the run's own memory limit holds regardless.
    let _ = std::fs::write("/proc/self/oom_score_adj", "900");
}

/// Same addresses in every run: orders that hang on addresses (sets of objects) then repeat, and with them verdicts.
pub fn fix_addresses() {
    // SAFETY: personality takes no pointers. A refusal costs repeatability of address-dependent programs, nothing else.
    unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) };
}

/// The limits that the kernel holds per process; those over the whole run are held by the supervisor.
fn limit(limits: &Limits, processes: u64) -> Result<(), SetUpError> {
    let cpu = limits.cpu_seconds.ceil() as u64 + 1;
    let wanted = [
        // Not 0, which would still start a program of the machine's where core_pattern names one; 1 means none at all.
        (Resource::Core, 1, 1),
        (Resource::Fsize, limits.file_bytes, limits.file_bytes),
        (Resource::Nofile, 1024, 1024),
        (Resource::Nproc, processes, processes),
        (Resource::Data, limits.data_bytes(), limits.data_bytes()),
        (Resource::Cpu, cpu, cpu + 1),
        (Resource::Memlock, 0, 0),
        (Resource::Msgqueue, 0, 0),
        (Resource::Sigpending, 1024, 1024),
        (Resource::Rtprio, 0, 0),
    ];
    for (resource, soft, hard) in wanted {
        // A limit that is already lower cannot and need not be raised.
        let hard = rustix::process::getrlimit(resource).maximum.map_or(hard, |present| present.min(hard));
        let limit = Rlimit { current: Some(soft.min(hard)), maximum: Some(hard) };
        rustix::process::setrlimit(resource, limit).step(format!("setrlimit {resource:?}"))?;
    }
    Ok(())
}

fn drop_capabilities() -> Result<(), SetUpError> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    // Ambient capabilities go with the inheritable ones.
    rustix::thread::set_capabilities(None, sets).step("drop capabilities")
}

fn restrict_by_landlock(ruleset: &OwnedFd) -> io::Result<()> {
    // SAFETY: takes a descriptor and flags, no pointers.
    let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Executes the program. A program that cannot be executed is the caller's mistake, answered as a shell would.
fn execute(job: &Job) -> i32 {
    let Some((program, arguments)) = job.argv.split_first() else { return NOT_FOUND };
    let environment = job.environment.iter().map(|(name, value)| (name, value));
    let error = Command::new(program).args(arguments).env_clear().envs(environment).exec();
    eprintln!("cannot run {program}: {error}");
    if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_START }
}
