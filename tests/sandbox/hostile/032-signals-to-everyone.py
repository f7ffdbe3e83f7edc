# item 32: signals to every number that a process of the machine may have, and to all at once
# verdict: exited 0; has alone
# control: ends-on-a-signal.py
import os
import signal

# Harmless signals first: a hole must not cost anybody his processes.
for pid in range(2, 33000):
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGCONT)
        except OSError:
            continue
        print(pid, "REACHED")
for pid in (-1, int(os.environ["HOST_PROCESS"])):
    try:
        os.kill(pid, signal.SIGCONT if pid == -1 else signal.SIGKILL)
    except OSError as error:
        print(pid, "denied", os.strerror(error.errno))
    else:
        print(pid, "REACHED")
print("alone")
