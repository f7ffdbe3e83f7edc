# item 2: forks processes of 4 MiB each as fast as it can: a thousand may be there before they have the memory that is theirs
# verdict: memory_limit or process_limit
# control: processes-below-the-limit.py; limits: processes=1000
import os
import time

while True:
    if os.fork() == 0:
        kept = bytearray(b"x" * (4 << 20))
        time.sleep(300)
