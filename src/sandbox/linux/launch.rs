//! Starts runs: cold, with a helper process of its own, or warm, as a fork of one interpreter that stays.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use serde_json::json;

use super::python::{self, Python};
use super::root::{BOX, RootPlan, WORK};
use super::seccomp::Filter;
use super::slots::{self, HostIds};
use super::supervise::Launched;
use super::wire::{self, Job, Report, Role};
use super::workdir::WorkDirectory;
use super::{ENVIRONMENT, landlock, usage};
use crate::sandbox::{HELPER_ARGUMENT, Limits, SandboxError, Tier};
use crate::types::Workspace;

const RUNNER: &str = include_str!("runner.py");

/// What a run is started with, cold or warm.
pub struct Start<'a> {
    pub tier: Tier,
    /// Number of the place it holds, from which its user id follows.
    pub slot: u32,
    pub limits: &'a Limits,
    pub files: &'a Workspace,
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
    /// Tasks of the same user that are not ours: they count against the same process limit.
    other_tasks: u64,
    /// Without an own user id and without Landlock's signal scope, a program in tier B can signal its keeper.
    keeper_in_reach: bool,
    server: Mutex<Option<Arc<Server>>>,
}

impl Launcher {
    pub fn new(helper: PathBuf) -> Result<Launcher, SandboxError> {
        let root = rustix::process::geteuid().is_root();
        let host_ids = if root {
            Some(HostIds::lease().map_err(|error| SandboxError::Broken(format!("user ids for runs: {error}")))?)
        } else {
            None
        };
        Ok(Launcher {
            helper,
            root: RootPlan::survey(),
            python_directory: None,
            host_ids,
            other_tasks: if root { 0 } else { usage::tasks_of_this_user() + 256 },
            keeper_in_reach: !root && landlock::supported() < 6,
            server: Mutex::new(None),
        })
    }

    /// Starts any command through a helper process.
    pub fn cold(
        &self,
        start: &Start<'_>,
        argv: &[String],
        added: &BTreeMap<String, String>,
        tests: Option<String>,
    ) -> Result<Started, String> {
        let host_id = self.host_ids.as_ref().map(|ids| ids.first + 1 + start.slot);
        let directory = self.directory(start.tier, host_id)?;
        let ruleset = self.ruleset(directory.as_ref())?;
        let pipes = Pipes::new(tests.is_some()).map_err(|error| format!("pipes for a run: {error}"))?;
        let mut environment = self.environment(directory.as_ref());
        environment.extend(added.iter().map(|(name, value)| (name.clone(), value.clone())));
        let job = Job {
            tier: start.tier,
            role: Role::Run,
            argv: argv.to_vec(),
            environment,
            files: start.files.clone(),
            evidence: tests.is_some(),
            stdin: tests,
            limits: start.limits.clone(),
            process_rlimit: self.process_rlimit(start.limits),
            host_id,
            host_ids: 1,
            root: if start.tier == Tier::A { self.root.clone() } else { RootPlan::default() },
            directory: directory.as_ref().map(|directory| directory.path().to_path_buf()),
            landlock: ruleset.is_some(),
        };
        let (helper, control) =
            self.start_helper(&job, &pipes.theirs(ruleset.as_ref())).map_err(|error| format!("helper: {error}"))?;
        let keeper_in_reach = start.tier == Tier::B && self.keeper_in_reach;
        Ok((pipes.launched(control, Some(helper), directory.as_ref(), keeper_in_reach), directory))
    }

    /// Starts tests in an interpreter of their own.
    pub fn cold_tests(&self, start: &Start<'_>, python: &Python, tests: &[String], nonce: &str) -> Result<Started, String> {
        let mut argv = python_command(python);
        argv.push("once".to_string());
        let request = json!({"tests": tests, "nonce": nonce}).to_string();
        self.cold(start, &argv, &BTreeMap::new(), Some(request))
    }

    /// Starts tests in a fork of the warm interpreter, which is started, or started again, when there is none.
    pub fn warm(&self, start: &Start<'_>, python: &Python, tests: &[String], nonce: &str) -> Result<Started, String> {
        let host_id = self.host_ids.as_ref().map(|ids| ids.first + 1 + start.slot);
        let directory = self.directory(start.tier, host_id)?;
        let ruleset = self.ruleset(directory.as_ref())?;
        let pipes = Pipes::new(true).map_err(|error| format!("pipes for a run: {error}"))?;
        let (control, theirs) = stream_pair().map_err(|error| format!("socket for a run: {error}"))?;
        let mut descriptors = vec![theirs.as_fd()];
        descriptors.extend(pipes.theirs(ruleset.as_ref()));
        // In the interpreter's own user namespace the block of ids starts at 0, which is its own.
        let id = if host_id.is_some() { start.slot + 1 } else { 0 };
        let mut server = self.server(start.tier, python)?;
        if wire::send_descriptors(&server.requests, id.to_string().as_bytes(), &descriptors).is_err() {
            // It has died since it was started. Runs that were in it have ended with it; ours was not yet: a new one takes it.
            self.forget(&server);
            server = self.server(start.tier, python)?;
            wire::send_descriptors(&server.requests, id.to_string().as_bytes(), &descriptors)
                .map_err(|error| format!("warm interpreter: {error}"))?;
        }
        drop(theirs);
        let limits = start.limits;
        let cpu = limits.cpu_seconds.ceil() as u64 + 1;
        let request = json!({
            "files": start.files,
            "tests": tests,
            "nonce": nonce,
            "host_id": host_id,
            "directory": directory.as_ref().map_or(Path::new(BOX), WorkDirectory::path),
            "processes": limits.processes,
            "workspace_bytes": limits.workspace_bytes,
            "workspace_entries": limits.workspace_entries(),
            "rlimits": [
                ("CORE", (1, 1)),
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
        let keeper_in_reach = start.tier == Tier::B && self.keeper_in_reach;
        Ok((pipes.launched(control, None, directory.as_ref(), keeper_in_reach), directory))
    }

    fn directory(&self, tier: Tier, host_id: Option<u32>) -> Result<Option<WorkDirectory>, String> {
        match tier {
            Tier::A => Ok(None),
            Tier::B => WorkDirectory::create(host_id).map(Some).map_err(|error| format!("directory for a run: {error}")),
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

    /// Starts our own program as a helper and gives it its job. It has a process group of its own: Ctrl-C at a terminal goes to
    /// the whole foreground group, and runs should end when we end them. If we die, the helper sees its socket close.
    fn start_helper(&self, job: &Job, descriptors: &[BorrowedFd<'_>]) -> io::Result<(Child, OwnedFd)> {
        let (control, theirs) = stream_pair()?;
        let mut helper = Command::new(&self.helper)
            .arg(HELPER_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.helper.display())))?;
        if let Err(error) = wire::send(&control, job, descriptors) {
            let _ = helper.kill();
            let _ = helper.wait();
            return Err(error);
        }
        Ok((helper, control))
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
        let job = Job {
            tier,
            role: Role::Serve,
            argv,
            environment: self.environment(None),
            files: Workspace::new(),
            stdin: None,
            limits: Limits::default(),
            process_rlimit: 0,
            host_id: self.host_ids.as_ref().map(|ids| ids.first),
            host_ids: slots::BLOCK,
            root: self.root.clone(),
            directory: None,
            evidence: false,
            landlock: false,
        };
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(failed)?;
        let (mut helper, control) = self.start_helper(&job, &[null.as_fd(), null.as_fd(), theirs.as_fd()]).map_err(failed)?;
        drop(theirs);
        if readable(&requests, Duration::from_secs(20)) {
            let mut word = [0; 16];
            if matches!(rustix::net::recv(&requests, &mut word[..], RecvFlags::empty()), Ok((5, _)) if word.starts_with(b"ready"))
            {
                return Ok(Server { requests, helper: Mutex::new(helper) });
            }
        }
        let reason = match wire::receive::<Report>(&control) {
            Ok(Some((Report::SetUp { step, errno }, _))) => format!("{step}: {}", io::Error::from_raw_os_error(errno)),
            _ => "it did not get ready".to_string(),
        };
        let _ = helper.kill();
        let _ = helper.wait();
        Err(format!("warm interpreter: {reason}"))
    }
}

/// The warm interpreter. It ends when its socket closes.
struct Server {
    requests: OwnedFd,
    helper: Mutex<Child>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // In tier A the keeper of the namespaces dies with the helper, and all forks with it.
        let helper = self.helper.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = helper.kill();
        let _ = helper.wait();
    }
}

/// The three pipes of a run: our ends to read, its ends to write.
struct Pipes {
    stdout: (OwnedFd, OwnedFd),
    stderr: (OwnedFd, OwnedFd),
    evidence: Option<(OwnedFd, OwnedFd)>,
}

impl Pipes {
    fn new(evidence: bool) -> io::Result<Pipes> {
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
        Ok(Pipes { stdout: pipe()?, stderr: pipe()?, evidence: if evidence { Some(pipe()?) } else { None } })
    }

    fn theirs<'a>(&'a self, ruleset: Option<&'a OwnedFd>) -> Vec<BorrowedFd<'a>> {
        let evidence = self.evidence.as_ref().map(|(_, write)| write);
        [Some(&self.stdout.1), Some(&self.stderr.1), evidence, ruleset].into_iter().flatten().map(AsFd::as_fd).collect()
    }

    /// Keeps our ends and closes the others.
    fn launched(
        self,
        control: OwnedFd,
        helper: Option<Child>,
        directory: Option<&WorkDirectory>,
        keeper_in_reach: bool,
    ) -> Launched {
        Launched {
            control,
            stdout: self.stdout.0,
            stderr: self.stderr.0,
            evidence: self.evidence.map(|(read, _)| read),
            helper,
            directory: directory.map(|directory| directory.path().to_path_buf()),
            keeper_in_reach,
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
