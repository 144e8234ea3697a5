"""Contracts C1, C2, C4 and C6 of the real pipeline, with fakes, in virtual time: thousands of schedules in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.config import AlgoConfig
from headrace.algo.noise import NoiseWatch
from headrace.core.errors import CheckpointError, HeadraceError, IdentityError, StalledError, TrainingError, WorkerDied
from headrace.core.reports import LagStats, Noise
from headrace.core.types import Completion
from headrace.episodes.rollout import RolloutConfig
from headrace.facts.facts import CheckpointSaved, Evaluated, GroupEnded, StepTrained, Warned, WeightsLive
from headrace.loop.checkpoints import Checkpoints, load_controller, step_of
from headrace.loop.partial import PartialConfig
from headrace.loop.pipeline import EarlierMetrics
from headrace.loop.staleness import StalenessConfig
from headrace.loop.turns import DeviceShare
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_world import PATIENT, FakeWorld, scheduled_world, schedules
from support.few import few


@settings(max_examples=100)  # `test_partial.py` asserts the same in more of each of seven modes
@given(schedules)
def test_c1_c2_c4_c5_hold_in_every_schedule(tmp_path_factory: pytest.TempPathFactory, s: dict[str, Any]) -> None:
    world = scheduled_world(tmp_path_factory.mktemp("run"), s)
    virtual_time.run(world.run())
    assert world.trainer.version == world.steps
    assert max(world.trained_lags()) <= world.staleness.lag_bound == s["max_lag"]
    assert min(world.trained_lags()) >= 0
    counted = world.buffer.accounting()
    assert counted.balance() == 0 and counted.in_pipeline == 0
    assert counted.trained == world.steps * s["groups"]
    trained = [group.ticket for batch in world.trainer.batches for group in batch.groups]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    for batch in world.trainer.batches:
        for group in batch.groups:
            for row, rollout in zip(group.rows, group.scored, strict=True):
                assert list(row.versions) == sorted(row.versions), "C4: versions of a completion decrease"
                assert row.prompt == group.prompt.tokens and row.tokens == rollout.episode.last.tokens, "C5"
                assert all(span.kv_version <= span.version for span in rollout.episode.last.spans)


def test_the_bound_is_reached(tmp_path: Path) -> None:
    """A proof of a bound that is never attained would be a proof of something else."""
    world = FakeWorld(
        tmp_path, StalenessConfig(groups_per_step=2, max_lag=3), engine=FakeEngine(seconds_per_token=0.001), steps=20
    )
    virtual_time.run(world.run())
    assert max(world.trained_lags()) == 3


def test_max_lag_0_is_synchronous(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, StalenessConfig(groups_per_step=3, max_lag=0))
    virtual_time.run(world.run())
    assert set(world.trained_lags()) == {0}


def test_strict_order_of_admission_with_window_1(tmp_path: Path) -> None:
    slow_and_fast = lambda rng: rng.choice([1, 8])  # noqa: E731
    world = FakeWorld(tmp_path, engine=FakeEngine(seconds_per_token=0.1, length=slow_and_fast))
    virtual_time.run(world.run())
    tickets = [group.ticket for batch in world.trainer.batches for group in batch.groups]
    assert tickets == sorted(tickets)


def test_no_prompt_is_drawn_that_the_run_does_not_need(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, steps=4)
    virtual_time.run(world.run())
    counted = world.buffer.accounting()
    assert counted.drawn == counted.trained + sum(counted.dropped.values()) + sum(counted.failed.values())
    assert counted.trained == 12


def test_groups_without_contrast_are_named_and_refilled(tmp_path: Path) -> None:
    rng = random.Random(0)
    world = FakeWorld(tmp_path, scorer=FakeScorer(reward=lambda prompt, episode: float(rng.random() < 0.3)))
    virtual_time.run(world.run())
    assert world.buffer.accounting().dropped["no_contrast"] > 0
    assert world.trainer.version == world.steps
    assert all(any(row.advantages) for batch in world.trainer.batches for row in batch.rows)


def test_a_task_without_contrast_stops_the_run_with_a_reason(tmp_path: Path) -> None:
    world = FakeWorld(
        tmp_path, scorer=FakeScorer(reward=lambda prompt, episode: 1.0), rollout=RolloutConfig(2, 8, patience=20)
    )
    with pytest.raises(TrainingError, match="20 groups in a row.*no_contrast"):
        virtual_time.run(world.run())


def test_failed_rollouts_are_data_and_the_rest_of_the_group_trains(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, scorer=FakeScorer(failure_rate=0.3), rollout=RolloutConfig(6, 8))
    virtual_time.run(world.run())
    counted = world.buffer.accounting()
    assert sum(counted.rollout_failures.values()) > 0
    sizes = {len(group.rows) for batch in world.trainer.batches for group in batch.groups}
    assert min(sizes) >= 2 and len(sizes) > 1, "uneven groups train on their own members"
    assert 0.0 not in [s.reward for b in world.trainer.batches for g in b.groups for s in g.scored]


def test_prompts_that_do_not_fit_fail_by_name(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, engine=FakeEngine(context_length=5), rollout=RolloutConfig(2, 8, patience=10))
    with pytest.raises(TrainingError, match="prompt_too_long"):
        virtual_time.run(world.run())


def test_skipped_steps_are_counted_and_three_in_a_row_stop_the_run(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, trainer=FakeTrainer(skip=lambda attempt: attempt in (1, 2)))
    virtual_time.run(world.run())
    assert world.buffer.accounting().dropped["nonfinite_gradient"] == 6
    assert world.trainer.version == world.steps
    world = FakeWorld(tmp_path / "second", trainer=FakeTrainer(skip=lambda attempt: attempt >= 1), checkpoint_every=1)
    with pytest.raises(TrainingError, match="3 steps in a row were skipped"):
        virtual_time.run(world.run())
    assert world.facts.of(CheckpointSaved)[-1].step == 1, "what was learned before is kept"


def test_a_dead_trainer_ends_the_run_at_once(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, trainer=FakeTrainer(seconds_per_step=100.0))

    async def kill_it() -> float:
        running = asyncio.ensure_future(world.run())
        await asyncio.sleep(50.0)
        world.trainer.die()
        with pytest.raises(WorkerDied, match="trainer"):
            await running
        return asyncio.get_running_loop().time()

    assert virtual_time.run(kill_it()) == pytest.approx(50.0)


def test_an_engine_given_up_leaves_a_checkpoint(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, steps=1000)

    async def kill_it() -> None:
        running = asyncio.ensure_future(world.run())
        await asyncio.sleep(5.0)
        world.engine.die()
        with pytest.raises(WorkerDied, match="engine"):
            await running

    virtual_time.run(kill_it())
    assert load_controller(world.checkpoints.all()[-1]).step == world.trainer.version > 0


def test_an_engine_given_up_while_a_checkpoint_is_written_does_not_spoil_it(tmp_path: Path) -> None:
    """The trainer writes on, whoever waits for it: a second checkpoint at that time would be written into by two."""

    @dataclass
    class Slow(FakeTrainer):
        writing: int = 0

        async def save(self, directory: Path, adapter: str = "") -> None:
            self.writing += 1
            assert self.writing == 1, "two checkpoints are written at once"
            await asyncio.shield(self._write(directory, adapter))

        async def _write(self, directory: Path, adapter: str) -> None:
            await asyncio.sleep(10.0)
            await super().save(directory, adapter)
            self.writing -= 1

    world = FakeWorld(tmp_path, steps=1000, trainer=Slow(), checkpoint_every=2)

    async def kill_it() -> None:
        running = asyncio.ensure_future(world.run())
        while not world.trainer.writing:
            await asyncio.sleep(0.1)
        world.engine.die()
        with pytest.raises(WorkerDied, match="engine"):
            await running

    virtual_time.run(kill_it())
    saved = world.facts.of(CheckpointSaved)
    assert [(fact.step, fact.error) for fact in saved] == [(2, ""), (world.trainer.version, "")]
    for path in world.checkpoints.all():
        assert (path / "fake_trainer.txt").read_text() == str(load_controller(path).step) == str(step_of(path))


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    class Forger(FakeTrainer):
        async def publish(self, adapter: str = "") -> Any:
            import msgspec

            update = await super().publish(adapter)
            return update if update.version < 3 else msgspec.structs.replace(update, fingerprint="forged")

    world = FakeWorld(tmp_path, trainer=Forger())
    with pytest.raises(IdentityError, match="version 3"):
        virtual_time.run(world.run())


def test_a_probe_that_disagrees_stops_the_run(tmp_path: Path) -> None:
    class Drifting(FakeEngine):
        async def score(self, tokens: Any, adapter: str = "") -> Completion:
            found = (-1.0 - (self.version >= 4),) * (len(tokens) - 1)
            return msgspec.structs.replace(await super().score(tokens), prompt_logprobs=found)

    world = FakeWorld(tmp_path, engine=Drifting())
    with pytest.raises(IdentityError, match="at version 4"):
        virtual_time.run(world.run())


@pytest.mark.parametrize("who", ["engine", "trainer", "scorer"])
def test_c6_a_stall_is_said_and_then_stops_the_run(tmp_path: Path, who: str) -> None:
    never = 1e9
    world = FakeWorld(tmp_path, stop_after=600.0)
    match who:
        case "engine":
            world.engine = FakeEngine(seconds_per_token=never)
        case "trainer":
            world.trainer = FakeTrainer(seconds_per_step=never)
        case "scorer":
            world.scorer = FakeScorer(seconds=never)
    with pytest.raises(StalledError, match=f"has waited 600 s for.*{who}"):
        virtual_time.run(world.run())
    assert any("has waited 300 s" in warning.message for warning in world.facts.of(Warned))


@settings(max_examples=100)
@given(schedules, st.floats(0.1, 20.0))
def test_interrupt_and_resume_lose_nothing_and_train_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, s: dict[str, Any], when: float
) -> None:
    tmp = tmp_path_factory.mktemp("run")
    first = scheduled_world(tmp, s)
    virtual_time.run(first.run(interrupt_after=when))
    assert load_controller(first.checkpoints.all()[-1]).step == first.trainer.version
    second = scheduled_world(tmp, s)
    virtual_time.run(second.run(resume=True))
    counted = second.buffer.accounting()
    assert second.trainer.version == second.steps and counted.balance() == 0 and counted.in_pipeline == 0
    ids = [group.prompt.id for world in (first, second) for batch in world.trainer.batches for group in batch.groups]
    assert len(ids) == len(set(ids)) == second.steps * s["groups"]
    assert max([0, *second.trained_lags()]) <= s["max_lag"]


def test_what_was_in_flight_goes_on_from_its_tokens(tmp_path: Path) -> None:
    first = FakeWorld(tmp_path, steps=30, engine=FakeEngine(seconds_per_token=0.3))
    virtual_time.run(first.run(interrupt_after=5.0))
    begun = load_controller(first.checkpoints.all()[-1]).begun
    unfinished = {name: one for name, one in begun.items() if one.stop == "interrupted"}
    assert unfinished, "nothing was in flight: choose another moment"
    second = FakeWorld(tmp_path, steps=30, engine=FakeEngine(seconds_per_token=0.3))
    virtual_time.run(second.run(resume=True))
    asked = {request.id: request for request in second.engine.requests}
    for name, one in unfinished.items():
        assert asked[name].prefix[: len(one.tokens)] == one.tokens
    trained = {
        (group.ticket, i): row for b in second.trainer.batches for group in b.groups for i, row in enumerate(group.rows)
    }
    for name, one in unfinished.items():
        ticket, index = name.removeprefix("t").split("/")
        row = trained.get((int(ticket), int(index)))
        if row is not None:  # a group may have lacked contrast
            assert row.tokens[: len(one.tokens)] == one.tokens and row.versions[: len(one.tokens)] == tuple(
                one.versions()
            )


@pytest.mark.parametrize("mark", ["a", "b"])
def test_groups_that_other_settings_have_scored_are_dropped_by_name(tmp_path: Path, mark: str) -> None:
    """And once, though the run is killed again before it has written a checkpoint."""

    def world(mark: str) -> FakeWorld:
        return FakeWorld(tmp_path, steps=30, trainer=FakeTrainer(seconds_per_step=0.5), mark=mark)

    async def killed() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await world(mark).run(resume=True)

    virtual_time.run(world("a").run(interrupt_after=5.0))
    ready = load_controller(Checkpoints(tmp_path / "checkpoints", keep=2).all()[-1]).buffer.ready
    assert ready, "nothing was ready: choose another moment"
    virtual_time.run(killed())
    last = world(mark)
    virtual_time.run(last.run(resume=True))
    counted = last.buffer.accounting()
    assert counted.balance() == 0 and counted.trained == 30 * 3 and last.trainer.version == 30
    assert counted.dropped.get("settings_changed", 0) == (len(ready) if mark == "b" else 0)


def test_steps_of_which_everything_was_rejected_end_the_run_with_their_remedy(tmp_path: Path) -> None:
    rejected = LagStats("0", 500, 1.0, 0.0, 1.0, 0.0, 0.0, {"opsm": 1.0})
    trainer = FakeTrainer(skip=lambda attempt: "all_rejected", lags=(rejected,), noise=Noise(500, 0.04, 25, 0.01))
    world = FakeWorld(tmp_path, trainer=trainer, noise=NoiseWatch(AlgoConfig("opsm", correction={"opsm": 1e-4})))
    with pytest.raises(
        TrainingError, match=r"3 steps in a row were skipped \(all_rejected\).*algo.correction.*widen them"
    ):
        virtual_time.run(world.run())
    messages = [fact.message for fact in world.facts.of(Warned)]
    assert "algo.correction.opsm = 0.0001 lies inside rounding: it stopped 100 % of 500 tokens" in messages[0]
    assert "step 0 was skipped: all_rejected; the weights are unchanged" in messages[1] and len(messages) == 4


def test_a_step_that_is_skipped_when_it_is_done_again_ends_the_run(tmp_path: Path) -> None:
    first = FakeWorld(tmp_path, steps=30)
    virtual_time.run(first.run(interrupt_after=5.0))
    shutil.rmtree(tmp_path / "checkpoints")  # all steps are done again
    second = FakeWorld(tmp_path, steps=30, trainer=FakeTrainer(skip=lambda attempt: attempt == 2))
    with pytest.raises(CheckpointError, match="step 2 was repeated from the journal and was nonfinite_gradient"):
        virtual_time.run(second.run(resume=True))
    done_again = second.trainer.batches
    assert [batch.skippable for batch in done_again] == [False, False], "the journal says that they were not skipped"
    assert all(batch.skippable for batch in first.trainer.batches)


def test_a_full_disk_at_a_checkpoint_warns_and_goes_on(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, trainer=FakeTrainer(full=lambda attempt: attempt < 2), checkpoint_every=2)
    virtual_time.run(world.run())
    assert world.trainer.version == world.steps
    assert [(fact.step, bool(fact.error)) for fact in world.facts.of(CheckpointSaved)] == [
        (2, True),
        (4, True),
        (6, False),
    ]
    assert any("No space left" in warning.message for warning in world.facts.of(Warned))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000006"], "a half-written one is left"


def test_the_last_checkpoint_is_tried_again_until_it_is_on_the_disk(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, trainer=FakeTrainer(full=lambda attempt: attempt < 3))
    virtual_time.run(world.run())
    assert [path.name for path in world.checkpoints.all()] == ["step-000006"]
    messages = [warning.message for warning in world.facts.of(Warned) if "not finished before" in warning.message]
    assert len(messages) == 3 and "free disk space; it is tried again in 4 s" in messages[2]


def test_a_run_whose_last_checkpoint_is_never_written_has_not_finished(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, trainer=FakeTrainer(full=lambda attempt: attempt > 0), checkpoint_every=4)
    with pytest.raises(CheckpointError, match=r"all 6 steps.*not finished.*last good one is step-000004.*--resume"):
        virtual_time.run(world.run())
    assert 5 < world.trainer.saves < 20, "tried again, a bounded number of times"
    assert world.buffer.accounting().balance() == 0
    again = FakeWorld(tmp_path)
    virtual_time.run(again.run(resume=True))
    assert load_controller(again.checkpoints.all()[-1]).step == again.trainer.version == 6


def test_whoever_interrupts_does_not_wait_for_the_last_checkpoint(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, trainer=FakeTrainer(full=lambda attempt: True))

    async def scenario() -> None:
        running = asyncio.ensure_future(world.run())
        while not world.trainer.saves:
            await asyncio.sleep(0.1)
        world.pipeline.interrupt()
        began = asyncio.get_running_loop().time()
        await running
        assert asyncio.get_running_loop().time() - began < 0.5 and world.trainer.saves == 2

    virtual_time.run(scenario())


MODES = ("inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group")


@pytest.mark.parametrize("when", ["generating", "swapping"])
@pytest.mark.parametrize("mode", few(MODES, keep=4))
def test_one_interrupt_is_enough_whatever_the_engine_does(tmp_path: Path, mode: Any, when: str) -> None:
    """It is stopped, and answers nobody: a checkpoint needs the trainer only."""
    partial = PartialConfig(mode=mode)
    world = FakeWorld(tmp_path, steps=1000, engine=FakeEngine(seconds_per_token=0.3, load_seconds=1.0), partial=partial)

    async def scenario() -> None:
        running = asyncio.ensure_future(world.run())
        await asyncio.sleep(0.05)
        while world.trainer.version < 3 + (when == "swapping"):
            await asyncio.sleep(0.01)
        if when == "generating":
            await asyncio.sleep(3.0)
        world.engine.stopped = True
        await asyncio.sleep(20.0)
        world.pipeline.interrupt()
        async with asyncio.timeout(5.0):
            await running

    virtual_time.run(scenario())
    assert load_controller(world.checkpoints.all()[-1]).step == world.trainer.version >= 3
    assert world.buffer.accounting().balance() == 0


@pytest.mark.parametrize("who", ["engine", "trainer"])
@pytest.mark.parametrize("mode", few(MODES, keep=4))
def test_whoever_leaves_at_once_waits_for_nobody(tmp_path: Path, mode: Any, who: str) -> None:
    """A second interrupt cancels the run."""
    world = FakeWorld(
        tmp_path,
        steps=1000,
        engine=FakeEngine(seconds_per_token=0.3, load_seconds=1.0),
        partial=PartialConfig(mode=mode),
    )

    async def scenario() -> None:
        running = asyncio.ensure_future(world.run())
        await asyncio.sleep(0.05)
        while world.trainer.version < 4:
            await asyncio.sleep(0.01)
        if who == "engine":
            world.engine.stopped = True
        else:
            world.trainer.seconds_per_step = world.trainer.save_seconds = 1e9
        await asyncio.sleep(20.0)
        world.pipeline.interrupt()
        running.cancel()
        done, _ = await asyncio.wait((running,), timeout=5.0)
        assert done and running.cancelled()

    virtual_time.run(scenario())


# --- what was due when a run was killed ----------------------------------------------------------------------------------


def _killed(world: FakeWorld, when: Callable[[], bool], resume: bool = False) -> FakeWorld:
    """Ends it in the middle, as soon as it is so far: without a checkpoint, whatever is under way."""

    async def scenario() -> None:
        running = asyncio.ensure_future(world.run(resume))
        await asyncio.sleep(0.05)
        while not when():
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait((running,))

    virtual_time.run(scenario())
    return world


def test_a_checkpoint_that_was_due_at_the_killed_step_is_written_after_the_resume(tmp_path: Path) -> None:
    first = FakeWorld(tmp_path, steps=9, trainer=FakeTrainer(save_seconds=100.0), checkpoint_every=4)
    _killed(first, lambda: first.trainer.version == 4)
    assert not first.checkpoints.all()
    second = FakeWorld(tmp_path, steps=9, checkpoint_every=4, earlier=first.in_metrics())
    virtual_time.run(second.run(resume=True))
    assert [fact.step for fact in second.facts.of(CheckpointSaved)] == [4, 8, 9]


def test_an_evaluation_that_was_due_at_the_killed_step_is_done_after_the_resume(tmp_path: Path) -> None:
    def world(earlier: EarlierMetrics = EarlierMetrics(), name: str = "run") -> FakeWorld:  # noqa: B008 frozen
        engine, trainer = FakeEngine(0.3), FakeTrainer(2.0)
        return FakeWorld(tmp_path / name, steps=9, evaluate_every=4, earlier=earlier, engine=engine, trainer=trainer)

    first = world()
    _killed(first, lambda: any(live.update.version == 4 for live in first.facts.of(WeightsLive)))
    assert first.trainer.version == 4 and not first.facts.of(Evaluated)
    second = world(first.in_metrics())
    _killed(second, lambda: second.trainer.version == 5 and bool(second.facts.of(Evaluated)), resume=True)
    assert [evaluation.step for evaluation in second.facts.of(Evaluated)] == [4]
    assert not any("evaluation was due" in warning.message for warning in second.facts.of(Warned))
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    third = world(first.in_metrics(), "other")  # as if that had been killed before it was over
    virtual_time.run(third.run(resume=True))
    assert [evaluation.step for evaluation in third.facts.of(Evaluated)] == [5, 8]
    assert any("evaluation was due at step 4" in warning.message for warning in third.facts.of(Warned))
    last = world(second.in_metrics())
    virtual_time.run(last.run(resume=True))
    assert [evaluation.step for evaluation in last.facts.of(Evaluated)] == [8], "what was done is not done twice"


@pytest.mark.parametrize(("steps", "kept"), [(9, [3, 4, 5, 6, 7, 8]), (3, [])])
def test_every_evaluation_that_a_kill_has_cost_is_told(tmp_path: Path, steps: int, kept: list[int]) -> None:
    """Several are under way at once where one takes longer than the steps until the next: only the newest weights are there to be measured."""
    slow = FakeWorld(tmp_path, steps=9, evaluate_every=1, engine=FakeEngine(5.0), trainer=FakeTrainer(0.1))
    _killed(slow, lambda: slow.trainer.version == 3)
    assert not slow.facts.of(Evaluated)
    second = FakeWorld(tmp_path, steps=steps, evaluate_every=1, earlier=slow.in_metrics(), trainer=FakeTrainer(9.0))
    virtual_time.run(second.run(resume=True))
    assert [evaluation.step for evaluation in second.facts.of(Evaluated)] == kept
    assert any("evaluation was due at 2 steps from 1 to 2" in warning.message for warning in second.facts.of(Warned))


def test_two_evaluations_at_one_instant_do_not_collide(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = FakeWorld(tmp_path, evaluate_every=1)
        world.build()
        await world.go_live()
        measure = world.parts.evaluator.measure
        one, other = await asyncio.gather(measure("during", 1), measure("during", 2))
        assert one is not None and other is not None and not one.failures and not other.failures
        names = [request.id for request in world.engine.requests]
        assert len(set(names)) == len(names) == 8

    virtual_time.run(scenario())


@pytest.mark.parametrize("known", [True, False])
def test_a_step_that_is_done_again_shows_its_reward(tmp_path: Path, known: bool) -> None:
    """`known`: what the metrics had of the groups that it took. A loss of power takes the ends of files."""
    first = FakeWorld(tmp_path, steps=9)
    _killed(first, lambda: first.trainer.version == 3)
    shown = {fact.report.version: fact.reward_drawn for fact in first.facts.of(StepTrained)}
    before = first.facts.facts.index(first.facts.of(StepTrained)[1]) if known else 0
    until = first.facts.facts.index(first.facts.of(StepTrained)[2]) if known else 0
    second = FakeWorld(tmp_path, steps=9, earlier=first.in_metrics(until))
    assert bool(before) == known
    virtual_time.run(second.run(resume=True))
    again = {fact.report.version: fact.reward_drawn for fact in second.facts.of(StepTrained)}
    assert sorted(again) == list(range(3 if known else 1, 10)) and not any(map(math.isnan, again.values()))
    assert not known or again[3] == pytest.approx(shown[3])


def test_who_shares_a_trainer_takes_turns_and_waiting_is_not_work() -> None:
    async def scenario() -> None:
        clock, turns, done = asyncio.get_running_loop().time, DeviceShare(), []

        async def work(name: str, seconds: float) -> None:
            async with turns.take(clock):
                await asyncio.sleep(seconds)
                done.append(name)

        began = clock()
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as all_of:
                all_of.create_task(work("first", 3.0))
                all_of.create_task(work("second", 1.0))
                await asyncio.sleep(10.0)
                all_of.create_task(work("cut off", 5.0))
                await asyncio.sleep(2.0)
                raise HeadraceError("enough")
        assert done == ["first", "second"] and turns.busy == clock() - began - 6.0 == 6.0
        async with turns.take(clock):
            """Nobody holds it who is gone."""

    virtual_time.run(scenario())


def test_every_ticket_ends_in_exactly_one_named_outcome(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, scorer=FakeScorer(failure_rate=0.6), engine=FakeEngine(failure_rate=0.3), watch=PATIENT)
    virtual_time.run(world.run())
    ended = world.facts.of(GroupEnded)
    assert len({fact.ticket for fact in ended}) == len(ended) == world.buffer.accounting().drawn
    assert all(fact.reason or fact.outcome == "ready" for fact in ended)
    trained = sum(len(fact.groups) for fact in world.facts.of(StepTrained))
    assert trained == sum(fact.outcome == "ready" for fact in ended)


def test_errors_of_ours_win_in_a_group_of_exceptions(tmp_path: Path) -> None:
    class Broken(FakeScorer):
        async def score(self, prompt: Any, episodes: Any) -> Any:
            raise HeadraceError("the scorer is broken")

    with pytest.raises(HeadraceError, match="the scorer is broken"):
        virtual_time.run(FakeWorld(tmp_path, scorer=Broken()).run())


def test_what_ends_a_teacher_ends_the_run_at_once_with_a_checkpoint(tmp_path: Path) -> None:
    async def watch() -> None:
        await asyncio.sleep(1.05)
        raise WorkerDied("teacher math", "died and could not be replaced")

    world = FakeWorld(tmp_path / "run", steps=1000, sentinels=[watch])

    async def main() -> float:
        with pytest.raises(WorkerDied, match="the teacher math process died and could not be replaced"):
            await world.run()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) < 3, "not at the end, and not at a deadline"
    assert world.checkpoints.all(), "the compute done so far is kept"
