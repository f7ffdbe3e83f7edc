# item 49: uses descriptors that it was born with
# verdict: exited 0; has none
# control: temporary-files.py
import os

found = []
for place in range(3, 4096):
    try:
        os.fstat(place)
    except OSError:
        continue
    found.append(place)
print("REACHED" if found else "none", found)
