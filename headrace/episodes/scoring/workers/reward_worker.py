"""A process that runs reward functions: `python -m headrace.episodes.scoring.workers.reward_worker [--check] SANDBOX FUNCTION...`, driven by `processes.py`.

Frames arrive on the original standard input and leave on the original standard output. Both are moved to other descriptors before the
user's code runs: what it prints goes to standard error, and its standard input is empty.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.sandbox.sandbox_limits import SandboxSettings, check_if_imported, use_settings
from headrace.episodes.scoring.builtin import load_reasoning_gym, load_unit_tests
from headrace.episodes.scoring.job import LoadedReward, call, call_async, is_async, signature_problem
from headrace.episodes.scoring.workers.reward_messages import Call, Ready, Reply, pack, read_call
from headrace.processes.health.family import leave_sigterm_to_controller, signal_me_when_orphaned
from headrace.processes.health.stacks import answer_signals
from headrace.processes.health.user_prints import LOG
from headrace.processes.obeying import FrameSender, obey_until_end, run_to_end, take_pipes
from headrace.settings.user_code import load_function

BUILTIN: dict[str, Callable[[], Callable[..., Any]]] = {
    "reasoning_gym": load_reasoning_gym,
    "unit_tests": partial(load_unit_tests, whole=False),
    "unit_tests_all": partial(load_unit_tests, whole=True),
}


def load_functions(specs: list[str]) -> list[Callable[..., Any]]:
    """Loads the functions. A file that several specs name is run once. Raises ConfigError if one cannot be loaded."""
    modules: dict[Path, ModuleType] = {}
    return [BUILTIN[spec]() if spec in BUILTIN else _from_file(spec, modules) for spec in specs]


def _from_file(spec: str, modules: dict[Path, ModuleType]) -> Callable[..., Any]:
    function = load_function(spec, f"reward function {spec}", modules)
    if problem := signature_problem(function):
        raise ConfigError(f"reward function {spec}: {spec.rpartition(':')[2]} {problem}")
    return function


Functions = list[Callable[..., Any]]


def main(arguments: list[str]) -> None:
    # Not SIGKILL: this process continues, reads the end of its input, and then kills what the user's function has started.
    signal_me_when_orphaned(signal.SIGCONT)
    answer_signals()
    leave_sigterm_to_controller()
    calls, pipe = take_pipes()
    answers = FrameSender(pipe)
    check = arguments[:1] == ["--check"]
    inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
    if not check:
        obey_until_end(partial(read_call, calls), inbox.put)
    sandbox, *specs = arguments[1:] if check else arguments
    use_settings(SandboxSettings.from_text(sandbox))
    try:
        functions = load_functions(specs)
        check_if_imported(f"the reward {', '.join(specs)}")
    except ConfigError as error:
        answers.send(pack(Ready(error=str(error))))
        return
    loaded = (
        LoadedReward(spec.rpartition(":")[2], is_async(function))
        for spec, function in zip(specs, functions, strict=True)
    )
    answers.send(pack(Ready(tuple(loaded))))
    if not check:
        _serve(inbox, answers, functions)


def _serve(inbox: queue.SimpleQueue[Call], answers: FrameSender, functions: Functions) -> None:
    """Runs plain functions one after the other in the main thread, and async ones concurrently in a loop of another thread."""
    concurrently = _loop_beside() if any(map(is_async, functions)) else None
    while True:
        received = inbox.get()
        function = functions[received.function]
        if is_async(function) and concurrently:
            concurrently(_answer_later(answers, received, function))
        else:
            values = call(function, received.job, LOG)
            sys.stdout.flush()
            answers.send(pack(Reply(received.id, values)))


def _loop_beside() -> Callable[[Coroutine[Any, Any, None]], object]:
    """Returns what starts a coroutine in a loop of another thread."""
    import asyncio  # plain functions need none

    loop = asyncio.new_event_loop()
    threading.Thread(target=run_to_end, args=(loop, loop.create_future()), daemon=True).start()
    return lambda work: asyncio.run_coroutine_threadsafe(work, loop)


async def _answer_later(answers: FrameSender, received: Call, function: Callable[..., Any]) -> None:
    answers.send(pack(Reply(received.id, await call_async(function, received.job, received.timeout, LOG))))


if __name__ == "__main__":
    main(sys.argv[1:])
