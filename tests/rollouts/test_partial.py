"""What becomes of rollouts when new weights come: every `partial.mode` through the real pipeline, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.core.steps import Finished, StepOutput, TokenDetails, Transcript, write_down
from headrace.core.types import Completion, Request, Sampling, SamplingMask, TopLogprobs, VersionSpan
from headrace.facts.facts import GroupEnded, WeightsLive
from headrace.facts.waits import Waits
from headrace.loop.partial import Interrupts, PartialConfig, joined, partial_problems
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_world import FakeWorld, scheduled_world, schedules

MODES = (
    "inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group",
)  # fmt: skip


def _completions(world: FakeWorld) -> list[Completion]:
    return [
        rollout.episode.last for batch in world.trainer.batches for group in batch.groups for rollout in group.scored
    ]


def _groups(world: FakeWorld) -> list[list[Completion]]:
    return [
        [rollout.episode.last for rollout in group.scored] for batch in world.trainer.batches for group in batch.groups
    ]


def _busy(tmp: Path, mode: Any, **other: Any) -> FakeWorld:
    """Long completions, frequent swaps: nearly every swap finds rollouts under way."""
    staleness = StalenessConfig(groups_per_step=2, max_lag=2)
    engine = FakeEngine(
        seconds_per_token=0.1, load_seconds=other.pop("load_seconds", 0.0), length=lambda rng: rng.choice([2, 8])
    )
    return FakeWorld(
        tmp,
        staleness,
        steps=12,
        engine=engine,
        trainer=FakeTrainer(seconds_per_step=0.3),
        partial=PartialConfig(mode=mode),
        **other,
    )


@pytest.mark.parametrize("examples", [5, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_keeps_the_contracts_in_every_schedule(
    tmp_path_factory: pytest.TempPathFactory, mode: Any, examples: int
) -> None:
    @settings(max_examples=examples)
    @given(s=schedules)
    def keeps_them(s: dict[str, Any]) -> None:
        world = dataclasses.replace(
            scheduled_world(tmp_path_factory.mktemp("run"), s), partial=PartialConfig(mode=mode)
        )
        virtual_time.run(world.run())
        assert world.trainer.version == world.steps
        assert 0 <= min(world.trained_lags()) <= max(world.trained_lags()) <= s["max_lag"]
        counted = world.buffer.accounting()
        assert counted.balance() == 0 and counted.in_pipeline == 0 and counted.trained == world.steps * s["groups"]
        for completion in _completions(world):
            assert completion.stop in ("stop", "length") and len(completion.versions()) == len(
                completion.tokens
            ) == len(completion.logprobs)
            assert completion.versions() == sorted(completion.versions())

    keeps_them()


@pytest.mark.parametrize("mode", ["inflight", "stream", "abort_resume", "save_resume"])
def test_what_goes_on_over_a_swap_has_the_tokens_it_would_have_had(tmp_path: Path, mode: Any) -> None:
    """The fake samples a function of request and place: a token that is lost, repeated or moved would be seen."""
    world, calm = _busy(tmp_path / "a", mode), _busy(tmp_path / "b", "barrier")
    for one in (world, calm):
        virtual_time.run(one.run())
    tokens = {
        (group.ticket, i): rollout.episode.last.tokens
        for batch in calm.trainer.batches for group in batch.groups for i, rollout in enumerate(group.scored)
    }  # fmt: skip
    spread = 0
    for batch in world.trainer.batches:
        for group in batch.groups:
            for i, rollout in enumerate(group.scored):
                assert rollout.episode.last.tokens == tokens.get((group.ticket, i), rollout.episode.last.tokens)
                spread += len(set(rollout.episode.last.versions())) > 1
    assert spread > 3, "no rollout met a swap: choose other speeds"


@pytest.mark.parametrize("mode", ["drain", "barrier", "cancel_group"])
def test_these_modes_sample_each_rollout_under_one_version(tmp_path: Path, mode: Any) -> None:
    world = _busy(tmp_path, mode)
    virtual_time.run(world.run())
    assert all(len(completion.spans) == 1 for completion in _completions(world))
    if mode != "drain":
        assert all(len({v for one in group for v in one.versions()}) == 1 for group in _groups(world))


def test_cancelled_groups_are_dropped_by_name_with_what_it_cost(tmp_path: Path) -> None:
    world = _busy(tmp_path, "cancel_group")
    virtual_time.run(world.run())
    ended = [fact for fact in world.facts.of(GroupEnded) if fact.reason == "interrupted"]
    assert world.buffer.accounting().dropped["interrupted"] == len(ended) > 0
    assert sum(fact.lost_tokens for fact in ended) > 0
    told = sum(fact.interrupted for fact in world.facts.of(WeightsLive))
    assert 0 < told <= len(ended) * world.rollout.group_size, "rollouts that had not ended"
    assert not world.engine.unfinished(), "their requests are cancelled"


def test_aborted_rollouts_are_counted_and_the_pause_is_told(tmp_path: Path) -> None:
    world = _busy(tmp_path, "abort_resume", load_seconds=0.05)
    virtual_time.run(world.run())
    live = world.facts.of(WeightsLive)
    assert sum(fact.interrupted for fact in live) > 0
    assert max(fact.pause for fact in live) == pytest.approx(0.05)
    assert any(request.prefix for request in world.engine.requests)


def test_what_was_set_aside_goes_on_behind_what_is_new(tmp_path: Path) -> None:
    for mode in ("abort_resume", "save_resume"):
        world = _busy(tmp_path / mode, mode)
        virtual_time.run(world.run())
        again = [request for request in world.engine.requests if request.prefix]
        newest = max(request.priority for request in world.engine.requests if not request.prefix)
        assert again and all((request.priority > newest) == (mode == "save_resume") for request in again)


def test_streamed_weights_mark_what_they_were_mixed_for(tmp_path: Path) -> None:
    world = _busy(tmp_path, "stream", load_seconds=0.3)
    virtual_time.run(world.run())
    spans = [span for completion in _completions(world) for span in completion.spans]
    assert any(span.mixed for span in spans) and not all(span.mixed for span in spans)


def test_a_group_is_as_old_as_the_oldest_token_of_any_of_its_requests() -> None:
    """Whether a request was interrupted, is being sampled, has ended unheard, or has ended and waits for the others (C1)."""

    async def go() -> None:
        engine = FakeEngine(seconds_per_token=1.0, length=lambda rng: 8)
        clock, trainer = asyncio.get_running_loop().time, FakeTrainer()
        interrupts = Interrupts(engine, PartialConfig(), Waits(lambda fact: None, clock, 1e5, 1e6), clock)

        async def live(version: int) -> None:
            trainer.versions[""] = version
            await engine.load(await trainer.publish())

        await live(3)
        assert interrupts.tokens.first_version(["t0/0", "t0/1"]) is None, "no token is sampled yet"
        asked = asyncio.ensure_future(interrupts.generate(Request("t0/0", (1,), Sampling(max_tokens=8))))
        await asyncio.sleep(2.5)
        for version in (4, 5):
            await live(version)
            await asyncio.sleep(1.0)
        assert engine.unfinished(["t0/0"])["t0/0"].completion().versions() == [3, 3, 4, 5]
        younger = asyncio.ensure_future(interrupts.generate(Request("t0/1", (1,), Sampling(max_tokens=8))))
        await asyncio.sleep(1.5)
        assert (
            interrupts.tokens.first_version(["t0/0", "t0/1"]) == 3 and interrupts.tokens.first_version(["t0/1"]) == 5
        ), "sampled"
        ends = asyncio.get_running_loop().create_future()  # in the same turn of the loop as the task that awaits it
        interrupts.tokens.asked["t0/0"].add_done_callback(
            lambda _: ends.set_result(
                ("t0/0" in interrupts.tokens.kept, interrupts.tokens.first_version(["t0/0", "t0/1"]))
            )
        )
        assert await ends == (False, 3), "unheard"
        await asked
        assert interrupts.tokens.first_version(["t0/0", "t0/1"]) == 3, "ended"
        await younger
        assert interrupts.tokens.first_version(["t0/1"]) == 5
        interrupts.tokens.restore(
            {"t1/0": Completion((1, 2), (0.0, 0.0), (VersionSpan(0, 1, 1), VersionSpan(1, 2, 1)), "interrupted")}
        )
        assert interrupts.tokens.first_version(["t1/0", "t1/1"]) == 1, "interrupted"

    virtual_time.run(go())


def test_an_evaluation_goes_on_over_an_abort(tmp_path: Path) -> None:
    """Interrupted completions of held-out prompts would count as short answers."""

    async def go() -> Completion:
        engine = FakeEngine(seconds_per_token=0.1, load_seconds=0.05, length=lambda rng: 8)
        await engine.load(await FakeTrainer().publish())
        clock = asyncio.get_running_loop().time
        waits = Waits(lambda fact: None, clock, 100, 200)
        interrupts = Interrupts(engine, PartialConfig(mode="abort_resume"), waits, clock)
        asked = asyncio.ensure_future(interrupts.once(Request("eval", (1,), Sampling(max_tokens=8))))
        await asyncio.sleep(0.35)
        trainer = FakeTrainer()
        trainer.versions[""] = 1
        await interrupts.deliver(await trainer.publish())
        done = await asked
        assert not interrupts.tokens.so_far()
        return done

    done = virtual_time.run(go())
    assert len(done.tokens) == 8 and done.stop == "length" and [span.version for span in done.spans] == [0, 1]


def test_tokens_are_heard_as_they_are_sampled_over_an_abort_and_after_a_restart() -> None:
    """Those that an earlier process sampled come first, at once."""
    kept = Completion((7, 8), (-0.5, -0.25), (VersionSpan(0, 0, 0),), "interrupted")
    heard: dict[str, list[tuple[float, int, float]]] = {"new": [], "kept": []}

    async def go() -> list[Completion]:
        engine = FakeEngine(seconds_per_token=0.1, load_seconds=0.05, length=lambda rng: 8)
        await engine.load(await FakeTrainer().publish())
        clock = asyncio.get_running_loop().time
        waits = Waits(lambda fact: None, clock, 100, 200)
        interrupts = Interrupts(engine, PartialConfig(mode="abort_resume"), waits, clock)
        interrupts.tokens.restore({"kept": kept})

        async def ask(name: str) -> Completion:
            def hear(token: int, logprob: float) -> None:
                heard[name].append((clock(), token, logprob))

            return await interrupts.generate(Request(name, (1,), Sampling(max_tokens=8)), hear)

        unheard = asyncio.ensure_future(interrupts.generate(Request("other", (1,), Sampling(max_tokens=8))))
        asked = asyncio.gather(ask("new"), ask("kept"))
        await asyncio.sleep(0.35)
        trainer = FakeTrainer()
        trainer.versions[""] = 1
        await interrupts.deliver(await trainer.publish())
        await unheard
        return list(await asked)

    for name, done in zip(heard, virtual_time.run(go()), strict=True):
        assert [token for _, token, _ in heard[name]] == list(done.tokens) and len(done.tokens) == 8
        assert [logprob for _, _, logprob in heard[name]] == list(done.logprobs)
        times = [when for when, _, _ in heard[name]]
        assert times == sorted(times) and len(set(times)) >= 6, "each with its pass, and not all at the end"
    assert [when for when, _, _ in heard["kept"]][:2] == [0.05, 0.05], (
        "as soon as they are asked for, after the first load"
    )


# -- joining ----------------------------------------------------------------------------------------------------------------


def _mask(rows: list[list[int]]) -> SamplingMask:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return SamplingMask(array("i", [token for row in rows for token in row]).tobytes(), array("q", offsets).tobytes())


versions = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8)


@given(versions, st.integers(0, 8), st.data())
def test_a_completion_cut_anywhere_and_joined_is_itself(drawn: list[tuple[int, bool]], cut: int, data: Any) -> None:
    told = sorted(drawn)
    cut = min(cut, len(told))
    rows = [data.draw(st.lists(st.integers(0, 9), max_size=3)) for _ in told]

    def part(at: slice, stop: Any) -> Completion:
        spans: list[VersionSpan] = []
        for place, (version, mixed) in enumerate(told[at]):
            if not spans or (spans[-1].version, spans[-1].mixed) != (version, mixed):
                spans.append(VersionSpan(place, version, version, mixed))
        count = len(told[at])
        begin = at.start or 0
        return Completion(
            tuple(range(begin, begin + count)), tuple(-float(i) for i in range(begin, begin + count)), tuple(spans), stop,
            mask=_mask(rows[at]),
        )  # fmt: skip

    whole = joined(part(slice(0, cut), "interrupted"), part(slice(cut, None), "stop"))
    assert whole == part(slice(0, None), "stop")


parts = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4),  # of each token, what was left to sample from
        st.sampled_from([None, 0, 1, 3]),  # None: no masks; else masks and so many of the most probable tokens
    ),
    min_size=1,
    max_size=4,
)


def _allowed(mask: SamplingMask | None, count: int) -> list[list[int]]:
    """[T] the rows of a mask; an empty one is the whole vocabulary."""
    if mask is None:
        return [[]] * count
    ids, offsets = array("i", mask.token_ids), array("q", mask.offsets)
    assert len(offsets) == count + 1 and offsets[-1] == len(ids)
    return [list(ids[start:end]) for start, end in itertools.pairwise(offsets)]


def _likely(top: TopLogprobs | None, count: int) -> list[list[int]]:
    """[T] the most probable tokens."""
    if top is None:
        return [[]] * count
    ids, values = array("i", top.tokens), array("f", top.logprobs)
    assert len(ids) == len(values) == count * top.k
    pairs = list(zip(ids, values, strict=True))
    return [
        [token for token, value in pairs[place * top.k : (place + 1) * top.k] if value > -np.inf]
        for place in range(count)
    ]


@given(parts)
def test_parts_with_and_without_masks_keep_each_token_its_own(drawn: list[tuple[list[list[int]], Any]]) -> None:
    """Processes of a run may differ in top_p, top_k, min_p. Their tokens are joined as completions, or are in one log of passes."""
    expected_rows: list[list[int]] = []
    expected_top: list[list[int]] = []
    whole: Completion | None = None
    last_k = drawn[-1][1]
    log = Transcript(
        request=Request("t0/0", (1,), Sampling(), return_mask=last_k is not None, top_logprobs=last_k or 0)
    )
    for rows, k in drawn:
        alone = Transcript(request=Request("t0/0", (1,), Sampling(), return_mask=k is not None, top_logprobs=k or 0))
        for row in rows:
            likely = list(range(k or 0))
            details = TokenDetails(
                "t0/0",
                array("i", likely).tobytes(),
                array("f", [-1.0] * len(likely)).tobytes(),
                array("i", row).tobytes(),
            )
            told = () if k is None else (details,)
            output = StepOutput(0, ("t0/0",), (5,), (-0.5,), (0,), details=told)
            for transcript in (alone, log):
                write_down(output, {"t0/0": transcript}.get)
            expected_rows.append([] if k is None else row)
            expected_top.append(likely)
        part = alone.completion(Finished("t0/0", "interrupted"))
        whole = joined(whole, part) if whole else part
    assert whole is not None
    for one in (whole, log.so_far()):
        assert _allowed(one.mask, len(expected_rows)) == expected_rows
        assert _likely(one.top, len(expected_top)) == expected_top


def test_what_is_told_at_the_end_is_that_of_the_end() -> None:
    first = Completion((1,), (-1.0,), (VersionSpan(0, 0, 0),), "interrupted", prompt_logprobs=(-2.0,))
    second = msgspec.structs.replace(first, tokens=(), logprobs=(), spans=(), stop="length", prompt_logprobs=None)
    assert joined(first, second) == msgspec.structs.replace(first, stop="length")


# -- settings ---------------------------------------------------------------------------------------------------------------


def test_pairs_that_cannot_work_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValidationError, match="partial.parts belongs to"):
        PartialConfig(mode="drain", parts=3)
    assert not partial_problems(PartialConfig("drain"), adapter=True, several=False)
    for mode in ("drain", "abort_resume", "save_resume"):
        assert "use inflight, barrier or cancel_group" in partial_problems(PartialConfig(mode), False, True)[0]
    assert "use inflight" in partial_problems(PartialConfig("stream"), True, False)[0]
