# item 31: every signal to the process that keeps the run, by number and by handle
# verdict: exited 0; has still kept
# control: ends-on-a-signal.py
import os
import signal
import time

keeper = os.getppid()
for number in range(1, 65):
    try:
        os.kill(keeper, number)
    except OSError:
        pass
    try:
        signal.pidfd_send_signal(os.pidfd_open(keeper), number)
    except OSError:
        pass
time.sleep(0.2)
assert os.getppid() == keeper
print("still kept")
