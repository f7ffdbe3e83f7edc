# item 3: threads that work together
# verdict: exited 0; has 190
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(int, range(20))))
