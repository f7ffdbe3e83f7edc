# item 6: a C compiler, and the program that it makes
# verdict: exited 0; has compiled
# limits: memory_bytes=268435456; needs: cc
printf '#include <stdio.h>\nint main(void) { puts("compiled"); }\n' > main.c
cc main.c -o main && exec ./main
