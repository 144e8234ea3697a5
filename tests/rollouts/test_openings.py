"""Rollouts of several turns are opened as far as the KV cache holds them: in virtual time, over an engine that forgets what was used longest ago."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types import Completion, RolloutKey
from headrace.loop.openings import LONGEST, CacheSize, Openings
from headrace.loop.world import virtual_time
from headrace.loop.world.virtual_time import run
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_environments import scripted
from support.fake_world import FakeWorld

SAMPLED = Completion((1,) * 10, (-1.0,) * 10, (), "stop")
PROMPT = 20


@dataclass
class ForgetfulEngine:
    """Computes 1,000 tokens a second and samples 100, for as many rollouts at once as ask. Entries of whole rollouts make room, longest unused first."""

    cache: int
    forwarded: int = 0
    entries: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)

    async def generate(self, rollout: tuple[int, int], context: int) -> Completion:
        there = min(self.entries.pop(rollout, 0), context)
        self.forwarded += context - there
        await asyncio.sleep((context - there) / 1000 + len(SAMPLED.tokens) / 100)
        self.entries[rollout] = context + len(SAMPLED.tokens)
        while sum(self.entries.values()) > self.cache:
            self.entries.popitem(last=False)
        return SAMPLED


async def play(
    gate: Openings, engine: ForgetfulEngine, rollout: tuple[int, int], tools: list[float], grows: int
) -> None:
    context = PROMPT
    try:
        for seconds in tools:
            async with gate.turn(rollout, prompt=PROMPT, context=context, most=10) as done:
                done(await engine.generate(rollout, context))
            context += len(SAMPLED.tokens) + grows
            await asyncio.sleep(seconds)
    finally:
        gate.close(rollout)


def played(
    kv: int, rollouts: dict[tuple[int, int], list[float]], *, gated: bool = True, grows: int = 40
) -> tuple[ForgetfulEngine, float]:
    """The engine, and the seconds that all took."""

    async def all_of_them() -> tuple[ForgetfulEngine, float]:
        gate, engine = Openings(CacheSize(tokens=kv if gated else 0, rows=64, longest=400)), ForgetfulEngine(kv)
        await asyncio.gather(*(play(gate, engine, name, tools, grows) for name, tools in rollouts.items()))
        assert not gate._open and not gate._waiting
        return engine, asyncio.get_running_loop().time()

    return run(all_of_them())


def test_what_fits_is_computed_once_where_all_at_once_compute_everything_again():
    """Twelve conversations of six turns, room for 40 % of them."""
    rollouts = {(i, 0): [0.05] * 6 for i in range(12)}
    kv = int(0.4 * 12 * 280)
    before, _ = played(kv, rollouts, gated=False)
    after, _ = played(kv, rollouts)
    once = 12 * (PROMPT + 5 * 40)
    assert after.forwarded <= 1.1 * once and before.forwarded >= 1.7 * once, (before.forwarded, after.forwarded)


@settings(max_examples=60)
@given(
    kv=st.integers(1, 4000),
    rollouts=st.dictionaries(
        st.tuples(st.integers(0, 8), st.integers(0, 3)),
        st.lists(st.sampled_from([0.0, 0.1, 5.0, 1000.0]), max_size=5),
        max_size=20,
    ),
    grows=st.integers(0, 200),
)
def test_every_rollout_ends_whatever_the_cache_holds_and_however_long_tools_take(kv, rollouts, grows):
    """Also a cache that holds none of them, and tools that take longer than everything else."""
    _, seconds = played(kv, rollouts, grows=grows)
    work = sum(len(tools) * (2000 / 1000 + 0.1) for tools in rollouts.values())
    assert seconds <= max((sum(tools) for tools in rollouts.values()), default=0) + work + LONGEST * sum(
        map(len, rollouts.values())
    )


def test_rollouts_that_wait_for_tools_do_not_keep_the_engine_idle():
    """Room for one, and ten whose tools take ten minutes each: they wait side by side."""
    _, seconds = played(200, {(i, 0): [600.0, 600.0] for i in range(10)})
    assert seconds < 1300


def test_the_oldest_ticket_begins_first_and_later_turns_never_wait():
    async def scenario() -> list[str]:
        gate, order = Openings(CacheSize(tokens=100, rows=4, longest=60)), []

        async def turns(ticket: int, count: int) -> None:
            for turn in range(count):
                async with gate.turn((ticket, 0), prompt=0, context=50, most=10) as done:
                    order.append(f"{ticket}.{turn}")
                    await asyncio.sleep(1)
                    done(SAMPLED)
            gate.close((ticket, 0))

        await asyncio.gather(turns(5, 2), turns(9, 1), turns(7, 1), turns(6, 1))
        return order

    assert run(scenario()) == ["5.0", "5.1", "6.0", "7.0", "9.0"]


def test_turns_of_one_rollout_that_begin_together_are_let_in_together():
    async def scenario() -> float:
        gate = Openings(CacheSize(tokens=100, rows=4, longest=60))

        async def turn(rollout: tuple[int, int]) -> None:
            async with gate.turn(rollout, prompt=0, context=50, most=10) as done:
                await asyncio.sleep(1)
                done(SAMPLED)

        async def agents(ticket: int) -> None:
            await asyncio.gather(turn((ticket, 0)), turn((ticket, 0)))
            gate.close((ticket, 0))

        await asyncio.gather(agents(1), agents(2), agents(3))
        return asyncio.get_running_loop().time()

    assert run(scenario()) == pytest.approx(3)


def test_one_that_is_cancelled_while_it_waits_leaves_its_place():
    async def scenario() -> float:
        gate, engine = Openings(CacheSize(tokens=100, rows=4, longest=60)), ForgetfulEngine(100)
        first = asyncio.ensure_future(play(gate, engine, (0, 0), [0.0] * 3, 0))
        second = asyncio.ensure_future(play(gate, engine, (1, 0), [0.0], 0))
        await asyncio.sleep(0.05)
        assert gate.holds_back(1) and not gate.holds_back(0)
        second.cancel()
        await asyncio.gather(first, play(gate, engine, (2, 0), [0.0], 0))
        assert not gate.holds_back(1) and not gate._open
        return asyncio.get_running_loop().time()

    assert run(scenario()) < 1


def test_the_advice_names_the_cache_with_which_they_all_fit():
    """And it is followed: with it nobody waits, and nothing is said."""
    rollouts, said = {(i, 0): [0.05] * 6 for i in range(12)}, []

    async def with_cache(gib: float) -> float:
        gate = Openings(CacheSize(tokens=int(1000 * gib), rows=64, longest=400, kv_gib=gib), said.append)
        engine = ForgetfulEngine(int(1000 * gib))
        await asyncio.gather(*(play(gate, engine, name, tools, 40) for name, tools in rollouts.items()))
        more = {(i + 20, 0): tools for i, (_, tools) in enumerate(rollouts.items())}
        await asyncio.gather(*(play(gate, engine, name, tools, 40) for name, tools in more.items()))
        return gib

    run(with_cache(1.5))
    (message,) = said
    gib = float(message.split("raise engine.kv_gib to ")[1].split()[0])
    assert 3 < gib < 6 and "wait for others to end" in message
    said.clear()
    run(with_cache(gib))
    assert said == []


@pytest.mark.parametrize("kv", [1, 150, 0])
def test_a_run_over_a_small_cache_trains_all_its_groups(kv):
    """Tools of 20 seconds, and waits of which none may last for a minute without progress. `kv` 1: one rollout at a time."""
    engine = FakeEngine(seconds_per_token=0.1, context_length=50)
    engine.capabilities = msgspec.structs.replace(engine.capabilities, kv_tokens=kv)
    world = FakeWorld(None, engine=engine, environment=scripted(3, seconds=20.0), steps=4, stop_after=60.0)
    virtual_time.run(world.run())
    assert [len(batch.groups) for batch in world.trainer.batches] == [3] * 4
    keys = [key for request in engine.requests if (key := RolloutKey.read(request.id))]
    begun = [key.ticket for key in keys if key.turn == 0]
    if kv:
        assert begun == sorted(begun), "the oldest ticket begins first"
