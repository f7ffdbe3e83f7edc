# item 65: a server and its client inside one run
# verdict: exited 0; has answered
# tier B: exited 1; because no socket can be made there
import socket
import threading

listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: listener.accept()[0].sendall(b"answered"), daemon=True).start()
with socket.create_connection(listener.getsockname(), 5) as client:
    print(client.recv(100).decode())
