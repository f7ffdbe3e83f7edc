# item 5: half of the memory that it may use
# verdict: exited 0; has held
kept = bytearray(b"x" * (16 << 20))
kept = [kept, bytearray(b"y" * (16 << 20))]
print("held")
