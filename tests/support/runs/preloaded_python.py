"""Python processes with headrace's libraries loaded from their start, for what tests need beside that which they test: servers, runs to kill.

A new interpreter imports torch and transformers for seconds, and the process from which it forks its workers does so again. Here one
process does it once for all tests, and is forked: the copy is the program, and forks the server of its workers (`fork_server.py`)
from itself. The workers of xdist are copies too, each with a template of its own. A command whose own start is tested is started as a
person starts it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import Popen2IOMaster

from headrace.processes.health.family import PARENT, parent_variables, signal_me_when_orphaned
from headrace.processes.launch import forking
from headrace.processes.launch.forking import OWN, ROOM, SERVER, CannotFork, ForkReply, ForkRequest, can_fork_for_parent
from headrace.processes.launch.local import ForkedProcess, environment
from headrace.run.rehearsal import machine

MODULES = (
    "headrace.cli",
    "headrace.run.run",
    "headrace.serve.start",
    "headrace.testing.servers.fake_vllm",
    "headrace.testing.servers.fake_sglang",
)
"""Those that the programs need, besides the libraries of workers."""

MODULES_OF_TESTS = (
    "accelerate",
    "anthropic",
    "beartype",
    "google.protobuf",
    "headrace.run.build",
    "jaxtyping",
    "jupyter_client",
    "matplotlib",
    "nbformat",
    "nltk",
    "openai",
    "peft",
    "reasoning_gym",
    "textarena",
    "tinker",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "transformers.models.mixtral.modeling_mixtral",
)
"""Those that tests need, whose import takes long. None of them starts a thread, as pandas does."""

_loaded = list(MODULES)
"""What the template of this process imports."""

TRIALS = "HEADRACE_TRIALS_OF_TESTS"
"""The environment variable with the folder of this suite in which workers keep the effects of trials, as they do for large models."""

if TRIALS not in os.environ:
    _kept = tempfile.TemporaryDirectory()
    os.environ[TRIALS] = _kept.name

ENVIRONMENT = environment(())
"""The template's. Tests change that of their process later."""

TESTS = "tests"
"""In place of the first word behind `python`: a worker of xdist."""

TEMPLATE = "HEADRACE_TEMPLATE"
"""The environment variable that tells a worker of xdist the number of its connection to a template of its own."""

_INHERITED = os.environ.pop(TEMPLATE, None)

LATER = (
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "COLUMNS",
    "SSL_CERT_FILE",
)
"""Variables that torch sets when a test first needs its compiler, headrace when it first shows a screen (`core/printing.py`), and tests. With
them each thread that trains would load all libraries anew."""

SERVED = 3
"""The number of the connection in a copy of the template that forks workers."""


class Program(subprocess.Popen[Any]):
    """As `subprocess.Popen`, of `[sys.executable, ...]`. Its standard input is empty unless one is given, and it has all variables of the process
    that is forked, besides those of `env`."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:  # type: ignore[override]
        if not can_fork_for_parent():
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        (_, _, _, _, cwd, env), streams = given[:6], given[9:15]
        into, _, _, out, _, err = streams
        files = {1: 1 if out < 0 else out, 2: 2 if err < 0 else err, **({} if into < 0 else {0: into})}
        try:
            self.pid = _forked(args[1:], os.environ if env is None else env, files, cwd or ".")
        finally:
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
        self._child_created = True


def _forked(words: Sequence[str], variables: Mapping[str, str], files: Mapping[int, int], directory: str = ".") -> int:
    """Returns the process id of a copy of the template. `files`: what is open in it, by the number that it has there."""
    answer, reply = os.pipe()
    place = os.open(directory, os.O_RDONLY)
    asked = ForkRequest(list(words), dict(variables), sorted(os.sched_getaffinity(0)), list(files))
    try:
        socket.send_fds(_template(), [msgspec.msgpack.encode(asked)], [reply, place, *files.values()])
    finally:
        os.close(reply)
        os.close(place)
    said = msgspec.msgpack.decode(os.read(answer, 1 << 16), type=ForkReply)
    os.close(answer)
    if said.refused:
        raise CannotFork(said.refused)
    return said.pid


def start(words: Sequence[str], variables: Mapping[str, str] | None = None) -> Program:
    """Starts a program that prints nowhere, with these variables besides those of this process. `words`: the words behind `python`."""
    nowhere = subprocess.DEVNULL
    return Program([sys.executable, *words], stdout=nowhere, stderr=nowhere, env={**os.environ, **(variables or {})})


def share_with_runs() -> None:
    """Lets the runs in this process have their workers forked by copies of the template too, and rehearsals ask a copy about torch."""
    if can_fork_for_parent():
        _take_servers_from(_forked_server)
        machine.ask_torch = _ask_torch


def _ask_torch() -> Program:
    """As `machine.ask_torch`, whose new interpreter imports torch for 2 s of CPU time. `headrace doctor` starts that one."""
    return Program(
        [sys.executable, "-c", machine.TORCH_PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _forked_server() -> tuple[socket.socket, ForkedProcess]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, tempfile.TemporaryFile() as printed:
        files = {1: printed.fileno(), 2: printed.fileno(), SERVED: theirs.fileno()}
        pid = _forked([SERVER], parent_variables(), files)
    return ours, ForkedProcess(pid)


class _TestWorker(Popen2IOMaster):
    """A worker of xdist. Where a library starts a thread when it is imported, it is a new interpreter, and the reason is printed."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        try:
            self.popen = Program([sys.executable, TESTS, *args[2:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except CannotFork as error:
            print(f"a worker of tests imports all by itself: {error}", file=sys.stderr)
            super().__init__(args, execmodel)
        else:
            Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


def share_with_workers_of_tests() -> None:
    """Lets xdist start its workers as copies of the template, which have the libraries of tests loaded."""
    if can_fork_for_parent():
        _loaded.extend(MODULES_OF_TESTS)
        gateway_io.Popen2IOMaster = _TestWorker
        _template()  # begins to load


@cache
def _template() -> socket.socket:
    """The process that is forked; it ends when this end of the connection is closed."""
    if _INHERITED is not None:
        return socket.socket(fileno=int(_INHERITED))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    begun = threading.Event()

    def begin() -> None:
        try:
            with theirs:
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *_loaded, ROOM],
                    pass_fds=[theirs.fileno()],
                    env={**ENVIRONMENT, **parent_variables()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        finally:
            begun.set()
        threading.Event().wait()

    # Linux ends it with the thread that started it (`family.py`), and the first test that asks may do so in a thread of its own.
    threading.Thread(target=begin, name="parent of preloaded programs", daemon=True).start()
    begun.wait()
    return ours


# -- in the process that is forked, and in its copies -----------------------------------------------------------------------------


def main() -> None:
    from headrace.run.worker import fork_server

    gc.disable()
    signal_me_when_orphaned(signal.SIGKILL)
    requests = socket.socket(fileno=int(sys.argv[1]))
    fork_server.load()
    for module in sys.argv[2:-1]:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()
    _serve(requests)


def _serve(requests: socket.socket) -> None:
    """The life of a process that forks programs, and of these."""
    from headrace.run.worker import fork_server

    found = fork_server.serve(requests, fork_server._unfit(requests.fileno()))
    if found is None:
        return
    request, files = found
    fork_server.become(request, files)
    if request.words == [SERVER]:
        _fork_workers(socket.socket(fileno=SERVED))
        return
    os.environ.pop(PARENT, None)
    os.environ.update(request.variables)
    if request.words[0] == TESTS:
        if _leave_a_template():
            _be_a_worker_of_tests()
            _end_after(request.words[1:])
    elif _fork_the_server():
        gc.enable()
        os.execve = _exec  # type: ignore[assignment]
        _end_after(request.words)


def _be_a_worker_of_tests() -> None:
    """Makes the process compute and give memory back as a new interpreter does: the template has the settings of a run's workers, which torch and glibc
    read when they were loaded."""
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if hasattr(
        libc := ctypes.CDLL(None), "mallopt"
    ):  # glibc's: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, with their defaults
        libc.mallopt(-1, 128 << 10)
        libc.mallopt(-3, 128 << 10)


def _leave_a_template() -> bool:
    """Forks the template of the programs that a worker of tests starts. Returns False in a program that is over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = os.getpid()
    if not os.fork():
        ours.close()
        os.setsid()
        os.environ[PARENT] = str(worker)
        signal_me_when_orphaned(signal.SIGKILL)
        for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY)):  # the worker's connection to xdist
            nowhere = os.open(os.devnull, mode)
            os.dup2(nowhere, number)
            os.close(nowhere)
        _serve(theirs)
        return False
    theirs.close()
    os.environ[TEMPLATE] = str(ours.detach())
    return True


def _fork_the_server() -> bool:
    """Forks the process from which the first workers of this program are forked. Returns False in a worker that is over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.getpid()
    if not (pid := os.fork()):
        ours.close()
        os.setsid()
        os.environ[PARENT] = str(program)
        _fork_workers(theirs)
        return False
    theirs.close()
    begin = forking.ForkServer.__init__

    def first() -> _Server:
        forking.ForkServer.__init__ = begin  # type: ignore[method-assign]
        return ours, ForkedProcess(pid)

    _take_servers_from(first)
    return True


def _fork_workers(requests: socket.socket) -> None:
    """The life of a process that forks workers, and of these."""
    from headrace.run.worker import fork_server, worker

    signal_me_when_orphaned(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (found := fork_server.serve(requests, fork_server._unfit(requests.fileno()))) is not None:
        fork_server.become(*found)
        _know_trials()
        worker.main()


def _know_trials() -> None:
    """Lets a worker take the effects of its trial from an earlier run of this suite with the same weights, if its own numbers are the same, bit for
    bit: half a second of CPU time for the smallest model. In `tests/orchestration/test_trial.py` they are computed."""
    from headrace.trainer.step import trainer

    if kept := os.environ.get(TRIALS):
        trainer.WORTH, trainer.cache_dir = 0, lambda: Path(kept)


_Server = tuple[socket.socket, ForkedProcess]
"""Our end of the connection to a process that forks workers, and the process."""


def _take_servers_from(give: Callable[[], _Server]) -> None:
    """Lets this process take those that fork its workers from here, where their libraries have read the same environment."""
    begin = forking.ForkServer.__init__

    def read_by_libraries(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name not in (*OWN, *LATER)}

    names = read_by_libraries(environment(()))

    def adopt(server: Any, wanted: Mapping[str, str]) -> None:
        if read_by_libraries(wanted) != names:
            begin(server, wanted)
            return
        server._owner, (server._requests, server._process) = os.getpid(), give()
        server._printed, server.has_forked = tempfile.TemporaryFile(), False  # noqa: SIM115
        server.close = weakref.finalize(server, forking._end, server._process, server._requests, server._owner)

    forking.ForkServer.__init__ = adopt  # type: ignore[method-assign]


def _exec(program: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """What a program becomes in place of itself: a worker, which needs the same libraries."""
    from headrace.run.worker import worker

    assert [program, *words[1:3]] == [sys.executable, "-m", worker.__name__], words
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [worker.__file__, *words[3:]]
    worker.main()
    raise SystemExit(0)


def _end_after(words: Sequence[str]) -> None:
    """Runs it and ends as Python would, but leaves its modules as they are: taking a copy of so many apart costs 0.4 s of CPU time."""
    try:
        _run(words)
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(words: Sequence[str]) -> None:
    """As `python WORDS`."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
