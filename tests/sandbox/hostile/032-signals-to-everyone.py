# item 32: the last signal to every number that a process of the machine may have, and to all at once
# verdict: exited 0; has alone
# control: ends-on-a-signal.py
import os
import signal

own = {os.getpid(), 0}
for pid in [int(os.environ["HOST_PROCESS"]), *range(2, 33000)]:
    if pid not in own:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
print("alone")
