# item 13: several processes that each compute less than they may
# verdict: cpu_timeout
# control: busy-for-a-while.py; limits: cpu_seconds=0.5
spin() { while :; do :; done; }
spin & spin & spin & spin &
wait
