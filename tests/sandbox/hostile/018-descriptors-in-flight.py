# item 18: hides descriptors inside a socket's queue, each a socket with descriptors in its own queue
# verdict: exited 0; has bounded
# control: socketpairs.py
import os
import socket

sent, reason, kept = 0, "none", []
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]
while sent < 100000:
    left, right = socket.socketpair()
    left.setblocking(False)
    try:
        while sent < 100000:
            socket.send_fds(left, [b"x"], files)
            sent += len(files)
    except BlockingIOError:
        pass
    except OSError as error:
        reason = os.strerror(error.errno)
        break
    files[0] = left.detach()
    kept.append(right)
    if len(kept) > 400:
        break
print(sent, "in flight,", reason)
print("bounded" if sent < 100000 else "REACHED")
