# item 9: needs most of the memory that it may have; so does another run at the same time, and both succeed
# verdict: exited 0; has enough
# control: half-of-the-memory.py; runs: 2 at once
import time

kept = bytearray(b"x" * (14 << 20))
kept = [kept, bytearray(b"y" * (14 << 20))]
time.sleep(0.3)
print("enough")
