# item 4: a pool as large as the cores of a large machine
# verdict: process_limit
# control: pool-of-the-visible-cores.py; limits: memory_bytes=268435456
import os
import time

for _ in range(192):
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
time.sleep(300)
