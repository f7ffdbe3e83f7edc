# item 68: the cloud's metadata, the gateway, and tokens that a cluster mounts
# verdict: exited 0; has done
# control: loopback-server.py
import os
import socket

for address in [("169.254.169.254", 80), ("169.254.170.2", 80), ("100.100.100.200", 80), ("172.17.0.1", 2375), ("10.0.0.1", 443)]:
    try:
        socket.create_connection(address, 2)
    except OSError as error:
        print(address, "denied", error)
    else:
        print(address, "REACHED")
places = ["/var/run/secrets/kubernetes.io/serviceaccount/token", "/run/secrets", "/root/.aws/credentials", "/root/.ssh", "/root/.netrc"]
places += ["/root/.kube/config", "/root/.docker/config.json", "/etc/kubernetes", "/root/.git-credentials", "/root/.cargo/credentials.toml"]
for place in places:
    try:
        os.listdir(place) if os.path.isdir(place) else open(place).read()
    except OSError as error:
        print(place, "denied", os.strerror(error.errno))
    else:
        print(place, "REACHED")
print([name for name in os.environ if "TOKEN" in name or "SECRET" in name or "KEY" in name or "KUBERNETES" in name] and "REACHED")
print("done")
