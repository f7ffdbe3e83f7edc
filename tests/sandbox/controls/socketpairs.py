# item 18: a pair of sockets that carries bytes and descriptors
# verdict: exited 0; has carried
import os
import socket

left, right = socket.socketpair()
reader, writer = os.pipe()
socket.send_fds(left, [b"x"], [writer])
_, received, _, _ = socket.recv_fds(right, 1, 1)
os.write(received[0], b"carried")
print(os.read(reader, 10).decode())
