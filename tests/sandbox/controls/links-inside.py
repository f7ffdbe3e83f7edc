# item 50: links of both kinds inside its own tree
# verdict: exited 0; has linked linked 2
import os

with open("file", "w") as file:
    file.write("linked")
os.symlink("file", "soft")
os.link("file", "hard")
print(open("soft").read(), open("hard").read(), os.stat("file").st_nlink)
