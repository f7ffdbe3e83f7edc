# item 2: forks processes of 4 MiB each where the limit on processes is far away
# verdict: memory_limit
# control: processes-below-the-limit.py; limits: processes=1000
import os
import time

while True:
    if os.fork() == 0:
        kept = bytearray(b"x" * (4 << 20))
        time.sleep(300)
