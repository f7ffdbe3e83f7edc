# item 54: a chain of 20,000 directories
# verdict: exited 0; has 20000 deep
# control: temporary-files.py; limits: workspace_bytes=134217728
import os

for _ in range(20000):
    os.mkdir("d")
    os.chdir("d")
print(20000, "deep")
