"""Plays rollouts with an environment of `verifiers` (0.4): a program for the interpreter that has verifiers. It knows nothing of headrace.

    python -P taskset_player.py

Input and output have a JSON object a line. The first line of the input has the settings (`SETTINGS`), a later one a rollout, or the
number of one that is not wanted any more:

    {"play": 7, "url": "http://127.0.0.1:8000/SECRET/v1", "seed": 12}
    {"play": 8, "url": "http://127.0.0.1:8000/SECRET/v1", "row": {"prompt": "What is 2 + 3?", "answer": "5"}}
    {"cancel": 7}

The first line of the output says that the environment is open, or why it is not; later ones say how rollouts ended:

    {"say": "opened", "tasks": 90, "held_out": 10}          {"say": "refused", "why": "no taskset of this name"}
    {"say": "ended", "id": 8, "failed": "TaskError: ..."}
    {"say": "ended", "id": 8, "runs": [{"session": "5e0c", "rewards": {"exact": 1.0}, "trained": true}]}

A run is what one agent of the environment did, from its first turn to its last. It asks for its turns with its session in the header
X-Session-ID. Agents without a model of their own ask for the model `policy`, or `policy/NAME` if there are several.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SETTINGS = ("name", "options", "max_turns", "held_out", "seeds", "memory", "tokenizer")
"""The taskset and the environment's config; the turns of an agent that names no number of them; the tasks that are held out; whether
rollouts name a seed instead of a row; bytes of memory, 0 for any; the directory with the model's tokenizer."""

KEPT = 8000
"""Characters of a traceback that are kept."""
GRACE = 5.0
"""Seconds that rollouts have to clean up when the run is over."""


class NotOpened(Exception):
    """The environment cannot play rollouts of a run. The message names the remedy."""


class Failed(Exception):
    """A rollout has no reward."""

    def __init__(self, why: str, trace: str = "", reason: str = "environment_raised") -> None:
        super().__init__(why)
        self.why, self.trace, self.reason = why, trace, reason


class TasksetPlayer:
    def __init__(self, settings: dict[str, Any]) -> None:
        """Opens the environment. Raises NotOpened, and whatever verifiers and the taskset raise."""
        import verifiers.v1 as vf

        self._vf = vf
        name, options = settings["name"], dict(settings["options"])
        if name.endswith(".py"):
            sys.path.insert(0, str(Path(name).parent))
            name = Path(name).stem
        self._renderer, self._tokenizer = options.pop("renderer", None), settings["tokenizer"]
        select = vf.SelectConfig(**options.pop("select", {}))
        raw = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
        config = vf.resolve_env_config(raw)
        _refuse_retries(config)
        self._seats = _policy_seats(vf, config)
        self.env = vf.load_environment(_placed(vf, config, self._seats, settings["max_turns"]))
        self._row = self.env.taskset.task_type()
        self._client("http://127.0.0.1/v1")  # raises if the renderer is none
        self.tasks: list[Any] = []
        self.held_out = 0
        if settings["seeds"]:
            self.tasks = _tasks(self.env.taskset.select(select), name)
            if settings["held_out"] and len(self.tasks) == 1:
                raise NotOpened(f"the taskset {name} has one task, and none to hold out: set task.held_out = 0")
            self.held_out = min(settings["held_out"], len(self.tasks) // 2)

    def task(self, order: dict[str, Any]) -> Any:
        """The task of a rollout. Seeds that are odd are held out, and so are the last tasks."""
        if "row" in order:
            return self._row(self._row.data_type().model_validate(order["row"]), self.env.config.taskset.task)
        number, held = order["seed"] >> 1, order["seed"] & 1
        first = len(self.tasks) - self.held_out
        return self.tasks[first + number % self.held_out if held else number % first]

    async def runs(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Plays a rollout, and returns the runs of its agents that asked the policy, in the order in which they ended, with their rewards by
        name times their weights. Raises Failed."""
        vf = self._vf
        episode = await self.env.run_episode(
            self.task(order), vf.ModelContext(model="policy", client=self._client(order["url"]))
        )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            last = errors[-1] if errors else None
            message = f"{last.type}: {last.message}" if last else "it was not completed, and nothing says why"
            raise Failed(message, (last.traceback or "") if last else "")
        own = [trace for trace in episode.traces if trace.agent.name in self._seats]
        return [
            {"session": trace.id, "rewards": _rewards(trace), "trained": True}
            if trace.agent.trainable
            else {"session": trace.id, "rewards": {}, "trained": False}
            for trace in own
        ]

    def _client(self, url: str) -> Any:
        """The client that asks for the turns of a rollout. Without a renderer it relays messages; with one it turns them into tokens itself."""
        place = {"base_url": url, "api_key_var": "HEADRACE_GIVES_NO_KEY"}
        if self._renderer is None:
            return self._vf.EvalClientConfig(**place)
        return self._vf.TrainClientConfig(**place, renderer=self._renderer, renderer_model_name=self._tokenizer)


def _rewards(trace: Any) -> dict[str, float | str]:
    return {name: _sent(reward.value) for name, reward in trace.rewards.items() if reward is not None}


def _sent(value: object) -> float | str:
    """Returns a number as JSON has it, else its text. The run decides which numbers it can train with."""
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        with suppress(Exception):
            value = value.item()
    try:
        number = float(value) if isinstance(value, (bool, int, float)) else math.nan
    except OverflowError:
        number = math.inf
    if math.isfinite(number):
        return number
    try:
        return repr(value)[:100]
    except Exception:
        return f"a {type(value).__name__}"


def _tasks(view: Any, name: str) -> list[Any]:
    if not view.bounded:
        raise NotOpened(f"the taskset {name} is endless: set environment.options.select.limit to a number of tasks")
    tasks = list(view)
    if not tasks:
        raise NotOpened(f"the taskset {name} has no tasks; look at environment.options.select")
    return tasks


def _seats(vf: Any, config: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, seat) for name, seat in config if isinstance(seat, vf.AgentConfig))


def _policy_seats(vf: Any, config: Any) -> dict[str, str]:
    """Returns the agents that ask the policy, because they have no model of their own, and the name of the model that each asks for."""
    seats = dict(_seats(vf, config))
    asks = [name for name, seat in seats.items() if seat.client is None]
    if not asks:
        message = (
            f"all agents of the environment ({', '.join(seats)}) have a model of their own, and none would be trained"
        )
        raise NotOpened(f"{message}: remove environment.options.NAME.client of those that are to be trained")
    return {name: f"policy/{name}" if len(asks) > 1 else "policy" for name in asks}


def _placed(vf: Any, config: Any, asking: dict[str, str], max_turns: int) -> Any:
    """Returns the config with what nobody has set: agents run on this machine, in a loop that executes no code, and end at our limit of
    turns. (verifiers' own choice is a sandbox of a service, and a shell.)"""
    changed = {}
    for name, seat in _seats(vf, config):
        update: dict[str, Any] = {}
        if name in asking:
            update["model"] = asking[name]
            if seat.max_turns is None:
                update["max_turns"] = max_turns
        if seat.harness is None and vf.default_harness_id(config.taskset.id) == "bash":
            update["harness"] = vf.harness_config_type("null")(id="null")
        if "runtime" not in seat.model_fields_set:
            update["runtime"] = vf.SubprocessConfig()
            ident = config.taskset.id if seat.harness is None else seat.harness.id
            harness = update.get("harness") or seat.harness or vf.harness_config_type(ident)(id=ident)
            if vf.load_harness(harness).EXECUTES_CODE:
                message = f"the harness {harness.id} of the agent {name} executes what the model writes, and nothing says where"
                remedy = f'environment.options.{name}.runtime = {{ type = "docker" }}, or "subprocess" for this machine, unprotected'
                raise NotOpened(f"{message}: set {remedy}")
        changed[name] = seat.model_copy(update=update)
    return config.model_copy(update=changed)


def _refuse_retries(config: Any) -> None:
    for where in [config, *(value for _, value in config if hasattr(value, "retries"))]:
        if where.retries.max_retries or where.retries.rules:
            raise NotOpened("retries would train a rollout that was given up: remove them from environment.options")


async def _until_end(player: TasksetPlayer, reports: Any) -> None:
    """Obeys the lines of the input until it ends."""
    loop, playing, over = asyncio.get_running_loop(), dict[int, asyncio.Task[None]](), asyncio.Event()

    async def play(id: int, order: dict[str, Any]) -> None:
        end: dict[str, Any] = {"say": "ended", "id": id}
        try:
            end["runs"] = await player.runs(order)
        except Failed as failed:
            end |= {"failed": failed.why[:2000], "reason": failed.reason, "traceback": failed.trace[-KEPT:]}
        except asyncio.CancelledError:
            end |= {"failed": "cancelled"}
        except Exception as error:  # of the taskset: data, as every failure is
            traceback_text = traceback.format_exc()[-KEPT:]
            end |= {"failed": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback_text}
        del playing[id]
        _say(reports, end)

    def obey(order: dict[str, Any] | None) -> None:
        if order is None:
            over.set()
        elif "play" in order:
            playing[order["play"]] = asyncio.create_task(play(order["play"], order))
        elif order["cancel"] in playing:
            playing[order["cancel"]].cancel()

    threading.Thread(target=_listen, args=(loop, obey), daemon=True).start()
    async with player.env.serving():
        _say(reports, {"say": "opened", "tasks": len(player.tasks) - player.held_out, "held_out": player.held_out})
        await over.wait()
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


def _listen(loop: asyncio.AbstractEventLoop, obey: Any) -> None:
    """Reads the input in a thread of its own, so that the process ends with its parent whatever the taskset is doing."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(obey, json.loads(line))
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(obey, None)
    time.sleep(GRACE)
    with suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


PID = os.getpid()
"""The process that was started. A fork of it has another."""


def _say(reports: Any, report: dict[str, Any]) -> None:
    if os.getpid() != PID:
        os._exit(1)  # a fork that a taskset has made, and that has come back here, would answer in place of its rollout
    with suppress(BrokenPipeError):  # the run is over
        reports.write(f"{json.dumps(report)}\n")
        reports.flush()


def main() -> None:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a taskset prints belongs to the log
    settings = json.loads(sys.stdin.readline())
    assert set(settings) == set(SETTINGS)
    logging.basicConfig(level=logging.WARNING)
    if settings["memory"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"], settings["memory"]))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # uv
    try:
        asyncio.run(_until_end(TasksetPlayer(settings), reports))
    except NotOpened as refused:
        _say(reports, {"say": "refused", "why": str(refused)})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        _say(reports, {"say": "refused", "why": f"{type(error).__name__}: {error}"[:4000]})


if __name__ == "__main__":
    main()
