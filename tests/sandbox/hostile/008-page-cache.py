# item 8: reads and writes files again and again, which fills caches and is no use of memory
# verdict: exited 0; has wrote
# control: temporary-files.py
for _ in range(20):
    with open("large", "wb") as file:
        for _ in range(6):
            file.write(b"x" * (1 << 20))
    with open("large", "rb") as file:
        while file.read(1 << 20):
            pass
print("wrote")
