# item 33: ends in the moment in which its time is up; whatever the verdict, it is one
# verdict: exited 0 or wall_timeout
# control: asyncio-subprocesses.py; limits: wall_seconds=0.2; runs: 12
import time

time.sleep(0.18)
