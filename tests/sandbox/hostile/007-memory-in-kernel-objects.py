# item 7: memory that is no process's own: memfd, System V segments, secret memory
# verdict: exited 0; has done
# control: files-in-shared-memory.py
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def attempt(name, call, *arguments):
    if call(*arguments) == -1:
        print(name, "denied", os.strerror(ctypes.get_errno()))
    else:
        print(name, "REACHED")


attempt("memfd_create", libc.memfd_create, b"x", 0)
attempt("shmget", libc.shmget, 0, 64 << 20, 0o1600)
attempt("memfd_secret", libc.syscall, 447, 0)
print("done")
