# item 30: chains of processes, each of which forks the next and ends: whoever is to be killed has already gone
# verdict: wall_timeout or process_limit
# control: pool-of-the-visible-cores.py; limits: wall_seconds=0.7, processes=2000, memory_bytes=1073741824
import os
import time

for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                if os.fork() > 0:
                    os._exit(0)
            except OSError:
                pass
time.sleep(1000)
