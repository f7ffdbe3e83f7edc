# item 29: runs a script of its own by its interpreter line
# verdict: exited 0; has run by sh
printf '#!/bin/sh\necho run by sh\n' > script
chmod +x script
exec ./script
