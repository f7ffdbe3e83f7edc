# item 44: fills both streams from two processes at once
# verdict: exited 0; truncated; has the end
# control: output-below-the-limit.py
import os

for stream in (1, 2):
    if os.fork() == 0:
        for _ in range(300):
            os.write(stream, b"x" * 1000)
        os._exit(0)
for _ in range(2):
    os.wait()
print("the end")
