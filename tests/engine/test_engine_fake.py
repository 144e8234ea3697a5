"""The fake engine keeps the promises of a real one, so that what is proven over it holds: prefixes, versions, interruptions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.steps import StepOutput, Transcript, write_down
from headrace.core.types import Completion
from headrace.engine.request_book import scoring
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request, update


async def opened(**options: Any) -> FakeEngine:
    engine = FakeEngine(**{"seconds_per_token": 0.1, "length": lambda rng: rng.randint(1, 30), **options})
    await engine.load(update(0))
    return engine


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return virtual_time.run(work)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    name=st.text("abc/0123456789", min_size=1, max_size=8),
    limit=st.integers(1, 30),
    aborts=st.lists(st.floats(0.01, 1.0), max_size=6),
    failures=st.sampled_from([0.0, 0.5]),
)
def test_issued_again_from_its_prefix_a_request_gets_what_it_would_have_had(
    seed: int, name: str, limit: int, aborts: list[float], failures: float
) -> None:
    async def go() -> None:
        options = {"seed": seed, "failure_rate": failures, "outage_rate": 0.05}
        whole = await (await opened(**options)).generate(request(name, tokens=limit))
        engine, prefix = await opened(**options), ()
        for pause in [*aborts, None]:
            going = asyncio.ensure_future(engine.generate(request(name, tokens=limit, prefix=prefix)))
            if pause is not None:
                await asyncio.sleep(pause)
                await engine.abort()
            answer = await going
            prefix += answer.tokens
            if answer.stop != "interrupted":
                break
        assert prefix == whole.tokens and answer.stop == whole.stop and answer.error == whole.error

    run(go())


def test_tokens_and_lengths_differ_between_requests_and_seeds() -> None:
    async def go() -> list[Completion]:
        engines = [await opened(seed=seed) for seed in (0, 1)]
        return [await engine.generate(request(name, tokens=50)) for engine in engines for name in ("a", "b", "c")]

    answers = run(go())
    assert len({answer.tokens for answer in answers}) == 6
    assert len({token for answer in answers for token in answer.tokens}) > 20


def test_a_prefix_that_is_all_there_is_ends_at_once() -> None:
    async def go() -> list[Completion]:
        engine = await opened(length=lambda rng: 4)
        whole = await engine.generate(request("r", tokens=50))
        return [
            await engine.generate(request("r", tokens=50, prefix=whole.tokens)),
            await engine.generate(request("r", tokens=3, prefix=whole.tokens[:3])),
        ]

    stopped, full = run(go())
    assert (stopped.tokens, stopped.stop) == ((), "stop") and (full.tokens, full.stop) == ((), "length")


@pytest.mark.parametrize("held", ["nothing", "drain"])
def test_an_abort_ends_all_who_are_here_and_nobody_else(held: str) -> None:
    async def go() -> None:
        engine = await opened(length=lambda rng: 20)
        running = [asyncio.ensure_future(engine.generate(request(f"r{i}", tokens=50))) for i in range(3)]
        await asyncio.sleep(0.55)
        draining = asyncio.ensure_future(engine.drain()) if held == "drain" else None
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(engine.generate(request("waiting", tokens=50)))
        await asyncio.sleep(0)
        told = engine.unfinished()
        assert {name: len(one.tokens) for name, one in told.items()} == {"r0": 5, "r1": 5, "r2": 5, "waiting": 0}
        before = asyncio.get_running_loop().time()
        await engine.abort()
        late = asyncio.ensure_future(engine.generate(request("late", tokens=50)))
        ends = await asyncio.gather(*running, waiting)
        assert asyncio.get_running_loop().time() == before, "at once, drained or not"
        assert {end.stop for end in ends} == {"interrupted"} and [len(end.tokens) for end in ends] == [5, 5, 5, 0]
        if draining:
            await draining
        await engine.load(update(1))
        await engine.resume()
        answer = await late
        assert answer.stop == "stop" and set(answer.versions()) == {1}
        assert len(told["r0"].tokens) == 5 and not engine.unfinished()

    run(go())


def test_listeners_hear_every_pass_before_it_shows() -> None:
    async def go() -> None:
        engine = await opened(length=lambda rng: 4)
        transcripts = {"r": Transcript(request=request("r", tokens=50))}
        ends: list[str] = []

        def listen(output: StepOutput) -> None:
            if "r" in engine.unfinished():
                assert engine.unfinished()["r"].tokens == transcripts["r"].tokens, "not yet"
            write_down(output, transcripts.get)
            ends.extend(end.request_id for end in output.finished)

        engine.listen(listen)
        answer = await engine.generate(request("r", tokens=50))
        await engine.generate(scoring("s", (4, 5, 6)))
        heard = transcripts["r"]
        assert tuple(heard.tokens) == answer.tokens and ends == ["r", "s"]

    run(go())


def test_what_costs_time_costs_it_again_when_it_was_interrupted() -> None:
    """A token is told when its pass is over: who interrupts all the time gets nothing for nothing."""

    async def go() -> float:
        engine, prefix = await opened(length=lambda rng: 5), ()
        loop = asyncio.get_running_loop()
        for _ in range(3):
            going = asyncio.ensure_future(engine.generate(request("r", tokens=50, prefix=prefix)))
            await asyncio.sleep(0.19)
            await engine.abort()
            prefix += (await going).tokens
        assert len(prefix) == 3
        await engine.generate(request("r", tokens=50, prefix=prefix))
        return loop.time()

    assert run(go()) == pytest.approx(3 * 0.19 + 2 * 0.1)


def test_two_requests_of_one_name_are_refused() -> None:
    async def go() -> None:
        engine = await opened()
        first = asyncio.ensure_future(engine.generate(request("r", tokens=50)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="here already"):
            await engine.generate(request("r", tokens=50))
        assert (await first).stop == "stop"

    run(go())


def test_lengths_are_drawn_as_told() -> None:
    async def go() -> list[int]:
        engine = await opened(seconds_per_token=0.0, length=lambda rng: rng.randint(1, 9))
        return [len((await engine.generate(request(str(i), tokens=50))).tokens) for i in range(500)]

    lengths = run(go())
    assert set(lengths) == set(range(1, 10)) and sum(lengths) / 500 == pytest.approx(5, abs=0.4)
    assert random.Random("0/7").randint(1, 9) == lengths[7]
