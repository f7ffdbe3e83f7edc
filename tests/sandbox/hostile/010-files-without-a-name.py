# item 10: fills the disk with files that it keeps open and has removed, so that no directory shows them
# verdict: disk_limit or exited 1
# control: temporary-files.py
import os
import time

kept = []
for number in range(1000):
    file = open("hidden", "wb", buffering=0)
    os.unlink("hidden")
    file.write(b"x" * (1 << 20))
    kept.append(file)
    time.sleep(0.005)
print("REACHED")
