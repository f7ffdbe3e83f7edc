# item 56: names with newlines, dashes, 255 bytes, bytes that are no text, pairs that differ in case
# verdict: exited 0; has named
# control: temporary-files.py
import os

names = [b"new\nline", b"-rf", b"--", b"x" * 255, b"\xff\xfe", b"Case", b"case", b"dots...", b" ", b"*", b"a\\b", b"$(reboot)"]
names += ["\u202etxt.exe".encode(), b"\x1b[2J", b"tab\t", b"quote'\""]
for name in names:
    with open(name, "wb") as file:
        file.write(name)
    os.mkdir(b"in " + name[:200])
assert sorted(os.listdir(b"."))[-1] == b"\xff\xfe"
print("named", len(names))
