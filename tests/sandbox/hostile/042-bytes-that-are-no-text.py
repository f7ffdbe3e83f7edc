# item 42: NUL, bytes that are no UTF-8, and half a character at the end
# verdict: exited 0; has begin; has end
# control: output-below-the-limit.py
import os

os.write(1, b"begin\0\xff\xfe\x80 \xe2\x82\n" + bytes(range(256)) + b"end\xe2\x82")
