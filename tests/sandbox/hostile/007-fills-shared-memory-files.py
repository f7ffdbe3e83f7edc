# item 7: fills the place of shared memory files
# verdict: disk_limit
# tier B: exited 1; has no shared memory; because there is no place for shared memory files
# control: files-in-shared-memory.py
import sys

try:
    open("/dev/shm/probe", "w").close()
except OSError as error:
    sys.exit(print("no shared memory:", error) or 1)
for number in range(32):
    with open(f"/dev/shm/{number}", "wb") as file:
        file.write(b"x" * (4 << 20))
print("REACHED")
