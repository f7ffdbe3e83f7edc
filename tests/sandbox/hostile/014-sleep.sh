# item 14: sleeps for ever
# verdict: wall_timeout
# control: asyncio-subprocesses.py; limits: wall_seconds=0.5
exec sleep 1000
