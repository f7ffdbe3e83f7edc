//! Tier A's own root: a small read-only tree of what programs need, put together from bind mounts.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use super::wire::{SetUpError, Step};
use crate::sandbox::Limits;

/// The writable tree inside: working directory, temporary files and shared memory, one tmpfs with one cap.
pub const BOX: &str = "/box";
pub const WORK: &str = "/box/work";
/// The user id that programs see as their own.
pub const INSIDE_ID: u32 = 1000;

/// What the root holds, found out once on the machine. All paths are absolute.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RootPlan {
    /// Mounted read-only at the same place.
    pub binds: Vec<PathBuf>,
    /// `(place, target)` of symbolic links.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// `(place, contents)` of small files.
    pub files: Vec<(PathBuf, String)>,
}

/// Directories with programs and libraries; where `/bin` and the like are links into `/usr` they stay links.
const SYSTEM: [&str; 10] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/etc/alternatives"];
const SYSTEM_FILES: [&str; 2] = ["/etc/ld.so.cache", "/etc/localtime"];
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

impl RootPlan {
    /// Looks at the machine: system directories and files, and the devices.
    pub fn survey() -> RootPlan {
        let mut plan = RootPlan::default();
        for place in SYSTEM.iter().chain(&SYSTEM_FILES).map(Path::new) {
            match fs::symlink_metadata(place) {
                Ok(found) if found.is_symlink() && place.parent() == Some(Path::new("/")) => {
                    if let Ok(target) = fs::read_link(place) {
                        plan.links.push((place.to_path_buf(), target));
                    }
                }
                Ok(_) => plan.binds.push(place.to_path_buf()),
                Err(_) => {}
            }
        }
        plan.binds.extend(DEVICES.iter().map(PathBuf::from));
        plan.links.push(("/tmp".into(), "box/tmp".into()));
        plan.links.push(("/dev/shm".into(), "../box/shm".into()));
        plan.links.push(("/dev/fd".into(), "/proc/self/fd".into()));
        plan.links.push(("/dev/ptmx".into(), "pts/ptmx".into()));
        for (name, number) in [("stdin", 0), ("stdout", 1), ("stderr", 2)] {
            plan.links.push((format!("/dev/{name}").into(), format!("/proc/self/fd/{number}").into()));
        }
        let users = format!(
            "root:x:0:0:root:/:/bin/sh\nsandbox:x:{INSIDE_ID}:{INSIDE_ID}:sandbox:{WORK}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
        );
        plan.files.push(("/etc/passwd".into(), users));
        plan.files.push(("/etc/group".into(), format!("root:x:0:\nsandbox:x:{INSIDE_ID}:\nnogroup:x:65534:\n")));
        plan.files.push(("/etc/hosts".into(), "127.0.0.1 localhost sandbox\n".into()));
        plan.files.push(("/etc/nsswitch.conf".into(), "passwd: files\ngroup: files\nhosts: files\n".into()));
        plan
    }

    /// With the directory where an interpreter lives, unless it is there already.
    pub fn with(mut self, prefix: &Path) -> RootPlan {
        if prefix != Path::new("/") && !self.binds.iter().any(|bound| prefix.starts_with(bound)) {
            self.binds.push(prefix.to_path_buf());
        }
        self
    }

    /// Descriptors of everything to bind, opened before the process changes its user id: an interpreter may live in a
    /// directory that only its owner may walk through.
    pub fn open(&self) -> Result<Vec<OwnedFd>, SetUpError> {
        let open = |place: &PathBuf| {
            rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).step(format!("open {}", place.display()))
        };
        self.binds.iter().map(open).collect()
    }

    /// Builds the root and enters it. The caller owns a fresh mount namespace and is process 1 of a fresh PID namespace.
    /// Returns whether a fresh /proc could be mounted; the kernel refuses one where the outer /proc is partly hidden.
    pub fn enter(&self, sources: &[OwnedFd], writable: Option<&Limits>) -> Result<bool, SetUpError> {
        let base = base_directory()?;
        let safe = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", base, safe, "size=4m,nr_inodes=4096,mode=0755").step("mount tmpfs for the root")?;
        let at = |place: &Path| base.join(place.strip_prefix("/").unwrap_or(place));
        for directory in ["/proc", "/dev/pts", "/etc", BOX] {
            fs::create_dir_all(at(Path::new(directory))).step(format!("create {directory}"))?;
        }
        for (place, source) in self.binds.iter().zip(sources) {
            self.bind(source, &at(place)).step(format!("bind {}", place.display()))?;
        }
        for (place, target) in &self.links {
            std::os::unix::fs::symlink(target, at(place)).step(format!("link {}", place.display()))?;
        }
        for (place, contents) in &self.files {
            fs::write(at(place), contents).step(format!("write {}", place.display()))?;
        }
        let own_proc = mount("proc", &at(Path::new("/proc")), safe | MountFlags::NOEXEC, "").is_ok();
        // Pseudo-terminals of the run's own, few of the machine's thousands. A kernel that has none refuses, and so does `openpty`
        // then.
        let terminals = "newinstance,ptmxmode=0666,mode=0620,max=64";
        let _ = mount("devpts", &at(Path::new("/dev/pts")), MountFlags::NOSUID | MountFlags::NOEXEC, terminals);
        if let Some(limits) = writable {
            mount_box(&at(Path::new(BOX)), limits)?;
        }
        rustix::process::chdir(base).step("chdir to the root")?;
        rustix::process::pivot_root(".", ".").step("pivot_root")?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).step("unmount the old root")?;
        rustix::process::chdir("/").step("chdir to /")?;
        restrict_mount("/", 0, MOUNT_ATTR_RDONLY).step("make the root read-only (mount_setattr)")?;
        Ok(own_proc)
    }

    /// Binds a file or directory tree, then takes the right to write and to gain privileges from it.
    fn bind(&self, source: &OwnedFd, target: &Path) -> io::Result<()> {
        let source_path = format!("/proc/self/fd/{}", source.as_raw_fd());
        let is_directory = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(source)?.st_mode).is_dir();
        if is_directory {
            fs::create_dir_all(target)?;
        } else {
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(target, "")?;
        }
        rustix::mount::mount_bind_recursive(source_path.as_str(), target)?;
        restrict_mount(target, AT_RECURSIVE, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    }
}

/// Where the new root is put together: any directory will do, it is hidden only in our own mount namespace.
fn base_directory() -> Result<&'static Path, SetUpError> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).step("make mounts private")?;
    ["/tmp", "/mnt", "/usr"]
        .map(Path::new)
        .into_iter()
        .find(|place| place.is_dir())
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
        .step("find a directory for the root (/tmp)")
}

/// The writable tree: one tmpfs, so that one cap bounds working directory, temporary files and shared memory together.
fn mount_box(place: &Path, limits: &Limits) -> Result<(), SetUpError> {
    let options = format!("size={},nr_inodes={},mode=0700", limits.workspace_bytes, limits.workspace_entries());
    mount("tmpfs", place, MountFlags::NOSUID | MountFlags::NODEV, &options).step("mount tmpfs for the workspace")?;
    for directory in ["work", "tmp", "shm"] {
        fs::create_dir(place.join(directory)).step(format!("create {directory}"))?;
    }
    Ok(())
}

fn mount(kind: &str, place: &Path, flags: MountFlags, options: &str) -> io::Result<()> {
    let options = std::ffi::CString::new(options)?;
    rustix::mount::mount(kind, place, kind, flags, options.as_c_str())?;
    Ok(())
}

const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;
const AT_RECURSIVE: u32 = 0x8000;

/// Adds attributes to a mount. Unlike a remount this keeps those that a user namespace may not clear. Linux 5.12.
fn restrict_mount(place: impl AsRef<Path>, flags: u32, attributes: u64) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let place = std::ffi::CString::new(place.as_ref().as_os_str().as_encoded_bytes())?;
    let attr = MountAttr { set: attributes, clear: 0, propagation: 0, user_namespace: 0 };
    // SAFETY: the kernel reads a NUL-terminated path and a `struct mount_attr` of the given size, both alive here.
    let result = unsafe {
        libc::syscall(libc::SYS_mount_setattr, CWD.as_raw_fd(), place.as_ptr(), flags, &raw const attr, size_of::<MountAttr>())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
