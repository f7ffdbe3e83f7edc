"""Tests in one process, the code that they test in another.

    examiner   runs the test files, holds the evidence descriptor, knows every expected value
    subject    imports and runs the code under test, knows only what it is asked

The subject is forked before any of the task's code is loaded and before the test files arrive, so it holds neither. In the
examiner an import hook stands in for every module of the code: calls, attributes and operators go over a socket as plain
data, and what comes back is rebuilt from exact built-in types. So an object that equals everything, a patched `assert`, a
walk over frames, an early exit or a monkeypatched clock touch nothing but the subject itself.

Objects of the code that are not plain stay in the subject and are seen through a `Remote`; functions and iterators of the
tests stay in the examiner and are called back.

A frame is a little-endian u32 length and that many bytes of JSON:
    request   [operation, arguments, keywords, heap, handles that are no longer needed]
    answer    ["return" | "raise", value, heap, containers of the request that have changed, frames of the traceback]
              ["unanswerable", reason]
"""

import _thread  # `threading` would make every fork dearer
import builtins
import importlib
import json
import operator
import os
import struct
import sys
import types
import weakref
from importlib.machinery import ModuleSpec

LONGEST_FRAME = 64 << 20
# Of a module, sent along with it.
MOST_NAMES = 32
IN_PROCESS = 'or declare "runner": "in_process"'


class Peer:
    """One end. `request` asks the other end and, while it waits, answers what the other end asks in turn."""

    def __init__(self, channel):
        self.channel = channel
        self.lock = _thread.RLock()
        self.freed = []
        self.broken = None

    def request(self, operation, arguments, keywords=None):
        with self.lock:
            if self.broken:
                raise Violation(self.broken)
            writer = Writer(self.export)
            words = list(map(writer.put, arguments))
            named = {name: writer.put(value) for name, value in (keywords or {}).items()}
            heap = writer.heap(0)
            freed, self.freed = self.freed, []
            self.send([operation, words, named, heap, freed])
            while True:
                message = self.receive()
                if type(message) is not list or not message:
                    raise self.breaks("it answered with something that is no answer")
                if message[0] in ("return", "raise", "unanswerable"):
                    return self.accept(message, writer.containers)
                self.answer(message)

    def accept(self, message, containers):
        if message[0] == "unanswerable":
            raise self.unproxyable(str(message[1])[:500])
        try:
            outcome, value, heap, changed, frames = message
            reader = Reader(self.resolve, containers)
            reader.fill(heap)
            value = reader.get(value)
            for number, contents in changed:
                reader.refill(containers[operator.index(number)], contents)
            if outcome == "raise":
                value._learner_frames = [str(frame)[:200] for frame in frames[-8:]]
        except Exception as error:
            raise self.breaks("its answer cannot be read: %s: %s" % (type(error).__name__, str(error)[:200])) from None
        if outcome == "raise":
            raise value
        return value

    def answer(self, message):
        """Does what the other end asks and sends what came of it."""
        operation, words, named, heap, freed = message
        self.forget(freed)
        reader = Reader(self.resolve)
        reader.fill(heap)
        arguments = list(map(reader.get, words))
        keywords = {name: reader.get(word) for name, word in named.items()}
        frames = []
        try:
            outcome, value = "return", self.perform(operation, arguments, keywords)
        except Violation:
            raise
        except BaseException as error:
            outcome, value, frames = "raise", error, frames_of(error)
        try:
            writer = Writer(self.export, reader.containers[: len(heap)])
            word = writer.put(value)
            changed = writer.changed(heap)
            self.send([outcome, word, writer.heap(len(heap)), changed, frames])
        except Exception as error:
            self.send(["unanswerable", "what the code gave cannot be sent: %s" % str(error)[:300]])

    def send(self, message):
        body = json.dumps(message).encode()
        if len(body) > LONGEST_FRAME:
            raise self.unproxyable("more than %d MiB cannot pass between the tests and the code" % (LONGEST_FRAME >> 20))
        try:
            self.channel.sendall(struct.pack("<I", len(body)) + body)
        except OSError:
            raise self.breaks("it has ended") from None

    def receive(self):
        (length,) = struct.unpack("<I", self.exactly(4))
        if length > LONGEST_FRAME:
            raise self.breaks("it sent a frame of %d bytes" % length)
        try:
            return json.loads(self.exactly(length))
        except (ValueError, RecursionError):
            raise self.breaks("it sent what is no JSON") from None

    def exactly(self, length):
        parts = []
        while length:
            try:
                part = self.channel.recv(length)
            except OSError:
                part = b""
            if not part:
                raise self.breaks("it has ended")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def breaks(self, how):
        self.broken = self.broken or "the code under test does not answer any more: " + how
        return Violation(self.broken)

    def unproxyable(self, reason):
        return Unproxyable(reason)


def frames_of(error):
    """The last frames of the code, one line each, without ours."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename != RUNNER and not code.co_filename.startswith("<frozen"):
            lines.append("%s:%d in %s" % (code.co_filename.rpartition("/")[2], trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return lines[-8:]


# --- the subject -----------------------------------------------------------------------------------------------------


class Anything:
    """Equal to nothing but itself; whatever claims to equal it claims to equal anything."""


def public_names(module):
    return getattr(module, "__all__", None) or [name for name in vars(module) if name[:1] != "_"]


def import_with_names(name):
    """A module, and its functions and classes: what tests are about to ask for."""
    module = importlib.import_module(name)
    kinds = (types.FunctionType, type)
    wanted = [(name, value) for name, value in vars(module).items() if type(value) in kinds and name[:1] != "_"]
    return module, dict(wanted[:MOST_NAMES])


ARITHMETIC = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()
OPERATIONS = {
    "call": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, *error: type(manager).__exit__(manager, *error),
    "equals_anything": lambda thing: bool(thing == Anything()) or not thing != Anything(),
    "exact": exact_value,
    "import": import_with_names,
    "public": public_names,
}
for _operation in (abs, bool, bytes, complex, delattr, dir, divmod, float, format, getattr, hash, int, isinstance, issubclass,
                   iter, len, next, repr, reversed, round, setattr, str):
    OPERATIONS[_operation.__name__] = _operation
for _name in "contains delitem eq ge getitem gt index invert le lt ne neg pos setitem".split():
    OPERATIONS[_name] = getattr(operator, _name)
for _name in ARITHMETIC:
    OPERATIONS[_name] = getattr(operator, "__%s__" % _name)
    OPERATIONS["r" + _name] = lambda right, left, operate=OPERATIONS[_name]: operate(left, right)


class Subject(Peer):
    """Runs the code. The other end knows its objects by handle."""

    def __init__(self, channel):
        super().__init__(channel)
        self.objects, self.handles, self.callbacks = {}, {}, {}
        self.next_handle = 1
        self.thread = _thread.get_ident()

    def serve(self):
        while True:
            self.answer(self.receive())

    def perform(self, operation, arguments, keywords):
        try:
            return OPERATIONS[operation](*arguments, **keywords)
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:
                    pass  # the code may have put anything there

    def export(self, writer, value):
        if isinstance(value, Callback):
            return ["k", value.number]
        handle = self.handles.get(id(value))
        if handle is None:
            handle = self.handles[id(value)] = self.next_handle
            self.objects[handle] = value
            self.next_handle += 1
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [writer.put(base) for base in value.__bases__ if issubclass(base, BaseException)]
            return ["x", handle, value.__name__, *bases]
        return ["h", handle, next((base.__name__ for base in BASES if isinstance(value, base)), "")]

    def resolve(self, reader, word):
        if word[0] == "k":
            if word[1] not in self.callbacks:
                kind = CallbackIterator if word[2] else Callback
                self.callbacks[word[1]] = kind(self, word[1])
            return self.callbacks[word[1]]
        return OPERATIONS_BY_NAME[word[1]] if word[0] == "f" else self.objects[word[1]]

    def forget(self, freed):
        for handle in freed:
            self.handles.pop(id(self.objects.pop(handle, None)), None)

    def request(self, operation, arguments, keywords=None):
        if _thread.get_ident() != self.thread:
            raise RuntimeError("a function of the tests can only be called by the thread that the tests called")
        return super().request(operation, arguments, keywords)


OPERATIONS_BY_NAME = {name: value for name, value in vars(builtins).items() if isinstance(value, types.BuiltinFunctionType)}
FUNCTION_NAMES = {value: name for name, value in OPERATIONS_BY_NAME.items()}


class Callback:
    """A function of the tests, as the code sees it."""

    def __init__(self, subject, number):
        self.subject, self.number = subject, number

    def __call__(self, *arguments, **keywords):
        return self.subject.request("call", [self, *arguments], keywords)


class CallbackIterator(Callback):
    def __iter__(self):
        return self

    def __next__(self):
        return self.subject.request("next", [self])


class Loopback:
    """An examiner's channel to a subject in this process, which answers at once. For warming up."""

    class Answers:
        def sendall(self, frame):
            self.waiting = frame

    def __init__(self):
        self.answers = Loopback.Answers()
        self.subject = Subject(self.answers)

    def sendall(self, frame):
        self.subject.answer(json.loads(frame[4:]))

    def recv(self, length):
        part, self.answers.waiting = self.answers.waiting[:length], self.answers.waiting[length:]
        return part


# --- the examiner ----------------------------------------------------------------------------------------------------


class Examiner(Peer):
    """Asks the subject on behalf of the tests."""

    def __init__(self, channel):
        super().__init__(channel)
        self.remotes = weakref.WeakValueDictionary()
        self.mirrors = {}
        self.functions, self.numbers = [], {}
        self.complaint = None
        self.asked = 0

    def request(self, operation, arguments, keywords=None):
        self.asked += 1
        return super().request(operation, arguments, keywords)

    def unproxyable(self, reason):
        """The test that meets this has failed, whatever it makes of the exception."""
        self.complaint = self.complaint or reason
        return Unproxyable(reason)

    def forged(self, reason):
        self.complaint = self.complaint or reason
        return Violation(reason)

    def answer(self, message):
        try:
            super().answer(message)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise self.breaks("it asked for something that makes no sense: " + str(error)[:200]) from None

    def perform(self, operation, arguments, keywords):
        # The subject may only call, or draw from, what the tests have handed to it.
        function, *arguments = arguments
        if not any(function is known for known in self.functions):
            raise self.breaks("it called what was never handed over")
        return function(*arguments, **keywords) if operation == "call" else next(function)

    def export(self, writer, value):
        kind = type(value)
        if kind is CodeModule:
            value = value._learner_remote
            kind = Remote
        if kind is Remote:
            return ["h", value._learner_handle]
        if kind is type and issubclass(value, Mirrored):
            return ["x", value._learner_handle]
        if kind is types.BuiltinFunctionType and value in FUNCTION_NAMES:
            return ["f", FUNCTION_NAMES[value]]
        iterator = hasattr(kind, "__next__")
        if not iterator and (not callable(value) or isinstance(value, type)):
            raise self.unproxyable(
                "%s of the tests cannot be handed to the code under test; hand over plain data, a function or an iterator, %s"
                % (kind.__name__, IN_PROCESS)
            )
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.functions)
            self.functions.append(value)
        return ["k", self.numbers[id(value)], iterator]

    def resolve(self, reader, word):
        tag, number = word[0], operator.index(word[1])
        if tag == "k" and number >= 0:
            return self.functions[number]
        if tag == "x":
            return self.mirror(number, word[2], list(map(reader.get, word[3:])))
        if tag != "h" or type(word[2]) is not str:
            raise ValueError("an unknown kind of value")
        remote = self.remotes.get(number)
        if remote is None:
            remote = self.remotes[number] = Remote(self, number, word[2])
            if number in self.freed:
                self.freed.remove(number)
        return remote

    def mirror(self, number, name, bases):
        """A class of exceptions of the code, so that the tests can name it in `except`."""
        if number not in self.mirrors:
            if not all(issubclass(base, BaseException) for base in bases):
                raise ValueError("a class of exceptions that is none")
            bases = bases if any(issubclass(base, Mirrored) for base in bases) else [Mirrored, *bases]
            self.mirrors[number] = type(name, tuple(bases), {"_learner_handle": number})
        return self.mirrors[number]

    def forget(self, freed):
        pass  # what the tests have handed over stays


class Mirrored(BaseException):
    """Exceptions of the code's own classes."""

    _learner_text = None

    def __str__(self):
        return BaseException.__str__(self) if self._learner_text is None else self._learner_text


def ask(operation):
    def method(self, *arguments, **keywords):
        return self._learner_peer.request(operation, [self, *arguments], keywords)

    return method


def exactly(operation, kind):
    def method(self, *arguments):
        value = self._learner_peer.request(operation, [self, *arguments])
        if type(value) is not kind:
            raise TypeError("%s() of the code under test gave no %s" % (operation, kind.__name__))
        return value

    return method


def compare(operation):
    """Plain data is compared here. What an object without any says of itself is its own word; one that says that it equals
    anything at all, or that it is both less and greater, is not believed."""
    operate = getattr(operator, operation)

    def method(self, other):
        peer, mine, theirs = self._learner_peer, value_of(self), value_of(other)
        both = (type(mine) is Remote) + (type(theirs) is Remote)
        if both == 0:
            return operate(mine, theirs)
        if both == 1:
            if mine is None or theirs is None:
                return operate(object(), None)
            raise peer.unproxyable(
                "an object of the code under test was compared with plain data; compare what it holds, " + IN_PROCESS
            )
        if operation in ("eq", "ne") and peer.request("equals_anything", [self]) is not False:
            raise peer.forged("an object of the code under test equals anything")
        answer = peer.request(operation, [self, other])
        if operation in ("lt", "gt") and answer is True and peer.request(operation, [other, self]) is True:
            raise peer.forged("an object of the code under test is both less and greater")
        return answer

    return method


def value_of(thing):
    """The plain data that an object of the code holds, if its class is a subclass of such a kind."""
    if type(thing) is not Remote or not thing._learner_base:
        return thing
    value = thing._learner_peer.request("exact", [thing])
    if type(value).__name__ != thing._learner_base:
        raise thing._learner_peer.breaks("it misnamed a value")
    return value


class Remote:
    """An object of the code under test: whatever is done to it is done there."""

    __slots__ = ("_learner_peer", "_learner_handle", "_learner_base", "__weakref__")

    def __init__(self, peer, handle, base):
        object.__setattr__(self, "_learner_peer", peer)
        object.__setattr__(self, "_learner_handle", handle)
        object.__setattr__(self, "_learner_base", base)

    def __del__(self):
        self._learner_peer.freed.append(self._learner_handle)

    @property
    def __class__(self):
        return TYPES.get(self._learner_base, Remote)

    def __iter__(self):
        iterator = self._learner_peer.request("iter", [self])
        return iterator if type(iterator) is Remote else iter(iterator)

    def __bool__(self):
        value = value_of(self)
        return bool(value) if type(value) is not Remote else exactly("bool", bool)(self)

    def __contains__(self, item):
        value = value_of(self)
        return item in value if type(value) is not Remote else exactly("contains", bool)(self, item)

    def __exit__(self, kind, error, trace):
        return self._learner_peer.request("exit", [self, kind, error, None])

    def __instancecheck__(self, instance):
        return bool(self._learner_peer.request("isinstance", [instance, self]))

    def __subclasscheck__(self, kind):
        return bool(self._learner_peer.request("issubclass", [kind, self]))

    def __mro_entries__(self, bases):
        raise self._learner_peer.unproxyable("a class of the code under test is the base of one of the tests; " + IN_PROCESS)

    def __reduce_ex__(self, protocol):
        raise self._learner_peer.unproxyable("an object of the code under test was copied or pickled; " + IN_PROCESS)

    __call__, __getattr__, __setattr__, __delattr__ = ask("call"), ask("getattr"), ask("setattr"), ask("delattr")
    __next__, __getitem__, __setitem__, __delitem__ = ask("next"), ask("getitem"), ask("setitem"), ask("delitem")
    __reversed__, __abs__, __round__, __divmod__ = ask("reversed"), ask("abs"), ask("round"), ask("divmod")
    __neg__, __pos__, __invert__, __enter__ = ask("neg"), ask("pos"), ask("invert"), ask("enter")
    __len__, __hash__, __int__, __index__ = (exactly(name, int) for name in ("len", "hash", "int", "index"))
    __str__, __repr__, __format__ = (exactly(name, str) for name in ("str", "repr", "format"))
    __float__, __complex__, __bytes__, __dir__ = (
        exactly("float", float), exactly("complex", complex), exactly("bytes", bytes), exactly("dir", list))
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(compare, ("eq", "ne", "lt", "le", "gt", "ge"))


for _name in ARITHMETIC:
    setattr(Remote, "__%s__" % _name, ask(_name))
    setattr(Remote, "__r%s__" % _name, ask("r" + _name))


class CodeModule(types.ModuleType):
    """A module of the code under test, as the tests see it. What came along with it counts until anything else is asked, which
    is as long as `from module import name` needs it. `import *` needs to know all names."""

    def __getattr__(self, name):
        remote, asked, names = self.__dict__["_learner_remote"], self.__dict__["_learner_asked"], self.__dict__["_learner_names"]
        if name in names and asked == remote._learner_peer.asked:
            return names[name]
        if name == "__all__":
            return list(remote._learner_peer.request("public", [remote]))
        return getattr(remote, name)

    def __setattr__(self, name, value):
        if name[:2] == "__" or name[:9] == "_learner_" or type(value) is CodeModule:
            super().__setattr__(name, value)
        else:
            setattr(self._learner_remote, name, value)

    def __delattr__(self, name):
        delattr(self._learner_remote, name)


class Importer:
    """Finds what the tests import: their own files in memory, the code under test in the subject, and nothing in the working
    directory, where the subject can write. All else is left to the path finder, which knows the standard library alone."""

    def __init__(self, peer, files, code, place):
        self.peer, self.files, self.place = peer, files, place
        # A directory of the repository that is called like a module of the library is no module unless it says so. Looked at
        # before any of the code has run.
        library = getattr(sys, "stdlib_module_names", ())
        is_module = lambda name: os.path.exists(name + ".py") or os.path.exists(name + "/__init__.py")
        self.code = {name for name in code if name not in library or is_module(name)}
        self.directories = {path[:end] for path in files for end in range(len(path)) if path[end] == "/"}

    def find_spec(self, name, path=None, target=None):
        place = name.replace(".", "/")
        for file, is_package in ((place + ".py", False), (place + "/__init__.py", True)):
            if file in self.files:
                return ModuleSpec(name, TestLoader(self, file), origin=file, is_package=is_package)
        if name.partition(".")[0] in self.code:
            return ModuleSpec(name, self, is_package=True)
        return ModuleSpec(name, None, is_package=True) if place in self.directories else None

    def create_module(self, spec):
        answer = self.peer.request("import", [spec.name])
        if type(answer) is not tuple or len(answer) != 2 or type(answer[0]) is not Remote or type(answer[1]) is not dict:
            raise self.peer.breaks("it imported what is no module")
        module = CodeModule(spec.name)
        module._learner_remote, module._learner_names = answer
        module._learner_asked = self.peer.asked
        return module

    def exec_module(self, module):
        pass  # the subject has done it

    def load(self, file):
        """A test file as a module, in the way of `import`."""
        name = file[:-3].replace("/", ".") if file.endswith(".py") else file
        if name in sys.modules:
            return sys.modules[name]
        module = types.ModuleType(name)
        sys.modules[name] = module
        self.execute(module, file)
        return module

    def execute(self, module, file):
        module.__file__ = self.place + "/" + file
        exec(compile(self.files[file], file, "exec"), module.__dict__)


class TestLoader:
    """A file of the tests, which is not on disk."""

    def __init__(self, importer, file):
        self.importer, self.file = importer, file

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.importer.execute(module, self.file)
