"""A trainer that does not answer counts as dead, by its own name, and deaths before an hour of progress are forgiven."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import StalledError, WorkerDied
from headrace.facts.facts import StepTrained, Waited, Warned
from headrace.facts.waits import Lasting, Waits
from headrace.facts.waits import Testimony as Told
from headrace.loop.world import virtual_time
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.run.worker.worker_messages import TrainerReady
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.fake_worker import FakeLauncher, FakeProcess, bare_start
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.lives import trial
from support.fake_world import FakeWorld


def waits_of(stop_after: float = 20.0, facts: list[Any] | None = None) -> Waits:
    return Waits(([] if facts is None else facts).append, asyncio.get_running_loop().time, stop_after / 2, stop_after)


class Trainer(FakeProcess):
    """Answers everything at once, but for one call."""

    slow, seconds = "score", 1e9

    async def serve(self) -> None:
        while True:
            frame = await self.receive()
            if frame.method == self.slow:
                await asyncio.sleep(self.seconds)
            self.reply(frame, TrainerReady({}, 0) if frame.method == "start" else [-1.0])


def asked(process: type[Trainer], stop_after: float = 20.0) -> list[float]:
    async def main() -> list[float]:
        trainer = ProcessTrainer(FakeLauncher({"trainer": process}), bare_start(), waits=waits_of(stop_after))
        try:
            await trainer.open()
            return await trainer.score([1, 2])
        finally:
            await trainer.close()

    return virtual_time.run(main())


# -- one call ---------------------------------------------------------------------------------------------------------------------


def test_a_call_without_an_answer_is_a_death_and_names_what_hangs() -> None:
    with pytest.raises(WorkerDied) as caught:
        asked(Trainer)
    assert caught.value.who == "trainer"
    assert str(caught.value) == (
        "the trainer process hangs: no answer to score for 20 s. If it can take that long, raise watch.stop_after"
    )


def test_a_trainer_that_hangs_while_it_loads_is_a_death_too() -> None:
    class Loading(Trainer):
        slow = "start"

    with pytest.raises(WorkerDied, match="no answer to start for 20 s"):
        asked(Loading)


def test_the_remedy_is_a_later_deadline() -> None:
    class Slow(Trainer):
        seconds = 25.0

    with pytest.raises(WorkerDied, match="raise watch.stop_after"):
        asked(Slow)
    assert asked(Slow, stop_after=30.0) == [-1.0]


def test_the_stacks_of_a_process_that_hangs_are_in_its_sentence() -> None:
    async def witness(wait: Lasting, every: Any) -> Told:
        assert wait.what == "the trainer (step)" and wait.seconds == 20.0
        return Told("trainer, pid 7: asleep", ["  core.py", "the stacks of all processes are in logs/stacks-1.txt"])

    async def main() -> None:
        waits = waits_of()
        waits.witness = witness
        async with waits.answer("trainer", "step"):
            await asyncio.Event().wait()

    with pytest.raises(WorkerDied) as caught:
        virtual_time.run(main())
    known = "(trainer, pid 7: asleep; the stacks of all processes are in logs/stacks-1.txt)"
    assert f"no answer to step for 20 s {known}. If" in str(caught.value)


# -- what waits for it ------------------------------------------------------------------------------------------------------------


def test_whoever_waits_for_a_process_is_not_stopped_before_it() -> None:
    """Admission has waited for longer, and is not to blame."""

    async def main() -> float:
        waits = waits_of()

        async def admission() -> None:
            async with waits.named("admission", "a free slot"):
                await asyncio.Event().wait()

        async def step() -> None:
            await asyncio.sleep(15.0)
            async with waits.named("controller", "the trainer (step)"), waits.answer("trainer", "step"):
                await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(admission())
                group.create_task(step())
        (error,) = caught.value.exceptions
        assert isinstance(error, WorkerDied) and "no answer to step for 20 s" in str(error)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 35.0


def test_a_wait_that_outlasts_the_call_is_stopped_after_it() -> None:
    async def main() -> float:
        waits, facts = waits_of(), list[Any]()

        async def call() -> None:
            async with waits.answer("trainer", "step"):
                await asyncio.sleep(25.0)

        async def admission() -> None:
            async with waits.named("admission", "a free slot"):
                await asyncio.Event().wait()

        waits_for = asyncio.ensure_future(admission())
        await asyncio.sleep(8.0)
        with pytest.raises(WorkerDied):
            await call()
        with pytest.raises(StalledError, match="admission has waited 29 s for a free slot"):
            await waits_for
        assert not facts
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 29.0


def test_a_call_is_no_wait_of_its_own_for_people() -> None:
    facts: list[Any] = []

    async def main() -> None:
        waits = waits_of(facts=facts)
        async with waits.named("controller", "the trainer (step)"), waits.answer("trainer", "step"):
            await asyncio.sleep(15.0)
            assert waits.picture() == "controller has waited 15 s for the trainer (step)"
            waits.forgive(12.0)  # the whole process was stopped: nobody is to blame
            await asyncio.sleep(15.0)

    virtual_time.run(main())
    assert len([fact for fact in facts if isinstance(fact, Waited)]) == 1
    assert all("the trainer (step)" in fact.message for fact in facts if isinstance(fact, Warned))


def test_a_run_whose_trainer_hangs_ends_by_its_name_and_goes_on_from_its_checkpoint() -> None:
    """The real controller, wherever the trainer hangs."""
    for turn in range(3, 16, 2):
        history = trial(Case(1, faults=(Fault("trainer_hangs", 0, turn),)))
        assert [said.split(" for ")[0] for said in history.stopped if "hangs" not in said] == []
        assert history.stopped and all(
            said.startswith("the trainer process hangs: no answer to ") for said in history.stopped
        )


def test_progress_is_counted_to_the_last_step(tmp_path: Path) -> None:
    class Hanging(FakeTrainer):
        async def step(self, batch: Any) -> Any:
            if batch.step == 5:
                await asyncio.sleep(7200.0)
            return await super().step(batch)

    async def main() -> None:
        world = FakeWorld(tmp_path, steps=10, trainer=Hanging(seconds_per_step=1.0))
        running = asyncio.ensure_future(world.run())
        await asyncio.sleep(7000.0)
        assert len(world.facts.of(StepTrained)) == 5 and 5.0 <= world.pipeline.worked < 60.0
        running.cancel()
        await asyncio.wait([running])

    virtual_time.run(main())
