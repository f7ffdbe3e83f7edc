# item 58: replaces the shell, the interpreter, git and the C library, and adds a library to be loaded first
# verdict: exited 0; has done
# control: own-programs-on-the-path.sh
import os
import shutil
import sys

for place in [sys.executable, os.path.realpath(sys.executable), os.__file__, os.environ["HOST_FILE"]]:
    try:
        open(place, "ab").close()
    except OSError:
        continue
    print("write", place, "REACHED")
places = ["/bin/sh", "/usr/bin/env", "/etc/passwd", "/etc/ld.so.cache"]
places += ["/etc/ld.so.preload", "/usr/local/bin/git", "/usr/bin/new", "/etc/new", "/new", "/lib/new", "/dev/new", "/usr/lib/sitecustomize.py"]
for place in places:
    for name, action in {
        "write": lambda: open(place, "ab").close(),
        "replace": lambda: os.rename(__file__, place),
        "remove": lambda: os.unlink(place),
        "chmod": lambda: os.chmod(place, 0o777),
        "link": lambda: os.symlink("/", place),
    }.items():
        try:
            action()
        except OSError as error:
            continue
        print(name, place, "REACHED")
print("done")
