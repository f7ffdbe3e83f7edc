# item 35: replaces its own clocks and outstays its time by them
# verdict: wall_timeout
# control: locale-and-time-zones.py; limits: wall_seconds=0.7
import time

frozen, sleep = time.monotonic(), time.sleep
time.time = time.monotonic = time.perf_counter = lambda: frozen
while time.monotonic() < frozen + 1000:
    sleep(0.1)
