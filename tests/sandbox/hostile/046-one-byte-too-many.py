# item 46: one byte more than is kept; that one is missing must be said
# verdict: exited 0; truncated; has [1 bytes left out]
# control: output-below-the-limit.py
import sys

sys.stdout.write("x" * (64 * 1024 + 1))
