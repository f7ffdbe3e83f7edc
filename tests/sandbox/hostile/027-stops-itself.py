# item 27: stops itself and everything around it
# verdict: wall_timeout
# control: ends-on-a-signal.py; limits: wall_seconds=0.7
import os
import signal

parent = os.getpid()
if os.fork() == 0:
    os.kill(parent, signal.SIGSTOP)
    os.kill(0, signal.SIGSTOP)
os.kill(0, signal.SIGSTOP)
