//! What the processes of a run use, read from /proc, and the end of those that have no namespace to die with.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{CWD, Dir, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal};

/// A moment of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Processes and threads, ended ones that were not waited for included.
    pub tasks: u64,
    /// Resident memory of all processes that no file stands behind, see [`Processes::usage`].
    pub bytes: u64,
    /// CPU time of all processes, ended ones included.
    pub cpu_seconds: f64,
}

/// Beyond which a look need not count exactly (tasks), or must (bytes).
#[derive(Clone, Copy, Debug)]
pub struct Most {
    pub tasks: u64,
    pub bytes: u64,
}

/// Where the processes of a run are to be found.
pub enum Processes {
    /// All of the PID namespace whose /proc this is; the keeper is its process 1.
    Namespace(OwnedFd),
    /// All descendants of this process, the keeper.
    DescendantsOf(Pid),
}

impl Processes {
    /// A look at all processes. Their memory is first bounded from above by cheap numbers; only where the bound is beyond the
    /// limit is it counted page by page, which takes a pass over each process's page tables. Of too many processes it is not:
    /// their number decides, and soon.
    pub fn usage(&self, most: Most) -> Usage {
        match self {
            Processes::Namespace(proc) => add_up(proc.as_fd(), 1, &numbers_in(proc), most),
            Processes::DescendantsOf(keeper) => {
                let keeper = keeper.as_raw_nonzero().get();
                let mut pids = descendants(keeper);
                pids.push(keeper);
                match rustix::fs::open("/proc", FOLDER, Mode::empty()) {
                    Ok(proc) => add_up(proc.as_fd(), keeper, &pids, most),
                    Err(_) => Usage::default(),
                }
            }
        }
    }
}

impl Processes {
    /// Disk space of files that processes hold open and that have no name any more. Those that are only mapped, or on their way
    /// through a socket, are not seen.
    pub fn unlinked_bytes(&self) -> u64 {
        let Processes::DescendantsOf(keeper) = self else { return 0 };
        let mut sizes = BTreeMap::new();
        for pid in descendants(keeper.as_raw_nonzero().get()) {
            let place = format!("/proc/{pid}/fd");
            for entry in std::fs::read_dir(&place).into_iter().flatten().flatten() {
                if let Ok(found) = std::fs::metadata(entry.path())
                    && found.is_file()
                    && found.nlink() == 0
                {
                    sizes.insert((found.dev(), found.ino()), found.blocks() * 512);
                }
            }
        }
        sizes.values().sum()
    }
}

fn add_up(proc: BorrowedFd<'_>, keeper: i32, pids: &[i32], most: Most) -> Usage {
    let mut usage = Usage::default();
    let (mut resident, mut out_of_sight) = (0, 0);
    let mut sizes = Vec::with_capacity(pids.len());
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
        let Some((place, size)) = memory_of(proc, pid, stat.threads) else { continue };
        usage.bytes += size.private();
        resident += size.resident;
        out_of_sight += size.out_of_sight();
        sizes.push((place, size));
    }
    if usage.tasks > most.tasks {
        return usage;
    }
    if resident > most.bytes {
        usage.bytes = sizes.iter().map(|(place, size)| anonymous_bytes(proc, place, size)).sum();
    }
    if resident.max(out_of_sight) > most.bytes {
        usage.bytes += out_of_sight_bytes(proc, &sizes);
    }
    usage
}

/// Sizes of a process from /proc/PID/statm, in bytes.
#[derive(Clone, Copy)]
struct Size {
    /// All addresses.
    total: u64,
    resident: u64,
    /// Of the resident: pages of files and of shared memory.
    shared: u64,
    /// Of the addresses: private ones that can be written, which RLIMIT_DATA bounds.
    data: u64,
}

impl Size {
    fn parse(text: &str) -> Option<Size> {
        let page = system_constant(libc::_SC_PAGESIZE);
        let pages: Vec<u64> = text.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
        let [total, resident, shared, _, _, data, ..] = pages[..] else { return None };
        Some(Size { total: total * page, resident: resident * page, shared: shared * page, data: data * page })
    }

    /// Resident memory of no file. Pages that a fork still shares with its parent count in both.
    fn private(&self) -> u64 {
        self.resident.saturating_sub(self.shared)
    }

    /// Addresses behind which memory may lie that is not resident: shared memory taken out of the page tables, and the page
    /// tables themselves.
    fn out_of_sight(&self) -> u64 {
        self.total.saturating_sub(self.data)
    }
}

const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// Where the memory of a process is told, and its sizes; `None` if it has ended. A main thread that has ended before the others
/// has none to show, and then one of those does.
fn memory_of(proc: BorrowedFd<'_>, pid: i32, threads: u64) -> Option<(String, Size)> {
    let mut text = Vec::new();
    let mut sized = |place: String| {
        let size = read_at(proc, &format!("{place}/statm"), &mut text).and_then(Size::parse)?;
        (size.total > 0).then_some((place, size))
    };
    sized(pid.to_string()).or_else(|| {
        let others = (threads > 1).then(|| rustix::fs::openat(proc, format!("{pid}/task"), FOLDER, Mode::empty()).ok())??;
        numbers_in(others).into_iter().find_map(|thread| sized(format!("{pid}/task/{thread}")))
    })
}

/// Anonymous pages of a process, those shared with others in part. One that does not let itself be read counts with all it has.
fn anonymous_bytes(proc: BorrowedFd<'_>, place: &str, size: &Size) -> u64 {
    match read_whole(proc, &format!("{place}/smaps_rollup")) {
        Ok(sums) => kibibytes(&sums, "Pss_Anon:").unwrap_or(size.resident),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => size.resident,
        Err(_) => 0, // it has ended
    }
}

/// Shared anonymous memory, which stays for as long as it is mapped somewhere, whether resident or not: each piece counts
/// once, as large as it is mapped. And page tables. A process that does not let itself be read counts with all its addresses.
fn out_of_sight_bytes(proc: BorrowedFd<'_>, sizes: &[(String, Size)]) -> u64 {
    let mut pieces: BTreeMap<String, u64> = BTreeMap::new();
    let mut bytes = 0;
    let mut text = Vec::new();
    for (place, size) in sizes {
        let tables = read_at(proc, &format!("{place}/status"), &mut text).and_then(|status| kibibytes(status, "VmPTE:"));
        bytes += tables.unwrap_or(0);
        match read_whole(proc, &format!("{place}/maps")) {
            Ok(maps) => {
                for (piece, length) in maps.lines().filter_map(shared_piece) {
                    let known = pieces.entry(piece).or_default();
                    *known = length.max(*known);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => bytes += size.out_of_sight(),
            Err(_) => {} // it has ended
        }
    }
    bytes + pieces.values().sum::<u64>()
}

/// The inode and the length of a line of /proc/PID/maps, if it is shared memory that no file system holds.
fn shared_piece(line: &str) -> Option<(String, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let shared = fields.next()?.ends_with('s');
    let inode = fields.nth(2)?;
    let anonymous = fields.next() == Some("/dev/zero") && fields.next() == Some("(deleted)");
    let address = |text| u64::from_str_radix(text, 16).ok();
    (shared && anonymous).then_some((inode.to_string(), address(end)?.saturating_sub(address(start)?)))
}

/// The number after `key` in lines such as `VmPTE:     132 kB`, in bytes.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
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

/// A positive constant of the system, such as the page size.
fn system_constant(name: i32) -> u64 {
    // SAFETY: sysconf takes a number and returns one.
    unsafe { libc::sysconf(name) }.max(1) as u64
}

fn read_at<'a>(directory: impl AsFd, name: &str, text: &'a mut Vec<u8>) -> Option<&'a str> {
    let file = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    text.clear();
    text.resize(4096, 0);
    let length = rustix::io::read(&file, &mut text[..]).ok()?;
    std::str::from_utf8(text.get(..length)?).ok()
}

fn read_whole(directory: impl AsFd, name: &str) -> io::Result<String> {
    let file = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut std::fs::File::from(file), &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
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
///
/// A number may have gone to another process since it was found. So each process is held by a handle first and only then looked
/// for a second time: what is a descendant still, and is ended by its handle, is no stranger.
pub fn kill_descendants(ancestor: Pid) {
    let ancestor = ancestor.as_raw_nonzero().get();
    let hold = |pid: i32| Some((pid, rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?));
    let held: Vec<(i32, OwnedFd)> = descendants(ancestor).into_iter().filter(|&pid| pid > 1).filter_map(hold).collect();
    let still = descendants(ancestor);
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    for (pid, handle) in held.iter().filter(|(pid, _)| still.binary_search(pid).is_ok()) {
        // Stopped it keeps its number for the call in between. Each call fails only for a process that has just gone.
        if rustix::process::pidfd_send_signal(handle, Signal::STOP).is_ok() {
            let _ = rustix::process::prlimit(Pid::from_raw(*pid), Resource::Nproc, none);
            let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
        }
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
    let Ok(proc) = rustix::fs::open("/proc", FOLDER, Mode::empty()) else { return 0 };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_out_of_sight_is_found_in_the_maps() {
        let line = "7f0b1c000000-7f0b1c800000 rw-s 00000000 00:01 2053                       /dev/zero (deleted)";
        assert_eq!(shared_piece(line), Some(("2053".to_string(), 8 << 20)));
        for other in [
            "7f0b1c000000-7f0b1c800000 rw-p 00000000 00:00 0 ",
            "7f0b1c000000-7f0b1c800000 rw-s 00000000 00:1a 7                          /box/shm/piece (deleted)",
            "55d0c8a00000-55d0c8a02000 r--p 00000000 fe:00 99                         /usr/bin/cat",
        ] {
            assert_eq!(shared_piece(other), None, "{other}");
        }
    }

    #[test]
    fn sizes_are_read() {
        let page = system_constant(libc::_SC_PAGESIZE);
        let size = Size::parse("1000 300 100 5 0 400 0").unwrap();
        assert_eq!((size.private(), size.out_of_sight()), (200 * page, 600 * page));
        assert_eq!(kibibytes("VmStk:\t 132 kB\nVmPTE:\t  52 kB\n", "VmPTE:"), Some(52 * 1024));
    }
}
