# item 16: more descriptors, processes, memory, priority; locked memory
# verdict: exited 0; has done
# control: lowers-its-limits.py
import ctypes
import os
import resource

libc = ctypes.CDLL(None, use_errno=True)


def attempt(name, action):
    try:
        result = action()
    except (OSError, ValueError) as error:
        print(name, "denied", error)
    else:
        print(name, "denied" if result == -1 else "REACHED")


for name in ["NOFILE", "NPROC", "DATA", "FSIZE", "CPU", "MEMLOCK", "CORE", "MSGQUEUE", "SIGPENDING", "RTPRIO"]:
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    assert hard != resource.RLIM_INFINITY, name
    attempt(name, lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
attempt("nice", lambda: os.nice(-5))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
ioprio_set = {"x86_64": 251, "aarch64": 30}[os.uname().machine]
attempt("real-time disk", lambda: libc.syscall(ioprio_set, 1, 0, 1 << 13))
attempt("mlock", lambda: libc.mlockall(1))
print("done")
