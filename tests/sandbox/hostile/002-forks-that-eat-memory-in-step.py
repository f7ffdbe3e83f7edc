# item 2: forks processes of 4 MiB each, the next one when the last has its memory
# verdict: memory_limit
# control: processes-below-the-limit.py; limits: processes=1000
import os
import time

while True:
    here, there = os.pipe()
    if os.fork() == 0:
        kept = bytearray(b"x" * (4 << 20))
        os.write(there, b".")
        time.sleep(300)
    os.close(there)
    os.read(here, 1)
    os.close(here)
