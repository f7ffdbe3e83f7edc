# item 31: takes memory, descriptors and CPU time from the process that keeps the run
# verdict: exited 0; has done
# control: lowers-its-limits.py
import os
import resource
import time


def attempt(name, action):
    try:
        action()
    except OSError as error:
        print(name, "denied", os.strerror(error.errno))
    else:
        print(name, "REACHED")


keeper = os.getppid()
for name in ["AS", "DATA", "CPU", "NOFILE", "STACK", "FSIZE", "NPROC"]:
    attempt(name, lambda: resource.prlimit(keeper, getattr(resource, "RLIMIT_" + name), (0, 0)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, keeper, 19))
attempt("cores", lambda: os.sched_setaffinity(keeper, {min(os.sched_getaffinity(0))}))
attempt("scheduler", lambda: os.sched_setscheduler(keeper, os.SCHED_IDLE, os.sched_param(0)))
for _ in range(8):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    os.wait()
time.sleep(0.1)
print("done")
