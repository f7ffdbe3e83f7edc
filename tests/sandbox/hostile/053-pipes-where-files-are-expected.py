# item 53: leaves pipes and sockets where files are expected
# verdict: exited 0; has left
# control: temporary-files.py
import os
import socket

os.mkfifo("solution.py")
os.mkfifo("tests.py")
try:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("notes.txt")
except OSError:
    pass
print("left")
