# item 6: the Go tool, a program with the runtime of its language
# verdict: exited 0; has go version
# limits: memory_bytes=536870912; needs: go
exec go version
