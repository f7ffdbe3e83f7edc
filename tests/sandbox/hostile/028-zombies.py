# item 28: children that have ended and are never waited for
# verdict: process_limit
# control: processes-below-the-limit.py
import os
import time

for _ in range(200):
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        pass
time.sleep(300)
