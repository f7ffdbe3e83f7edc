# item 35: sets the machine's clocks
# verdict: exited 0; has denied denied denied done
# control: locale-and-time-zones.py
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
wanted = (ctypes.c_long * 2)(0, 0)
answers = [libc.settimeofday(wanted, None), libc.clock_settime(0, wanted), libc.adjtimex(ctypes.create_string_buffer(b"\1", 256))]
print(*["denied" if answer == -1 else "REACHED" for answer in answers], "done")
