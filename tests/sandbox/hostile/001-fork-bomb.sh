# item 1: a shell function that starts itself twice, for ever
# verdict: process_limit
# control: processes-below-the-limit.py
exec 2> /dev/null
bomb() { bomb | bomb & }
bomb
sleep 300
