# item 63: reads about itself and its children in /proc
# verdict: exited 0; has python sleep
# tier B: exited 1; because /proc is not to be read there
import os
import subprocess

child = subprocess.Popen(["sleep", "1000"])
while open(f"/proc/{child.pid}/comm").read() != "sleep\n":
    pass
names = [open(f"/proc/{pid}/comm").read().strip()[:6] for pid in ("self", child.pid)]
assert os.readlink("/proc/self/exe") and len(os.listdir("/proc/self/fd")) >= 3
assert open("/proc/self/oom_score_adj").read() == "900\n", "not the first to go when the machine has no memory left"
child.kill()
print(*names)
