# item 7: a little memory that parent and children share
# verdict: exited 0; has [0, 1, 2, 3]
import mmap
import os

shared = mmap.mmap(-1, 8 << 20)
for number in range(4):
    if os.fork() == 0:
        shared[number] = number
        os._exit(0)
for _ in range(4):
    os.wait()
print(list(shared[:4]))
