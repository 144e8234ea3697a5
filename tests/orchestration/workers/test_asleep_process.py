"""The engine's process asleep: what is asked of it meanwhile, and what its death costs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_engine_process import LONG, PROMPT, long_llama, opened, sampled, until, worker_of  # noqa: F401

from headrace.core.types import Completion
from headrace.run.clients.process_engine import LentProcess
from headrace.run.worker.build import open_launcher
from headrace.testing.makers import request


def asleep_at_first(model: Path, logs: Path) -> Any:
    return opened(model, open_launcher(logs), context_length=LONG + 100, kv_gib=0.1, exact=True, asleep=True)


async def answers(model: Path, logs: Path, *, nap: bool, kill: bool, keep: bool = True) -> list[Completion]:
    """Two requests, in the middle of which the engine may sleep, and die in its sleep. A third comes meanwhile."""
    async with asleep_at_first(model, logs) as (engine, publish):
        asked = [
            asyncio.ensure_future(engine.generate(request(name, PROMPT, LONG, seed=i))) for i, name in enumerate("ab")
        ]
        await until(lambda: _more_than(engine, 20))
        if nap:
            await engine.sleep(keep)
            before = await sampled(engine)
            asked.append(asyncio.ensure_future(engine.generate(request("c", PROMPT, 30, seed=7))))
            if kill:
                gone = asyncio.ensure_future(engine.absence())
                os.kill(worker_of(engine).pid, signal.SIGKILL)
                await gone
            newer = asyncio.ensure_future(engine.load(publish(1)))
            assert await sampled(engine) == before and not newer.done(), "nothing happens in its sleep"
            newer.cancel()
            await engine.wake(replaced=False)
        else:
            asked.append(asyncio.ensure_future(engine.generate(request("c", PROMPT, 30, seed=7))))
        return await asyncio.gather(*asked)


async def _more_than(engine: Any, tokens: int) -> bool:
    return await sampled(engine) > tokens


@pytest.mark.slow
def test_requests_are_answered_as_if_it_had_not_slept_even_if_it_dies_in_its_sleep(
    long_llama: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    whole = asyncio.run(answers(long_llama, tmp_path, nap=False, kill=False))
    for keep, kill in ((False, False), (True, True)):
        found = asyncio.run(answers(long_llama, tmp_path, nap=True, kill=kill, keep=keep))
        assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in whole]


def test_a_lent_process_that_died_is_absent_until_another_one_wakes(long_llama: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its successor is up and answers, but nobody has lent it anything: a fleet that took it for one that serves waited for ever."""

    async def main() -> None:
        async with opened(long_llama, open_launcher(tmp_path), asleep=True, kind=LentProcess) as (engine, _):
            gone = asyncio.ensure_future(engine.absence())
            os.kill(worker_of(engine).pid, signal.SIGKILL)
            how = await gone
            await engine.stats()  # the successor's answer
            assert "SIGKILL" in how and how == await asyncio.wait_for(engine.absence(), 60)
            await engine.wake(replaced=True)
            there = asyncio.ensure_future(engine.absence())
            await engine.stats()
            assert not there.done()
            there.cancel()

    asyncio.run(main())
