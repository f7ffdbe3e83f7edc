# item 65: every way to a network that is not its own
# verdict: exited 0; has done
# control: loopback-server.py
import os
import socket


def attempt(name, action):
    try:
        action()
    except (OSError, OverflowError) as error:
        print(name, "denied", error)
    else:
        print(name, "REACHED")


def connect(family, kind, address):
    with socket.socket(family, kind) as client:
        client.settimeout(2)
        client.connect(address)
        client.send(b"x")


port = int(os.environ["HOST_PORT"])
four, six, stream, datagram = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
attempt("machine's loopback", lambda: connect(four, stream, ("127.0.0.1", port)))
attempt("machine's loopback, UDP", lambda: connect(four, datagram, ("127.0.0.1", port)) or connect(four, stream, ("127.0.0.1", port)))
attempt("TCP", lambda: connect(four, stream, ("1.1.1.1", 80)))
attempt("UDP", lambda: connect(four, datagram, ("8.8.8.8", 53)))
attempt("IPv6", lambda: connect(six, stream, ("2606:4700:4700::1111", 80)))
attempt("IPv6, UDP", lambda: connect(six, datagram, ("2606:4700:4700::1111", 53)))
attempt("DNS", lambda: socket.getaddrinfo("example.com", 80))
attempt("multicast", lambda: connect(four, datagram, ("224.0.0.1", 5353)))
attempt("ping", lambda: connect(four, datagram, ("127.0.0.1", 0)) if socket.socket(four, datagram, socket.IPPROTO_ICMP) else 0)
attempt("raw", lambda: socket.socket(four, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("vsock", lambda: socket.socket(socket.AF_VSOCK, stream))
attempt("bluetooth", lambda: socket.socket(31, socket.SOCK_RAW, 1))
attempt("can", lambda: socket.socket(29, socket.SOCK_RAW, 1))
attempt("crypto", lambda: socket.socket(38, 5, 0))
attempt("tipc", lambda: socket.socketpair(30, stream, 0))
attempt("rds", lambda: socket.socket(21, 5, 0))
attempt("smc", lambda: socket.socket(43, stream, 0))
attempt("xdp", lambda: socket.socket(44, socket.SOCK_RAW, 0))
print("done")
