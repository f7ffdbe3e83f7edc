# item 54: a chain of 20,000 directories
# verdict: exited 0; has 20000 deep
# tier B: disk_limit; because what lies below a path that is too long cannot be counted
# control: temporary-files.py; limits: workspace_bytes=134217728
import os

for _ in range(20000):
    os.mkdir("d")
    os.chdir("d")
print(20000, "deep")
