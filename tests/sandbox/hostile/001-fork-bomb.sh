# item 1: a shell function that starts itself twice, for ever
# verdict: process_limit
# control: processes-below-the-limit.py
bomb() { bomb | bomb & }
bomb
sleep 300
