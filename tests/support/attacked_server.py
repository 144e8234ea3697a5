"""All doors over an engine without a model, in one process and one event loop that may open few files: MODEL DIRECTORY.

Says where they are, and then, for each line that it reads, for how much CPU time its event loop was busy with one thing at most since the line
before. CPU time of the loop's thread is not that of neighbours, and `slowness` says how slow the machine is.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from asyncio.events import Handle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from headrace.core.protocols import Limits
from headrace.core.types import Completion, Prompt, VersionSpan
from headrace.episodes.environments.agents.served_rollouts import talks_of
from headrace.episodes.environments.atropos.atropos_environment import open_atropos
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import RolloutSession, Room, TurnAsked
from headrace.models.chat import ChatEncoder
from headrace.processes.joining.listener import Listener
from headrace.run.fleets.pool_door import SOCKET, PoolDoor
from headrace.serve.config import TrainLimits
from headrace.serve.start import make_app
from headrace.serve.training.saved_weights import Store
from headrace.serve.training.tinker_messages import CreateSession
from headrace.serve.training.tinker_routes import routes
from headrace.serve.training.tinker_service import TinkerService
from headrace.testing.fake_engine import FakeEngine
from headrace.views.board.board_routes import make_board_app
from headrace.views.board.runs_board import RunsBoard
from headrace.web.limits import ServerLimits
from support.fact_stream import write_run
from support.served import answering, faked

CONTEXT = 4000
REFERENCE = 0.030
"""CPU seconds of `_some_work` on the machine on which a server's 0.25 s were measured."""

longest = 0.0


def _some_work() -> float:
    began = time.thread_time()
    total, names = 0, {}
    for number in range(200_000):
        total += number % 7
        names[number % 1000] = str(total)
    return time.thread_time() - began


def measure_callbacks() -> None:
    original = Handle._run

    def run(self: Handle) -> None:
        global longest
        began = time.thread_time()
        original(self)
        longest = max(longest, time.thread_time() - began)

    Handle._run = run  # type: ignore[method-assign]


async def tinker_door(serving: Any, place: Path) -> tuple[TinkerService, dict[str, str]]:
    door = TinkerService(serving, Store(place), TrainLimits(poll_seconds=0.01), directory=place, places=1)
    door.trainer = AsyncMock()
    session = door.create_session(CreateSession(sdk_version="0.38"))["session_id"]
    return door, {"session": session}


async def gateway_rollout(encoder: ChatEncoder) -> str:
    """The address of a rollout whose turns are answered at once."""
    gateway = Gateway(encoder, (), {}, ServerLimits())
    done = Completion((3, 4), (-0.5, -0.5), (VersionSpan(0, 0, 0),), "length")
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ask(asked: TurnAsked) -> Completion:
        return Completion(done.tokens, done.logprobs, done.spans, done.stop)

    class Environment:
        def __init__(self, prompt: Prompt, seed: int) -> None:
            pass

        async def play(self, agent: Any) -> Mapping[str, float]:
            rollout = await gateway.open(talks_of(agent, encoder, stops=()))
            found.set_result(gateway.url(rollout))
            await asyncio.Event().wait()
            return {}

    session = RolloutSession(0, ask, encoder.decode, limits=Limits(turns=10_000, tokens=CONTEXT))
    keep.append(asyncio.ensure_future(session.play(Environment, Prompt("p", "?", (1,)), 0)))
    return await found


async def atropos_group(encoder: ChatEncoder, place: Path) -> str:
    """The address of a run for environments of Atropos, with groups that they may play."""
    config, log = EnvironmentConfig(kind="atropos"), place / "environment.log"
    numbers = {"steps": 9, "group_size": 2, "groups_per_step": 2, "longest": CONTEXT}
    kind = open_atropos(OpenedWith(config=config, encoder=encoder, sampling={}, log=log, name="tiny", **numbers))

    async def ask(asked: TurnAsked) -> Completion:
        return Completion((3, 4), (-0.5, -0.5), (VersionSpan(0, 0, 0),), "length")

    for number in range(16):
        prompt = Prompt(f"p{number}", "?", (1,))
        playing = roll_out(kind, prompt, range(2), ask=ask, decode=encoder.decode, room=Room(CONTEXT, 0))
        keep.append(asyncio.ensure_future(playing))
    while not (place / ADDRESS_FILE).exists():
        await asyncio.sleep(0.01)
    return (place / ADDRESS_FILE).read_text().strip()


keep: list[Any] = []


async def main(model: Path, place: Path) -> None:
    engine = FakeEngine(seconds_per_token=5.0, length=lambda rng: 10_000, context_length=100_000)
    slowness = min(_some_work() for _ in range(5)) / REFERENCE
    write_run(place / "runs" / "first")
    board = RunsBoard(place / "runs", held=lambda path: False, make_pieces=lambda path: None)
    listener = Listener("a token of many characters")
    await listener.open()
    fleet: Any = SimpleNamespace(members=[])
    pool = PoolDoor(place, fleet, None, ())
    await pool.open()
    measure_callbacks()
    async with faked(model, engine) as (client, serving):
        door, facts = await tinker_door(serving, place / "checkpoints")
        async with answering(make_app(serving, "", routes(door))) as tinker, answering(make_board_app(board)) as seen:
            doors = {"serve": client.url, "tinker": tinker, "board": seen, "pool": str(place / SOCKET), **facts}
            doors |= {"gateway": await gateway_rollout(serving.encoder), "dial_in": f"http://{listener.address}"}
            doors |= {"atropos": await atropos_group(serving.encoder, place)}
            print(json.dumps({**doors, "slowness": slowness, "searched": len(gc.get_objects())}), flush=True)
            await answer()


async def answer() -> None:
    global longest
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(longest), flush=True)
        longest = 0.0


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
