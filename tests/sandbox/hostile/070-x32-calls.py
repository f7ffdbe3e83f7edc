# item 70: a system call of the x32 kind, a second door to the same kernel
# verdict: signaled 31; lacks REACHED
# control: own-process.py
import ctypes
import os
import signal

if os.uname().machine == "x86_64":
    print("REACHED", ctypes.CDLL(None).syscall(0x40000000 | 39))
else:
    os.kill(os.getpid(), signal.SIGSYS)
