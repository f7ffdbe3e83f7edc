# item 10: file after file, each of a size that is allowed
# verdict: disk_limit
# control: temporary-files.py
import time

for number in range(1000):
    with open(f"file-{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
    time.sleep(0.005)
print("REACHED")
