"""Values as JSON, between the tests and the code that they test.

Plain data is None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, built-in
types by name, and exceptions: exact types, never an instance of a subclass. Lists, dicts, sets and bytearrays are numbered
and travel in a heap of their own, so that sharing, cycles and changes in place survive the journey.
"""

import builtins
import json
import operator

DEEPEST = 200
CONTAINERS = {list: "l", dict: "d", set: "e", bytearray: "B"}
EMPTY = {tag: kind for kind, tag in CONTAINERS.items()}
TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
NAMES = {value: name for name, value in TYPES.items()}
# Kinds of values that an instance of a subclass can be reduced to; see exact_value.
BASES = (int, float, complex, str, bytes, tuple, list, dict, frozenset, set)


class Unproxyable(TypeError):
    """Something that cannot pass between the tests and the code under test."""


class Violation(BaseException):
    """The code under test has ended or does not keep to the protocol: nothing that it says counts any more."""


def exact_value(value):
    """The value inside an instance of a subclass, taken out by the base class so that no override has a say."""
    if isinstance(value, (int, float, complex)):
        base = next(base for base in (int, float, complex) if isinstance(value, base))
        return base.__pos__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, tuple, list)):
        base = next(base for base in (bytes, tuple, list) if isinstance(value, base))
        return base.__getitem__(value, slice(None))
    if isinstance(value, dict):
        return dict(dict.items(value))
    return {*set.__iter__(value)} if isinstance(value, set) else frozenset(frozenset.__iter__(value))


def is_unicode(text):
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON would join with another half
        return False
    return True


class Writer:
    """Turns values into JSON. `containers` are those that both sides know by number; `export(writer, value)` writes what is
    not plain."""

    def __init__(self, export, containers=()):
        self.export = export
        self.containers = list(containers)
        self.numbers = {id(container): number for number, container in enumerate(self.containers)}

    def put(self, value, depth=0):
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            return value if -(1 << 1000) < value < 1 << 1000 else ["i", hex(value)]
        if kind is str:
            return value if value.isascii() or is_unicode(value) else ["s", value.encode("utf-32-le", "surrogatepass").hex()]
        if depth > DEEPEST:
            raise Unproxyable("data nested deeper than %d cannot pass between the tests and the code" % DEEPEST)
        if kind in CONTAINERS:
            number = self.numbers.get(id(value))
            if number is None:
                number = self.numbers[id(value)] = len(self.containers)
                self.containers.append(value)
            return ["r", number]
        if kind is tuple or kind is frozenset:
            return ["t" if kind is tuple else "z", *[self.put(item, depth + 1) for item in value]]
        if kind is bytes:
            return ["b", value.hex()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is range:
            return ["g", *map(self.put, (value.start, value.stop, value.step))]
        if kind is type and value in NAMES:
            return ["n", NAMES[value]]
        if isinstance(value, BaseException):
            return self.put_exception(value, depth + 1)
        return self.export(self, value)

    def put_exception(self, error, depth):
        """Its class, arguments and fields; for classes of the code also its text, which may be made by a method."""
        kind = type(error)
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        text = None if kind in NAMES else str(error)
        return ["E", self.put(kind, depth), self.put(tuple(error.args), depth), self.put(fields, depth), text]

    def contents(self, container):
        kind = type(container)
        if kind is bytearray:
            return ["B", container.hex()]
        items = [part for item in container.items() for part in item] if kind is dict else container
        return [CONTAINERS[kind], *map(self.put, items)]

    def heap(self, start):
        """The contents of all containers from number `start` on; writing them may find more."""
        contents = []
        while start < len(self.containers):
            contents.append(self.contents(self.containers[start]))
            start += 1
        return contents

    def changed(self, before):
        """(number, contents) of each known container that is no longer as it was. Compared as text, as [1] == [True]."""
        found = [(number, self.contents(self.containers[number])) for number in range(len(before))]
        return [pair for pair in found if json.dumps(pair[1]) != json.dumps(before[pair[0]])]


class Reader:
    """Turns JSON back into values; `resolve(reader, word)` reads what is not plain. What is malformed raises."""

    def __init__(self, resolve, containers=()):
        self.resolve = resolve
        self.containers = list(containers)

    def fill(self, heap):
        fresh = [EMPTY[contents[0]]() for contents in heap]
        self.containers += fresh
        for container, contents in zip(fresh, heap):
            self.refill(container, contents)

    def refill(self, container, contents):
        if CONTAINERS[type(container)] != contents[0]:
            raise ValueError("a container that has changed its kind")
        if type(container) is bytearray:
            container[:] = bytes.fromhex(contents[1])
            return
        items = list(map(self.get, contents[1:]))
        if type(container) is list:
            container[:] = items
            return
        container.clear()
        container.update(zip(items[::2], items[1::2]) if type(container) is dict else items)

    def get(self, word):
        if type(word) is not list:
            if type(word) is dict:
                raise ValueError("an object where a value is due")
            return word
        tag = word[0]
        if tag == "r":
            if word[1] < 0:
                raise ValueError("a container below the first")
            return self.containers[word[1]]
        if tag == "t":
            return tuple([self.get(item) for item in word[1:]])
        if tag == "z":
            return frozenset([self.get(item) for item in word[1:]])
        if tag == "i":
            return int(word[1], 16)
        if tag == "s":
            return bytes.fromhex(word[1]).decode("utf-32-le", "surrogatepass")
        if tag == "b":
            return bytes.fromhex(word[1])
        if tag == "c":
            return complex(word[1], word[2])
        if tag == "g":
            return range(*[operator.index(self.get(part)) for part in word[1:]])
        if tag == "n":
            return TYPES[word[1]]
        if tag == "E":
            return self.get_exception(*map(self.get, word[1:]))
        return self.resolve(self, word)

    def get_exception(self, kind, arguments, fields, text):
        if not issubclass(kind, BaseException) or type(arguments) is not tuple or type(fields) is not dict:
            raise ValueError("an exception that is none")
        try:
            error = kind(*arguments) if kind in NAMES else kind.__new__(kind, *arguments)
        except Exception:
            error = kind.__new__(kind)
        error.args = arguments
        for name, field in fields.items():
            try:
                setattr(error, name, field)
            except Exception:
                pass  # a field that its class keeps for itself
        if kind not in NAMES and type(text) is str:
            error._learner_text = text
        return error
