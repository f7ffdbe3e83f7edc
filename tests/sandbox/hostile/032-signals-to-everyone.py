# item 32: signals to every number that a process of the machine may have
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
try:
    os.kill(int(os.environ["HOST_PROCESS"]), signal.SIGKILL)
    print("REACHED")
except OSError as error:
    print("denied", os.strerror(error.errno))
print("alone")
