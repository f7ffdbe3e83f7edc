# item 30: the same chains, after the program has ended
# verdict: exited 0 or process_limit; has ended
# control: pool-of-the-visible-cores.py; limits: processes=2000, memory_bytes=1073741824
import os

for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                if os.fork() > 0:
                    os._exit(0)
            except OSError:
                pass
print("ended", flush=True)
os._exit(0)
