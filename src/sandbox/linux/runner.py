"""Runs named Python tests and says, for each that returned, that it did.

once    run tests in this process
serve   be the warm interpreter: fork a contained process for every request, never run a test here

    tier A                                             tier B
    server      runs no task code, reports             server
      anchor    process 1 of the run's namespaces        keeper    child subreaper: reaps, ends, reports
      task      runs the tests                             task    runs the tests
        subject   runs the code, see separate.py             subject   runs the code, see separate.py

A fork costs about a millisecond, mostly page faults, and each run should pay for only one. So in tier A the keeper's work
is the server's own, and the anchor shares the server's memory and sleeps in pause(2): it holds the namespaces together, and
when it is killed the kernel ends everything in them.

Descriptor 3 is the task's line to the grader. The examination comes over it (test files, names, a nonce), read by the task
alone and only after the subject was forked. Evidence goes back over it, one line `nonce index outcome` per test, and nowhere
else: what the code prints, how it exits, which files it writes say nothing about a test.
"""

import array  # used by socket.send_fds; loaded here once for every fork, as are those below
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from importlib.machinery import ModuleSpec, PathFinder

EVIDENCE = 3
CLONE_VM, CLONE_NEWUSER, CLONE_NEWPID = 0x100, 0x10000000, 0x20000000
OTHER_NAMESPACES = 0x20000 | 0x8000000 | 0x4000000 | 0x40000000  # CLONE_NEWNS, NEWIPC, NEWUTS, NEWNET
INSIDE_ID = 1000
NOSUID, NODEV, NOEXEC = 2, 4, 8
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine)
SYS_LANDLOCK_RESTRICT_SELF = 446
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE = 444, 445
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
CAPABILITIES_V3 = 0x20080522

RUNNER = (lambda: None).__code__.co_filename

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


# --- running tests ---------------------------------------------------------------------------------------------------


def examine(separate, hidden, removed, readable):
    """Runs the tests that come over descriptor 3; returns whether all passed. `separate`: the code under test runs in a process
    of its own; `hidden`: the tests have data files, which that process must not see, though it may see what lies in `readable`;
    `removed`: files of the tree to take away."""
    place, peer, trouble = os.path.dirname(os.getcwd()) + "/tests", None, None
    try:
        for name in removed:
            os.unlink(name)
        if hidden:
            place = private_place(place)
        if separate:
            peer = Examiner(start_subject(place if hidden else None, readable))
    except (OSError, SetUpError) as error:
        trouble = repr(error)
    line = socket.socket(fileno=EVIDENCE)
    examination = json.loads(receive(line))
    line.detach()
    tests, nonce, files = examination["tests"], examination["nonce"], examination["files"]
    try:
        if hidden and not trouble:
            word = peer.channel.recv(1000)
            trouble = None if word == READY else word.decode("utf-8", "replace")
            lay({place + "/" + name: text for name, text in files.items()})
        elif not separate:
            lay(files)
    except OSError as error:
        trouble = repr(error)
    if trouble:  # none of the code under test has run yet, so it has no part in this
        os.write(EVIDENCE, ("%s unprepared %s\n" % (nonce, trouble.replace("\n", " "))).encode("utf-8", "replace"))
        os._exit(1)
    sys.modules["__main__"] = types.ModuleType("__main__")
    if not separate:
        search_working_directory()
        return run_tests(tests, nonce, load)
    del sys.path[0]  # the empty entry that -c puts there: the subject can write to the working directory
    importer = Importer(peer, files, examination["code"], place)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), importer)
    return run_tests(tests, nonce, importer.load, peer)


def private_place(place):
    """Makes a directory for the data of the tests: `place`, or where only the temporary directory can be written, as in tier B,
    a part of that; the other part is what is temporary from now on."""
    try:
        os.mkdir(place, 0o700)
        return place
    except PermissionError:
        temporary = os.environ["TMPDIR"]
        os.environ["TMPDIR"] = temporary + "/shared"
        os.mkdir(temporary + "/shared", 0o700)
        os.mkdir(temporary + "/tests", 0o700)
        return temporary + "/tests"


def search_working_directory():
    sys.path[0] = os.getcwd()  # in place of the empty entry that -c puts there
    sys.meta_path.insert(sys.meta_path.index(PathFinder), BareModules)


def start_subject(hidden_place, readable):
    """Forks the process for the code under test. It gets neither descriptor 3 nor anything that came over it, and this process
    becomes one whose memory and descriptors no other may look into."""
    step("PR_SET_DUMPABLE", libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        subjects.append(pid)
        return ours
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.close(EVIDENCE)
        ours.close()
        if hidden_place:
            try:
                keep_out_of(hidden_place, readable)
            except Exception as error:
                theirs.sendall(repr(error).encode())
                os._exit(1)
            theirs.sendall(READY)
        sys.modules["__main__"] = types.ModuleType("__main__")
        search_working_directory()
        Subject(theirs).serve()
    except Violation:
        pass  # the examiner has gone
    finally:
        os._exit(0)


subjects = []
READY = b"ready"


def keep_out_of(place, readable):
    """Shuts this process out of `place`, by allowing all that lies beside the path to it. What cannot be listed, in tier B, holds
    no more of use than `readable` and the working directory."""
    version = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, 0, 1)
    step("Landlock's version", version)
    # All access to files that the kernel's version knows: version 2 adds moving between directories, 3 truncation.
    files = 0x1FFF | (0x2000 if version >= 2 else 0) | (0x4000 if version >= 3 else 0)
    ruleset = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, struct.pack("=Q", files), 8, 0)
    step("landlock_create_ruleset", ruleset)
    above, _, name = place.rpartition("/")
    while name:
        try:
            beside = [entry.path for entry in os.scandir(above or "/") if entry.name != name and not entry.is_symlink()]
        except PermissionError:
            beside = [*readable, os.getcwd(), "/dev", "/etc", "/proc"]
        for path in beside:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            # Of these, files know executing, writing, reading and truncation.
            allowed = files if os.path.isdir(path) else files & 0x4007
            rule = struct.pack("=Qi", allowed, beneath)
            step("landlock_add_rule", libc.syscall(SYS_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0))
            os.close(beneath)
        above, _, name = above.rpartition("/")
    step("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    step("landlock_restrict_self", libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def run_tests(tests, nonce, load, peer=None):
    """Runs tests in order, each file loaded by its first one; returns whether all passed. What passes between the tests and the
    code in a way that cannot be told from forgery fails the test that met it."""
    write = os.write
    files = {}
    all_passed = True
    for index, name in enumerate(tests):
        path, _, function = name.partition("::")
        try:
            if path not in files:
                files[path] = None
                files[path] = load(path)
            if files[path] is None:
                raise ImportError(path + " could not be imported, see above")
            passed = completes(getattr(files[path], function))
            if peer is not None and (peer.broken or peer.complaint):
                raise Violation(peer.broken or peer.complaint)
        except BaseException as error:
            passed = False
            explain(name, error)
        if peer is not None:
            peer.complaint = None
        all_passed = all_passed and passed
        write(EVIDENCE, b"%s %d %d\n" % (nonce.encode(), index, passed))
    return all_passed


class BareModules:
    """Imports `name` from `name.py` in the working directory: what the path finder would do there, at a tenth of its price.
    It stands just before the path finder, which still finds everything else."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        place = sys.path[0] + "/" + name + ".py"
        if path is None and os.path.isfile(place) and not os.path.isdir(place[:-3]):
            return ModuleSpec(name, BareModules, origin=place)
        return None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        place = module.__spec__.origin
        module.__file__ = place
        with open(place, "rb", buffering=0) as file:
            code = compile(file.read(), place, "exec")
        exec(code, module.__dict__)


def load(path):
    name = path[:-3].replace("/", ".") if path.endswith(".py") else path
    with open(path, "rb", buffering=0) as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType(name)
    module.__file__ = os.path.abspath(path)
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module


UNRUN = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def completes(test):
    result = test()
    if isinstance(result, UNRUN):  # its body has not run
        raise TypeError("the test is a generator or coroutine; only plain functions are run")
    return True


def explain(name, error):
    """One line for the test, one for each of the last frames of the code under test, one for the exception. The traceback
    module would also quote the source lines, for a millisecond a test: most of what a run costs."""
    try:
        frames = frames_of(error) + getattr(error, "_learner_frames", [])
        reason = type(error).__name__ + ": " + str(error)[:500]
        lines = ["FAILED " + name, *["  " + frame for frame in frames[-8:]], "  " + reason, ""]
        os.write(2, "\n".join(lines).encode("utf-8", "replace"))
    except BaseException:
        pass  # an exception that cannot be shown has failed all the same


def finish(all_passed):
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass
    for pid in subjects:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # so that what it used is counted with this process
    os._exit(0 if all_passed else 1)


def once(arrangement):
    os.set_inheritable(EVIDENCE, False)
    finish(examine(**arrangement))


# --- the warm interpreter --------------------------------------------------------------------------------------------


class SetUpError(Exception):
    """A step that the kernel refused: name and errno."""


def step(name, result):
    if result == -1:
        raise SetUpError(name, ctypes.get_errno())


def serve(config):
    """Starts a run for every request until the supervisor closes the socket."""
    requests = socket.socket(fileno=os.dup(0))
    config["filter"] = Filter(bytes.fromhex(config["filter"]))
    limits = {name[7:]: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    config["highest"] = {name: (number, resource.getrlimit(number)[1]) for name, number in limits.items()}
    config["null"] = os.open(os.devnull, os.O_RDONLY)
    os.dup2(config["null"], 0)
    # An anchor shares our memory: no signal may run a handler in it, and none of its neighbours may look into it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    warm_up()
    gc.collect()
    # What compiling this program took is given back: every fork would copy its page tables and be counted as using it.
    getattr(libc, "malloc_trim", lambda _: 0)(0)
    gc.disable()
    gc.freeze()  # forks then share these objects' pages for longer
    requests.send(b"ready")
    if config["tier"] == "A":
        Server(config, requests).loop()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers; each reports for itself
    while True:
        _, descriptors = accept(requests)
        try:
            keeper = os.fork()
        except OSError as error:  # that run cannot be, others can
            keeper = None
            report_failure(socket.socket(fileno=os.dup(descriptors[0])), error)
        if keeper == 0:
            keep(config, requests, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def warm_up():
    """Does once, with code of our own, what Python does at its first time only and every fork would otherwise do again:
    the first compile() makes the types of all syntax nodes, which takes milliseconds."""
    module = types.ModuleType("warm_up")
    exec(compile("def test():\n    assert [0] == []\n", "warm_up.py", "exec"), module.__dict__)
    json.loads(json.dumps({"files": {"a": "b"}, "tests": [["c", 1.5]]}))
    examiner = Examiner(Loopback())
    importer = Importer(examiner, {"a.py": ""}, ["__main__"], "/tests")
    for _ in range(20):  # so that the interpreter has specialised the code before it is shared
        importer.find_spec("a")
        importer.create_module(importer.find_spec("__main__")).lay({})
        examiner.request("call", [examiner.request("getattr", [[1], "index"]), 1])
    (ctypes.c_uint32 * 2)(), (ctypes.c_uint32 * 6)()


def accept(requests):
    message, descriptors, _, _ = socket.recv_fds(requests, 64, 8)
    if not message:
        os._exit(0)
    return int(message), descriptors


class Run:
    """One run of tier A, from the server's side."""

    def __init__(self, control, stack):
        self.control, self.stack = control, stack
        self.anchor = self.anchor_handle = self.task = self.task_handle = self.status = self.usage = None


class Server:
    """Tier A: anchors and tasks as they come and go."""

    def __init__(self, config, requests):
        self.config, self.requests = config, requests
        self.own_namespace = os.pidfd_open(os.getpid())
        self.poll = select.poll()
        self.poll.register(requests, select.POLLIN)
        self.on_event = {}
        self.stacks = []

    def loop(self):
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.requests.fileno():
                    self.start(*accept(self.requests))
                elif descriptor in self.on_event:
                    handle, run = self.on_event[descriptor]
                    handle(run)

    def expect(self, descriptor, event, handle, run):
        self.on_event[descriptor] = handle, run
        self.poll.register(descriptor, event)

    def forget(self, descriptor):
        del self.on_event[descriptor]
        self.poll.unregister(descriptor)

    def start(self, outside_id, descriptors):
        control = socket.socket(fileno=descriptors[0])
        stack = self.stacks.pop() if self.stacks else ctypes.create_string_buffer(16384)
        run = Run(control, stack)
        try:
            self.make_anchor(run, outside_id)
            step("setns", libc.setns(run.anchor_handle, CLONE_NEWPID))
            run.task = os.fork()  # into the anchor's PID namespace
            if run.task == 0:
                self.become_task_of(run, descriptors)
            step("setns back", libc.setns(self.own_namespace, CLONE_NEWPID))
            run.task_handle = os.pidfd_open(run.task)
            self.expect(run.task_handle, select.POLLIN, self.task_ended, run)
            self.expect(control.fileno(), select.POLLRDHUP, self.end, run)
        except BaseException as error:
            report_failure(control, error)
            self.abandon(run)
        for descriptor in descriptors[1:]:
            os.close(descriptor)

    def abandon(self, run):
        """Undoes what there is of a run that could not be started: its neighbours go on."""
        if libc.setns(self.own_namespace, CLONE_NEWPID) == -1:
            os._exit(1)  # every further run would start in the wrong namespace; the server is replaced
        for descriptor in (run.control.fileno(), run.task_handle):
            if descriptor in self.on_event:
                self.forget(descriptor)
        if run.anchor is not None:
            os.kill(run.anchor, signal.SIGKILL)
            for child in (run.task, run.anchor):  # the anchor's end waits for that of everything in its namespace
                if child is not None:
                    os.waitpid(child, 0)
        self.release(run)

    def release(self, run):
        run.control.close()
        for handle in (run.task_handle, run.anchor_handle):
            if handle is not None:
                os.close(handle)
        self.stacks.append(run.stack)

    def make_anchor(self, run, outside_id):
        top = (ctypes.addressof(run.stack) + len(run.stack)) & ~63
        flags = CLONE_VM | CLONE_NEWUSER | CLONE_NEWPID | signal.SIGCHLD
        anchor = libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, flags, None)
        step("clone", anchor)
        run.anchor = anchor
        for file, text in (("setgroups", b"deny"), ("uid_map", None), ("gid_map", None)):
            handle = os.open("/proc/%d/%s" % (anchor, file), os.O_WRONLY)
            os.write(handle, text or b"%d %d 1" % (INSIDE_ID, outside_id))
            os.close(handle)
        run.anchor_handle = os.pidfd_open(anchor)

    def become_task_of(self, run, descriptors):
        try:
            request = json.loads(receive(run.control))
            step("setns", libc.setns(run.anchor_handle, CLONE_NEWUSER))
            enter_namespaces(request)
            handles = [run.anchor_handle]
            handles += [os.open(place, os.O_RDONLY | os.O_DIRECTORY) for place in ("/proc", "/box")]
        except BaseException as error:
            report_failure(run.control, error)
            os._exit(126)
        become_task(self.config, run.control, descriptors, request, handles)

    def end(self, run):
        """The supervisor wants the end of the run, or has gone."""
        self.forget(run.control.fileno())
        signal.pidfd_send_signal(run.anchor_handle, signal.SIGKILL)

    def task_ended(self, run):
        if run.control.fileno() in self.on_event:
            self.end(run)
        self.forget(run.task_handle)
        _, run.status, run.usage = os.wait4(run.task, 0)
        self.expect(run.anchor_handle, select.POLLIN, self.all_ended, run)

    def all_ended(self, run):
        """Nothing of the run is left. The anchor has waited for orphans, so its usage holds theirs."""
        self.forget(run.anchor_handle)
        _, _, orphans = os.wait4(run.anchor, 0)
        cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in (run.usage, orphans))
        peak_bytes = run.usage.ru_maxrss * 1024
        finished = {"status": run.status, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes, "processes": 0, "disk_full": False}
        try:
            report(run.control, {"finished": finished})
        except OSError:
            pass  # the supervisor has gone
        self.release(run)


def enter_namespaces(request):
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    step("unshare", libc.unshare(OTHER_NAMESPACES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, b"lo".ljust(16, b"\0") + IFF_UP.to_bytes(2, sys.byteorder) + bytes(22))
    step("mount /proc", libc.mount(b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None))
    options = b"size=%d,nr_inodes=%d,mode=0700" % (request["workspace_bytes"], request["workspace_entries"])
    step("mount the workspace", libc.mount(b"tmpfs", b"/box", b"tmpfs", NOSUID | NODEV, options))
    for directory in ("work", "tmp", "shm"):
        os.mkdir("/box/" + directory)


def keep(config, requests, descriptors):
    """Tier B, in the fork: starts the run, ends it, reports. Never returns."""
    control = socket.socket(fileno=descriptors[0])
    try:
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # It outlives the server: if learner dies, the control socket closes, and this process ends the others of its run.
        request = json.loads(receive(control))
        step("become child subreaper", libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        handles = [os.pidfd_open(os.getpid())]
        task = os.fork()
        if task == 0:
            become_task(config, control, descriptors, request, handles)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        report(control, {"finished": watch(request, control, task)})
    except BaseException as error:
        report_failure(control, error)
    finally:
        os._exit(0)


def become_task(config, control, descriptors, request, handles):
    """Gives up what a task must not have, then runs the tests. Never returns."""
    try:
        os.setsid()
        if config["tier"] == "B" and request["host_id"] is not None:
            os.setgroups([])
            os.setresgid(*[request["host_id"]] * 3)
            os.setresuid(*[request["host_id"]] * 3)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.umask(0o022)
        os.chdir(request["directory"] + "/work")
        os.environ.update(HOME=request["directory"] + "/work", TMPDIR=request["directory"] + "/tmp")
        lay(request["files"])
        # Numbers 0 to 3 are the task's; whatever else lies there is lifted out of the way first.
        lifted = [lift(fd) for fd in (config["null"], *descriptors[1:4])]
        others = [lift(fd) for fd in (control.fileno(), *handles, *descriptors[4:5])]
        for place, descriptor in enumerate(lifted):
            os.dup2(descriptor, place, inheritable=place < EVIDENCE)
        for name, (soft, hard) in request["rlimits"]:
            number, highest = config["highest"][name]
            hard = hard if highest == resource.RLIM_INFINITY else min(hard, highest)
            resource.setrlimit(number, (min(soft, hard), hard))
        if config["tier"] == "A" or request["host_id"] is not None:
            drop_capabilities()
        step("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if config["tier"] == "B":
            step("landlock_restrict_self", libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, others[-1], 0))
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that /proc/self is the task's own again
        config["filter"].install()
        control = socket.socket(fileno=others[0])
        started = {"own_proc": len(handles) > 1, "cpu_seconds": time.process_time()}
        report(control, {"started": started}, others[1 : 1 + len(handles)])
        control.detach()
        os.closerange(EVIDENCE + 1, 256)
    except BaseException as error:
        report_failure(control, error)
        os._exit(126)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
        finish(examine(**request["arrangement"]))
    finally:
        os._exit(1)  # nothing that the tests do may lead back into the server's own code


def lift(descriptor):
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)


def lay(files):
    made = set()
    for name, contents in files.items():
        parent = os.path.dirname(name)
        if parent and parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        with open(name, "wb") as file:
            file.write(contents.encode())


def drop_capabilities():
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    step("drop capabilities", libc.syscall(SYS_CAPSET, header, nothing))


class Filter:
    """A seccomp program, made by the supervisor, in the layout of `struct sock_fprog`."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    def __init__(self, instructions):
        self.instructions = ctypes.create_string_buffer(instructions, len(instructions))
        self.program = Filter.Program(len(instructions) // 8, ctypes.addressof(self.instructions))

    def install(self):
        step("seccomp filter", libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(self.program), 0, 0))


def watch(request, control, task):
    """Waits for the task's end or for the word to end it, ends everything, and adds up."""
    ended = {}
    poll = select.poll()
    poll.register(os.pidfd_open(task), select.POLLIN)
    poll.register(control, select.POLLIN)
    asked, processes = False, 0
    # Many that wait together to be reaped were there together: a fork bomb that nobody has seen alive.
    while not asked and task not in ended and processes <= request["processes"]:
        # Orphans become our children without any event; the timeout is how long their zombies may stay.
        asked = any(descriptor == control.fileno() for descriptor, _ in poll.poll(50))
        earlier = len(ended)
        reap(ended)
        processes = max(processes, len(ended) - earlier)
    left_over = None
    while reap(ended):
        left_over = len(descendants()) if left_over is None else left_over
        kill_descendants(request["host_id"])
        time.sleep(0.0002)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "status": ended.get(task, 0),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "processes": max(processes, left_over or 0),
        "disk_full": False,
    }


def reap(ended):
    """Reaps what has ended; whether there are children left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        ended[pid] = status


def descendants():
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                pass  # it has just gone
    found, waiting = [], [os.getpid()]
    while waiting:
        ancestor = waiting.pop()
        children = [pid for pid, parent in parents.items() if parent == ancestor]
        found += children
        waiting += children
    return found


def kill_descendants(host_id):
    if host_id is not None:
        # A process with the run's own user id can end all others that have it in one call, however fast they multiply.
        try:
            killer = os.fork()
        except OSError:
            return  # no room for another process; the sweep comes again
        if killer == 0:
            os.setresuid(host_id, host_id, host_id)
            try:
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        return
    for pid in descendants():
        for end in (lambda: resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0)), lambda: os.kill(pid, signal.SIGKILL)):
            try:
                end()  # first it can no longer multiply, then it goes
            except OSError:
                pass  # it has just gone


def receive(control):
    def exactly(length):
        parts = []
        while length:
            part = control.recv(min(length, 1 << 20))
            if not part:
                os._exit(0)  # the supervisor has gone
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    return exactly(int.from_bytes(exactly(4), "little"))


def report(control, message, descriptors=()):
    body = json.dumps(message).encode()
    length = len(body).to_bytes(4, "little")
    if descriptors:
        socket.send_fds(control, [length], descriptors)
        control.sendall(body)
    else:
        control.sendall(length + body)


def report_failure(control, error):
    if isinstance(error, SetUpError):
        name, errno = error.args
    else:
        name, errno = "warm interpreter: " + repr(error), getattr(error, "errno", 0) or 0
    try:
        report(control, {"set_up": {"step": name, "errno": errno}})
    except OSError:
        pass  # the supervisor has gone


if sys.argv[1] == "once":
    once(json.loads(sys.argv[2]))
else:
    serve(json.loads(sys.argv[2]))
