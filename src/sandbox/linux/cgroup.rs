//! Control groups, where the machine lets us make some: exact limits on memory and processes, kept by the kernel.
//!
//! They are a bonus. A plain container offers none that can be written, and a machine may bind some controllers to version 1
//! and leave version 2 empty; so what is there is found out by making a group, and a result says what was in force.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::lease;
use crate::sandbox::{Accounting, Limits};

/// Where groups for runs are made.
pub struct Groups {
    memory: Result<Parent, String>,
    processes: Result<Parent, String>,
}

/// A directory in which groups can be made that have a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parent {
    directory: PathBuf,
    version: Accounting,
}

impl Groups {
    /// Finds out by making a group, version 2 first. Also removes the groups of a learner that was killed.
    pub fn probe() -> Groups {
        let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let (mounts, own) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
        Groups { memory: parent_for("memory", &mounts, &own), processes: parent_for("pids", &mounts, &own) }
    }

    /// How each of memory and processes is limited, or why not by a group.
    pub fn describe(&self) -> (String, String) {
        let describe = |parent: &Result<Parent, String>| match parent {
            Ok(Parent { version: Accounting::CgroupV2, .. }) => "control group, version 2".to_string(),
            Ok(_) => "control group, version 1".to_string(),
            Err(reason) => format!("sampled (no control group: {reason})"),
        };
        (describe(&self.memory), describe(&self.processes))
    }

    /// A group for one run with its limits set; `None` if there can be none here.
    pub fn leaf(&self, limits: &Limits) -> Result<Option<Leaf>, String> {
        let mut leaf = Leaf { memory: None, processes: None };
        if let Ok(parent) = &self.memory {
            leaf.memory = Some(Group::create(parent, |group| group.limit_memory(limits.memory_bytes))?);
        }
        if let Ok(parent) = &self.processes {
            let limit = |group: &Group| group.write("pids.max", limits.processes);
            leaf.processes = Some(match &leaf.memory {
                Some(memory) if memory.directory.parent() == Some(&parent.directory) => {
                    limit(memory)?;
                    Group { directory: memory.directory.clone(), version: parent.version, _lease: None, shared: true }
                }
                _ => Group::create(parent, limit)?,
            });
        }
        Ok((leaf.memory.is_some() || leaf.processes.is_some()).then_some(leaf))
    }
}

/// The directory of our own group in the hierarchy of a controller, if groups can be made there.
fn parent_for(controller: &str, mounts: &str, own: &str) -> Result<Parent, String> {
    let mut reasons = Vec::new();
    for version in [Accounting::CgroupV2, Accounting::CgroupV1] {
        let Some(directory) = own_directory(version, controller, mounts, own) else { continue };
        let parent = Parent { directory, version };
        match parent.try_out(controller) {
            Ok(()) => {
                lease::sweep(&parent.directory, |group| drop(fs::remove_dir(group))); // one with processes in it stays
                return Ok(parent);
            }
            Err(reason) => reasons.push(reason),
        }
    }
    if reasons.is_empty() { Err(format!("no mounted hierarchy has {controller}")) } else { Err(reasons.join("; ")) }
}

/// From mountinfo (proc_pid_mountinfo(5)) and cgroup (cgroups(7)) of /proc/self.
fn own_directory(version: Accounting, controller: &str, mounts: &str, own: &str) -> Option<PathBuf> {
    let (kind, own_path) = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (fits, kind) = match version {
            Accounting::CgroupV2 => (number == "0", "cgroup2"),
            _ => (controllers.split(',').any(|name| name == controller), "cgroup"),
        };
        fits.then_some((kind, path))
    })?;
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (found, _source, options) = (after.next()?, after.next()?, after.next()?);
        if found != kind || (kind == "cgroup" && !options.split(',').any(|name| name == controller)) {
            return None;
        }
        let mut fields = before.split(' ').skip(3);
        let (root, place) = (Path::new(fields.next()?), Path::new(fields.next()?));
        // What is mounted may be a part of the hierarchy, seen from another place than the path in /proc/self/cgroup.
        let below = Path::new(own_path).strip_prefix(root).unwrap_or(Path::new(""));
        Some(place.join(below))
    })
}

impl Parent {
    /// Makes a group and looks whether it has the controller.
    fn try_out(&self, controller: &str) -> Result<(), String> {
        if self.version == Accounting::CgroupV2 {
            self.hand_down(controller)?;
        }
        let file = if controller == "memory" && self.version == Accounting::CgroupV1 {
            "memory.limit_in_bytes".to_string()
        } else {
            format!("{controller}.max")
        };
        let group = Group::create(self, |_| Ok(()))?;
        if group.directory.join(&file).exists() {
            Ok(())
        } else {
            Err(format!("{}: no {file} in a new group", self.directory.display()))
        }
    }

    /// Version 2: groups below ours have a controller only if ours hands it down, which it cannot while processes are in it. If
    /// we are the only one, as where a group was delegated to us, we move into a group below it.
    fn hand_down(&self, controller: &str) -> Result<(), String> {
        let file = |name: &str| self.directory.join(name);
        let has = |name: &str| {
            fs::read_to_string(file(name)).is_ok_and(|text| text.split_ascii_whitespace().any(|word| word == controller))
        };
        if !has("cgroup.controllers") {
            return Err(format!("{}: version 2 without {controller}", self.directory.display()));
        }
        if has("cgroup.subtree_control") {
            return Ok(());
        }
        let failed = |error: io::Error| format!("{}: {error}", file("cgroup.subtree_control").display());
        let enable = || fs::write(file("cgroup.subtree_control"), format!("+{controller}"));
        let busy = match enable() {
            Ok(()) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => error,
            Err(error) => return Err(failed(error)),
        };
        let inside = fs::read_to_string(file("cgroup.procs")).map_err(failed)?;
        if inside.trim() != std::process::id().to_string() {
            return Err(format!("{}: other processes are in this group", failed(busy)));
        }
        let supervisor = file("learner-supervisor");
        fs::create_dir_all(&supervisor).and_then(|()| fs::write(supervisor.join("cgroup.procs"), "0")).map_err(failed)?;
        enable().map_err(failed)
    }
}

/// The groups of one run, removed when dropped.
pub struct Leaf {
    memory: Option<Group>,
    processes: Option<Group>,
}

impl Leaf {
    pub fn memory(&self) -> Accounting {
        self.memory.as_ref().map_or(Accounting::Sampled, |group| group.version)
    }

    pub fn processes(&self) -> Accounting {
        self.processes.as_ref().map_or(Accounting::Sampled, |group| group.version)
    }

    fn groups(&self) -> impl Iterator<Item = &Group> {
        self.memory.iter().chain(self.processes.iter().filter(|group| !group.shared))
    }

    /// Files through which a single-threaded process enters by writing 0. Who may do that was decided at opening.
    pub fn entrances(&self) -> Result<Vec<OwnedFd>, String> {
        self.groups().map(Group::entrance).collect()
    }

    /// Whether the kernel has ended a process of the run for want of memory, and whether it has refused one.
    pub fn refused(&self) -> (bool, bool) {
        let count =
            |group: &Option<Group>, file: &str, word: &str| group.as_ref().is_some_and(|group| group.count(file, word) > 0);
        let events = if self.memory() == Accounting::CgroupV1 { "memory.oom_control" } else { "memory.events" };
        (count(&self.memory, events, "oom_kill"), count(&self.processes, "pids.events", "max"))
    }

    pub fn peak_bytes(&self) -> Option<u64> {
        let group = self.memory.as_ref()?;
        let file = if group.version == Accounting::CgroupV1 { "memory.max_usage_in_bytes" } else { "memory.peak" };
        fs::read_to_string(group.directory.join(file)).ok()?.trim().parse().ok()
    }

    /// Of all its processes; 0 where the group does not count it.
    pub fn cpu_seconds(&self) -> f64 {
        let of = |group: &Group| group.count("cpu.stat", "usage_usec") as f64 * 1e-6;
        self.groups().filter(|group| group.version == Accounting::CgroupV2).map(of).fold(0.0, f64::max)
    }

    /// Ends every process at once, where the kernel offers that (version 2, Linux 5.14).
    pub fn kill(&self) {
        for group in self.groups().filter(|group| group.version == Accounting::CgroupV2) {
            let _ = fs::write(group.directory.join("cgroup.kill"), "1"); // the keeper ends them in any case
        }
    }
}

struct Group {
    directory: PathBuf,
    version: Accounting,
    _lease: Option<OwnedFd>,
    /// The directory is another group's too, which removes it.
    shared: bool,
}

impl Group {
    fn create(parent: &Parent, limit: impl FnOnce(&Group) -> Result<(), String>) -> Result<Group, String> {
        let made = lease::create(&parent.directory, |path| fs::create_dir(path));
        let (directory, lease) = made.map_err(|error| error.to_string())?;
        let group = Group { directory, version: parent.version, _lease: Some(lease), shared: false };
        limit(&group)?;
        Ok(group)
    }

    fn write(&self, file: &str, value: u64) -> Result<(), String> {
        let file = self.directory.join(file);
        fs::write(&file, value.to_string()).map_err(|error| format!("{}: {error}", file.display()))
    }

    fn limit_memory(&self, bytes: u64) -> Result<(), String> {
        let swap = |file: &str, value| if self.directory.join(file).exists() { self.write(file, value) } else { Ok(()) };
        if self.version == Accounting::CgroupV1 {
            self.write("memory.limit_in_bytes", bytes)?;
            return swap("memory.memsw.limit_in_bytes", bytes); // memory and swap together
        }
        self.write("memory.max", bytes)?;
        swap("memory.swap.max", 0)?;
        self.write("memory.oom.group", 1)
    }

    fn entrance(&self) -> Result<OwnedFd, String> {
        let file = self.directory.join(if self.version == Accounting::CgroupV1 { "tasks" } else { "cgroup.procs" });
        rustix::fs::open(&file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| format!("{}: {error}", file.display()))
    }

    /// The number after a word, in a file of such pairs.
    fn count(&self, file: &str, word: &str) -> u64 {
        let Ok(text) = fs::read_to_string(self.directory.join(file)) else { return 0 };
        text.lines().find_map(|line| line.strip_prefix(word)?.trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.shared {
            // A process that cannot be ended keeps its group; the next start sweeps it.
            let _ = fs::remove_dir(&self.directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED_MOUNTS: &str = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        31 23 0:27 /jobs /sys/fs/cgroup/pids rw shared:9 - cgroup cgroup rw,pids\n\
        32 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const MIXED_OWN: &str = "8:pids:/jobs/one\n4:memory:/run/two\n0::/three\n";

    #[test]
    fn own_groups_are_found() {
        let find = |version, controller| own_directory(version, controller, MIXED_MOUNTS, MIXED_OWN);
        assert_eq!(find(Accounting::CgroupV1, "memory"), Some("/sys/fs/cgroup/memory/run/two".into()));
        assert_eq!(find(Accounting::CgroupV1, "pids"), Some("/sys/fs/cgroup/pids/one".into()));
        assert_eq!(find(Accounting::CgroupV2, "pids"), Some("/sys/fs/cgroup/unified/three".into()));
        assert_eq!(find(Accounting::CgroupV1, "cpu"), None);
    }

    /// A directory of plain files in place of the kernel's: what is written where, and how it is read.
    #[test]
    fn version_2_is_written_and_read() {
        let place = tempfile::tempdir().unwrap();
        let parent = Parent { directory: place.path().to_path_buf(), version: Accounting::CgroupV2 };
        let line = parent.try_out("memory").unwrap_err();
        assert!(line.ends_with("version 2 without memory"), "{line}");
        let groups = Groups { memory: Ok(parent.clone()), processes: Ok(parent) };
        let limits = Limits { memory_bytes: 4096, processes: 7, ..Limits::default() };
        let leaf = groups.leaf(&limits).unwrap().unwrap();
        let directory = leaf.memory.as_ref().unwrap().directory.clone();
        let read = |file: &str| fs::read_to_string(directory.join(file)).unwrap();
        assert_eq!((read("memory.max"), read("memory.oom.group"), read("pids.max")), ("4096".into(), "1".into(), "7".into()));
        assert_eq!((leaf.refused(), leaf.groups().count()), ((false, false), 1));
        fs::write(directory.join("memory.events"), "low 0\nmax 9\noom 1\noom_kill 2\n").unwrap();
        fs::write(directory.join("pids.events"), "max 3\n").unwrap();
        fs::write(directory.join("memory.peak"), "4096\n").unwrap();
        fs::write(directory.join("cpu.stat"), "usage_usec 2500000\nuser_usec 1\n").unwrap();
        assert_eq!((leaf.refused(), leaf.peak_bytes(), leaf.cpu_seconds()), ((true, true), Some(4096), 2.5));
    }
}
