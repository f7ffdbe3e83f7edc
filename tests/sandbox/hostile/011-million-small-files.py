# item 11: empty files without end
# verdict: disk_limit
# control: temporary-files.py
for number in range(1000000):
    open(f"file-{number}", "w").close()
