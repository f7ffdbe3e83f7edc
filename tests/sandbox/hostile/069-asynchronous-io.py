# item 69: takes all events of asynchronous input and output that the machine has
# verdict: exited 0; has done
# control: asyncio-subprocesses.py
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
io_setup = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
place = ctypes.c_ulong(0)
print("io_setup", "denied" if libc.syscall(io_setup, 60000, ctypes.byref(place)) == -1 else "REACHED")
print("done")
