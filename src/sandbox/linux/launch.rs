//! Starts runs: cold, as a fork of the zygote that executes a program, or warm, as a fork of one interpreter that stays.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use serde_json::json;

use super::cgroup::{Groups, Leaf};
use super::examination::{Examination, RUNNER};
use super::host_ids::{self, HostIds};
use super::python::{self, Python};
use super::root::{BOX, RootPlan, WORK};
use super::seccomp::Filter;
use super::supervise::{self, Launched};
use super::wire::{self, Job, Order, Plan, Report, Role, Size, Tree};
use super::workdir::{self, WorkDirectory};
use super::{ENVIRONMENT, copy, explain, landlock, usage};
use crate::sandbox::{HELPER_ARGUMENT, Limits, SandboxError, Snapshot, Tier, TreeSource};
use crate::types::Workspace;

/// What a run is started with, cold or warm.
pub struct Start<'a> {
    pub tier: Tier,
    /// When its set-up began.
    pub since: Instant,
    /// Number of the run, from which its user id follows.
    pub number: u32,
    pub limits: &'a Limits,
    pub files: &'a Workspace,
    pub tree: Option<&'a Snapshot>,
}

/// What a command is, beside where it runs.
pub struct Command<'a> {
    pub argv: &'a [String],
    pub environment: &'a BTreeMap<String, String>,
    pub stdin: Option<String>,
    pub evidence: bool,
}

/// A run on its way, and the directory that must outlive it.
pub type Started = (Launched, Option<WorkDirectory>);

pub struct Launcher {
    helper: PathBuf,
    pub root: RootPlan,
    /// Goes to the front of PATH.
    pub python_directory: Option<PathBuf>,
    /// Only when run by root.
    pub host_ids: Option<HostIds>,
    pub groups: Groups,
    /// Where the kernel refuses an overlay, a tree may be copied.
    copy_trees: bool,
    /// Tasks of the same user that are not ours: they count against the same process limit.
    other_tasks: u64,
    /// Without an own user id and without Landlock's signal scope, a program in tier B can signal its keeper.
    keeper_in_reach: bool,
    zygote: Mutex<Option<Arc<Zygote>>>,
    server: Mutex<Option<Arc<Server>>>,
}

impl Launcher {
    pub fn new(helper: PathBuf, copy_trees: bool) -> Result<Launcher, SandboxError> {
        let root = rustix::process::geteuid().is_root();
        let host_ids = if root {
            Some(HostIds::lease().map_err(|error| SandboxError::Broken(format!("user ids for runs: {error}")))?)
        } else {
            None
        };
        workdir::sweep();
        Ok(Launcher {
            helper,
            root: RootPlan::survey(),
            python_directory: None,
            host_ids,
            groups: Groups::probe(),
            copy_trees,
            other_tasks: if root { 0 } else { usage::tasks_of_this_user() + 256 },
            keeper_in_reach: !root && landlock::supported() < 6,
            zygote: Mutex::new(None),
            server: Mutex::new(None),
        })
    }

    /// The id that programs of a run have on the machine.
    fn host_id(&self, number: u32) -> Option<u32> {
        self.host_ids.as_ref().map(|ids| ids.first + 1 + number)
    }

    /// Starts a command in a fresh tree, in processes of its own.
    pub fn cold(&self, start: &Start<'_>, command: Command<'_>) -> Result<Started, String> {
        let directory = self.directory(start)?;
        let launched = match start.tier {
            Tier::A => {
                let order = self.order(Role::Run, start.number, start.tree);
                let (control, mut job) = (self.fork(Tier::A, &order)?, self.job(start, &command, None)?);
                job.copy = self.room_for_copy(start.tree)?;
                let tree = start.tree.map(|tree| (tree.clone(), self.host_id(start.number)));
                let mut launched = self.send_job(start, &control, job, &[])?.launched(start.since, control, None);
                launched.tree_source = if tree.is_some() { TreeSource::Overlay } else { TreeSource::Empty };
                launched.tree = tree;
                launched
            }
            Tier::B => self.cold_in(start, command, directory.as_ref())?,
        };
        Ok((launched, directory))
    }

    /// Tier B: starts a command in a directory that is there.
    pub fn cold_in(
        &self,
        start: &Start<'_>,
        command: Command<'_>,
        directory: Option<&WorkDirectory>,
    ) -> Result<Launched, String> {
        let control = self.fork(Tier::B, &self.order(Role::Run, start.number, None))?;
        let mut job = self.job(start, &command, directory)?;
        let ruleset = self.ruleset(directory)?;
        job.landlock = ruleset.is_some();
        let others: Vec<BorrowedFd<'_>> = ruleset.iter().map(AsFd::as_fd).collect();
        let directory = directory.map(|directory| (directory.path().to_path_buf(), directory.room(start.limits)));
        let mut launched = self.send_job(start, &control, job, &others)?.launched(start.since, control, directory);
        launched.tree_source = if start.tree.is_some() { TreeSource::Copy } else { TreeSource::Empty };
        launched.keeper_in_reach = self.keeper_in_reach;
        Ok(launched)
    }

    /// Tier A: starts a session's keeper and waits until its tree is set up. Returns its socket, where changes will be, and
    /// how the tree came there.
    pub fn session(&self, start: &Start<'_>) -> Result<(OwnedFd, OwnedFd, TreeSource), String> {
        let control = self.fork(Tier::A, &self.order(Role::Session, start.number, start.tree))?;
        let job = Job {
            files: start.files.clone(),
            limits: start.limits.clone(),
            copy: self.room_for_copy(start.tree)?,
            ..Job::default()
        };
        let null = std::fs::File::open("/dev/null").map_err(|error| format!("/dev/null: {error}"))?;
        // A keeper that could not start closes its end; what it has said is read below.
        let _ = wire::send(&control, &job, &[null.as_fd(), null.as_fd()]);
        let mut source = if start.tree.is_some() { TreeSource::Overlay } else { TreeSource::Empty };
        loop {
            match wire::receive::<Report>(&control) {
                Ok(Some((Report::Ready, descriptors))) => {
                    let changes = descriptors.into_iter().next().ok_or("session: no directory of changes")?;
                    return Ok((control, changes, source));
                }
                Ok(Some((Report::CopyTree, descriptors))) => {
                    source = TreeSource::Copy;
                    let tree = start.tree.map(|tree| (tree, self.host_id(start.number)));
                    supervise::answer_with_copy(&control, tree, descriptors)?;
                }
                Ok(Some((Report::SetUp { step, errno }, _))) => return Err(explain::failed_step(&step, errno)),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return Err("the session's keeper has died".to_string()),
            }
        }
    }

    /// Tier A: starts a command in a session.
    pub fn in_session(&self, start: &Start<'_>, command: Command<'_>, session: &OwnedFd) -> Result<Launched, String> {
        let job = self.job(start, &command, None)?;
        let (control, theirs) = stream_pair().map_err(|error| format!("socket for a run: {error}"))?;
        let pipes = self.send_job(start, session, job, &[theirs.as_fd()])?;
        Ok(pipes.launched(start.since, control, None))
    }

    fn order(&self, role: Role, number: u32, tree: Option<&Snapshot>) -> Order {
        let tree = tree.map(|tree| {
            let (user, group) = tree.owner();
            Tree { path: tree.path().to_path_buf(), user, group }
        });
        Order { role, host_id: self.host_id(number), host_ids: 1, tree }
    }

    fn job(&self, start: &Start<'_>, command: &Command<'_>, directory: Option<&WorkDirectory>) -> Result<Job, String> {
        let mut environment = self.environment(directory);
        environment.extend(command.environment.iter().map(|(name, value)| (name.clone(), value.clone())));
        Ok(Job {
            argv: command.argv.to_vec(),
            environment,
            files: start.files.clone(),
            stdin: command.stdin.clone(),
            limits: start.limits.clone(),
            process_rlimit: self.process_rlimit(start.limits),
            directory: directory.map(|directory| directory.path().to_path_buf()),
            evidence: command.evidence,
            ..Job::default()
        })
    }

    fn room_for_copy(&self, tree: Option<&Snapshot>) -> Result<Option<Size>, String> {
        tree.filter(|_| self.copy_trees).map(|tree| copy::size_of(tree.path())).transpose()
    }

    /// Gives a keeper its job, with pipes and a control group.
    fn send_job(&self, start: &Start<'_>, keeper: &OwnedFd, mut job: Job, others: &[BorrowedFd<'_>]) -> Result<Pipes, String> {
        let mut pipes = Pipes::new(job.evidence).map_err(|error| format!("pipes for a run: {error}"))?;
        pipes.cgroup = self.groups.leaf(start.limits)?;
        let entrances = pipes.cgroup.as_ref().map(Leaf::entrances).transpose()?.unwrap_or_default();
        job.cgroups = entrances.len();
        let landlock = usize::from(job.landlock);
        let mut descriptors = pipes.theirs();
        descriptors.extend(&others[..landlock]);
        descriptors.extend(entrances.iter().map(AsFd::as_fd));
        descriptors.extend(&others[landlock..]);
        // A keeper that could not start closes its end; the supervisor then reads why.
        let _ = wire::send(keeper, &job, &descriptors);
        drop(descriptors);
        Ok(pipes)
    }

    /// Starts tests in an interpreter of their own.
    pub fn cold_tests(&self, start: &Start<'_>, python: &Python, examination: &Examination<'_>) -> Result<Started, String> {
        let mut argv = python_command(python);
        argv.push("once".to_string());
        argv.push(examination.arrangement(&self.root.binds).to_string());
        let environment = BTreeMap::new();
        let started = self.cold(start, Command { argv: &argv, environment: &environment, stdin: None, evidence: true })?;
        examination.send(&started.0);
        Ok(started)
    }

    /// Starts tests in a fork of the warm interpreter, which is started, or started again, when there is none.
    pub fn warm(&self, start: &Start<'_>, python: &Python, examination: &Examination<'_>) -> Result<Started, String> {
        let host_id = self.host_id(start.number);
        let directory = self.directory(start)?;
        let ruleset = self.ruleset(directory.as_ref())?;
        let pipes = Pipes::new(true).map_err(|error| format!("pipes for a run: {error}"))?;
        let (control, theirs) = stream_pair().map_err(|error| format!("socket for a run: {error}"))?;
        let mut descriptors = vec![theirs.as_fd()];
        descriptors.extend(pipes.theirs());
        descriptors.extend(ruleset.iter().map(AsFd::as_fd));
        // In the interpreter's own user namespace the block of ids starts at 0, which is its own.
        let id = if host_id.is_some() { start.number + 1 } else { 0 };
        let mut server = self.server(start.tier, python)?;
        if wire::send_descriptors(&server.requests, id.to_string().as_bytes(), &descriptors).is_err() {
            // It has died since it was started. Runs that were in it have ended with it; ours was not yet: a new one takes it.
            self.forget(&server);
            server = self.server(start.tier, python)?;
            wire::send_descriptors(&server.requests, id.to_string().as_bytes(), &descriptors)
                .map_err(|error| format!("warm interpreter: {error}"))?;
        }
        drop(descriptors);
        drop(theirs);
        let limits = start.limits;
        let cpu = limits.cpu_seconds.ceil() as u64 + 1;
        let request = json!({
            "files": start.files,
            "arrangement": examination.arrangement(&self.root.binds),
            "host_id": host_id,
            "directory": directory.as_ref().map_or(Path::new(BOX), WorkDirectory::path),
            "processes": limits.processes,
            "workspace_bytes": limits.workspace_bytes,
            "workspace_entries": limits.workspace_entries(),
            "rlimits": [
                ("CORE", (0, 0)),
                ("FSIZE", (limits.file_bytes, limits.file_bytes)),
                ("NOFILE", (1024, 1024)),
                ("NPROC", (self.process_rlimit(limits), self.process_rlimit(limits))),
                ("DATA", (limits.data_bytes(), limits.data_bytes())),
                ("CPU", (cpu, cpu + 1)),
                ("MEMLOCK", (0, 0)),
                ("MSGQUEUE", (0, 0)),
                ("SIGPENDING", (1024, 1024)),
                ("RTPRIO", (0, 0)),
            ],
        });
        // A keeper that could not start closes its end; the supervisor then reads why.
        let _ = wire::send(&control, &request, &[]);
        let room = directory.as_ref().map(|directory| (directory.path().to_path_buf(), directory.room(limits)));
        let mut launched = pipes.launched(start.since, control, room);
        launched.keeper_in_reach = start.tier == Tier::B && self.keeper_in_reach;
        examination.send(&launched);
        Ok((launched, directory))
    }

    /// Tier B: a directory for a run, filled with its tree.
    pub fn directory(&self, start: &Start<'_>) -> Result<Option<WorkDirectory>, String> {
        match start.tier {
            Tier::A => Ok(None),
            Tier::B => {
                let created = WorkDirectory::create(self.host_id(start.number), start.tree.map(Snapshot::path));
                created.map(Some).map_err(|reason| format!("directory for a run: {reason}"))
            }
        }
    }

    fn ruleset(&self, directory: Option<&WorkDirectory>) -> Result<Option<OwnedFd>, String> {
        directory.map(|directory| landlock::ruleset(&self.root.binds, directory.path())).transpose()
    }

    fn environment(&self, directory: Option<&WorkDirectory>) -> Vec<(String, String)> {
        let system = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";
        let path = match &self.python_directory {
            Some(first) => format!("{}:{system}", first.display()),
            None => system.to_string(),
        };
        let (home, temporary) = match directory {
            None => (WORK.to_string(), "/tmp".to_string()),
            Some(directory) => {
                let place = |name| directory.path().join(name).to_string_lossy().into_owned();
                (place("work"), place("tmp"))
            }
        };
        let mut environment = vec![("PATH".to_string(), path), ("HOME".to_string(), home), ("TMPDIR".to_string(), temporary)];
        environment.extend(ENVIRONMENT.map(|(name, value)| (name.to_string(), value.to_string())));
        environment
    }

    /// Well above the run's own limit. The watch over the whole run decides; a bomb that met the kernel's limit first could
    /// die of its failing forks between two looks of the watch, and 512 forks take longer than that.
    fn process_rlimit(&self, limits: &Limits) -> u64 {
        limits.processes.saturating_add(512 + self.other_tasks)
    }

    /// Has a keeper forked; returns our end of its control socket.
    fn fork(&self, tier: Tier, order: &Order) -> Result<OwnedFd, String> {
        let (control, theirs) = stream_pair().map_err(|error| format!("socket for a run: {error}"))?;
        let mut zygote = self.zygote(tier)?;
        if wire::send_message(&zygote.orders, order, &[theirs.as_fd()]).is_err() {
            // It has died since it was started, and every run in it. A new one takes this one.
            self.forget_zygote(&zygote);
            zygote = self.zygote(tier)?;
            wire::send_message(&zygote.orders, order, &[theirs.as_fd()]).map_err(|error| format!("zygote: {error}"))?;
        }
        Ok(control)
    }

    /// The running zygote, or a new one: also where the root has changed since, as while an interpreter is looked for.
    fn zygote(&self, tier: Tier) -> Result<Arc<Zygote>, String> {
        let mut zygote = self.zygote.lock().unwrap_or_else(PoisonError::into_inner);
        let root = if tier == Tier::A { self.root.clone() } else { RootPlan::default() };
        if let Some(zygote) = zygote.as_ref().filter(|zygote| zygote.plan.tier == tier && zygote.plan.root == root) {
            return Ok(Arc::clone(zygote));
        }
        let started = Arc::new(Zygote::start(&self.helper, Plan { tier, root })?);
        *zygote = Some(Arc::clone(&started));
        Ok(started)
    }

    fn forget_zygote(&self, dead: &Arc<Zygote>) {
        let mut zygote = self.zygote.lock().unwrap_or_else(PoisonError::into_inner);
        if zygote.as_ref().is_some_and(|present| Arc::ptr_eq(present, dead)) {
            *zygote = None;
        }
    }

    /// The running interpreter, or a new one.
    fn server(&self, tier: Tier, python: &Python) -> Result<Arc<Server>, String> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = server.as_ref() {
            return Ok(Arc::clone(server));
        }
        let started = Arc::new(self.start_server(tier, python)?);
        *server = Some(Arc::clone(&started));
        Ok(started)
    }

    fn forget(&self, dead: &Arc<Server>) {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if server.as_ref().is_some_and(|present| Arc::ptr_eq(present, dead)) {
            *server = None;
        }
    }

    fn start_server(&self, tier: Tier, python: &Python) -> Result<Server, String> {
        let failed = |error: io::Error| format!("warm interpreter: {error}");
        let mut argv = python_command(python);
        argv.push("serve".to_string());
        argv.push(json!({"tier": tier, "filter": Filter::new(tier).to_hex()}).to_string());
        let (requests, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.into()))?;
        let order = Order {
            role: Role::Serve,
            host_id: self.host_ids.as_ref().map(|ids| ids.first),
            host_ids: if self.host_ids.is_some() { host_ids::BLOCK } else { 1 },
            tree: None,
        };
        let job = Job { argv, environment: self.environment(None), ..Job::default() };
        let control = self.fork(tier, &order)?;
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(failed)?;
        // If it could not be forked, that is read below.
        let _ = wire::send(&control, &job, &[null.as_fd(), null.as_fd(), theirs.as_fd()]);
        drop(theirs);
        let mut keeper = None;
        if readable(&requests, PATIENCE) {
            let mut word = [0; 16];
            if matches!(rustix::net::recv(&requests, &mut word[..], RecvFlags::empty()), Ok((5, _)) if word.starts_with(b"ready"))
            {
                return Ok(Server { requests });
            }
        }
        loop {
            match wire::receive::<Report>(&control) {
                Ok(Some((Report::Kept, descriptors))) => keeper = descriptors.into_iter().next(),
                Ok(Some((Report::SetUp { step, errno }, _))) => {
                    return Err(format!("warm interpreter: {}", explain::failed_step(&step, errno)));
                }
                _ => break,
            }
        }
        drop(keeper);
        Err("warm interpreter: it did not get ready".to_string())
    }
}

/// The warm interpreter. It ends when its socket closes, and with it every run that was forked off it.
struct Server {
    requests: OwnedFd,
}

/// For the start of a zygote or an interpreter.
const PATIENCE: Duration = Duration::from_secs(20);

/// Our own program as helper, and what it became.
struct Zygote {
    plan: Plan,
    orders: OwnedFd,
    helper: Mutex<Child>,
}

impl Zygote {
    /// It has a process group of its own: Ctrl-C at a terminal goes to the whole foreground group, and runs should end when we
    /// end them. If we die, it sees its socket close.
    fn start(helper: &Path, plan: Plan) -> Result<Zygote, String> {
        let failed = |error: io::Error| format!("{}: {error}", helper.display());
        let (orders, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.into()))?;
        let child = std::process::Command::new(helper)
            .arg(HELPER_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let zygote = Zygote { plan, orders, helper: Mutex::new(child) };
        wire::send_message(&zygote.orders, &zygote.plan, &[]).map_err(failed)?;
        if !readable(&zygote.orders, PATIENCE) {
            return Err(format!("{} did not become a zygote in {} seconds", helper.display(), PATIENCE.as_secs()));
        }
        match wire::receive_message::<Report>(&zygote.orders) {
            Ok(Some((Report::Ready, _))) => Ok(zygote),
            Ok(Some((Report::SetUp { step, errno }, _))) => Err(explain::failed_step(&step, errno)),
            _ => Err(format!("{} is no helper of sandboxes, or was killed", helper.display())),
        }
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // The zygote of tier A dies with its helper, and all of its keepers with it.
        let helper = self.helper.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = helper.kill();
        let _ = helper.wait();
    }
}

/// What a run and its supervisor share: lines, our ends first, and perhaps a control group. Over the line for evidence the
/// examination goes in and evidence comes out.
struct Pipes {
    stdout: (OwnedFd, OwnedFd),
    stderr: (OwnedFd, OwnedFd),
    evidence: Option<(OwnedFd, OwnedFd)>,
    cgroup: Option<Leaf>,
}

impl Pipes {
    fn new(evidence: bool) -> io::Result<Pipes> {
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
        let evidence = if evidence { Some(stream_pair()?) } else { None };
        Ok(Pipes { stdout: pipe()?, stderr: pipe()?, evidence, cgroup: None })
    }

    fn theirs(&self) -> Vec<BorrowedFd<'_>> {
        let evidence = self.evidence.as_ref().map(|(_, write)| write);
        [Some(&self.stdout.1), Some(&self.stderr.1), evidence].into_iter().flatten().map(AsFd::as_fd).collect()
    }

    /// Keeps our ends and closes the others.
    fn launched(self, since: Instant, control: OwnedFd, directory: Option<(PathBuf, Size)>) -> Launched {
        Launched {
            since,
            control,
            stdout: self.stdout.0,
            stderr: self.stderr.0,
            evidence: self.evidence.map(|(read, _)| read),
            directory,
            tree: None,
            tree_source: TreeSource::Empty,
            cgroup: self.cgroup,
            keeper_in_reach: false,
        }
    }
}

fn python_command(python: &Python) -> Vec<String> {
    let mut argv = vec![python.executable.to_string_lossy().into_owned()];
    argv.extend(python::FLAGS.map(str::to_string));
    argv.extend(["-c".to_string(), RUNNER.to_string()]);
    argv
}

fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

fn readable(descriptor: &OwnedFd, patience: Duration) -> bool {
    let patience = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
    loop {
        match rustix::event::poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&patience)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(ready) => return ready > 0,
            Err(_) => return false,
        }
    }
}
