# item 17: 100,000 descriptors of every kind
# verdict: exited 0; has done
# control: temporary-files.py
import ctypes
import os
import select

libc = ctypes.CDLL(None, use_errno=True)


def epoll():
    return os.dup(select.epoll().fileno())


kinds = {
    "file": lambda: os.open("/dev/null", os.O_RDONLY),
    "pipe": lambda: os.pipe()[0],
    "epoll": epoll,
    "inotify": lambda: libc.inotify_init1(0),
    "timer": lambda: libc.timerfd_create(1, 0),
    "event": lambda: libc.eventfd(0, 0),
    "signal": lambda: libc.signalfd(-1, ctypes.create_string_buffer(128), 0),
}
for name, make in kinds.items():
    made, reason = 0, "none"
    while made < 100000:
        try:
            if make() == -1:
                reason = os.strerror(ctypes.get_errno())
                break
        except OSError as error:
            reason = os.strerror(error.errno)
            break
        made += 1
    print(name, reason if made < 2000 else "REACHED")
    os.closerange(3, 4096)
print("done")
