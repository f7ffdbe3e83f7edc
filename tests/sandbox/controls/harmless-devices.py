# item 19: null, zero, full, random, urandom
# verdict: exited 0; has [b'', b'\x00\x00', 2, 2]
import os

with open("/dev/null", "wb") as null:
    null.write(b"x")
try:
    open("/dev/full", "wb", buffering=0).write(b"x")
    raise SystemExit("full has room")
except OSError:
    pass
read = lambda name: os.read(os.open("/dev/" + name, os.O_RDONLY), 2)
print([read("null"), read("zero"), len(read("random")), len(read("urandom"))])
