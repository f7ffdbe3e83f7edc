# item 52: hard links to files outside its tree
# verdict: exited 0; has done
# control: links-inside.py
import os

for number, place in enumerate(["/etc/passwd", "/bin/sh", "/usr/bin/env", os.environ["HOST_FILE"], "/etc/shadow"]):
    try:
        os.link(place, f"link-{number}", follow_symlinks=True)
    except OSError as error:
        print(place, "denied", os.strerror(error.errno))
    else:
        print(place, "REACHED")
print("done")
