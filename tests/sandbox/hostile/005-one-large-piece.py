# item 5: asks for one piece of memory that is larger than all of its own
# verdict: memory_limit or exited 1; lacks got it
# control: half-of-the-memory.py
kept = bytearray(b"x" * (512 << 20))
print("got it")
