# item 51: exchanges a directory and a link to the machine, again and again, while somebody may look
# verdict: exited 0; has swapped
# control: links-inside.py
import os

os.mkdir("tree")
open("tree/file", "w").close()
os.symlink("/etc", "away")
for _ in range(2000):
    os.rename("tree", "aside")
    os.rename("away", "tree")
    os.rename("tree", "away")
    os.rename("aside", "tree")
print("swapped")
