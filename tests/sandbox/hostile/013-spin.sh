# item 13: computes for ever
# verdict: cpu_timeout
# control: busy-for-a-while.py; limits: cpu_seconds=0.5
while :; do :; done
