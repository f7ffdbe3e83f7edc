# item 21: handles signals, and ends children by them
# verdict: exited 0; has handled 15 ended -9
import os
import signal
import subprocess

caught = []
signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
os.kill(os.getpid(), signal.SIGTERM)
child = subprocess.Popen(["sleep", "1000"])
child.kill()
print("handled", *caught, "ended", child.wait())
