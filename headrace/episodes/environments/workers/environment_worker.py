"""A process that plays environments: `python -m headrace.episodes.environments.workers.environment_worker SPEC SETTINGS`, driven by `environment_pool.py`.

Frames arrive on the original standard input and leave on the original standard output. Both are moved to other descriptors before the
user's code runs: what it prints goes to standard error, and its standard input is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

from headrace.core.errors import ConfigError
from headrace.episodes.environments.workers.episode_frames import Beat, FromController, FunctionLoaded, pack, read_order
from headrace.episodes.environments.workers.player import Player, ToolLimits, load_player
from headrace.episodes.environments.workers.step_driver import exports, exports_if_set, is_stepped
from headrace.episodes.sandbox.sandbox_limits import SandboxSettings, check_if_imported, use_settings
from headrace.processes.health.family import leave_sigterm_to_controller, signal_me_when_orphaned
from headrace.processes.health.patience import Patience
from headrace.processes.health.stacks import answer_signals
from headrace.processes.obeying import FrameSender, obey_until_end, run_to_end, take_pipes

BEAT = 1.0
"""Seconds between two beats."""
BLOCKED = 10.0
"""Seconds in which it could run after which an async function that has not let the event loop run is reported."""


def main(arguments: list[str]) -> None:
    # Not SIGKILL: this process continues, reads the end of its input, and then kills what the user's function has started.
    signal_me_when_orphaned(signal.SIGCONT)
    answer_signals()
    leave_sigterm_to_controller()
    orders, reports = take_pipes()
    spec, settings = arguments[0], json.loads(arguments[1])
    sender = FrameSender(reports)
    if settings["memory"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"], settings["memory"]))
    use_settings(SandboxSettings.from_text(settings["sandbox"]))
    try:
        function = load_player(spec, settings["library"])
        check_if_imported("the environment")
    except ConfigError as error:
        sender.send(pack(FunctionLoaded(str(error))))
        return
    own = settings["library"] is None
    loaded = FunctionLoaded(
        stepped=own and is_stepped(function), exports=exports(function), exports_if_set=exports_if_set(function)
    )
    sender.send(pack(loaded))
    if not settings["check"]:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            run_to_end(loop, loop.create_task(_serve(orders, sender, function, settings)))


async def _serve(orders: BinaryIO, sender: FrameSender, function: Any, settings: Mapping[str, Any]) -> None:
    limits = ToolLimits(settings["seconds"], settings["characters"])
    player = Player(function, lambda frame: sender.send(pack(frame)), limits, settings["resumes"])
    loop = asyncio.get_running_loop()

    def obey(order: FromController) -> None:
        loop.call_soon_threadsafe(player.obey, order)

    obey_until_end(partial(read_order, orders), obey)
    threading.Thread(
        target=_beat, args=(sender, player, loop, threading.get_native_id()), name="headrace-beat", daemon=True
    ).start()
    await loop.create_future()  # the reading thread ends the process


def _beat(sender: FrameSender, player: Player, loop: asyncio.AbstractEventLoop, thread: int) -> None:
    """Sends a beat every second, which says whether one rollout keeps the loop from running. It needs the interpreter's lock: a process
    whose code never releases that is silent."""
    ran = threading.Event()
    patience = Patience(thread, BLOCKED)
    loop.call_soon_threadsafe(ran.set)
    with contextlib.suppress(OSError, RuntimeError):  # the process is ending
        while True:
            time.sleep(BEAT)
            if ran.is_set():
                ran.clear()
                patience = Patience(thread, BLOCKED)
                loop.call_soon_threadsafe(ran.set)
            sender.send(pack(Beat(player.running() if patience.left < 0 else -1)))


if __name__ == "__main__":
    main(sys.argv[1:])
