"""A thousand rollouts of a user's function at once, with tools that take 10 ms to 60 s: what the controller spends on them.

    python benchmarks/environments.py [--rollouts 1000] [--slowest 60]

The engine is a fake that answers at once with a tool call, twice, and then with text. Seconds are those of the processor
(`resource`), except the lag of the event loop: how much later than asked for a sleep of 10 ms ended, without the time in which the
controller waited for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from headrace.core.types import Completion, Prompt, VersionSpan
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.function import open_function
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played, TurnAsked
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.processes.health.patience import waited_for_a_core

ENV = '''
import asyncio

async def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"

async def play(agent, prompt):
    reply = await agent.chat(prompt, tools=[wait])
    while reply.tool_calls:
        reply = await agent.chat(await agent.call(reply))
    return float(reply.text == "done")
'''


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident(pid: int | str = "self") -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


async def lags(found: list[float]) -> None:
    while True:
        asked, waited = time.perf_counter() + 0.01, waited_for_a_core(os.getpid())
        await asyncio.sleep(0.01)
        late = time.perf_counter() - asked
        found.append(max(late - (waited_for_a_core(os.getpid()) - waited), 0.0))


async def measure(rollouts: int, slowest: float, workers: int) -> dict[str, float]:
    encoder, rng = ChatEncoder(resolve_model("smollm2-135m-instruct")), random.Random(0)

    async def ask(asked: TurnAsked) -> Completion:
        seconds = math.exp(rng.uniform(math.log(0.01), math.log(slowest)))
        call = json.dumps({"name": "wait", "arguments": {"seconds": seconds}})
        tokens = encoder.encode_completion("done" if asked.turn == 2 else f"<tool_call>{call}</tool_call>", True)
        return Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "env.py"
        path.write_text(ENV)
        config = EnvironmentConfig(function=f"{path}:play", tools="hermes", workers=workers)
        kind = open_function(config, encoder, system="", log=None)
        prompt = Prompt("p", "Wait for it.", (1,))
        await roll_out(
            kind, prompt, [0] * workers, ask=ask, decode=encoder.decode
        )  # the processes have imported everything
        pids = kind.close.__self__.pids  # type: ignore[attr-defined]
        before, memory, theirs = cpu(), resident(), sum(map(resident, pids))
        late: list[float] = []
        ticking, began = asyncio.create_task(lags(late)), time.perf_counter()
        found = await roll_out(kind, prompt, list(range(rollouts)), ask=ask, decode=encoder.decode)
        wall = time.perf_counter() - began
        ticking.cancel()
        assert all(isinstance(one, Played) and one.rewards == {"play": 1.0} for one in found)
        spent, late = cpu() - before, sorted(late)
        result = {
            "rollouts": rollouts,
            "seconds by the clock": wall,
            "controller CPU share": spent / wall,
            "controller CPU ms a turn": 1e3 * spent / (3 * rollouts),
            "event loop lag p50 ms": 1e3 * late[len(late) // 2],
            "event loop lag p99 ms": 1e3 * late[int(len(late) * 0.99)],
            "event loop lag max ms": 1e3 * late[-1],
            "controller KiB a rollout": 1024 * (resident() - memory) / rollouts,
            "processes KiB a rollout": 1024 * (sum(map(resident, pids)) - theirs) / rollouts,
        }
        await kind.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--slowest", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    for name, value in asyncio.run(measure(given.rollouts, given.slowest, given.workers)).items():
        print(f"{name:28} {value:,.2f}", file=sys.stdout)


if __name__ == "__main__":
    main()
