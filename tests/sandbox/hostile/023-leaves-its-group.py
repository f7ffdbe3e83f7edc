# item 23: children in groups and sessions of their own, without a death signal
# verdict: wall_timeout
# control: pool-of-the-visible-cores.py; limits: wall_seconds=0.7
import ctypes
import os
import time

PR_SET_PDEATHSIG = 1
for number in range(6):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
        os.setsid() if number % 2 else os.setpgid(0, 0)
        time.sleep(1000)
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
time.sleep(1000)
