"""C1, C2, C4, C5 and C7 with a fleet, whatever dies, hangs, is slow or computes something else: the real pipeline, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import IdentityError
from headrace.core.steps import StepOutput
from headrace.core.types import Completion, RolloutKey
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import GroupEnded, MemberMoved, TicketDrawn, WeightsLive
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.world import World
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_task import FakeTask
from support.fake_world import PATIENT, LendingTrainer, OnLentDevices, lends

SILENCE, GIVE_WAY = 2.0, 3.0
MODES = ("inflight", "stream", "abort_resume", "save_resume", "drain", "barrier")
STEPS = 6


class Unlike(FakeEngine):
    """Computes log-probs that are not the trainer's while `wrong`."""

    wrong = False

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        found = await super().score(tokens, adapter)
        return msgspec.structs.replace(found, prompt_logprobs=(-7.0,) * (len(tokens) - 1)) if self.wrong else found


class UnlikeLent(OnLentDevices, Unlike):
    """The same on devices that the trainer lends while it waits."""


misfortune = st.fixed_dictionaries(
    {
        "at": st.floats(0, 40, allow_nan=False),
        "member": st.integers(0, 3),
        "kind": st.sampled_from(["vanish", "stop", "slow", "wrong", "die"]),
        "seconds": st.sampled_from([0.1, 1.0, 5.0, 20.0]),
    }
)
fleets = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "members": st.integers(1, 3),
        "lent": st.booleans(),  # whether there is one more, on the trainer's devices
        "groups": st.integers(1, 3),
        "max_lag": st.integers(0, 3),
        "mode": st.sampled_from(MODES),
        "speeds": st.tuples(*[st.sampled_from([0.01, 0.1, 0.5])] * 3),
        "loads": st.tuples(*[st.sampled_from([0.0, 0.3, 1.5])] * 3),
        "step": st.sampled_from([0.05, 0.5, 5.0]),
        "score": st.sampled_from([0.0, 0.5]),
        "rows": st.tuples(*[st.sampled_from([0, 1, 2])] * 3),
        "misfortunes": st.lists(misfortune, max_size=8),
    }
)


class Witness:
    """Checks every token when the controller is told of it, from the facts alone: no request of a group is sampled by weights older than
    those that were live when the group was admitted, and no version of it decreases."""

    def __init__(self, world: World) -> None:
        self._facts = world.facts
        self.tokens: dict[str, list[int]] = {}
        self._newest: dict[str, int] = {}
        self._read, self._live, self._admitted = 0, -1, dict[int, int]()

    def listen(self, output: StepOutput) -> None:
        for fact in self._facts.facts[self._read :]:
            self._read += 1
            if isinstance(fact, WeightsLive):
                self._live = fact.update.version
            elif isinstance(fact, TicketDrawn):
                self._admitted[fact.ticket] = self._live
        for name, token, _, version in output.sampled():
            self.tokens.setdefault(name, []).append(token)
            key = RolloutKey.read(name)
            assert key is not None and version >= self._admitted[key.ticket], f"C1: {name} of {version}"
            assert version >= self._newest.get(name, -1), f"C4: {name} goes back to {version}"
            self._newest[name] = version


def engines_of(s: dict[str, Any]) -> list[Unlike]:
    heavy_tail = lambda rng: min(8, int(rng.paretovariate(0.7)))  # noqa: E731
    usual: dict[str, Any] = {"length": heavy_tail, "failure_rate": 0.05, "seed": s["seed"]}
    kinds = [Unlike] * s["members"] + [UnlikeLent] * s["lent"]
    return [kind(s["speeds"][i % 3], s["loads"][i % 3], rows=s["rows"][i % 3], **usual) for i, kind in enumerate(kinds)]


def befall(engine: Unlike, number: int, one: dict[str, Any]) -> None:
    loop, usual = asyncio.get_running_loop(), engine.load_seconds
    later = lambda act, *given: loop.call_later(one["seconds"], act, *given)  # noqa: E731
    match one["kind"]:
        case "vanish":
            engine.vanish("was killed (fake)")
            later(engine.reappear)
        case "stop":
            engine.stopped = True
            later(setattr, engine, "stopped", False)
        case "slow":
            engine.load_seconds = 4 * SILENCE
            later(setattr, engine, "load_seconds", usual)
        case "wrong":
            engine.wrong = True
            later(setattr, engine, "wrong", False)
        case "die" if number and not is_lost(engine):  # the first one lives: somebody has to
            engine.die()


def is_lost(engine: Unlike) -> bool:
    return engine._died is not None and engine._died.done()


async def life(world: World, s: dict[str, Any], engines: list[Unlike]) -> None:
    clock, record = asyncio.get_running_loop().time, world.observer.record
    telemetry = Telemetry(record, clock, Waits(record, clock, 1e6, 1e6))
    parts, lent = {str(i): engine for i, engine in enumerate(engines)}, engines[-1]
    patience, last = FleetPatience(1e5, SILENCE), str(len(engines) - 1)
    world.engine = fleet = Fleet(parts, patience, telemetry, last if s["lent"] else None)
    if isinstance(lent, OnLentDevices):
        lends(world, fleet, lent, GIVE_WAY)
    await fleet.open()
    for engine in engines:
        engine.is_kept = lambda asked, one=engine: (
            asked.version >= fleet._rotation.wanted[""].version - 1 or is_lost(one)
        )  # type: ignore[misc]
    fleet.listen(Witness(world).listen)
    for one in s["misfortunes"]:
        number = one["member"] % len(engines)
        asyncio.get_running_loop().call_later(one["at"], befall, engines[number], number, one)
    try:
        await world.run()
    finally:
        await fleet.close()


def world_of(directory: Path | None, s: dict[str, Any]) -> World:
    return World(
        directory,
        StalenessConfig(groups_per_step=s["groups"], max_lag=s["max_lag"]),
        engine=FakeEngine(),
        trainer=LendingTrainer(s["step"]),
        task=FakeTask(),
        scorer=FakeScorer(seconds=s["score"], seed=s["seed"]),
        steps=STEPS,
        partial=PartialConfig(mode=s["mode"]),
        watch=PATIENT,
    )


@pytest.mark.slow
@settings(max_examples=80)
@given(fleets)
def test_no_member_serves_older_tokens_than_the_bound_allows(
    tmp_path_factory: pytest.TempPathFactory, s: dict[str, Any]
) -> None:
    world, engines = world_of(tmp_path_factory.mktemp("run"), s), engines_of(s)
    try:
        virtual_time.run(life(world, s, engines))
    except IdentityError:
        wrong = {one["member"] % len(engines) for one in s["misfortunes"] if one["kind"] == "wrong"}
        gone = {one["member"] % len(engines) for one in s["misfortunes"]}
        assert wrong and gone >= set(range(s["members"])), "somebody was left who computes what the trainer does"
        return
    batches = world.trainer.batches  # type: ignore[attr-defined]
    lags = [batch.step - version for batch in batches for row in batch.rows for version in row.versions]
    assert 0 <= min(lags) <= max(lags) <= s["max_lag"] == world.staleness.lag_bound
    counted = world.buffer.accounting()
    assert counted.balance() == 0 and counted.in_pipeline == 0 and counted.trained == STEPS * s["groups"]
    assert not [fact for fact in world.facts.of(GroupEnded) if fact.lost_tokens]
    for batch in batches:
        for group in batch.groups:
            found = sorted(rollout.episode.last.tokens for rollout in group.scored)
            drawn = [tokens_of(engines[0], str(RolloutKey(group.ticket, i))) for i in range(2)]
            assert all(tokens in drawn for tokens in found), "C5: other tokens than those of a run without misfortunes"
    moves = world.facts.of(MemberMoved)
    assert not [move for move in moves if move.requests < 0]
    killed = [one for one in s["misfortunes"] if one["kind"] == "die"]
    assert len([move for move in moves if move.state == "lost"]) <= len(killed), "whoever was away for long comes back"


def tokens_of(engine: FakeEngine, name: str) -> tuple[int, ...]:
    """The tokens of a request on an engine that nothing happens to."""

    async def alone() -> tuple[int, ...]:
        from headrace.testing.makers import request, update

        other = FakeEngine(0.0, 0.0, engine.length, seed=engine.seed)
        await other.load(update(0))
        return (await other.generate(request(name, tokens=8))).tokens

    return virtual_time.run(alone())
