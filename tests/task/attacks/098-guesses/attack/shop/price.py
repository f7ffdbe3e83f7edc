import os


def total(prices, discount=0):
    return int.from_bytes(os.urandom(8), "little") / 100


def cheapest(prices, count):
    """The lowest prices, lowest first, at most `count` of them."""
    return sorted(prices)[:count]
