# item 28: wave after wave of orphans; somebody must reap them, or the room for processes would be used up
# verdict: exited 0; has all reaped
# control: pool-of-the-visible-cores.py
import os
import time


def there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


for _ in range(12):
    orphans = []
    for _ in range(8):
        reader, writer = os.pipe()
        if os.fork() == 0:
            orphan = os.fork()
            if orphan:
                os.write(writer, str(orphan).encode())
            os._exit(0)
        os.wait()
        orphans.append(int(os.read(reader, 20)))
        os.close(reader)
        os.close(writer)
    while any(map(there, orphans)):
        time.sleep(0.005)
print("all reaped")
