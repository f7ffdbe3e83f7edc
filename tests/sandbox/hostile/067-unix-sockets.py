# item 67: sockets of the machine: abstract ones and ones with a path
# verdict: exited 0; has done
# control: socketpairs.py
import os
import socket

addresses = ["\0" + os.environ["HOST_ABSTRACT_SOCKET"], os.environ["HOST_SOCKET"], "/var/run/docker.sock", "/run/dbus/system_bus_socket"]
addresses += ["/run/containerd/containerd.sock", "/proc/1/root" + os.environ["HOST_SOCKET"], "\0/tmp/.X11-unix/X0"]
for address in addresses:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            client = socket.socket(socket.AF_UNIX, kind)
            client.connect(address)
        except OSError as error:
            print(repr(address), "denied", os.strerror(error.errno))
        else:
            print(repr(address), "REACHED")
print("done")
