"""Programs that attack the machine from a call of the sandbox: its processes, its files, its kernel, and everybody's share of it.

All of them run on this kernel, and once more as on one that has neither the signal scope of Landlock (Linux before 6.12) nor namespaces (most
containers), where only the filter is left. What is attacked belongs to this file: a process, two sockets, a file.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.episodes.sandbox import sandbox as sandboxes
from headrace.episodes.sandbox.kernel import seccomp, syscalls
from headrace.episodes.sandbox.sandbox import Sandbox, SandboxResult
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits
from support.few import few
from support.runs.beside import Beside, until
from support.runs.processes import descendants

LIMITS = SandboxLimits(cpu_seconds=2, seconds=30.0, memory=256 << 20, disk=1 << 20, files=8, threads=24, output=20_000)
pytestmark = pytest.mark.skipif(
    not (syscalls.landlock_version() and seccomp.known()), reason="the kernel has no Landlock or no filters"
)

OLDER = (
    "import sys; from headrace.episodes.sandbox import zygote; from headrace.episodes.sandbox.kernel import syscalls; "
    "syscalls.landlock_version = lambda: 3; zygote.enter_namespaces = lambda trial: False; zygote.main(sys.argv[1:])"
)
"""The process that makes calls, as on Linux 6.2 in a container."""

PREFIX = """
import array, ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result

def function(name, *arguments):
    result = getattr(libc, name)(*[ctypes.c_long(one) if isinstance(one, int) else one for one in arguments])
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result

def attack(*works):
    for work in works:
        try:
            found = work()
        except (OSError, AttributeError, ValueError, RuntimeError, MemoryError, OverflowError):
            continue
        print("COULD", work.__name__, found)
"""


class Host(NamedTuple):
    """What is attacked."""

    victim: subprocess.Popen[bytes]
    inbox: socket.socket
    listening: socket.socket
    abstract: socket.socket
    file: Path

    @property
    def names(self) -> dict[str, Any]:
        return {
            "VICTIM": self.victim.pid,
            "INBOX": self.inbox.getsockname(),
            "LISTENING": self.listening.getsockname(),
            "ABSTRACT": self.abstract.getsockname(),
            "FILE": str(self.file),
            "LIBRARY": os.__file__,
        }

    def unharmed(self) -> bool:
        state = os.stat(self.file)
        for inbox in (self.inbox, self.abstract):
            with pytest.raises(BlockingIOError):
                inbox.recv(1, socket.MSG_DONTWAIT)
        self.listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            self.listening.accept()
        return (
            self.victim.poll() is None
            and (self.file.read_text(), state.st_mode & 0o777, state.st_mtime) == ("kept", 0o640, 1000)
            and os.getpriority(os.PRIO_PROCESS, self.victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
            and os.sched_getaffinity(self.victim.pid) == os.sched_getaffinity(0)
        )


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    place = tmp_path_factory.mktemp("host")
    file = place / "file"
    file.write_text("kept")
    file.chmod(0o640)
    os.utime(file, (1000, 1000))
    command = [sys.executable, "-I", "-S", "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    made = [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    inbox, listening, abstract = made
    inbox.bind(str(place / "inbox"))
    listening.bind(str(place / "listening"))
    listening.listen()
    abstract.bind(f"\0headrace-attacked-{os.getpid()}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None and victim.stdout.readline() == b"up\n"
        yield Host(victim, inbox, listening, abstract, file)
    for one in made:
        one.close()


@pytest.fixture(scope="module", params=["this kernel", "an older one"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "an older one":
            patch.setattr(sandboxes, "_ZYGOTE", ("-P", "-c", OLDER))
        made = Sandbox(LIMITS)
        assert made.run("1").out == "1\n"
    assert (made.facts["landlock"], made.facts["in_memory"]) == (3, False) or request.param == "this kernel"
    yield made
    made.close()


def program(code: str, **names: Any) -> str:
    return PREFIX + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + textwrap.dedent(code)


# --- what must not be possible ---------------------------------------------------------------------------------------

REFUSED = {
    "sockets of other processes": """
        def socket_of(family, kind):
            return lambda: socket.socket(family, kind)
        def datagram():
            for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM): return one.sendto(b"hello", INBOX)
        def packets():
            for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET): return one.connect(LISTENING)
        def to_abstract():
            for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM): return one.sendto(b"hello", ABSTRACT)
        def with_descriptors():
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1]))]
            for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM): return one.sendmsg([b"x"], rights, 0, INBOX)
        a, b = socket.socketpair()
        def stream_connects(): return a.connect(LISTENING)
        def stream_sends_elsewhere(): return a.sendto(b"x", INBOX)
        def stream_sends_a_message_elsewhere(): return a.sendmsg([b"x"], [], 0, INBOX)
        def binds(): return a.bind("")
        def listens(): return a.listen()
        def accepts(): return a.accept()
        def handle_of_its_maker(): return socket.socket(fileno=os.dup(3)).getsockopt(1, 77)
        def filter_of_a_socket(): return a.setsockopt(1, 26, struct.pack("HxxxxxxQ", 0, 0))
        attack(datagram, packets, to_abstract, with_descriptors, stream_connects, stream_sends_elsewhere,
               stream_sends_a_message_elsewhere, binds, listens, accepts, handle_of_its_maker, filter_of_a_socket,
               *[socket_of(family, kind) for family in (1, 2, 10, 16, 17, 38, 40) for kind in (1, 2, 3, 5)])
        a.send(b"kept"); print(b.recv(4))
        """,
    "signals by the owner of a descriptor": """
        reading, writing = os.pipe()
        def owner(): fcntl.fcntl(reading, fcntl.F_SETOWN, VICTIM); return fire()
        def owner_of_a_group(): fcntl.fcntl(reading, fcntl.F_SETOWN, -os.getppid()); return fire()
        def owner_ex(): fcntl.fcntl(reading, 15, struct.pack("ii", 1, VICTIM)); return fire()
        def owner_by_ioctl(): fcntl.ioctl(a, 0x8901, struct.pack("i", VICTIM)); return fire()
        def group_by_ioctl(): fcntl.ioctl(a, 0x8902, struct.pack("i", VICTIM)); return fire()
        def chosen_signal(): return fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
        def asynchronous(): return fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | 0o20000)
        def asynchronous_by_ioctl(): return fcntl.ioctl(reading, 0x5452, struct.pack("i", 1))
        def upper_half(): return call(FCNTL, reading, 1 << 32 | fcntl.F_SETOWN, VICTIM)
        a, b = socket.socketpair()
        def fire():
            fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | 0o20000)
            return os.write(writing, b"x")
        attack(owner, owner_of_a_group, owner_ex, owner_by_ioctl, group_by_ioctl, chosen_signal, asynchronous, asynchronous_by_ioctl, upper_half)
        """,
    "signals": """
        def to(pid): return lambda: os.kill(pid, 0)
        def killed(): return os.kill(VICTIM, 9)
        def thread(): return libc.tgkill(VICTIM, VICTIM, 9) or 1 / 0
        def queued(): return call(SIGQUEUE, VICTIM, 9, ctypes.create_string_buffer(128))
        def by_descriptor(): return signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)
        def by_timer():
            event = struct.pack("QiiiI40x", 0, 9, 4, VICTIM, 0)
            return function("timer_create", 1, event, ctypes.create_string_buffer(8))
        def by_message():
            queue = function("mq_open", b"/headrace", os.O_CREAT | os.O_RDWR, 0o600, 0)
            return queue
        def at_the_end_of_its_parent(): return call(PRCTL, 1, 9, 0, 0, 0)
        def other_session(): return os.setsid()
        def other_group(): return os.setpgid(0, os.getppid())
        attack(killed, queued, by_descriptor, by_timer, by_message, at_the_end_of_its_parent, other_session, other_group,
               *[to(pid) for pid in (VICTIM, os.getppid(), 1, 0, -1, -VICTIM, 2)])
        if libc.tgkill(VICTIM, VICTIM, 9) == 0 or libc.killpg(VICTIM, 9) == 0: print("COULD tgkill")
        """,
    "memory and descriptors of others": """
        def vector(): return (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
        def reads(): return function("process_vm_readv", VICTIM, vector(), 1, vector(), 1, 0)
        def writes(): return function("process_vm_writev", os.getppid(), vector(), 1, vector(), 1, 0)
        def traces(): return function("ptrace", 16, VICTIM, 0, 0)
        def seizes(): return function("ptrace", 0x4206, os.getppid(), 0, 0)
        def takes_a_descriptor(): return call(438, os.pidfd_open(os.getppid()), 0, 0)
        def takes_a_descriptor_of_its_own(): return call(438, 3, 0, 0)
        def opened(path): return lambda: os.open(path, os.O_RDONLY)
        def advises(): return call(440, 3, vector(), 1, 21, 0)
        attack(reads, writes, traces, seizes, takes_a_descriptor, takes_a_descriptor_of_its_own, advises,
               *[opened(f"/proc/{pid}/{what}") for pid in (1, "self", VICTIM, os.getppid()) for what in
                 ("mem", "environ", "cmdline", "maps", "fd", "fd/0", "root", "task", "stack", "syscall")],
               *[opened(f"/proc/{pid}/{what}") for pid in (1, VICTIM, os.getppid()) for what in ("ns/mnt", "ns/user", "cwd", "exe")])
        """,
    "limits and priorities of others": """
        def limit(): return resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))
        def limit_of_its_maker(): return resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
        def priority(): return os.setpriority(os.PRIO_PROCESS, VICTIM, 19)
        def priority_of_all(): return os.setpriority(os.PRIO_USER, os.getuid(), 19)
        def cores(): return os.sched_setaffinity(VICTIM, {0})
        def scheduler(): return os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))
        def more_time(): return resource.setrlimit(resource.RLIMIT_CPU, (99, 99))
        def more_memory(): return resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        attack(limit, limit_of_its_maker, priority, priority_of_all, cores, scheduler, more_time, more_memory)
        """,
    "processes and programs": """
        import subprocess, multiprocessing
        def forks(): return os.fork()
        def spawns(): return os.posix_spawn("/bin/true", ["true"], {})
        def runs(): return subprocess.run(["true"])
        def process(): return multiprocessing.Process(target=print).start()
        def replaced(): return os.execv(sys.executable, ["python"])
        def from_memory():
            descriptor = os.memfd_create("x"); os.write(descriptor, open(LIBRARY, "rb").read(100)); os.execve(descriptor, ["x"], {})
        def clones(flags): return lambda: call(CLONE, flags, 0, 0, 0, 0)
        def clones_by_structure(): return call(435, struct.pack("8Q24x", 0, 0, 0, 0, 17, 0, 0, 0), 64)
        attack(forks, spawns, runs, process, replaced, from_memory, clones_by_structure,
               *[clones(flags) for flags in (17, 0x4111, 0x8011, 0x10000000 | 17, 0x20000000 | 17, 0x40000000 | 17, 0)])
        """,
    "files of others": """
        def opens(path, flags): return lambda: os.open(path, flags)
        def mode(): return os.chmod(FILE, 0o777)
        def owner(): return os.chown(FILE, os.getuid(), -1)
        def time_of_it(): return os.utime(FILE, (5, 5))
        def shortens(): return os.truncate(FILE, 0)
        def removes(): return os.unlink(FILE)
        def renames(): return os.rename(FILE, "mine")
        def attribute(): return os.setxattr(FILE, "user.x", b"x")
        def attributes(): return os.listxattr(FILE)
        def through_a_link(): os.symlink(FILE, "link"); return open("link").read()
        def through_a_hard_link(): os.link(FILE, "hard"); return open("hard").read()
        def pipe_with_a_name(): return os.mkfifo("fifo")
        def socket_with_a_name(): return os.mknod("socket", 0o140600)
        def device(): return os.mknod("kmsg", 0o20600, os.makedev(1, 11))
        def mode_of_a_library(): return os.fchmod(os.open(LIBRARY, os.O_RDONLY), 0o644)
        def locks_a_library(): return fcntl.flock(os.open(LIBRARY, os.O_RDONLY), fcntl.LOCK_EX)
        def leases_a_library(): return fcntl.fcntl(os.open(LIBRARY, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
        def told_of_changes(): return fcntl.fcntl(os.open(os.path.dirname(LIBRARY), os.O_RDONLY), fcntl.F_NOTIFY, 1)
        def watches(): return function("inotify_init")
        def standard_input(): return os.write(0, b"x")
        def handle(): return function("name_to_handle_at", -100, FILE.encode(), ctypes.create_string_buffer(200), ctypes.create_string_buffer(8), 0)
        attack(mode, owner, time_of_it, shortens, removes, renames, attribute, attributes, through_a_link, through_a_hard_link,
               pipe_with_a_name, socket_with_a_name, device, mode_of_a_library, locks_a_library, leases_a_library,
               told_of_changes, watches, standard_input, handle,
               *[opens(path, flags) for path in (FILE, os.path.dirname(FILE), "/", "/etc/passwd", "/dev/shm", "/dev/tty", "/dev/ptmx", "/sys", "/proc", "/run")
                 for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY)],
               *[opens(place + "/headrace-x", os.O_CREAT | os.O_WRONLY) for place in (os.path.dirname(FILE), "/tmp", "/dev/shm", "..")])
        """,
    "memory that outlives the call": """
        def shared(): return function("shmget", 0, 4096, 0o1600)
        def messages(): return function("msgget", 0, 0o1600)
        def semaphores(): return function("semget", 0, 1, 0o1600)
        def posix(): return function("mq_open", b"/headrace-x", os.O_CREAT | os.O_RDWR, 0o600, 0)
        def anonymous(): return os.memfd_create("x")
        def key(): return call(KEYCTL, 0, -4, 1)
        attack(shared, messages, semaphores, posix, anonymous, key)
        """,
    "every other call of the kernel": """
        def tried(number):
            try: return call(number, 0, 0, 0, 0, 0, 0)
            except OSError as error: return error.errno
        own = (335, 336)  # uretprobe and uprobe, which no filter sees on x86-64; the kernel ends who is not its own trampoline
        print([number for number in range(600) if number not in (*LISTED, *own) and tried(number) not in (errno.EPERM, errno.ENOSYS)])
        """,
}
"""Programs that print what they could do."""


def numbers(name: str, x86: int, arm: int) -> dict[str, int]:
    return {name: x86 if platform.machine() == "x86_64" else arm}


@pytest.mark.parametrize("name", REFUSED)
def test_what_must_not_be_possible(name, sandbox, host):
    every = [*seccomp.ALLOWED.values(), *(one.numbers for one in seccomp.checked(0).values())]
    names = {
        "LISTED": [one[0 if platform.machine() == "x86_64" else 1] for one in every],
        **numbers("FCNTL", 72, 25), **numbers("SIGQUEUE", 129, 138), **numbers("PRCTL", 157, 167), **numbers("CLONE", 56, 220),
        **numbers("KEYCTL", 250, 219),
    }  # fmt: skip
    result = sandbox.run(program(REFUSED[name], **names, **host.names))
    kept = {"sockets of other processes": "b'kept'\n", "every other call of the kernel": "[]\n"}.get(name, "")
    assert (result.reason, result.out) == ("", kept), result
    assert host.unharmed()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is for x86-64")
def test_the_other_doors_of_the_processor(sandbox):
    """Calls of 32 bits end the process; those of x32 do not exist."""
    code = """
    room = mmap.mmap(-1, 4096, prot=7)
    room.write(bytes.fromhex("b814000000cd80c3"))  # getpid by int 0x80
    print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(room)))())
    """
    result = sandbox.run(program(code))
    assert (result.reason, "SIGSYS" in result.detail) == ("died", True), result
    assert sandbox.run(program("attack(lambda: call(0x40000000 + 57), lambda: call(0x40000000 + 39))")).out == ""


# --- everybody's share -----------------------------------------------------------------------------------------------

BOMBS = {
    "processes": ("while True: os.fork()", "raised", "PermissionError"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "memory", "256 MiB"),
    "memory by mappings": ("x = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))", "raised", "Cannot allocate memory"),
    "output": ("while True: os.write(1, b'x' * 100_000)", "output", "20,000 bytes"),
    "errors": ("while True: os.write(2, b'x' * 100_000)", "output", "20,000 bytes"),
    "one file": ("f = open('x', 'wb', buffering=0)\nwhile f.write(bytes(100_000)) == 100_000: pass\nf.write(b'x')", "raised", "OSError"),
    "a file with a hole": ("os.ftruncate(os.open('x', os.O_RDWR | os.O_CREAT), 1 << 40)", "raised", "OSError"),
    "descriptors": ("x = []\nwhile True: x.append(os.pipe())", "raised", "Too many open files"),
}  # fmt: skip
SLEEPS = {
    "sleep with all signals ignored": "for one in range(1, 65):\n    try: signal.signal(one, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(1000)",
    "all signals blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nthreading.Event().wait()",
    "a thread that does not end": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "at its end": "import atexit\natexit.register(time.sleep, 1000)\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}
"""All of them end by the clock."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_its_own_call(name, sandbox):
    code, reason, word = BOMBS[name]
    result = sandbox.run(program(code))
    assert (result.reason, word in result.detail) == (reason, True), result


@pytest.mark.parametrize(
    "code", ["while True: pass", "[threading.Thread(target=sum, args=(range(10 ** 12),)).start() for _ in range(8)]"]
)
def test_time_has_a_limit(code):
    own = Sandbox(LIMITS._replace(cpu_seconds=1))
    result = own.run(
        program("for one in (signal.SIGXCPU, signal.SIGTERM): signal.signal(one, signal.SIG_IGN)\n" + code)
    )
    assert (result.reason, "1 s of CPU time" in result.detail) == ("cpu", True), result
    own.close()


def test_output_below_its_limit_is_a_result_whatever_its_bytes_are():
    """JSON writes a control character as six bytes."""
    own = Sandbox(LIMITS._replace(output=(2 << 20) + 100))
    code = "for one in (1, 2): os.write(one, b'\\x01' * (2 << 20))"
    result = own.run(program(code))
    assert (result.reason, result.out, result.err) == ("", "\x01" * (2 << 20), "\x01" * (2 << 20)), result.detail
    own.close()


def test_files_together_have_a_limit(sandbox):
    code = "for n in range(4): open(str(n), 'wb').write(bytes(400_000))\ntime.sleep(1000)"
    result = sandbox.run(program(code))
    assert result.reason == "disk" or "No space left" in result.detail, result


def test_code_that_waits_for_ever_ends_by_the_clock():
    own = Sandbox(LIMITS._replace(seconds=0.2))
    for name, code in SLEEPS.items():
        assert own.run(program(code)).reason == "time", name
    own.close()


NATIVE = """
attributes, thread = ctypes.create_string_buffer(128), ctypes.c_size_t()
libc.pthread_attr_init(attributes)
libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 17))
wait = ctypes.cast(libc.pause, ctypes.c_void_p)
count = 0
while count < 8000 and libc.pthread_create(ctypes.byref(thread), attributes, wait, None) == 0: count += 1
print(count, flush=True)
"""


def test_threads_have_a_limit(sandbox):
    assert sandbox.run(program(NATIVE)).out == f"{LIMITS.threads - 1}\n"
    ended_ones_do_not_count = "for _ in range(100):\n    one = threading.Thread(target=int); one.start(); one.join()\nprint(threading.active_count())"
    assert sandbox.run(program(ended_ones_do_not_count)).out == "1\n"


def test_threads_that_are_started_at_once_are_at_most_twice_as_many(sandbox):
    code = (
        NATIVE.partition("count = 0")[0]
        + """
started, together = [], threading.Barrier(12)
def breed():
    own = ctypes.c_size_t()
    together.wait()
    while libc.pthread_create(ctypes.byref(own), attributes, wait, None) == 0: started.append(1)
threading.stack_size(1 << 17)
breeders = [threading.Thread(target=breed) for _ in range(12)]
for one in breeders: one.start()
for one in breeders: one.join()
print(1 + len(breeders) + len(started), flush=True)
os._exit(0)
"""
    )
    most = int(sandbox.run(program(code)).out)
    assert LIMITS.threads <= most <= 2 * LIMITS.threads


def test_the_kernel_memory_of_a_call_is_bounded(sandbox):
    """Pipes, sockets and descriptors under way are memory that the limit of address space does not count."""
    code = """
    held = 0
    ends = []
    try:
        while True:
            for one in (*os.pipe(), *(end.detach() for end in socket.socketpair())):
                ends.append(one)
                os.set_blocking(one, False)
    except OSError: pass
    for one in ends:
        try: fcntl.fcntl(one, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: held += os.write(one, bytes(1 << 16))
        except OSError: pass
    print(held)
    """
    assert int(sandbox.run(program(code)).out) < 64 << 20


def test_signals_that_wait_are_bounded(sandbox):
    """All processes of the user share how many may wait."""
    code = "print(resource.getrlimit(resource.RLIMIT_SIGPENDING))\nresource.setrlimit(resource.RLIMIT_SIGPENDING, (99, 99))"
    result = sandbox.run(program(code))
    assert (result.reason, result.out) == ("raised", "(64, 64)\n"), result


def test_a_bomb_beside_honest_calls_changes_nothing_for_them():
    """Threads of one call do not count for another. The count is that of the host."""
    other = Sandbox(LIMITS._replace(seconds=3.0), parallel=2)
    ended: list[SandboxResult] = []
    bomb = Beside(lambda: ended.append(other.run(program(NATIVE + "time.sleep(1000)"))))
    until(lambda: any(threads(pid) >= LIMITS.threads for pid in descendants(os.getpid())))
    honest = "import threading\none = threading.Thread(target=print, args=(1,)); one.start(); one.join()"
    assert [other.run(honest).out for _ in range(3)] == ["1\n"] * 3
    bomb.join()
    assert (ended[0].reason, ended[0].out) == ("time", f"{LIMITS.threads - 1}\n")
    other.close()


def threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


# --- what must be possible -------------------------------------------------------------------------------------------

HONEST = {
    "asyncio": """
        import asyncio
        async def main():
            left, right = socket.socketpair()
            reading, kept = await asyncio.open_connection(sock=left)
            unread, writing = await asyncio.open_connection(sock=right)
            writing.write(b"line\\n")
            await writing.drain()
            return await asyncio.to_thread(str, await reading.readline())
        print(asyncio.run(main()))
        """,
    "threads up to the limit": f"""
        from concurrent.futures import ThreadPoolExecutor
        threading.stack_size(1 << 20)
        with ThreadPoolExecutor({LIMITS.threads - 1}) as pool:
            barrier = threading.Barrier({LIMITS.threads - 1})
            print(len(list(pool.map(lambda _: barrier.wait(), range({LIMITS.threads - 1})))))
        """,
    "numpy": "import numpy as np\nprint(int(np.linalg.det(np.eye(50)) + np.arange(4).reshape(2, 2).trace()))",
    "a database": """
        import sqlite3
        base = sqlite3.connect("base")
        base.execute("create table t (a)")
        base.executemany("insert into t values (?)", [(1,), (2,)])
        base.commit()
        print(base.execute("select sum(a) from t").fetchone())
        """,
    "files": """
        import pathlib, shutil, tempfile, zipfile
        pathlib.Path("a").write_text("text")
        shutil.copyfile("a", "b"); os.rename("b", "c"); os.makedirs("d"); os.symlink("a", "l"); os.remove("c")
        with open("a", "r+b") as file, mmap.mmap(file.fileno(), 0) as room: room[0:1] = b"T"; os.fsync(file.fileno())
        with tempfile.TemporaryDirectory() as place: pathlib.Path(place, "x").touch()
        with zipfile.ZipFile("z", "w") as packed: packed.write("a")
        fcntl.lockf(os.open("a", os.O_RDWR), fcntl.LOCK_EX)
        print(pathlib.Path("l").read_text(), sorted(os.listdir()), os.isatty(1), os.cpu_count() > 0)
        """,
    "signals of its own": """
        signal.signal(signal.SIGALRM, lambda *_: print("rang"))
        signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGALRM); signal.raise_signal(signal.SIGALRM)
        signal.pthread_kill(threading.get_ident(), 0)
        """,
}
PRINTED = {
    "asyncio": "b'line\\n'\n",
    "threads up to the limit": f"{LIMITS.threads - 1}\n",
    "numpy": "4\n",
    "a database": "(3,)\n",
    "files": "Text ['a', 'd', 'l', 'z'] False True\n",
    "signals of its own": "rang\nrang\nrang\n",
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run(name, sandbox):
    result = sandbox.run(program(HONEST[name]))
    assert (result.reason, result.out) == ("", PRINTED[name]), result


LEAVES = {
    "deep": "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "unreadable": "os.mkdir('d', 0o300); open('d/f', 'w').write('x')",
    "unwritable": "os.mkdir('d'); os.mkdir('d/e', 0o100)",
}


@pytest.mark.parametrize("what", few(LEAVES, keep=1))
def test_a_call_leaves_nothing_to_the_next_one(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk, where its directories are removed one by one. (Whoever is root can read all of them.)"""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox = Sandbox(LIMITS._replace(files=100_000), in_memory=False)
    try:
        made = sandbox.run(f"import os\n{LEAVES[what]}")
        assert made.reason in ("", "disk"), made
        after = sandbox.run("import os; print(os.listdir('.'))")
        assert (after.reason, after.out) == ("", "[]\n"), after
    finally:
        sandbox.close()
    assert list(tmp_path.iterdir()) == []
