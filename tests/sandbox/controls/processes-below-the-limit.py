# item 1: as many processes as it may have, all at once
# verdict: exited 0; has 24 ended
import os
import time

children = []
for _ in range(24):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.05)
        os._exit(0)
    children.append(pid)
print(sum(os.waitpid(pid, 0)[1] == 0 for pid in children), "ended")
