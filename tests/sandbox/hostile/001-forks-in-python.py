# item 1: every process forks as often as it may and then waits
# verdict: process_limit
# control: processes-below-the-limit.py; limits: memory_bytes=268435456
import os
import time

while True:
    try:
        os.fork()
    except OSError:
        time.sleep(300)
