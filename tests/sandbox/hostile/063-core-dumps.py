# item 63: crashes, where the machine may have a program that is started for each crash
# verdict: signaled 11; has limit (1, 1)
# control: ends-on-a-signal.py
import os
import resource
import signal

print("limit", resource.getrlimit(resource.RLIMIT_CORE), flush=True)
os.kill(os.getpid(), signal.SIGSEGV)
