# item 62: leaves marks wherever it may write, and looks for those of the run before
# verdict: exited 0; has left; lacks found
# control: temporary-files.py; runs: 2
import os

home, temporary = os.environ["HOME"], os.environ["TMPDIR"]
places = [home, temporary, "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run", "/run/lock", "/var/lock", "/", "/etc", "/usr/local"]
places += [os.path.dirname(home), os.path.dirname(os.path.dirname(home)), home + "/.cache/pip", home + "/.ccache", home + "/.config"]
places += ["/var/cache", "/var/crash", "/proc", "/proc/sys/kernel", "/sys/fs/cgroup"]
for place in sorted(set(map(os.path.realpath, places))):
    mark = os.path.join(place, "mark-of-a-run")
    if os.path.exists(mark):
        print("found", mark)
    try:
        open(mark, "w").close()
    except OSError:
        continue
    print("left", mark)
