# item 21: ignores every signal that can be ignored
# verdict: wall_timeout
# control: ends-on-a-signal.py; limits: wall_seconds=0.5
trap '' TERM INT HUP QUIT PIPE ALRM USR1 USR2
while :; do sleep 1000; done
