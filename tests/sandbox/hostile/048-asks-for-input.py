# item 48: reads from nowhere, asks for a password, types into a terminal
# verdict: exited 0; has done
# control: reads-its-input.sh
import ctypes
import os
import sys

libc = ctypes.CDLL(None, use_errno=True)
assert sys.stdin.read() == ""
try:
    os.open("/dev/tty", os.O_RDWR)
    print("REACHED a terminal")
except OSError as error:
    print("terminal", os.strerror(error.errno))
for number in (0x5412, 0x541C):
    print("typing", "denied" if libc.ioctl(0, number, b"x") == -1 and ctypes.get_errno() == 1 else "REACHED")
print("isatty", [os.isatty(place) for place in range(3)])
print("done")
