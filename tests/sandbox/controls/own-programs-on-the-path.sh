# item 58: a program of its own before the system's, which is nobody else's matter
# verdict: exited 0; has own git
mkdir bin
printf '#!/bin/sh\necho own git\n' > bin/git
chmod +x bin/git
PATH=$PWD/bin:$PATH git status
