# item 41: 100 MB without the end of a line
# verdict: output_limit; truncated
# control: output-below-the-limit.py
import os

for _ in range(1600):
    os.write(1, b"x" * 65536)
