# item 45: children write on while the run is being ended
# verdict: exited 0; has hi
# control: asyncio-subprocesses.py
import os
import signal
import time

print("hi", flush=True)
for _ in range(4):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        while True:
            os.write(1, b"late\n")
            time.sleep(0.002)
os._exit(0)
