# item 55: directories that nobody may enter, files that nobody may change, immutable where allowed
# verdict: exited 0; has closed
# control: temporary-files.py
import fcntl
import os
import struct

FS_IOC_SETFLAGS, IMMUTABLE, APPEND_ONLY = 0x40086602, 0x10, 0x20
os.makedirs("a/b/c")
for number, flag in enumerate((IMMUTABLE, APPEND_ONLY)):
    with open(f"a/b/c/file-{number}", "w") as file:
        try:
            fcntl.ioctl(file.fileno(), FS_IOC_SETFLAGS, struct.pack("l", flag))
            print("REACHED")
        except OSError as error:
            print("denied", os.strerror(error.errno))
for place in ["a/b/c/file-0", "a/b/c", "a/b", "a", "."]:
    os.chmod(place, 0)
print("closed")
