// item 29: a child made by vfork that never executes anything: its parent waits for it in the kernel
// verdict: wall_timeout
// control: scripts.sh; limits: wall_seconds=0.5
#define _GNU_SOURCE
#include <unistd.h>

int main(void) {
    if (vfork() == 0) {
        for (;;) pause();
    }
    return 0;
}
