# item 7: fills as many pipes of the largest size as it can hold
# verdict: exited 0 or memory_limit
# control: pipes.py
import fcntl
import os

F_SETPIPE_SZ = 1031
kept = 0
pipes = 0
try:
    while pipes < 10000:
        reader, writer = os.pipe()
        pipes += 1
        try:
            fcntl.fcntl(writer, F_SETPIPE_SZ, 1 << 20)
        except OSError:
            pass
        os.set_blocking(writer, False)
        try:
            while True:
                kept += os.write(writer, b"x" * 65536)
        except BlockingIOError:
            pass
except OSError as error:
    print(pipes, "pipes,", kept >> 20, "MiB,", os.strerror(error.errno))
print("bounded" if pipes < 1000 and kept < 128 << 20 else "REACHED")
