# item 3: starts threads until none can be started
# verdict: process_limit
# control: threads.py
import threading
import time

started = 0
while started < 10000:
    try:
        threading.Thread(target=time.sleep, args=(300,)).start()
        started += 1
    except RuntimeError:
        time.sleep(0.01)
