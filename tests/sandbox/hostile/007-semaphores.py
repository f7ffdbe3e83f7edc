# item 7: sets of System V semaphores, 2 MiB of kernel memory each
# verdict: exited 0; has done
# control: pool-of-the-visible-cores.py
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
made = sum(libc.semget(0, 32000, 0o1600) != -1 for _ in range(20))
print(made, "sets", "REACHED" if made else "denied")
print("done")
