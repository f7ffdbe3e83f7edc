# item 6: reserves 256 GiB of addresses as language runtimes do, and uses little of it; must succeed
# verdict: exited 0; has used
# control: node.sh
import ctypes
import mmap

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NO_RESERVE = 0x4000
place = libc.mmap(None, 256 << 30, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE, -1, 0)
assert place not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
assert libc.mprotect(place + (1 << 30), 16 << 20, mmap.PROT_READ | mmap.PROT_WRITE) == 0
ctypes.memset(place + (1 << 30), 1, 16 << 20)
print("used")
