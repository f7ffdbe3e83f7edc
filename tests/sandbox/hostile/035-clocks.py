# item 35: sets the machine's clock, replaces its own, and outstays its time by both
# verdict: wall_timeout; has denied denied denied done
# control: locale-and-time-zones.py; limits: wall_seconds=0.8
import ctypes
import time

libc = ctypes.CDLL(None, use_errno=True)
wanted = (ctypes.c_long * 2)(0, 0)
answers = [libc.settimeofday(wanted, None), libc.clock_settime(0, wanted), libc.adjtimex(ctypes.create_string_buffer(b"\1", 256))]
frozen = time.monotonic()
time.time = time.monotonic = lambda: frozen
print(*["denied" if answer == -1 else "REACHED" for answer in answers], "done", flush=True)
time.sleep(1000)
