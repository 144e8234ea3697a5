"""Everything that a hostile or careless program does is a result with a reason for its one call, and the next call works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.episodes.sandbox.isolation import examine_isolation
from headrace.episodes.sandbox.sandbox import Sandbox, SandboxLost
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits
from support.few import few
from support.runs.beside import until
from support.runs.processes import alive, descendants

LIMITS = SandboxLimits(cpu_seconds=2, seconds=20.0, memory=256 << 20, disk=2 << 20, files=8, threads=64, output=10_000)


def lacking() -> list[str]:
    """The kinds of isolation that this machine does not have."""
    return [one.kind for one in examine_isolation(LIMITS) if not one.there]


pytestmark = pytest.mark.skipif(bool(lacking()), reason="the machine cannot isolate code")


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(LIMITS)
    yield made
    made.close()


HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "raised", "PermissionError"),
    "a program": ("import subprocess; subprocess.run(['true'])", "raised", "PermissionError"),
    "multiprocessing": ("import multiprocessing as m; m.Process(target=print).start()", "raised", "PermissionError"),
    "a new program": ("import os; os.execv('/bin/true', ['true'])", "raised", "PermissionError"),
    "memory": ("x = bytearray(1 << 30)", "memory", "256 MiB"),
    "memory by threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "raised", "can't start new thread",
    ),
    "memory in a list": ("x = []\nwhile True: x.append(' ' * 10_000_000)", "memory", "256 MiB"),
    "memory without a mapping": ("import os; os.memfd_create('x')", "raised", "PermissionError"),
    "endless loop": ("while True: pass", "cpu", "2 s of CPU time"),
    "endless loop that catches all": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    try: 1 / 0\n    except BaseException: pass", "cpu", "CPU time"),
    "the interpreter's lock": ("9 ** 9 ** 9", "cpu", "CPU time"),
    "a large file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(100_000))", "raised", "OSError"),
    "many files": ("for n in range(10_000): open(f'{n}', 'w').close()", "raised", "No space left"),
    "much output": ("print('x' * 10_000_000)", "output", "10,000 bytes"),
    "much output, slowly": ("while True: print('x')", "output", "10,000 bytes"),
    "much on standard error": ("import sys\nsys.stderr.write('x' * 10_000_000)", "output", "10,000 bytes"),
    "the passwords": ("open('/etc/passwd').read()", "raised", "PermissionError"),
    "a process's environment": ("open('/proc/self/environ').read()", "raised", "PermissionError"),
    "the home": (f"import os; os.listdir({str(Path.home())!r})", "raised", "PermissionError"),
    "a sibling directory": ("import os; os.listdir('..')", "raised", "PermissionError"),
    "a link out of it": ("import os; os.symlink('/etc', 'x'); os.listdir('x')", "raised", "PermissionError"),
    "shared memory": ("open('/dev/shm/headrace-x', 'w')", "raised", "PermissionError"),
    "modes of files": (f"import os; os.chmod({str(Path.home())!r}, 0o777)", "raised", "PermissionError"),
    "a socket": ("import socket; socket.socket()", "raised", "PermissionError"),
    "a name server": ("import socket; socket.getaddrinfo('example.com', 80)", "raised", "gaierror"),
    "its parent": ("import os; os.kill(os.getppid(), 9)", "raised", "PermissionError"),
    "all processes": ("import os; os.kill(-1, 9)", "raised", "PermissionError"),
    "its group": ("import os; os.killpg(0, 9)", "raised", "PermissionError"),
    "others' priority": ("import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "raised", "PermissionError"),
    "others' limits": ("import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))", "raised", "PermissionError"),
    "its own limits": ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99))", "raised", "not allowed to raise"),
    "a mount": ("import ctypes, os\nif ctypes.CDLL(None, use_errno=True).umount2(os.getcwd().encode(), 2): raise OSError(ctypes.get_errno(), 'refused')", "raised", "Errno 1"),
    "sys.exit": ("import sys; sys.exit(3)", "exit", "exit code 3"),
    "os._exit": ("import os; os._exit(7)", "exit", "exit code 7"),
    "a crash": ("import ctypes; ctypes.string_at(0)", "died", "SIGSEGV"),
    "its own end": ("import os; os.kill(os.getpid(), 9)", "died", "SIGKILL"),
    "a stop": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time", "1 s"),
    "sleep": ("import time; time.sleep(1000)", "time", "1 s"),
    "waiting for input": ("import os, time\nr, w = os.pipe()\nos.read(r, 1)", "time", "1 s"),
    "no Python": ("def f(:", "raised", "SyntaxError"),
    "a null": ("x = '\0'", "raised", "null bytes"),
    "deep recursion": ("def f(): f()\nf()", "raised", "RecursionError"),
    "deep nesting": ("(" * 1000, "raised", "SyntaxError"),
    "closed descriptors": ("import os; os.closerange(0, 64); raise ValueError", "raised", ""),
}  # fmt: skip
"""A program, the reason of its end, and a word of the detail."""


@pytest.mark.parametrize("name", few(HOSTILE, keep=8))
def test_hostile_code_ends_its_own_call(name, sandbox):
    code, reason, word = HOSTILE[name]
    if reason == "time":
        sandbox = Sandbox(LIMITS._replace(seconds=1.0))
    result = sandbox.run(code)
    assert (result.reason, word in result.detail) == (reason, True), result
    assert sandbox.run("print(40 + 2)").out == "42\n"
    if reason == "time":
        sandbox.close()


def test_the_table_can_fail(sandbox):
    """Without the filter and without Landlock, the same programs do what they want."""
    code = "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\nopen('/etc/passwd').read()"
    direct = subprocess.run([sys.executable, "-c", code], check=False)
    assert direct.returncode == 0
    assert sandbox.run(code).reason == "raised"


def test_ordinary_programs_run(sandbox):
    code = """
import asyncio, dataclasses, os, tempfile, threading
@dataclasses.dataclass
class Point:
    x: int
async def later():
    await asyncio.sleep(0.001)
    return Point(int(input()))
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
with open("note", "w") as file: file.write("kept")
os.rename("note", "renamed")
print(open("renamed").read(), os.listdir())
with tempfile.TemporaryFile() as file: file.write(b"x")
asyncio.run(later())
"""
    result = sandbox.run(code, "7")
    assert (result.reason, result.out) == ("", "thread\nkept ['renamed']\nPoint(x=7)\n"), result


AT_THE_END = {
    "what is registered": ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n", ""),
    "an output that is written at the end": (
        "import atexit, io, os\nout = io.StringIO()\natexit.register(lambda: os.write(1, out.getvalue().encode()))\nout.write('5') and None",
        "5", "",
    ),
    "behind an exception": ("import atexit\natexit.register(print, 'bye')\nraise ValueError", "bye\n", "raised"),
    "what ends the process": ("import atexit, os\natexit.register(os._exit, 3)\nprint('hi', flush=True)", "hi\n", "exit"),
    "what raises": ("import atexit\natexit.register(int, 'x')\nprint('hi')", "hi\n", ""),
    "an idle executor": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\nprint(pool.submit(pow, 2, 5).result())",
        "32\n", "",
    ),
    "a daemon": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nprint('hi')", "hi\n", ""),
}  # fmt: skip
"""Programs with what the interpreter prints of them, and the reason that they end for."""


@pytest.mark.parametrize("name", few(AT_THE_END, keep=4))
def test_the_end_of_a_program_is_that_of_the_interpreter(name, sandbox):
    code, out, reason = AT_THE_END[name]
    result = sandbox.run(code)
    assert (result.out, result.reason) == (out, reason), result


def test_an_output_of_exactly_the_limit_is_whole(sandbox):
    """Beside the mark that a confined process writes before it runs code."""
    for stream in ("stdout", "stderr"):
        code = f"import sys\nsys.{stream}.write('\\0' * {{}}) and None"
        fits, over = (sandbox.run(code.format(size)) for size in (LIMITS.output, LIMITS.output + 1))
        assert (fits.reason, fits.out + fits.err) == ("", "\0" * LIMITS.output), fits.detail
        assert (over.reason, len(over.out + over.err)) == ("output", LIMITS.output), over.detail


def test_a_call_leaves_nothing_to_the_next(sandbox):
    assert sandbox.run("import builtins\nbuiltins.len = None\nopen('x', 'w').write('y')\nz = 1").reason == ""
    result = sandbox.run("import os\nprint(len(os.listdir()), 'z' in globals())")
    assert result.out == "0 False\n"


def test_the_environment_of_the_user_is_not_there(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    own = Sandbox(LIMITS)
    assert "HF_TOKEN" not in own.run("import os\nprint(dict(os.environ))").out
    own.close()


def test_files_on_the_disk_are_watched():
    """One file has a limit, and all of them are looked at."""
    own = Sandbox(LIMITS, in_memory=False)
    waits = "import time\nfor n in range(6):\n    open(f'{n}', 'wb').write(bytes(1_000_000))\n    time.sleep(0.2)"
    assert own.run(waits).reason == "disk"
    assert own.run("import time\nfor n in range(30): open(f'{n}', 'w').close()\ntime.sleep(9)").reason == "disk"
    assert own.run("open('x', 'wb').write(bytes(10_000_000))").detail.startswith("OSError")
    assert own.run("import os\nprint(os.listdir())").out == "[]\n"
    own.close()


def test_no_process_outlives_its_caller():
    code = (
        "import os, threading, time\nfrom headrace.episodes.sandbox.sandbox import Sandbox, SandboxLimits\n"
        f"own = Sandbox({LIMITS._replace(seconds=1000.0)})\n"
        "threading.Thread(target=own.run, args=('import time\\ntime.sleep(1000)',), daemon=True).start()\n"
        "print('ready', flush=True)\ntime.sleep(1000)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None and caller.stdout.readline() == "ready\n"
    until(lambda: len(descendants(caller.pid)) == 2)  # the one that makes calls, and the call
    below = descendants(caller.pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    until(lambda: not any(map(alive, below)))


def makers() -> set[int]:
    """The processes of this one that make calls."""
    found = set()
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # gone meanwhile
            if alive(pid) and "zygote" in Path(f"/proc/{pid}/cmdline").read_text():
                found.add(pid)
    return found


def test_a_process_that_makes_calls_may_die():
    own, before = Sandbox(LIMITS), makers()
    assert own.run("1").out == "1\n"
    (pid,) = makers() - before
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="ended with exit code -9|could not be sent"):
        own.run("2")
    assert own.run("3").out == "3\n"
    own.close()
    assert own.run("4").out == "4\n"
    own.close()


def test_directories_are_removed_with_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = Sandbox(LIMITS)
    assert own.run("open('x', 'w').write('y')").reason == ""
    assert len(list(tmp_path.iterdir())) == 1
    own.close()
    assert list(tmp_path.iterdir()) == []
