# item 31: every signal to the process that keeps the run, and to process 1
# verdict: exited 0; has still kept
# control: ends-on-a-signal.py
import os
import signal
import time

keeper = os.getppid()
for pid in {keeper, 1}:
    for number in range(1, 65):
        try:
            os.kill(pid, number)
        except OSError:
            pass
        try:
            signal.pidfd_send_signal(os.pidfd_open(pid), number)
        except OSError:
            pass
time.sleep(0.2)
assert os.getppid() == keeper
print("still kept")
