# item 57: mounts over its tree, changes its root, makes namespaces to do so in
# verdict: exited 0; has done
# control: temporary-files.py
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
BIND, NEWNS, NEWUSER, NEWPID, NEWNET = 0x1000, 0x20000, 0x10000000, 0x20000000, 0x40000000
machine = os.uname().machine
pivot_root, clone = {"x86_64": (155, 56), "aarch64": (41, 220)}[machine]


def attempt(name, result):
    print(name, "denied" if result < 0 else "REACHED")


os.mkdir("over")
attempt("mount tmpfs", libc.mount(b"none", b"over", b"tmpfs", 0, None))
attempt("bind", libc.mount(b"/", b"over", None, BIND, None))
attempt("remount", libc.mount(None, b"/", None, 0x20, None))
attempt("umount", libc.umount2(b"/proc", 2))
attempt("pivot_root", libc.syscall(pivot_root, b".", b"."))
attempt("chroot", libc.chroot(b"."))
attempt("open_tree", libc.syscall(428, -100, b"/", 1))
attempt("fsopen", libc.syscall(430, b"tmpfs", 0))
attempt("mount_setattr", libc.syscall(442, -100, b"/", 0, ctypes.create_string_buffer(32), 32))
for name, flag in {"mounts": NEWNS, "users": NEWUSER, "users and mounts": NEWUSER | NEWNS, "pids": NEWPID, "net": NEWNET}.items():
    attempt("unshare " + name, libc.unshare(flag))
    pid = libc.syscall(clone, flag | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    attempt("clone " + name, pid)
arguments = (ctypes.c_uint64 * 11)(NEWUSER, 0, 0, 0, 17)
pid = libc.syscall(435, arguments, 88)
if pid == 0:
    os._exit(0)
attempt("clone3", pid)
for name in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"]:
    try:
        attempt("setns " + name, libc.setns(os.open("/proc/self/ns/" + name, os.O_RDONLY), 0))
    except OSError:
        print("setns", name, "denied")
print("done")
