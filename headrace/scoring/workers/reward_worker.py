"""A process that runs reward functions: `python -m headrace.scoring.workers.reward_worker [--check] FUNCTION...`, driven by `processes.py`.

Frames arrive on the original standard input and leave on the original standard output. Both are moved to other descriptors before the
user's code runs: what it prints goes to standard error, and its standard input is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from headrace.errors import ConfigError
from headrace.observe.health.orphans import signal_me_when_orphaned
from headrace.observe.health.own_stacks import answer_signals
from headrace.scoring.job import LoadedReward, call, call_async, is_async
from headrace.scoring.workers.frames import Call, Ready, Reply, pack, read_call
from headrace.scoring.workers.load import load_functions

Functions = list[Callable[..., Any]]


def main(arguments: list[str]) -> None:
    # Not SIGKILL: this process continues, reads the end of its input, and then kills what the user's function has started.
    signal_me_when_orphaned(signal.SIGCONT)
    answer_signals()
    calls, answers = _take_pipes()
    check = arguments[:1] == ["--check"]
    inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
    if not check:
        threading.Thread(target=_read, args=(calls, inbox), daemon=True).start()
    specs = arguments[1:] if check else arguments
    try:
        functions = load_functions(specs)
    except ConfigError as error:
        _send(answers, Ready(error=str(error)))
        return
    loaded = (
        LoadedReward(spec.rpartition(":")[2], is_async(function))
        for spec, function in zip(specs, functions, strict=True)
    )
    _send(answers, Ready(tuple(loaded)))
    if not check:
        _serve(inbox, answers, functions)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, answers


def _read(calls: BinaryIO, inbox: queue.SimpleQueue[Call]) -> None:
    """Reads calls in a separate thread, so that the process ends with its parent whatever the user's function is doing. The process ends
    whenever this thread does: without it, it would wait for calls for ever."""
    try:
        while (received := read_call(calls)) is not None:
            inbox.put(received)
    except Exception:
        traceback.print_exc()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgrp() == os.getpid():  # the leader of a process group, which holds all that the function started
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _serve(inbox: queue.SimpleQueue[Call], answers: BinaryIO, functions: Functions) -> None:
    """Runs plain functions one after the other in the main thread, and async ones concurrently in a loop of another thread."""
    loop = asyncio.new_event_loop()
    if any(map(is_async, functions)):
        threading.Thread(target=loop.run_forever, daemon=True).start()
    while True:
        received = inbox.get()
        function = functions[received.function]
        if is_async(function):
            asyncio.run_coroutine_threadsafe(_answer_later(answers, received, function), loop)
        else:
            values = call(function, received.job)
            sys.stdout.flush()
            _send(answers, Reply(received.id, values))


async def _answer_later(answers: BinaryIO, received: Call, function: Callable[..., Any]) -> None:
    _send(answers, Reply(received.id, await call_async(function, received.job, received.timeout)))


_sending = threading.Lock()


def _send(answers: BinaryIO, frame: Reply | Ready) -> None:
    with _sending:
        answers.write(pack(frame))
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
