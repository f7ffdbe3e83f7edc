//! What the processes of a run use, read from /proc, and the end of those that have no namespace to die with.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{CWD, Dir, Mode, OFlags};
use rustix::process::{Pid, Resource, Rlimit, Signal};

/// A moment of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Processes and threads, ended ones that were not waited for included.
    pub tasks: u64,
    /// Private resident memory of all processes.
    pub bytes: u64,
    /// CPU time of all processes, ended ones included.
    pub cpu_seconds: f64,
}

/// Where the processes of a run are to be found.
pub enum Processes {
    /// All of the PID namespace whose /proc this is; the keeper is its process 1.
    Namespace(OwnedFd),
    /// All descendants of this process, the keeper.
    DescendantsOf(Pid),
}

impl Processes {
    pub fn usage(&self) -> Usage {
        match self {
            Processes::Namespace(proc) => add_up(proc.as_fd(), 1, &numbers_in(proc)),
            Processes::DescendantsOf(keeper) => {
                let keeper = keeper.as_raw_nonzero().get();
                let mut pids = descendants(keeper);
                pids.push(keeper);
                match rustix::fs::open("/proc", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
                    Ok(proc) => add_up(proc.as_fd(), keeper, &pids),
                    Err(_) => Usage::default(),
                }
            }
        }
    }
}

fn add_up(proc: std::os::fd::BorrowedFd<'_>, keeper: i32, pids: &[i32]) -> Usage {
    let mut usage = Usage::default();
    let mut text = Vec::with_capacity(1024);
    for &pid in pids {
        let Some(stat) = read_at(proc, &format!("{pid}/stat"), &mut text).and_then(Stat::parse) else {
            usage.tasks += u64::from(pid != keeper); // it was there a moment ago, with the others
            continue;
        };
        usage.cpu_seconds += stat.reaped_cpu_seconds;
        if pid == keeper {
            continue; // its own time and memory are ours
        }
        usage.cpu_seconds += stat.own_cpu_seconds;
        usage.tasks += stat.threads.max(1);
        usage.bytes += read_at(proc, &format!("{pid}/statm"), &mut text).and_then(private_bytes).unwrap_or(0);
    }
    usage
}

/// The fields of /proc/PID/stat (proc_pid_stat(5)) that matter here.
struct Stat {
    parent: i32,
    threads: u64,
    own_cpu_seconds: f64,
    /// Of its children that have ended and were waited for, and theirs.
    reaped_cpu_seconds: f64,
}

impl Stat {
    fn parse(text: &str) -> Option<Stat> {
        // The second field is a name in parentheses that may hold anything, parentheses included.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let per_second = system_constant(libc::_SC_CLK_TCK) as f64;
        Some(Stat {
            parent: fields.get(1)?.parse().ok()?,
            threads: field(20)?,
            own_cpu_seconds: (field(14)? + field(15)?) as f64 / per_second,
            reaped_cpu_seconds: (field(16)? + field(17)?) as f64 / per_second,
        })
    }
}

/// Resident pages less those backed by files, from /proc/PID/statm.
fn private_bytes(text: &str) -> Option<u64> {
    let mut fields = text.split_ascii_whitespace().skip(1).map(|field| field.parse::<u64>().ok());
    let (resident, shared) = (fields.next()??, fields.next()??);
    Some(resident.saturating_sub(shared) * system_constant(libc::_SC_PAGESIZE))
}

/// A positive constant of the system, such as the page size.
fn system_constant(name: i32) -> u64 {
    // SAFETY: sysconf takes a number and returns one.
    unsafe { libc::sysconf(name) }.max(1) as u64
}

fn read_at<'a>(directory: impl AsFd, name: &str, text: &'a mut Vec<u8>) -> Option<&'a str> {
    let file = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    text.clear();
    text.resize(1024, 0);
    let length = rustix::io::read(&file, &mut text[..]).ok()?;
    std::str::from_utf8(text.get(..length)?).ok()
}

/// The numeric entries of a /proc directory.
fn numbers_in(directory: impl AsFd) -> Vec<i32> {
    let Ok(entries) = Dir::read_from(directory) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok()).collect()
}

/// Children, their children and so on. Orphans stay below a keeper that is a child subreaper.
fn descendants(ancestor: i32) -> Vec<i32> {
    let mut found = vec![ancestor];
    let mut next = 0;
    let mut table = None;
    while let Some(&pid) = found.get(next) {
        next += 1;
        match children_of(pid) {
            Some(children) => found.extend(children),
            // A kernel without `children` files, or the process has just gone: look through all processes once.
            None => {
                let parents = table.get_or_insert_with(parents_of_all);
                found.extend(parents.iter().filter(|&&(_, parent)| parent == pid).map(|&(child, _)| child));
            }
        }
    }
    found.remove(0);
    found.sort_unstable();
    found.dedup();
    found
}

fn children_of(pid: i32) -> Option<Vec<i32>> {
    let threads =
        numbers_in(rustix::fs::open(format!("/proc/{pid}/task"), OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()?);
    let mut children = Vec::new();
    for thread in threads {
        let list = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).ok()?;
        children.extend(list.split_ascii_whitespace().filter_map(|child| child.parse::<i32>().ok()));
    }
    Some(children)
}

/// `(process, parent)` of every process on the machine.
fn parents_of_all() -> Vec<(i32, i32)> {
    let mut text = Vec::with_capacity(1024);
    let Ok(proc) = rustix::fs::openat(CWD, "/proc", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else {
        return Vec::new();
    };
    let stat = |pid| Some((pid, Stat::parse(read_at(&proc, &format!("{pid}/stat"), &mut text)?)?.parent));
    numbers_in(&proc).into_iter().filter_map(stat).collect()
}

/// Processes of the calling keeper's run that are still there.
pub fn count(own_proc: Option<&OwnedFd>) -> u64 {
    match own_proc {
        Some(proc) => numbers_in(proc).len().saturating_sub(1) as u64,
        None => descendants(rustix::process::getpid().as_raw_nonzero().get()).len() as u64,
    }
}

/// One pass of ending a tree: first no process may fork any more, then each is killed. Repeat until none is left.
pub fn kill_descendants(ancestor: Pid) {
    let mut pids = descendants(ancestor.as_raw_nonzero().get());
    pids.retain(|&pid| pid > 1);
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    for pid in pids.iter().filter_map(|&pid| Pid::from_raw(pid)) {
        // Either call fails only for a process that has just gone.
        let _ = rustix::process::prlimit(Some(pid), Resource::Nproc, none);
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// CPU seconds of all children waited for, and the largest resident set of one of them, in bytes.
pub fn of_reaped_children() -> (f64, u64) {
    // SAFETY: rusage is plain numbers, for which zero is a value; the kernel fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    (seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_maxrss as u64 * 1024)
}

/// Whether a file system of a run's own has no room for another page or another file.
pub fn is_full(tree: impl AsFd) -> bool {
    rustix::fs::fstatvfs(tree).is_ok_and(|room| room.f_bavail == 0 || room.f_favail == 0)
}

/// Tasks that run under this process's user id, for process limits that count them all.
pub fn tasks_of_this_user() -> u64 {
    let own = rustix::process::getuid().as_raw();
    let Ok(proc) = rustix::fs::open("/proc", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else { return 0 };
    let mut text = Vec::with_capacity(1024);
    let mut tasks = 0;
    for pid in numbers_in(&proc) {
        let owned = rustix::fs::statat(&proc, format!("{pid}").as_str(), rustix::fs::AtFlags::empty());
        if owned.is_ok_and(|found| found.st_uid == own) {
            tasks += read_at(&proc, &format!("{pid}/stat"), &mut text).and_then(Stat::parse).map_or(1, |stat| stat.threads);
        }
    }
    tasks
}

/// The process that a pidfd refers to, as this process sees it.
pub fn pid_of(pidfd: &OwnedFd) -> io::Result<Pid> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<i32>().ok());
    // -1 stands for a process that has ended.
    let pid = pid.filter(|&pid| pid > 0).and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}
