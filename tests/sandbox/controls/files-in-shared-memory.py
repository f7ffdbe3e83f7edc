# item 7: a block of shared memory with a name
# verdict: exited 0; has shared
# tier B: exited 1; because there is no place for shared memory files
from multiprocessing import shared_memory

block = shared_memory.SharedMemory(create=True, size=1 << 20)
other = shared_memory.SharedMemory(name=block.name)
block.buf[:6] = b"shared"
print(bytes(other.buf[:6]).decode())
other.close()
block.close()
block.unlink()
