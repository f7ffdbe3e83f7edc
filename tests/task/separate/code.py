"""Code of many kinds, to be tested from another process."""

import enum
import os
import threading
from collections import Counter, namedtuple

CONSTANT = [1, 2, 3]
STATE = {"count": 0}
Pair = namedtuple("Pair", "a b")


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class CodeError(ValueError):
    def __init__(self, first, second):
        self.first = first
        super().__init__(first, second)

    def __str__(self):
        return "code error of %s" % self.first


class NarrowError(CodeError):
    pass


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __eq__(self, other):
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self):
        return hash((self.x, self.y))

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __rmul__(self, factor):
        return Point(self.x * factor, self.y * factor)

    def __lt__(self, other):
        return self.x < other.x

    def __repr__(self):
        return "Point(%r, %r)" % (self.x, self.y)

    def __len__(self):
        return 2

    def __iter__(self):
        return iter((self.x, self.y))

    def __getitem__(self, index):
        return (self.x, self.y)[index]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.x = 0 if kind is None else -1
        return kind is KeyError


class Always:
    def __eq__(self, other):
        return True

    def __lt__(self, other):
        return True

    __gt__ = __lt__


class AlwaysOne(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def same(value):
    return value


def sort(values):
    values.sort()
    return values


def hold(mapping):
    mapping["held"].append(mapping)
    return mapping["held"]


def squares(count):
    for number in range(count):
        yield number * number


def fail():
    raise NarrowError(1, 2)


def divide(a, b):
    return a / b


def apply(function, values):
    return [function(value) for value in values]


def total(values):
    return sum(values)


def letters(text):
    return Counter(text)


def count_up():
    STATE["count"] += 1
    return STATE["count"]


def large():
    return 10**5000


def from_thread(function):
    caught = []

    def work():
        try:
            function()
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return caught


def nested():
    value = ()
    for _ in range(1000):
        value = (value,)
    return value


def leave():
    os._exit(0)
