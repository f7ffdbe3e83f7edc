# item 48: a program on a pseudo-terminal of its own
# verdict: exited 0; has a terminal True
# tier B: exited 1; because the machine's terminals are out of reach there
import os
import pty

pid, terminal = pty.fork()
if pid == 0:
    print("a terminal", os.isatty(0), os.ttyname(0), flush=True)
    os._exit(0)
text = b""
while b"\n" not in text:
    text += os.read(terminal, 1000)
os.waitpid(pid, 0)
print(text.decode())
