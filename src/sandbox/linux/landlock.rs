//! Tier B's view of files: the machine's own tree, in which Landlock lets a run read what programs need and write only to
//! its own directory.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use landlock::{ABI, Access, AccessFs, AccessNet, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, Scope, path_beneath_rules};

/// Beyond the root plan's directories: what the C library looks up, and the devices.
const READABLE: [&str; 6] =
    ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/localtime"];
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// The youngest interface used. Older kernels hold less, see [`supported`]; a kernel without Landlock makes no ruleset.
const NEWEST: ABI = ABI::V6;

/// Landlock's interface version on this kernel; 0 without Landlock. 6 and later keep signals and abstract sockets in.
pub fn supported() -> i64 {
    const VERSION: libc::c_ulong = 1;
    // SAFETY: with this flag the kernel looks at no pointer and returns a number.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) }.max(0)
}

/// A ruleset for a run whose only writable places are `work` and `tmp` in `directory`. Not the directory itself: a program that
/// could replace `work` by a link would choose where the next command of its session starts.
///
/// # Errors
/// One line that says what the kernel lacks.
pub fn ruleset(readable: &[PathBuf], directory: &Path) -> Result<OwnedFd, String> {
    let all = AccessFs::from_all(NEWEST);
    let read = AccessFs::from_read(NEWEST);
    let device: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::WriteFile;
    let build = || {
        let created = Ruleset::default()
            .handle_access(all)?
            .handle_access(AccessNet::from_all(NEWEST))?
            .scope(Scope::from_all(NEWEST))?
            .create()?
            .add_rules(path_beneath_rules(readable, read))?
            .add_rules(path_beneath_rules(READABLE, read))?
            .add_rules(path_beneath_rules(DEVICES, device))?
            .add_rules(path_beneath_rules(["work", "tmp"].map(|name| directory.join(name)), all))?;
        Ok(created)
    };
    let created = build().map_err(|error: landlock::RulesetError| format!("Landlock: {error}"))?;
    let descriptor: Option<OwnedFd> = created.into();
    descriptor.ok_or_else(|| "Landlock is not supported or not enabled by this kernel (5.13 or later, lsm=landlock)".to_string())
}
