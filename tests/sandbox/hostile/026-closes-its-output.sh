# item 26: closes its output and stays; the end of the output is not the end of the run
# verdict: wall_timeout
# control: asyncio-subprocesses.py; limits: wall_seconds=0.5
echo hi
exec >&- 2>&-
sleep 1000
