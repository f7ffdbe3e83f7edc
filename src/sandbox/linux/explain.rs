//! Words for what the kernel refuses: which mechanism, what it answered, and how to allow it.

use std::io;

/// A step of a set-up that failed, in one line: the step, the kernel's answer by name and in words, and the remedy if one is known.
pub fn failed_step(step: &str, errno: i32) -> String {
    let words = io::Error::from_raw_os_error(errno).to_string();
    let words = words.split(" (os error").next().unwrap_or_default();
    match remedy(step, errno) {
        Some(remedy) => format!("{step}: {} ({words}); {remedy}", name(errno)),
        None => format!("{step}: {} ({words})", name(errno)),
    }
}

/// How to allow what was refused. The first fitting row counts; `None` for the answer fits any.
const REMEDIES: &[(&str, Option<i32>, &str)] = &[
    (
        "namespaces (clone)",
        Some(libc::ENOSPC),
        "raise the sysctls user.max_user_namespaces, user.max_pid_namespaces and user.max_mnt_namespaces",
    ),
    (
        "namespaces (unshare)",
        Some(libc::ENOSPC),
        "raise the sysctls user.max_net_namespaces, user.max_mnt_namespaces and user.max_ipc_namespaces",
    ),
    ("namespaces (clone)", Some(libc::EUSERS), "user namespaces are nested too deep here: start learner further out"),
    (
        "(clone)",
        Some(libc::EPERM),
        "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1; in a container, a seccomp profile that permits clone with \
         namespaces, or CAP_SYS_ADMIN (docker run --security-opt seccomp=unconfined, --cap-add SYS_ADMIN)",
    ),
    ("(clone)", Some(libc::EINVAL), "the kernel was built without one of these namespaces"),
    ("(clone)", Some(libc::EAGAIN), "too many processes: raise ulimit -u or the container's pids limit"),
    (
        "(unshare)",
        Some(libc::EPERM),
        "namespaces without rights inside are what AppArmor leaves of them: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an \
         AppArmor profile for learner with the rule userns",
    ),
    (
        "write uid_map",
        Some(libc::EPERM),
        "AppArmor or a container restricts user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or give root in \
         the container CAP_SETUID and CAP_SETGID",
    ),
    ("write uid_map", Some(libc::EINVAL), "the ids do not exist in this user namespace: see /proc/self/uid_map"),
    (
        "write setgroups",
        Some(libc::EACCES),
        "AppArmor restricts user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        "mount a fresh /proc",
        Some(libc::EPERM),
        "mount too revealing: parts of this container's /proc are masked; unmask them (docker run --security-opt systempaths=unconfined, \
         procMount: Unmasked on Kubernetes)",
    ),
    (
        "id-mapped mount",
        Some(libc::EINVAL),
        "the tree's file system has no id-mapped mounts: put it on ext4, xfs, btrfs or tmpfs, or set sandbox.copy_trees = true to give \
         each run a copy",
    ),
    ("id-mapped mount", None, "set sandbox.copy_trees = true to give each run a copy of the tree"),
    ("(open_tree)", Some(libc::ENOENT), "the tree was removed, or lies outside of what learner's root directory shows"),
    ("(open_tree)", None, "set sandbox.copy_trees = true to give each run a copy of the tree"),
    (
        "overlay",
        Some(libc::ENODEV),
        "load the module overlay, or set sandbox.copy_trees = true to give each run a copy of the tree",
    ),
    (
        "overlay",
        None,
        "Linux 5.11 or later mounts one in a user namespace; set sandbox.copy_trees = true to give each run a copy of the tree",
    ),
    (
        "mount",
        Some(libc::EPERM),
        "mounting in a user namespace is refused: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a container's seccomp and \
         AppArmor profiles that permit mount (docker run --security-opt apparmor=unconfined --security-opt seccomp=unconfined)",
    ),
    (
        "mount",
        Some(libc::EACCES),
        "a security module refuses to mount: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or docker run --security-opt \
         apparmor=unconfined",
    ),
    ("(mount_setattr)", Some(libc::ENOSYS), "Linux 5.12 or later is needed"),
    (
        "pivot_root",
        Some(libc::EINVAL),
        "learner's root is not a mount of its own (an initramfs or a chroot): start it in a container",
    ),
    ("seccomp", Some(libc::EINVAL), "the kernel was built without CONFIG_SECCOMP_FILTER"),
    ("landlock", Some(libc::ENOSYS), "the kernel has no Landlock (5.13 or later, CONFIG_SECURITY_LANDLOCK)"),
    ("landlock", Some(libc::EOPNOTSUPP), "Landlock is built but not enabled: add landlock to the boot parameter lsm="),
    ("write ", Some(libc::ENOSPC), "raise limits.workspace_bytes: the files of the request do not fit"),
];

fn remedy(step: &str, errno: i32) -> Option<&'static str> {
    let fits = |row: &&(&str, Option<i32>, &str)| step.contains(row.0) && row.1.is_none_or(|expected| expected == errno);
    REMEDIES.iter().find(fits).map(|row| row.2)
}

/// The answer as manual pages call it.
fn name(errno: i32) -> String {
    let known = [
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::ENOMEM, "ENOMEM"),
        (libc::EACCES, "EACCES"),
        (libc::EBUSY, "EBUSY"),
        (libc::ENODEV, "ENODEV"),
        (libc::ENOTDIR, "ENOTDIR"),
        (libc::EINVAL, "EINVAL"),
        (libc::EMFILE, "EMFILE"),
        (libc::ENFILE, "ENFILE"),
        (libc::ENOSPC, "ENOSPC"),
        (libc::EROFS, "EROFS"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::ELOOP, "ELOOP"),
        (libc::EPROTO, "EPROTO"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::EUSERS, "EUSERS"),
        (libc::EDQUOT, "EDQUOT"),
    ];
    known.iter().find(|(number, _)| *number == errno).map_or(format!("errno {errno}"), |(_, name)| name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of a step that fails here and now, as they would come from a helper.
    fn said(step: &str, errno: i32) -> String {
        failed_step(step, errno)
    }

    #[test]
    fn each_line_names_mechanism_answer_and_remedy() {
        let cases = [
            (
                "create user, mount, PID and UTS namespaces (clone)",
                libc::EPERM,
                "EPERM (Operation not permitted)",
                "kernel.unprivileged_userns_clone=1",
            ),
            (
                "create user and PID namespaces (clone)",
                libc::ENOSPC,
                "ENOSPC (No space left on device)",
                "user.max_user_namespaces",
            ),
            (
                "create mount, IPC and network namespaces (unshare)",
                libc::EPERM,
                "EPERM",
                "kernel.apparmor_restrict_unprivileged_userns=0",
            ),
            ("write uid_map (0 1000 1)", libc::EPERM, "EPERM", "CAP_SETUID"),
            ("mount tmpfs for the root", libc::EACCES, "EACCES (Permission denied)", "apparmor=unconfined"),
            ("mount tmpfs for the workspace", libc::EPERM, "EPERM", "seccomp=unconfined"),
            ("mount a fresh /proc", libc::EPERM, "EPERM", "mount too revealing"),
            ("mount an overlay of the tree", libc::ENODEV, "ENODEV (No such device)", "module overlay"),
            ("mount an overlay of the tree", libc::EPERM, "EPERM", "sandbox.copy_trees"),
            ("give the run its ids in the tree /data (mount_setattr, id-mapped mount)", libc::EINVAL, "EINVAL", "ext4"),
            ("make the root read-only (mount_setattr)", libc::ENOSYS, "ENOSYS", "5.12"),
            ("landlock_restrict_self", libc::EOPNOTSUPP, "EOPNOTSUPP", "lsm="),
            ("seccomp filter", libc::EINVAL, "EINVAL", "CONFIG_SECCOMP_FILTER"),
        ];
        for (step, errno, answer, how) in cases {
            let line = said(step, errno);
            assert!(line.starts_with(&format!("{step}: {answer}")) && line.contains(how) && !line.contains('\n'), "{line}");
        }
        assert_eq!(said("fork", libc::EAGAIN), "fork: EAGAIN (Resource temporarily unavailable)");
        assert_eq!(said("report", 99), "report: errno 99 (Cannot assign requested address)");
    }
}
