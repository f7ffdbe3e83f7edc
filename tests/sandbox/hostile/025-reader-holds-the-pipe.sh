# item 25: a reader of its output goes on after it has ended
# verdict: exited 0; has hi
# control: asyncio-subprocesses.py
mkfifo pipe
(cat pipe; sleep 1000) &
echo hi | tee pipe
