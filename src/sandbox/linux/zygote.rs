//! The zygote: a single-threaded process of ours that forks the keeper of every run.
//!
//! ```text
//! supervisor (threads of learner)
//!   └ helper            this program again; maps ids, waits            tier A only
//!       └ zygote        own mounts and processes, the prepared root    tier B: the helper itself
//!           ├ keeper    one for each run, see `keeper`
//!           └ ...
//! ```
//! Starting a program of our size and putting a root together from bind mounts costs more than everything else that a run
//! needs. So both are done once: keepers are forks of a small process, and their mounts are a copy of its few. If the zygote
//! dies, every run dies with it; if learner dies, the zygote sees its socket close.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountAttrFlags, OpenTreeFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};
use rustix::thread::LinkNameSpaceType;

use super::keeper::{self, report_failure};
use super::root::{self, INSIDE_ID};
use super::wire::{self, Order, Plan, Report, Role, SetUpError, Step, Tree};
use crate::sandbox::Tier;

/// Exit code of a zygote that found no fresh /proc to be had for a PID namespace of its own.
const NO_FRESH_PROC: i32 = 3;

/// Entry of the helper process; its standard input is the socket of plan and orders.
pub fn helper_main() -> ExitCode {
    let Ok(orders) = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 100) else { return ExitCode::from(2) };
    close_on_execution();
    // Number 3 is the program's place for evidence: occupied until then, so that no descriptor of ours comes to lie there.
    let Ok(_place) = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return ExitCode::from(2);
    };
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let Ok(Some((plan, _))) = wire::receive_message::<Plan>(&orders) else { return ExitCode::from(2) };
    let outcome = match plan.tier {
        Tier::A => in_namespaces(&plan, &orders),
        Tier::B => Zygote { orders: &orders, view: None, id_maps: HashMap::new() }.serve(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            refuse(&orders, &error);
            ExitCode::FAILURE
        }
    }
}

/// Says why there can be no zygote.
fn refuse(orders: &OwnedFd, error: &SetUpError) {
    // If the supervisor is gone there is nobody left to tell.
    let _ = wire::send_message(orders, &error.report(), &[]);
}

/// Whatever descriptors the helper was born with end with it: no program of ours or of others gets to see them.
fn close_on_execution() {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: takes numbers only. Before Linux 5.11 it fails, and descriptors that learner itself was given without the
    // close-on-exec flag stay open.
    unsafe { libc::syscall(libc::SYS_close_range, 3 as libc::c_uint, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
}

/// Tier A: the zygote in mount, UTS and PID namespaces of its own, and for an ordinary user in a user namespace. Where the
/// machine's /proc is partly hidden the kernel refuses a fresh one, which a PID namespace needs; then it goes without.
fn in_namespaces(plan: &Plan, orders: &OwnedFd) -> Result<(), SetUpError> {
    let user = rustix::process::geteuid();
    let base = libc::CLONE_NEWNS | libc::CLONE_NEWUTS | if user.is_root() { 0 } else { libc::CLONE_NEWUSER };
    for own_proc in [true, false] {
        let flags = if own_proc { base | libc::CLONE_NEWPID } else { base };
        let (ready, announce) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).step("pipe")?;
        let zygote = match clone(flags).step("create user, mount, PID and UTS namespaces (clone)")? {
            None => {
                drop(announce);
                std::process::exit(be_zygote(plan, orders, &ready, own_proc))
            }
            Some(zygote) => zygote,
        };
        if !user.is_root() {
            let group = rustix::process::getegid();
            let proc = rustix::fs::open("/proc", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).step("open /proc")?;
            map_ids(
                &proc,
                zygote,
                &MapOf { inside: 0, user: user.as_raw(), group: group.as_raw(), count: 1, deny_groups: true },
            )?;
        }
        // A zygote that has gone is waited for in any case.
        let _ = rustix::io::write(&announce, b"m");
        let status = wait_for(zygote).step("wait for the zygote")?;
        if status.exit_status() != Some(NO_FRESH_PROC) {
            break;
        }
    }
    Ok(())
}

/// The zygote of tier A, from its first moment to its end.
fn be_zygote(plan: &Plan, orders: &OwnedFd, ready: &OwnedFd, own_proc: bool) -> i32 {
    let prepare = || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("set parent death signal")?;
        if !told_to_go_on(ready) {
            return Ok(None);
        }
        set_host_name("sandbox").step("set host name")?;
        // Trees of runs are found in the machine's own view of files, which the root hides.
        let open =
            |place: &str| rustix::fs::open(place, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).step(format!("open {place}"));
        let host_mounts = open("/proc/self/ns/mnt")?;
        let host_proc = open("/proc")?;
        unshare(libc::CLONE_NEWNS).step("create a mount namespace (unshare)")?;
        let own_mounts = open("/proc/self/ns/mnt")?;
        let mounted = plan.root.build(own_proc)?;
        let proc = if mounted { open("/proc")? } else { host_proc };
        Ok(Some(View { host_mounts, own_mounts, proc, own_proc: mounted }))
    };
    let view = match prepare() {
        Ok(Some(view)) => view,
        Ok(None) => return 0, // the helper failed and has said why
        Err(error) => {
            refuse(orders, &error);
            return 1;
        }
    };
    if own_proc && !view.own_proc {
        return NO_FRESH_PROC;
    }
    match (Zygote { orders, view: Some(view), id_maps: HashMap::new() }).serve() {
        Ok(()) => 0,
        Err(error) => {
            refuse(orders, &error);
            1
        }
    }
}

struct Zygote<'a> {
    orders: &'a OwnedFd,
    /// Tier A only.
    view: Option<View>,
    /// User namespaces that hold no process, only a map from a tree's owner to a run's id, by user, group and that id.
    id_maps: IdMaps,
}

/// What a zygote of tier A sees of the machine, and holds on to.
struct View {
    /// The mount namespace in which trees are found, and the one with the root of all runs.
    host_mounts: OwnedFd,
    own_mounts: OwnedFd,
    /// A /proc in which the zygote's children have the numbers that it knows.
    proc: OwnedFd,
    /// Fresh instances of /proc can be had.
    own_proc: bool,
}

impl Zygote<'_> {
    /// Forks as ordered until learner closes the socket.
    fn serve(mut self) -> Result<(), SetUpError> {
        ignore_children(true);
        wire::send_message(self.orders, &Report::Ready, &[]).step("report")?;
        while let Some((order, descriptors)) = wire::receive_message::<Order>(self.orders).step("receive an order")? {
            let Some(control) = descriptors.into_iter().next() else { continue };
            if let Err(error) = self.fork(&order, &control) {
                report_failure(&control, &error);
            }
        }
        Ok(())
    }

    fn fork(&mut self, order: &Order, control: &OwnedFd) -> Result<(), SetUpError> {
        let Some(view) = &self.view else {
            if clone(0).step("fork")?.is_none() {
                self.become_keeper(order, control, |order, control| keeper::in_this_process(order.role, order.host_id, control));
            }
            return Ok(());
        };
        let own_proc = view.own_proc;
        let tree = order.tree.as_ref().map(|tree| lower(view, &mut self.id_maps, tree, order.host_id));
        let (ready, announce) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).step("pipe")?;
        match clone(libc::CLONE_NEWUSER | libc::CLONE_NEWPID).step("create user and PID namespaces (clone)")? {
            None => {
                drop(announce);
                self.become_keeper(order, control, |order, control| {
                    if told_to_go_on(&ready) { keeper::in_namespaces(order, control, tree, own_proc) } else { Ok(()) }
                })
            }
            Some(keeper) => {
                map_ids(&view.proc, keeper, &MapOf::keeper(order))?; // if this fails the keeper sees the pipe close and ends
                let _ = rustix::io::write(&announce, b"m");
                Ok(())
            }
        }
    }

    /// In the fork. Never returns, and leaves nothing of the zygote's open.
    fn become_keeper(
        &mut self,
        order: &Order,
        control: &OwnedFd,
        keep: impl FnOnce(&Order, &OwnedFd) -> Result<(), SetUpError>,
    ) -> ! {
        ignore_children(false);
        self.view = None;
        self.id_maps.clear();
        let code = match keep(order, control) {
            Ok(()) => 0,
            Err(error) => {
                report_failure(control, &error);
                1
            }
        };
        std::process::exit(code)
    }
}

/// User namespaces by a tree's user and group and a run's id.
type IdMaps = HashMap<(u32, u32, u32), OwnedFd>;

/// A tree as a mount that is attached nowhere, in which the tree's owner is the run's own id.
fn lower(view: &View, id_maps: &mut IdMaps, tree: &Tree, host_id: Option<u32>) -> Result<OwnedFd, SetUpError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let found = view.in_host_mounts(|| Ok(rustix::mount::open_tree(rustix::fs::CWD, &tree.path, flags)?))?;
    let mount = found.step(format!("open the tree {} (open_tree)", tree.path.display()))?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let ids: Option<&OwnedFd> = match host_id {
        Some(id) => {
            attributes |= MountAttrFlags::MOUNT_ATTR_IDMAP;
            match id_maps.entry((tree.user, tree.group, id)) {
                Entry::Occupied(present) => Some(&*present.into_mut()),
                Entry::Vacant(place) => Some(&*place.insert(make_id_map(&view.proc, tree, id)?)),
            }
        }
        None => None,
    };
    root::restrict_mount(&mount, "", root::EMPTY_PATH, attributes, ids)
        .step(format!("give the run its ids in the tree {} (mount_setattr, id-mapped mount)", tree.path.display()))?;
    Ok(mount)
}

impl View {
    /// Runs `look` where the machine's files are seen. An error is of the way there.
    fn in_host_mounts<T>(&self, look: impl FnOnce() -> io::Result<T>) -> Result<io::Result<T>, SetUpError> {
        let enter = |mounts: &OwnedFd| rustix::thread::move_into_link_name_space(mounts.as_fd(), Some(LinkNameSpaceType::Mount));
        enter(&self.host_mounts).step("enter the machine's mounts (setns)")?;
        let found = look();
        if enter(&self.own_mounts).is_err() {
            std::process::exit(1); // a keeper forked from here would see the machine's files
        }
        Ok(found)
    }
}

/// A user namespace in which the owner of a tree is `id`. It lives as long as its descriptor.
fn make_id_map(proc: &OwnedFd, tree: &Tree, id: u32) -> Result<OwnedFd, SetUpError> {
    let Some(holder) = clone(libc::CLONE_NEWUSER).step("create a user namespace (clone)")? else {
        loop {
            // SAFETY: takes nothing; the holder sleeps until it is killed.
            unsafe { libc::pause() };
        }
    };
    let made = || {
        for (name, owner) in [("uid_map", tree.user), ("gid_map", tree.group)] {
            write_in(proc, holder, name, &format!("{owner} {id} 1\n"))?;
        }
        let place = format!("{}/ns/user", holder.as_raw_nonzero());
        rustix::fs::openat(proc, place, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).step("open a user namespace")
    };
    let made = made();
    // It is our own child, which nobody has waited for: the handle is its.
    let end = |handle: OwnedFd| rustix::process::pidfd_send_signal(handle, Signal::KILL);
    rustix::process::pidfd_open(holder, PidfdFlags::empty()).and_then(end).step("end the holder of a user namespace")?;
    made
}

/// Writes a file of a process in /proc.
fn write_in(proc: &OwnedFd, process: Pid, file: &str, text: &str) -> Result<(), SetUpError> {
    let place = format!("{}/{file}", process.as_raw_nonzero());
    let opened = rustix::fs::openat(proc, place, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    let written = opened.and_then(|opened| rustix::io::write(&opened, text.as_bytes()));
    written.map(drop).step(format!("write {file} ({})", text.trim_end()))
}

/// Which ids of the machine a new user namespace has.
struct MapOf {
    inside: u32,
    user: u32,
    group: u32,
    count: u32,
    /// Without rights over the outer namespace, groups can be mapped only by giving up to change them.
    deny_groups: bool,
}

impl MapOf {
    /// A run has one id; the warm interpreter has ids for all its runs. An ordinary user's zygote has one, which it sees as 0.
    fn keeper(order: &Order) -> MapOf {
        let inside = if order.role == Role::Serve { 0 } else { INSIDE_ID };
        let outside = order.host_id.unwrap_or(0);
        MapOf { inside, user: outside, group: outside, count: order.host_ids, deny_groups: order.host_id.is_none() }
    }
}

/// Writes what the ids of a process's user namespace are outside of it.
fn map_ids(proc: &OwnedFd, process: Pid, map: &MapOf) -> Result<(), SetUpError> {
    if map.deny_groups {
        write_in(proc, process, "setgroups", "deny")?;
    }
    write_in(proc, process, "uid_map", &format!("{} {} {}\n", map.inside, map.user, map.count))?;
    write_in(proc, process, "gid_map", &format!("{} {} {}\n", map.inside, map.group, map.count))
}

/// Like fork, but the child is in new namespaces. `None` in the child.
pub fn clone(namespaces: i32) -> io::Result<Option<Pid>> {
    let flags = libc::c_long::from(namespaces | libc::SIGCHLD);
    // SAFETY: without CLONE_VM and with no new stack this is fork; the process has a single thread, so the child's copy of
    // memory (locks, allocator) is consistent. The last two arguments change places between architectures, and both are 0.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Pid::from_raw(pid as i32))
}

pub fn unshare(namespaces: i32) -> io::Result<()> {
    // SAFETY: takes flags only; the process has a single thread.
    if unsafe { libc::unshare(namespaces) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether ended children vanish by themselves or wait to be reaped.
pub fn ignore_children(ignore: bool) {
    // SAFETY: sets no handler, only one of the two dispositions that need none; neither can be refused for this signal.
    unsafe { libc::signal(libc::SIGCHLD, if ignore { libc::SIG_IGN } else { libc::SIG_DFL }) };
}

/// Waits for the word that the id maps are written. False if it will not come.
fn told_to_go_on(ready: &OwnedFd) -> bool {
    matches!(rustix::io::retry_on_intr(|| rustix::io::read(ready, &mut [0u8; 1][..])), Ok(1))
}

fn set_host_name(name: &str) -> io::Result<()> {
    // SAFETY: the kernel reads `len` bytes of a string that is alive here.
    let result = unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn wait_for(child: Pid) -> io::Result<WaitStatus> {
    loop {
        match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
            Ok(Some((_, status))) => return Ok(status),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
