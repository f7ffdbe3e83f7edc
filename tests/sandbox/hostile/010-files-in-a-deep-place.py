# item 10: fills the disk below directories whose path is longer than a path may be
# verdict: disk_limit
# control: temporary-files.py
import os
import time

for _ in range(24):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
for number in range(1000):
    with open(f"file-{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
    time.sleep(0.005)
print("REACHED")
