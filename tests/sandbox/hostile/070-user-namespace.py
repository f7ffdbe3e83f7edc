# item 70: a user namespace and what it opens: nftables, overlays, packets; old and rare system calls
# verdict: exited 0; has done
# control: own-process.py
import ctypes
import os
import socket

libc = ctypes.CDLL(None, use_errno=True)
attempts = {
    "unshare users": lambda: libc.unshare(0x10000000),
    "netfilter": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "overlay": lambda: libc.mount(b"overlay", b".", b"overlay", 0, b"lowerdir=/,upperdir=.,workdir=."),
    "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM),
    "vm86": lambda: libc.modify_ldt(0, None, 0) if hasattr(libc, "modify_ldt") else -1,
    "ports": lambda: libc.ioperm(0x80, 1, 1) if hasattr(libc, "ioperm") else -1,
    "handles": lambda: libc.name_to_handle_at(-100, b".", ctypes.create_string_buffer(64), ctypes.create_string_buffer(8), 0),
    "accounting": lambda: libc.acct(b"log"),
    "quota": lambda: libc.quotactl(0x800002, None, 0, None),
    "swap": lambda: libc.swapon(b"file", 0),
    "host name": lambda: libc.sethostname(b"x", 1),
    "log": lambda: libc.klogctl(3, ctypes.create_string_buffer(64), 64),
    "module": lambda: libc.syscall(313 if os.uname().machine == "x86_64" else 273, 0, b"", 0),
    "reboot": lambda: libc.reboot(0x89ABCDEF),
}
for name, attempt in attempts.items():
    try:
        print(name, "denied" if attempt() == -1 else "REACHED")
    except OSError as error:
        print(name, "denied", os.strerror(error.errno))
print("done")
