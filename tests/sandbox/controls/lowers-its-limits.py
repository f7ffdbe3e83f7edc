# item 16: lowers limits and priority of its own
# verdict: exited 0; has lowered
import os
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)
os.nice(3)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print("lowered", os.getpriority(os.PRIO_PROCESS, 0))
