# item 52: changes times, modes and attributes of a file outside its tree
# verdict: exited 0; has done; lacks changed
# tier B: exited 0; has done; because Landlock does not govern them: an ordinary user's runs can change those of the user's files
# control: temporary-files.py
import os

place = os.environ["HOST_FILE"]
for name, change in {
    "times": lambda: os.utime(place),
    "mode": lambda: os.chmod(place, 0o666),
    "attribute": lambda: os.setxattr(place, "user.mark", b"x"),
    "owner": lambda: os.chown(place, os.getuid(), os.getgid()),
}.items():
    try:
        change()
    except OSError as error:
        print(name, "denied", os.strerror(error.errno))
    else:
        print(name, "changed")
print("done")
