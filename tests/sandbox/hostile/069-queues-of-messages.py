# item 69: fills POSIX message queues, which count against nobody's memory
# verdict: exited 0; has done
# control: files-in-shared-memory.py
import ctypes
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
made = 0
attributes = ctypes.create_string_buffer(struct.pack("8l", 0, 10, 8192, 0, 0, 0, 0, 0))
for number in range(1000):
    if libc.mq_open(b"/queue-%d" % number, os.O_RDWR | os.O_CREAT, 0o600, attributes) == -1:
        break
    made += 1
print(made, "queues", "REACHED" if made > 10 else "")
print("done")
