//! Tier A's own root: a small read-only tree of what programs need, put together from bind mounts.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use super::wire::{SetUpError, Size, Step};
use crate::sandbox::Limits;

/// The writable tree inside: working directory, temporary files and shared memory, one tmpfs with one cap.
pub const BOX: &str = "/box";
pub const WORK: &str = "/box/work";
/// The layers of an overlay, hidden from programs once it is mounted.
const LAYERS: &str = "/box/layers";
/// An empty directory to hide things with.
const NOTHING: &str = "/.nothing";
/// The user id that programs see as their own.
pub const INSIDE_ID: u32 = 1000;

/// What the root holds, found out once on the machine. All paths are absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Builds the root and enters it. The caller owns a fresh mount namespace; with `proc`, also a fresh PID namespace.
    /// Returns whether a fresh /proc could be mounted; the kernel refuses one where the outer /proc is partly hidden.
    pub fn build(&self, proc: bool) -> Result<bool, SetUpError> {
        let base = base_directory()?;
        let open = |place: &PathBuf| {
            rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).step(format!("open {}", place.display()))
        };
        let sources = self.binds.iter().map(open).collect::<Result<Vec<OwnedFd>, SetUpError>>()?;
        let safe = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", base, safe, "size=4m,nr_inodes=4096,mode=0755").step("mount tmpfs for the root")?;
        let at = |place: &Path| base.join(place.strip_prefix("/").unwrap_or(place));
        for directory in ["/proc", "/dev", "/etc", BOX, NOTHING] {
            fs::create_dir_all(at(Path::new(directory))).step(format!("create {directory}"))?;
        }
        // Opened before the root is mounted, which hides one of the machine's directories.
        for (place, source) in self.binds.iter().zip(&sources) {
            bind(source, &at(place)).step(format!("bind {}", place.display()))?;
        }
        for (place, target) in &self.links {
            std::os::unix::fs::symlink(target, at(place)).step(format!("link {}", place.display()))?;
        }
        for (place, contents) in &self.files {
            fs::write(at(place), contents).step(format!("write {}", place.display()))?;
        }
        let own_proc = proc && mount_proc(at(Path::new("/proc"))).is_ok();
        rustix::process::chdir(base).step("chdir to the root")?;
        rustix::process::pivot_root(".", ".").step("pivot_root")?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).step("unmount the old root")?;
        rustix::process::chdir("/").step("chdir to /")?;
        restrict_mount(CWD, "/", 0, MountAttrFlags::MOUNT_ATTR_RDONLY, None).step("make the root read-only (mount_setattr)")?;
        Ok(own_proc)
    }
}

/// Binds a file or directory tree, then takes the right to write and to gain privileges from it.
fn bind(source: &OwnedFd, target: &Path) -> io::Result<()> {
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
    restrict_mount(CWD, target, AT_RECURSIVE, MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOSUID, None)
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
/// Returns the working directory.
pub fn mount_box(limits: &Limits) -> Result<OwnedFd, SetUpError> {
    let options = format!("size={},nr_inodes={},mode=0700", limits.workspace_bytes, limits.workspace_entries());
    mount("tmpfs", BOX.as_ref(), MountFlags::NOSUID | MountFlags::NODEV, &options).step("mount tmpfs for the workspace")?;
    for directory in ["work", "tmp", "shm"] {
        fs::create_dir(Path::new(BOX).join(directory)).step(format!("create {directory}"))?;
    }
    open_directory(WORK)
}

/// Room in the box for a copy of a tree beside what the limits allow.
pub fn enlarge_box(limits: &Limits, size: Size) -> Result<(), SetUpError> {
    let bytes = limits.workspace_bytes.saturating_add(size.bytes);
    let options = format!("size={bytes},nr_inodes={}", limits.workspace_entries().saturating_add(size.entries));
    let options = std::ffi::CString::new(options).map_err(io::Error::from).step("options of the workspace")?;
    rustix::mount::mount_remount(BOX, MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())
        .step("enlarge the tmpfs for the workspace")
}

/// Puts a tree below the working directory of a box that is mounted: what a run changes lies in the box, and counts against
/// its cap. Returns the directory of the changes, which no program can reach.
pub fn mount_overlay(tree: &OwnedFd) -> Result<OwnedFd, SetUpError> {
    let layer = |name: &str| format!("{LAYERS}/{name}");
    fs::create_dir(LAYERS).step("create the layers")?;
    for name in ["lower", "upper", "scratch"] {
        fs::create_dir(layer(name)).step(format!("create {name}"))?;
    }
    rustix::mount::move_mount(tree, "", CWD, layer("lower"), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .step("place the tree (move_mount)")?;
    // Marks of the overlay are kept in attributes that need no rights over the machine (userxattr, Linux 5.11).
    let options = format!("lowerdir={},upperdir={},workdir={},userxattr", layer("lower"), layer("upper"), layer("scratch"));
    mount("overlay", WORK.as_ref(), MountFlags::NOSUID | MountFlags::NODEV, &options).step("mount an overlay of the tree")?;
    let upper = open_directory(&layer("upper"))?;
    rustix::mount::mount_bind(NOTHING, LAYERS).step("hide the layers")?;
    Ok(upper)
}

fn open_directory(place: &str) -> Result<OwnedFd, SetUpError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(place, flags, Mode::empty()).step(format!("open {place}"))
}

/// Mounts the /proc of the caller's PID namespace.
pub fn mount_proc(place: impl AsRef<Path>) -> io::Result<()> {
    mount("proc", place.as_ref(), MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, "")
}

fn mount(kind: &str, place: &Path, flags: MountFlags, options: &str) -> io::Result<()> {
    let options = std::ffi::CString::new(options)?;
    rustix::mount::mount(kind, place, kind, flags, options.as_c_str())?;
    Ok(())
}

/// Flags of mount_setattr(2): everything below too; the descriptor itself, with an empty path.
const AT_RECURSIVE: u32 = 0x8000;
pub const EMPTY_PATH: u32 = 0x1000;

/// Adds attributes to a mount, and the id map of a user namespace. Unlike a remount this keeps attributes that a user namespace
/// may not clear. Linux 5.12.
pub fn restrict_mount(
    directory: impl AsFd,
    place: impl AsRef<Path>,
    flags: u32,
    attributes: MountAttrFlags,
    ids: Option<&OwnedFd>,
) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let place = std::ffi::CString::new(place.as_ref().as_os_str().as_encoded_bytes())?;
    let user_namespace = ids.map_or(0, |ids| ids.as_raw_fd() as u64);
    let attr = MountAttr { set: attributes.bits().into(), clear: 0, propagation: 0, user_namespace };
    let directory = directory.as_fd().as_raw_fd();
    // SAFETY: the kernel reads a NUL-terminated path and a `struct mount_attr` of the given size, both alive here.
    let result = unsafe {
        libc::syscall(libc::SYS_mount_setattr, directory, place.as_ptr(), flags, &raw const attr, size_of::<MountAttr>())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
