# item 5: touches memory in small pieces until there is none
# verdict: memory_limit
# control: half-of-the-memory.py
kept = []
while True:
    kept.append(bytearray(b"x" * (1 << 18)))
