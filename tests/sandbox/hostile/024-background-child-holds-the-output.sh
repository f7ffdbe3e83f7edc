# item 24: ends at once, while a child in the background holds its output open
# verdict: exited 0; has hi
# control: asyncio-subprocesses.py
sleep 1000 &
echo hi
