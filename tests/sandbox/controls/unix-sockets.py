# item 67: a server with a path, and one with an abstract name, inside one run
# verdict: exited 0; has ab
# tier B: exited 1; because no socket can be made there
import socket

for address, word in (("socket", b"a"), ("\0abstract", b"b")):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    listener.accept()[0].sendall(word)
    print(client.recv(1).decode(), end="")
