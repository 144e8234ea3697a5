"""Checkpoints beside training, in virtual time: the trainer stands still for the copy, and for nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.core.errors import IdentityError
from headrace.facts.facts import CheckpointSaved, StepTrained, Waited, Warned, Withdrawn
from headrace.loop.checkpoints import UNSAVED, load_controller, step_of
from headrace.loop.world import virtual_time
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_world import FakeWorld
from support.few import few

SLOW = {"seconds_per_step": 1.0, "capture_seconds": 0.25}


def said(world: FakeWorld, words: str) -> list[str]:
    return [warning.message for warning in world.facts.of(Warned) if words in warning.message]


def assert_of_one_moment(world: FakeWorld) -> None:
    """Weights, tickets and name of each checkpoint are those of one step."""
    for path in world.checkpoints.all():
        assert int((path / "fake_trainer.txt").read_text()) == load_controller(path).step == step_of(path)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, steps=40, trainer=FakeTrainer(**SLOW, save_seconds=15.0), checkpoint_every=20)
    virtual_time.run(world.run())
    first, last = world.facts.of(CheckpointSaved)
    meanwhile = [step for step in world.facts.of(StepTrained) if first.t - first.seconds < step.t < first.t]
    assert first.seconds >= 15.0 and first.stopped == first.held == 0.25 and len(meanwhile) >= 10
    assert [first.step, last.step] == [20, 40], "the last one is waited for"
    assert world.facts.facts.index(first) > world.facts.facts.index(meanwhile[-1])
    assert_of_one_moment(world)
    assert not said(world, "checkpoint")


def test_the_next_one_waits_for_the_one_before_and_the_remedy_is_to_make_fewer(tmp_path: Path) -> None:
    slow = FakeTrainer(**SLOW, save_seconds=15.0)  # which refuses two at once
    world = FakeWorld(tmp_path / "often", steps=12, trainer=slow, checkpoint_every=3)
    virtual_time.run(world.run())
    assert [checkpoint.step for checkpoint in world.facts.of(CheckpointSaved)] == [3, 6, 9, 12]
    (told,) = said(world, "training waited")
    assert "until the checkpoint of step 3 was written, before that of step 6: raise checkpoint.every" in told
    assert any(wait.what == "the checkpoint of step 3 to be written" for wait in world.facts.of(Waited))
    assert_of_one_moment(world)
    seldom = FakeWorld(
        tmp_path / "seldom", steps=60, trainer=FakeTrainer(**SLOW, save_seconds=15.0), checkpoint_every=30
    )
    virtual_time.run(seldom.run())
    assert not said(seldom, "training waited")


def test_a_trainer_without_room_for_a_copy_stands_still_and_says_so_once(tmp_path: Path) -> None:
    short = "a copy of it takes 1.5 GiB of memory more, and 0.3 GiB are free"
    trainer = FakeTrainer(**SLOW, save_seconds=15.0, short=short)
    world = FakeWorld(tmp_path, steps=6, trainer=trainer, checkpoint_every=2)
    virtual_time.run(world.run())
    assert said(world, "stands still") == [f"training stands still while checkpoints are written: {short}. Free memory"]
    for saved in world.facts.of(CheckpointSaved):
        assert saved.held == saved.seconds >= 15.0
        assert not [step for step in world.facts.of(StepTrained) if saved.t - saved.seconds < step.t < saved.t]
    assert_of_one_moment(world)


def test_training_goes_on_beside_the_next_one_when_memory_was_freed(tmp_path: Path) -> None:
    class Freed(FakeTrainer):
        async def save(self, directory: Path, adapter: str = "") -> None:
            await super().save(directory, adapter)
            self.short = ""

    world = FakeWorld(tmp_path, steps=20, trainer=Freed(**SLOW, save_seconds=5.0, short="no room"), checkpoint_every=10)
    virtual_time.run(world.run())
    assert [checkpoint.held for checkpoint in world.facts.of(CheckpointSaved)] == [pytest.approx(5.25), 0.25]


def test_one_that_cannot_be_written_beside_training_warns_and_training_goes_on(tmp_path: Path) -> None:
    full = FakeTrainer(**SLOW, save_seconds=5.0, full=lambda attempt: attempt == 0)
    world = FakeWorld(tmp_path, steps=20, trainer=full, checkpoint_every=10)
    virtual_time.run(world.run())
    assert [(checkpoint.step, bool(checkpoint.error)) for checkpoint in world.facts.of(CheckpointSaved)] == [
        (10, True),
        (20, False),
    ]
    assert "No space left" in said(world, "could not write the checkpoint of step 10")[0]
    assert [fact.key for fact in world.facts.of(Withdrawn)] == [UNSAVED], "the next one was written"


def test_an_error_that_must_end_the_run_ends_it_in_the_middle_of_a_step(tmp_path: Path) -> None:
    class Changed(FakeTrainer):
        async def save(self, directory: Path, adapter: str = "") -> None:
            await asyncio.sleep(2.5)
            raise IdentityError("the frozen base weights changed")

    world = FakeWorld(tmp_path, steps=100, trainer=Changed(**SLOW), checkpoint_every=5)
    with pytest.raises(IdentityError):
        virtual_time.run(world.run())
    assert world.trainer.version < 12 and not world.checkpoints.all()


@pytest.mark.parametrize("into", few([0.1, 3.0, 14.9], keep=1))
def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_one_before(tmp_path: Path, into: float) -> None:
    """What was trained meanwhile is in the journal."""

    @dataclass
    class Dying(FakeTrainer):
        writes: int = 0
        dies: asyncio.Event = field(default_factory=asyncio.Event)

        async def save(self, directory: Path, adapter: str = "") -> None:
            self.writes += 1
            (directory / "half").write_text("")
            if self.writes == 2:
                await asyncio.sleep(into)
                self.dies.set()
            await super().save(directory, adapter)

    trainer = Dying(**SLOW, save_seconds=15.0)
    world = FakeWorld(tmp_path, steps=60, trainer=trainer, checkpoint_every=20)

    async def life() -> None:
        running = asyncio.ensure_future(world.run())
        await trainer.dies.wait()
        running.cancel()
        await asyncio.wait([running])

    virtual_time.run(life())
    done = trainer.version
    assert [step_of(path) for path in world.checkpoints.all()] == [20] and done >= 40
    assert (tmp_path / "checkpoints" / ".writing-step-000040" / "half").exists()
    again = FakeWorld(tmp_path, steps=60, checkpoint_every=20)
    virtual_time.run(again.run(resume=True))
    assert again.trainer.version == 60 and [batch.step for batch in again.trainer.batches] == list(range(20, 60))
    again_done, before = again.trainer.batches[: done - 20], trainer.batches[20:done]
    assert [one.groups for one in again_done] == [one.groups for one in before], "the same steps again"
    assert [step_of(path) for path in again.checkpoints.all()] == [done, 60], "the one that was due is made at once"
    assert not list((tmp_path / "checkpoints").glob(".writing*"))


def test_an_interrupt_waits_for_the_one_that_is_written_and_for_its_own(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, steps=1000, trainer=FakeTrainer(**SLOW, save_seconds=15.0), checkpoint_every=20)

    async def scenario() -> None:
        running = asyncio.ensure_future(world.run())
        while world.trainer.version < 22:
            await asyncio.sleep(0.1)
        world.pipeline.interrupt()
        await running

    virtual_time.run(scenario())
    assert [checkpoint.step for checkpoint in world.facts.of(CheckpointSaved)] == [20, world.trainer.version]
    assert_of_one_moment(world)
