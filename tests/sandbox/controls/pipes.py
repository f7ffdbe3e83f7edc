# item 7: a pipe between two processes carries more than it holds
# verdict: exited 0; has 1000000
import os

reader, writer = os.pipe()
if os.fork() == 0:
    os.close(reader)
    rest = 1000000
    while rest:
        rest -= os.write(writer, b"x" * min(rest, 65536))
    os._exit(0)
os.close(writer)
total = 0
while piece := os.read(reader, 65536):
    total += len(piece)
print(total)
