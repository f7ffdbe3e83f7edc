# item 32: takes memory, CPU time, priority and cores from processes of the machine
# verdict: exited 0; has done
# control: lowers-its-limits.py
import ctypes
import os
import resource

libc = ctypes.CDLL(None, use_errno=True)
ioprio_set = {"x86_64": 251, "aarch64": 30}[os.uname().machine]


def attempt(name, action):
    try:
        result = action()
    except (OSError, ProcessLookupError) as error:
        print(name, "denied", os.strerror(error.errno))
    else:
        print(name, "denied" if result == -1 else "REACHED")


other = int(os.environ["HOST_PROCESS"])
attempt("memory", lambda: resource.prlimit(other, resource.RLIMIT_AS, (0, 0)))
attempt("CPU time", lambda: resource.prlimit(other, resource.RLIMIT_CPU, (0, 0)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, other, 19))
attempt("cores", lambda: os.sched_setaffinity(other, {min(os.sched_getaffinity(0))}))
attempt("scheduler", lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0)))
attempt("disk", lambda: libc.syscall(ioprio_set, 1, other, 3 << 13))
print("done")
