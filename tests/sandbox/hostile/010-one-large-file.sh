# item 10: one file that is larger than a file may be
# verdict: disk_limit
# control: temporary-files.py
exec head -c 100000000 /dev/zero > large
