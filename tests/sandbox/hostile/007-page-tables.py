# item 7: reads every second MiB of 64 GiB that it never wrote: little memory of its own, but a page table for each
# verdict: memory_limit; lacks read all
# control: node.sh
import ctypes
import mmap
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SIZE, NO_RESERVE, MADV_NOHUGEPAGE = 64 << 30, 0x4000, 15
place = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE, -1, 0)
libc.madvise(place, SIZE, MADV_NOHUGEPAGE)
for offset in range(0, SIZE, 2 << 20):
    ctypes.c_char.from_address(place + offset).value
time.sleep(1)
print("read all")
