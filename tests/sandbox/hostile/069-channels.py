# item 69: kernel objects by which two runs could speak: keys, System V and POSIX queues, locks, watches
# verdict: exited 0; has done; lacks heard
# control: files-in-shared-memory.py; runs: 2
import ctypes
import fcntl
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
add_key, request_key, keyctl = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
perf_event_open, bpf, userfaultfd, fanotify = {"x86_64": (298, 321, 323, 300), "aarch64": (241, 280, 282, 262)}[os.uname().machine]


def attempt(name, answer):
    print(name, "denied" if answer == -1 else "REACHED")


attempt("add_key", libc.syscall(add_key, b"user", b"mark", b"x", 1, -4))
attempt("request_key", libc.syscall(request_key, b"user", b"mark", None, 0))
attempt("keyctl", libc.syscall(keyctl, 0, -5, 1))
attempt("shmget", libc.shmget(0x5EED, 4096, 0o1666))
attempt("msgget", libc.msgget(0x5EED, 0o1666))
attempt("perf", libc.syscall(perf_event_open, ctypes.create_string_buffer(struct.pack("II", 1, 128), 128), 0, -1, -1, 0))
attempt("bpf", libc.syscall(bpf, 0, ctypes.create_string_buffer(128), 128))
attempt("userfaultfd", libc.syscall(userfaultfd, 0))
attempt("fanotify", libc.syscall(fanotify, 0, 0))
attempt("semget", libc.semget(0x5EED, 1, 0o1666))
# Where a queue may be made it must be the run's own: none of another run is there.
queue = libc.mq_open(b"/mark", os.O_RDWR)
if queue != -1:
    print("heard by a queue")
libc.mq_open(b"/mark", os.O_RDWR | os.O_CREAT, 0o666, None)
for place in ["/etc/passwd", "/usr/bin/env", os.path.realpath("/bin/sh")]:
    with open(place) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("heard by a lock on", place)
print("done")
