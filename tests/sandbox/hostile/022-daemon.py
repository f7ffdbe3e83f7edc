# item 22: leaves a daemon behind: forked twice, in a session of its own, deaf to signals
# verdict: exited 0; has left
# control: pool-of-the-visible-cores.py
import os
import signal
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        null = os.open("/dev/null", os.O_RDWR)
        for place in range(3):
            os.dup2(null, place)
        time.sleep(1000)
    os._exit(0)
os.wait()
print("left")
