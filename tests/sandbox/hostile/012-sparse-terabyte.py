# item 12: a file of 1 TiB without a byte in it
# verdict: exited 0; has 0 blocks
# control: sparse-file.py; limits: file_bytes=4398046511104
import os

with open("sparse", "wb") as file:
    file.truncate(1 << 40)
print(os.stat("sparse").st_size >> 40, "TiB,", os.stat("sparse").st_blocks, "blocks")
