# item 48: takes all pseudo-terminals that the machine has
# verdict: exited 0; has done
# control: pseudo-terminals.py
import os

taken = []
try:
    while len(taken) < 500:
        taken.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as error:
    print(len(taken), "taken,", os.strerror(error.errno))
print("done" if len(taken) < 100 else "REACHED")
