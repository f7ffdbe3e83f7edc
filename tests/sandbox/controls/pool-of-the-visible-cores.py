# item 4: a pool of processes as large as the cores that it sees
# verdict: exited 0; has [0, 1, 4, 9, 16, 25]
# tier B: exited 1; because a pool needs semaphores in /dev/shm, which a run does not have there
import multiprocessing
import os


def square(number):
    return number * number


if __name__ == "__main__":
    with multiprocessing.Pool(min(len(os.sched_getaffinity(0)), 8)) as pool:
        print(pool.map(square, range(6)))
