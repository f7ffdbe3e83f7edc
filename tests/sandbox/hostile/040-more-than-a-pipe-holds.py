# item 40: three times what a pipe holds, to both streams; whoever waits before he reads would wait for ever
# verdict: exited 0; truncated
# control: output-below-the-limit.py
import os

for stream in (1, 2):
    rest = 200000
    while rest:
        rest -= os.write(stream, b"x" * rest)
