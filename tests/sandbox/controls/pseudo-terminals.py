# item 48: a pseudo-terminal of its own
# verdict: exited 1
import os
import pty

print(pty.openpty(), os.ttyname(0))
