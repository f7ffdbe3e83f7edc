# item 7: touches shared memory and takes it out of its page tables, where the pages are kept all the same
# verdict: memory_limit; lacks hidden
# control: shared-anonymous-memory.py
import mmap
import time

kept = []
for _ in range(64):
    piece = mmap.mmap(-1, 4 << 20)
    kept.append(piece)
    for place in range(0, 4 << 20, 4096):
        piece[place] = 1
    piece.madvise(mmap.MADV_DONTNEED)
    time.sleep(0.02)
time.sleep(1)
print("hidden")
