//! The machine around the sandbox: bait for hostile programs, and a look at it before and after that must be the same.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpListener, UdpSocket};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use learner::sandbox::Sandbox;

/// What a look at the machine finds. Only what this process and its runs could have made: others use the machine too.
#[derive(Debug, PartialEq)]
pub struct Host {
    /// Descendants of this process, orphans included, and whatever has a user id of the sandbox.
    processes: BTreeSet<String>,
    mounts: String,
    /// Our open descriptors and what they are.
    descriptors: Vec<String>,
    /// Entries of the directory for temporary files, which is this process's own.
    temporary: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    /// System V objects of the user ids of the sandbox.
    objects: BTreeSet<String>,
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Looks at the machine on behalf of one sandbox.
pub struct Watch {
    ids: Range<u32>,
    before: Host,
}

impl Watch {
    /// To be begun by a process that runs one test only, see `alone::process`.
    pub fn begin(sandbox: &Sandbox) -> Watch {
        Watch::over(ids(sandbox))
    }

    /// The same without the sandbox, which ends before.
    pub fn begin_without(sandbox: Sandbox) -> Watch {
        let ids = ids(&sandbox);
        drop(sandbox);
        Watch::over(ids)
    }

    fn over(ids: Range<u32>) -> Watch {
        // Processes that escape from a sandbox become children of ours, and are seen.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        // Processes of ours that kept the runs with which a sandbox starts may still be on their way out.
        let begin = Instant::now();
        let mut before = look(&ids);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let again = look(&ids);
            if again == before || begin.elapsed() > PATIENCE {
                return Watch { ids, before: again };
            }
            before = again;
        }
    }

    /// What differs from the look at the beginning; empty if nothing does. The processes of ours that kept a run end by
    /// themselves right after it, so what differs is looked at again until it does not, or for too long.
    pub fn changes(&self) -> Vec<String> {
        let begin = Instant::now();
        loop {
            let changes = self.changes_now();
            if changes.is_empty() || begin.elapsed() > PATIENCE {
                return changes;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn changes_now(&self) -> Vec<String> {
        let now = look(&self.ids);
        let mut changes = Vec::new();
        let mut compare = |what: &str, before: String, after: String| {
            if before != after {
                changes.push(format!("{what}: {before} became {after}"));
            }
        };
        // One that had ended before may have been reaped since.
        let mut before = self.before.processes.clone();
        before.retain(|process| !process.ends_with('Z') || now.processes.contains(process));
        compare("processes", format!("{before:?}"), format!("{:?}", now.processes));
        compare("mounts", self.before.mounts.clone(), now.mounts);
        compare("descriptors", format!("{:?}", self.before.descriptors), format!("{:?}", now.descriptors));
        compare("temporary files", format!("{:?}", self.before.temporary), format!("{:?}", now.temporary));
        compare("cgroups", format!("{:?}", self.before.cgroups), format!("{:?}", now.cgroups));
        compare("objects", format!("{:?}", self.before.objects), format!("{:?}", now.objects));
        changes
    }
}

/// User ids that a sandbox gives to its runs; none when it has no right to.
fn ids(sandbox: &Sandbox) -> Range<u32> {
    let first = sandbox.guarantees().iter().find_map(|(name, how)| {
        let first = how.rsplit_once("from ")?.1.split(' ').next()?.parse::<u32>().ok()?;
        (name == "user").then_some(first)
    });
    first.map_or(0..0, |first| first..first + 1023)
}

fn look(ids: &Range<u32>) -> Host {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?.display().to_string();
        // The descriptor of this very listing has another number each time.
        (!target.ends_with("/fd")).then(|| format!("{} {target}", entry.file_name().display()))
    });
    let mut descriptors: Vec<String> = descriptors.collect();
    descriptors.sort();
    let objects = ["shm", "sem", "msg"].iter().flat_map(|kind| {
        let table = read(&format!("/proc/sysvipc/{kind}"));
        let lines: Vec<String> = table.lines().skip(1).map(|line| format!("{kind} {line}")).collect();
        lines.into_iter().filter(|line| line.split_ascii_whitespace().any(|word| word.parse().is_ok_and(|id| ids.contains(&id))))
    });
    Host {
        processes: processes(ids),
        mounts: read("/proc/self/mountinfo"),
        descriptors,
        temporary: entries(&std::env::temp_dir()),
        cgroups: cgroups(),
        objects: objects.collect(),
    }
}

fn entries(directory: &Path) -> BTreeSet<String> {
    std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.file_name().display().to_string()).collect()
}

/// Process numbers, names and states: zombies too, since what is ours we must reap.
fn processes(ids: &Range<u32>) -> BTreeSet<String> {
    let stat = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (name, rest) = text.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace();
        let (state, parent) = (fields.next()?.to_string(), fields.next()?.parse::<u32>().ok()?);
        let owner = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
        Some((parent, owner, format!("{name}) {state}")))
    };
    let all: BTreeMap<u32, _> = numbers("/proc").into_iter().filter_map(|pid| Some((pid, stat(pid)?))).collect();
    let descends = |pid: u32| {
        let mut at = all.get(&pid).map(|(parent, ..)| *parent);
        while let Some(parent) = at.filter(|&parent| parent > 1) {
            if parent == std::process::id() {
                return true;
            }
            at = all.get(&parent).map(|(parent, ..)| *parent);
        }
        false
    };
    let ours = all.iter().filter(|(pid, (_, owner, _))| ids.contains(owner) || descends(**pid));
    // A sleeping process may be found in another state: only a zombie's counts.
    ours.map(|(_, (_, _, text))| text.trim_end_matches(|state: char| state.is_alphabetic() && state != 'Z').to_string()).collect()
}

fn numbers(directory: &str) -> Vec<u32> {
    let entries = std::fs::read_dir(directory).unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Control groups of this process, by its number in their names; and those inside this process's own.
fn cgroups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![(Path::new("/sys/fs/cgroup").to_path_buf(), 0)];
    while let Some((directory, depth)) = waiting.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            if depth < 5 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let path = entry.path();
                let text = path.display().to_string();
                if text.contains("learner") && text.contains(&std::process::id().to_string()) {
                    found.insert(text);
                }
                waiting.push((path, depth + 1));
            }
        }
    }
    found
}

/// Things of the machine that a hostile program would like to reach, and the environment in which it finds their names.
pub struct Bait {
    pub environment: BTreeMap<String, String>,
    process: Child,
    tcp: TcpListener,
    udp: UdpSocket,
    sockets: [UnixListener; 2],
    datagrams: UnixDatagram,
    directory: tempfile::TempDir,
}

const SECRET: &str = "secret of the machine";

impl Bait {
    pub fn lay() -> Bait {
        // Open to everyone by its mode bits: the sandbox, not the file's mode, must keep programs from it.
        let directory =
            tempfile::Builder::new().prefix("bait").permissions(std::fs::Permissions::from_mode(0o755)).tempdir().unwrap();
        let file = directory.path().join("secret");
        std::fs::write(&file, SECRET).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
        let (path, name) = (directory.path().join("socket"), format!("learner-bait-{}", std::process::id()));
        let listen = |address: SocketAddr| UnixListener::bind_addr(&address).unwrap();
        let sockets = [listen(SocketAddr::from_pathname(&path).unwrap()), listen(SocketAddr::from_abstract_name(&name).unwrap())];
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        let datagram_path = directory.path().join("datagrams");
        let datagrams = UnixDatagram::bind(&datagram_path).unwrap();
        std::fs::set_permissions(&datagram_path, std::fs::Permissions::from_mode(0o777)).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind(tcp.local_addr().unwrap()).unwrap();
        assert!(std::net::TcpStream::connect(tcp.local_addr().unwrap()).is_ok(), "reachable from outside the sandbox");
        tcp.accept().unwrap();
        let process = Command::new("sleep").arg("100000").spawn().unwrap();
        let environment = [
            ("HOST_PROCESS", process.id().to_string()),
            ("HOST_PORT", tcp.local_addr().unwrap().port().to_string()),
            ("HOST_FILE", file.display().to_string()),
            ("HOST_SOCKET", path.display().to_string()),
            ("HOST_DATAGRAM_SOCKET", datagram_path.display().to_string()),
            ("HOST_ABSTRACT_SOCKET", name),
        ];
        let environment = environment.map(|(name, value)| (name.to_string(), value)).into();
        Bait { environment, process, tcp, udp, sockets, datagrams, directory }
    }

    /// What has been done to the bait; empty if nothing has.
    pub fn taken(&mut self) -> Vec<String> {
        let mut taken = Vec::new();
        let mut unless = |holds: bool, what: &str| {
            if !holds {
                taken.push(format!("bait: {what}"));
            }
        };
        unless(matches!(self.process.try_wait(), Ok(None)), "the process of the machine has ended");
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.process.id())).unwrap_or_default();
        let own = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        unless(limits == own, "the limits of the process of the machine have changed");
        self.tcp.set_nonblocking(true).unwrap();
        unless(self.tcp.accept().is_err(), "somebody has connected by TCP");
        self.udp.set_nonblocking(true).unwrap();
        unless(self.udp.recv(&mut [0; 1]).is_err(), "somebody has sent by UDP");
        for socket in &self.sockets {
            socket.set_nonblocking(true).unwrap();
            unless(socket.accept().is_err(), "somebody has connected to a Unix socket");
        }
        self.datagrams.set_nonblocking(true).unwrap();
        unless(self.datagrams.recv(&mut [0; 1]).is_err(), "somebody has sent to a Unix socket");
        let file = self.directory.path().join("secret");
        let links = std::fs::metadata(&file).map_or(0, |found| found.nlink());
        unless(std::fs::read_to_string(&file).is_ok_and(|text| text == SECRET) && links == 1, "the file has changed");
        unless(entries(self.directory.path()).len() == 3, "its directory has changed");
        taken
    }
}

impl Drop for Bait {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
