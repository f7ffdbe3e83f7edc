# item 7: touches 256 MiB of shared anonymous memory, which counts as no process's private memory
# verdict: memory_limit; lacks touched all
# control: shared-anonymous-memory.py
import mmap
import time

kept = []
for _ in range(32):
    piece = mmap.mmap(-1, 8 << 20)
    kept.append(piece)
    for place in range(0, 8 << 20, 4096):
        piece[place] = 1
    time.sleep(0.02)
time.sleep(1)
print("touched all")
