# item 10: fills the disk below a directory that nobody may list
# verdict: disk_limit
# control: temporary-files.py
import os
import time

os.mkdir("closed")
place = os.open("closed", os.O_RDONLY)
os.mkdir("closed/inner")
inner = os.open("closed/inner", os.O_RDONLY)
os.chmod("closed/inner", 0o300)
os.chmod("closed", 0o300)
for number in range(1000):
    file = os.open(f"file-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=inner)
    os.write(file, b"x" * (1 << 20))
    os.close(file)
    time.sleep(0.005)
print("REACHED")
