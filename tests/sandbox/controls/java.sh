# item 6: a Java machine, which reserves far more addresses than it uses
# verdict: exited 0; has OpenJDK
# limits: memory_bytes=536870912, processes=64; needs: java
exec java -version 2>&1
