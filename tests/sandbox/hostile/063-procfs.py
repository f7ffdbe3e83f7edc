# item 63: other processes' environments and memory, and the files of /proc and /sys that drive the machine
# verdict: exited 0; has done; lacks CARGO
# control: own-process.py
import glob
import os

other = os.environ["HOST_PROCESS"]
keeper = str(os.getppid())
for pid in (other, keeper):
    for name in ["environ", "mem", "maps", "auxv", "stack", "syscall", "exe", "cwd", "root", "fd/0", "ns/mnt", "map_files"]:
        place = f"/proc/{pid}/{name}"
        try:
            if name in ("exe", "cwd", "root", "ns/mnt"):
                found = os.readlink(place)
            elif name == "map_files":
                found = os.listdir(place)
            else:
                found = os.read(os.open(place, os.O_RDONLY | os.O_NONBLOCK), 100)
        except OSError:
            continue
        print(place, "REACHED", found)
    for place in glob.glob(f"/proc/{pid}/*") + glob.glob(f"/proc/{pid}/attr/*"):
        try:
            os.write(os.open(place, os.O_WRONLY | os.O_NONBLOCK), b"1")
        except OSError:
            continue
        print("writing", place, "REACHED")
drives = "sysrq-trigger kcore kmsg kallsyms sys/kernel/core_pattern sys/kernel/modprobe sys/vm/drop_caches sys/vm/overcommit_memory"
drives += " sys/kernel/hostname sys/kernel/randomize_va_space sys/fs/file-max sys/net/ipv4/ip_forward irq/default_smp_affinity"
for place in ["/proc/" + name for name in drives.split()] + ["/sys/power/state", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs"]:
    try:
        os.open(place, os.O_WRONLY)
    except OSError:
        continue
    print("writing", place, "REACHED")
for place in ["/proc/kcore", "/proc/kmsg", "/proc/vmallocinfo", "/proc/slabinfo", "/proc/pagetypeinfo"]:
    try:
        os.read(os.open(place, os.O_RDONLY | os.O_NONBLOCK), 10)
    except OSError:
        continue
    print("reading", place, "REACHED")
try:
    os.close(os.open("/proc/self/exe", os.O_WRONLY))
    print("own program REACHED")
except OSError:
    pass
try:
    visible = [name for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    visible = []
print(len(visible), "processes seen" if len(visible) < 8 else "REACHED")
print("done")
