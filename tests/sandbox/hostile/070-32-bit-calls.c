// item 70: a system call by the 32-bit door, where the numbers mean other things
// verdict: signaled 31; lacks REACHED
// control: own-process.py
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>

int main(void) {
#if defined(__x86_64__)
    long number = 20, answer; /* getpid there, writev here */
    __asm__ volatile("int $0x80" : "=a"(answer) : "a"(number) : "memory");
    printf("REACHED %ld\n", answer);
    return 0;
#else
    return raise(SIGSYS);
#endif
}
