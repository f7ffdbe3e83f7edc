# item 19: opens and makes devices
# verdict: exited 0; has done
# control: harmless-devices.py
import os
import stat


def attempt(name, action):
    try:
        action()
    except OSError as error:
        print(name, "denied", os.strerror(error.errno))
    else:
        print(name, "REACHED")


names = "mem kmem port kmsg sda vda nvme0n1 loop0 loop-control kvm fuse net/tun vsock tty tty0 ttyS0 console hpet"
names += " vhost-net vhost-vsock userfaultfd nvidia0 nvidiactl nvidia-uvm dri/card0 dri/renderD128 input/event0 snapshot zram0"
for name in names.split():
    attempt(name, lambda: os.open("/dev/" + name, os.O_RDWR | os.O_NONBLOCK))
attempt("mknod", lambda: os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(254, 0)))
attempt("mknod of memory", lambda: os.mknod("memory", stat.S_IFCHR | 0o600, os.makedev(1, 1)))
print("done")
