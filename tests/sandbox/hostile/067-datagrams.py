# item 67: a pair of datagram sockets, sent on to a socket of the machine
# verdict: exited 0; has done
# control: socketpairs.py
import os
import socket

try:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
except OSError as error:
    left = right = None
    print("pair", os.strerror(error.errno))
for address in (os.environ["HOST_DATAGRAM_SOCKET"], "\0" + os.environ["HOST_ABSTRACT_SOCKET"], "/dev/log", "/run/systemd/notify"):
    for name, send in {
        "sendto": lambda: left.sendto(b"x", address),
        "sendmsg": lambda: left.sendmsg([b"x"], [], 0, address),
        "connect": lambda: right.connect(address),
    }.items() if left else ():
        try:
            send()
        except OSError as error:
            print(name, repr(address), "denied", os.strerror(error.errno))
        else:
            print(name, repr(address), "REACHED")
print("done")
