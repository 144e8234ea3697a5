"""Python processes with headrace's libraries loaded from their start, for what tests need beside that which they test: servers, runs to kill.

A new interpreter imports torch and transformers for seconds, and the process from which it forks its workers does so again. Here one
process does it once for all tests of a process, and is forked: the copy is the program, and forks the server of its workers (`fork_server.py`)
from itself. A command whose own start is tested is started as a person starts it.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headrace.observe.health.orphans import PARENT, of_this_process, signal_me_when_orphaned
from headrace.orchestration.workers.launch import preloaded
from headrace.orchestration.workers.launch.child import environment
from headrace.orchestration.workers.launch.clone import can_fork_for_parent
from headrace.orchestration.workers.launch.forked_process import ForkedProcess
from headrace.orchestration.workers.launch.preloaded import OWN, ROOM, ForkReply, ForkRequest

MODULES = ("headrace.cli", "headrace.serve.start", "headrace.serve.fakes.fake_vllm", "headrace.serve.fakes.fake_sglang")
"""Those that the programs need, besides the libraries of workers."""


class Program(subprocess.Popen[Any]):
    """As `subprocess.Popen`, of `[sys.executable, ...]`. Its standard input is empty, and it has all variables of the process that is forked,
    besides those of `env`."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:  # type: ignore[override]
        if not can_fork_for_parent():
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        (_, _, _, _, cwd, env), streams = given[:6], given[9:15]
        _, _, _, out, _, err = streams
        answer, reply = os.pipe()
        place = os.open(cwd or ".", os.O_RDONLY)
        standard = [1 if out < 0 else out, 2 if err < 0 else err]
        asked = ForkRequest(
            list(args[1:]), dict(os.environ if env is None else env), sorted(os.sched_getaffinity(0)), [1, 2]
        )
        try:
            socket.send_fds(_template(), [msgspec.msgpack.encode(asked)], [reply, place, *standard])
        finally:
            os.close(reply)
            os.close(place)
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
        said = msgspec.msgpack.decode(os.read(answer, 1 << 16), type=ForkReply)
        os.close(answer)
        assert said.pid, said.refused
        self.pid, self._child_created = said.pid, True


def start(words: Sequence[str], variables: Mapping[str, str] | None = None) -> Program:
    """Starts a program that prints nowhere, with these variables besides those of this process. `words`: the words behind `python`."""
    nowhere = subprocess.DEVNULL
    return Program([sys.executable, *words], stdout=nowhere, stderr=nowhere, env={**os.environ, **(variables or {})})


@cache
def _template() -> socket.socket:
    """The process that is forked; it ends when this end of the connection is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    begun = threading.Event()

    def begin() -> None:
        try:
            with theirs:
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), ROOM],
                    pass_fds=[theirs.fileno()],
                    env={**environment(()), **of_this_process()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        finally:
            begun.set()
        threading.Event().wait()

    # Linux ends it with the thread that started it (`orphans.py`), and the first test that asks may do so in a thread of its own.
    threading.Thread(target=begin, name="parent of preloaded programs", daemon=True).start()
    begun.wait()
    return ours


# -- in the process that is forked, and in its copies -----------------------------------------------------------------------------


def main() -> None:
    from headrace.orchestration.workers import fork_server

    gc.disable()
    signal_me_when_orphaned(signal.SIGKILL)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for kind in fork_server.KINDS:
        fork_server.preload(kind)
    for module in (*MODULES, *(f"transformers.models.{family}.modeling_{family}" for family in fork_server.MODELS)):
        importlib.import_module(module)
    gc.freeze()
    found = fork_server.serve(requests, fork_server._unfit(requests.fileno()))
    if found is None:
        return
    request, files = found
    fork_server.become(request, files)
    os.environ.pop(PARENT, None)
    os.environ.update(request.variables)
    if _fork_the_server():
        gc.enable()
        os.execve = _exec  # type: ignore[assignment]
        _end_after(request.words)


def _fork_the_server() -> bool:
    """Forks the process from which the first workers of this program are forked. Returns False in a worker that is over."""
    from headrace.orchestration.workers import fork_server, worker

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.getpid()
    if not (pid := os.fork()):
        ours.close()
        os.setsid()
        os.environ[PARENT] = str(program)
        signal_me_when_orphaned(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if (found := fork_server.serve(theirs, fork_server._unfit(theirs.fileno()))) is not None:
            fork_server.become(*found)
            worker.main()
        return False
    theirs.close()
    begin, owner = preloaded.ForkServer.__init__, os.getpid()
    names = {name: value for name, value in environment(()).items() if name not in OWN}

    def adopt(server: Any, wanted: Mapping[str, str]) -> None:
        """The first server of this program: it is there already, if its libraries have read the same environment."""
        preloaded.ForkServer.__init__ = begin  # type: ignore[method-assign]
        if dict(wanted) != names:
            begin(server, wanted)
            return
        server._owner, server._requests, server._process = owner, ours, ForkedProcess(pid)
        server._printed, server.has_forked = tempfile.TemporaryFile(), False  # noqa: SIM115
        server.close = weakref.finalize(server, preloaded._end, server._process, ours, owner)

    preloaded.ForkServer.__init__ = adopt  # type: ignore[method-assign]
    return True


def _exec(program: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """What a program becomes in place of itself: a worker, which needs the same libraries."""
    from headrace.orchestration.workers import worker

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
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
