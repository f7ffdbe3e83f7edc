# item 66: a ring that would make sockets and open files behind the filter
# verdict: exited 0; has done
# control: asyncio-subprocesses.py
import ctypes
import errno

libc = ctypes.CDLL(None, use_errno=True)
parameters = ctypes.create_string_buffer(120)
for name, arguments in {"setup": (425, 8, parameters), "enter": (426, 0, 1, 0, 0, 0, 0), "register": (427, 0, 0, None, 0)}.items():
    answer = libc.syscall(*arguments)
    print(name, "denied" if answer == -1 and ctypes.get_errno() == errno.EPERM else "REACHED")
print("done")
