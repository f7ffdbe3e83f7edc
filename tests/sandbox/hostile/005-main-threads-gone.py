# item 5: several processes that hold memory together, of whose main threads nothing is left to look at
# verdict: memory_limit
# control: half-of-the-memory.py
import ctypes
import os
import threading
import time

EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]


def hold():
    time.sleep(0.5)
    kept = bytearray(40 << 20)
    for place in range(0, len(kept), 4096):
        kept[place] = 1
    time.sleep(30)


for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall(EXIT, 0)  # of this thread alone
time.sleep(30)
