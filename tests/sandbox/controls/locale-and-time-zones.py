# item 35: dates in other time zones, and text beyond ASCII
# verdict: exited 0; has 01:00 é utf-8
import datetime
import locale
import os
import sys
import time

os.environ["TZ"] = "CET-1"
time.tzset()
locale.setlocale(locale.LC_ALL, "C.UTF-8")
print(time.strftime("%H:%M", time.localtime(0)), "\u00e9", sys.stdout.encoding, datetime.date(2024, 2, 29))
