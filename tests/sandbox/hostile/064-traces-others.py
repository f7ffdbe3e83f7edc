# item 64: traces, reads and writes its parent, its child and a process of the machine, and takes their descriptors
# verdict: exited 0; has done
# control: own-process.py
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
kcmp = {"x86_64": 312, "aarch64": 272}[os.uname().machine]
PIDFD_OPEN, PIDFD_GETFD, PROCESS_MADVISE, ATTACH, SEIZE = 434, 438, 440, 16, 0x4206
child = os.fork()
if child == 0:
    import time

    time.sleep(1000)
for pid in {os.getppid(), int(os.environ["HOST_PROCESS"]), child}:
    piece = ctypes.create_string_buffer(64)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(piece), 64)
    handle = libc.syscall(PIDFD_OPEN, pid, 0)
    answers = {
        "attach": libc.ptrace(ATTACH, pid, None, None),
        "seize": libc.ptrace(SEIZE, pid, None, None),
        "read": libc.process_vm_readv(pid, vector, 1, vector, 1, 0),
        "write": libc.process_vm_writev(pid, vector, 1, vector, 1, 0),
        "compare": libc.syscall(kcmp, os.getpid(), pid, 1, 0, 0),
        "advise": libc.syscall(PROCESS_MADVISE, handle, vector, 1, 21, 0),
        "take": libc.syscall(PIDFD_GETFD, handle, 0, 0),
    }
    for name, answer in answers.items():
        print(name, pid, "denied" if answer == -1 else "REACHED")
os.kill(child, 9)
print("done")
