"""The program of the process that forks workers: `python -m headrace.run.worker.fork_server FD ROOM`.

It imports the libraries of all kinds of workers, without a thread, a file or a GPU: none of these would survive a fork. It never
computes. Then it answers requests (`launch/forking.py`): it clones itself, and the child becomes a worker that is indistinguishable from
one that was started by itself: the controller's child, with session, directory, cores, environment and files of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.processes.health.family import leave_sigterm_to_controller, signal_me_when_orphaned
from headrace.processes.launch.forking import MOST_BYTES, MOST_FILES, OWN, ForkReply, ForkRequest, fork_for_parent
from headrace.run.worker import worker
from headrace.run.worker.build import KINDS, preload

LATER = (
    "numpy.ma",  # asked for by `numpy.unique`
    "headrace.engine.native.runners.decoder",
    "headrace.engine.native.runners.hugging_face",
    "headrace.engine.native.runners.own_cache",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "qwen3", "mistral")),
)
"""Modules that are imported when they are first needed. Other families cost a worker about 0.05 s each."""


def main() -> None:
    gc.disable()  # as in a worker, which enables it
    signal_me_when_orphaned(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_sigterm_to_controller()
    requests = socket.socket(fileno=int(sys.argv[1]))
    load()
    gc.freeze()  # a collection in a worker would copy every page that it writes to
    if (found := serve(requests, _unfit(requests.fileno()))) is not None:
        become(*found)
        worker.main()


def load() -> None:
    """Imports the libraries of all kinds of workers, and makes the table that transformers makes for the first model that is loaded (0.13 s)."""
    for kind in KINDS:
        preload(kind)
    for module in LATER:
        importlib.import_module(module)
    with suppress(ImportError, AttributeError):  # it is not documented
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")


def serve(requests: socket.socket, unfit: str = "") -> tuple[ForkRequest, list[int]] | None:
    """Forks a worker for each request. Returns the request and its files in the worker, and None in the server when the controller is
    gone. `unfit`: why this process cannot fork, which is then the answer to every request."""
    while True:
        data, files, *_ = socket.recv_fds(requests, MOST_BYTES, MOST_FILES)
        if not data:
            return None
        if not _abandoned(files[0]):
            refused = unfit or _fork()
            if refused is None:
                requests.close()
                return msgspec.msgpack.decode(data, type=ForkRequest), files
            if refused:
                with suppress(BrokenPipeError):  # the controller has given the worker up meanwhile
                    os.write(files[0], msgspec.msgpack.encode(ForkReply(refused=refused)))
        for file in files:
            os.close(file)


def _fork() -> str | None:
    """Returns None in the worker. In the server, returns why there is none, or an empty string."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return "" if fork_for_parent() else None
    except OSError as error:
        return f"this system does not fork for another process: {error}"


def _unfit(*known: int) -> str:
    """Returns why a copy of this process would not work, or an empty string."""
    import torch

    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"importing the libraries started {threads - 1} threads, which a fork would not have"
    if torch.cuda.is_initialized():
        return "importing the libraries opened a GPU, which a fork could not use"
    files = {int(name) for name in os.listdir("/proc/self/fd")}
    if more := [file for file in files - {0, 1, 2, *known} if Path(f"/proc/self/fd/{file}").exists()]:
        return f"importing the libraries opened {len(more)} files, which a fork would share"
    return ""


def _abandoned(reply: int) -> bool:
    """Returns whether nobody reads this pipe any more."""
    asked = select.poll()
    asked.register(reply, 0)
    return bool(asked.poll(0))


# -- in the worker ------------------------------------------------------------------------------------------------------------


def become(request: ForkRequest, files: list[int]) -> None:
    """Makes this copy of the server the worker that was asked for.

    It answers the controller itself: if the server is killed right now, the controller still knows whether it has this worker."""
    reply, place, *given = files
    # Ctrl-C in the terminal reaches the controller only. Before the answer: whoever asks for this worker's group, to signal it later,
    # would get that of the server.
    os.setsid()
    try:
        os.write(reply, msgspec.msgpack.encode(ForkReply(os.getpid())))
    except BrokenPipeError:  # the controller has given the worker up meanwhile
        os._exit(0)
    os.close(reply)
    os.fchdir(place)
    os.close(place)
    put(dict(zip(given, request.numbers, strict=True)))  # every file arrives under a number of its own
    os.sched_setaffinity(0, request.affinity)
    for name in OWN:
        os.environ.pop(name, None)
    os.environ.update(request.variables)
    with suppress(OSError):  # the directory was deleted
        sys.path[0] = os.getcwd()  # as `python -m` does
    sys.argv = [worker.__file__, *request.words[2:]]
    _show([sys.executable, *request.words])
    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by the fork, torch's is always the same
        sys.modules["numpy.random"].seed()


def put(files: dict[int, int]) -> None:
    """Moves open files to other numbers: `{from: to}`. Other files that have these numbers are closed."""
    above = 1 + max([*files, *files.values(), 2])
    for file, number in [(fcntl.fcntl(old, fcntl.F_DUPFD_CLOEXEC, above), new) for old, new in files.items()]:
        os.dup2(file, number, inheritable=number <= 2)
        os.close(file)
    for old in set(files) - set(files.values()):
        os.close(old)


def _show(words: list[str]) -> None:
    """Writes the command line that `ps` shows over the server's, if there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (
        int(fields[45]),
        int(fields[46]),
    )  # proc_pid_stat(5): arg_start and arg_end; `fields` begins with the third
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if start and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
