# item 50: symbolic links from its tree to files of the machine
# verdict: exited 0; has done; lacks secret of the machine
# control: links-inside.py
import os

places = ["/etc/shadow", os.path.dirname(os.environ["HOST_FILE"]), os.environ["HOST_FILE"], "/proc/1/environ", "/proc/1/root" + os.environ["HOST_FILE"]]
for number, place in enumerate(places):
    os.symlink(place, f"link-{number}")
    try:
        if os.path.isdir(f"link-{number}"):
            print(number, "REACHED", os.listdir(f"link-{number}"))
        else:
            print(number, "REACHED", open(f"link-{number}").read())
    except OSError as error:
        print(number, "denied", os.strerror(error.errno))
print("done")
