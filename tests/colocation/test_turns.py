"""Engine and trainer on the same devices, in virtual time: who has them when, and what a run makes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import StalledError, WorkerDied
from headrace.core.reports import SleepReport
from headrace.facts.facts import Slept, StepTrained, WeightsLive, Woke
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.turns import DeviceShare, SharedDevices
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.faultsim.case import MODES, Case
from headrace.testing.faultsim.chance import OneAtATime
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.lives import trial
from support.fake_world import FakeWorld
from support.few import few


def trained(tmp_path: Path, **settings: Any) -> FakeWorld:
    world = FakeWorld(tmp_path / f"run{len(list(tmp_path.iterdir()))}", **settings)
    virtual_time.run(world.run())
    return world


@pytest.mark.parametrize("mode", few(MODES, keep=4))
@pytest.mark.parametrize("kv", ["host", "drop"])
def test_one_sleeps_while_the_other_works_in_every_mode(tmp_path: Path, mode: Any, kv: Any) -> None:
    engine = FakeEngine(load_seconds=0.2)
    engine.sleep_seconds = 0.1
    world = trained(
        tmp_path,
        kv=kv,
        partial=PartialConfig(mode=mode),
        engine=engine,
        trainer=FakeTrainer(sleep_seconds=0.3, publish_seconds=0.1),
        checkpoint_every=2,
        evaluate_every=2,
        steps=6,
    )
    facts = world.facts.facts
    turns = [(type(fact), fact.who) for fact in facts if isinstance(fact, Slept | Woke)]
    to_engine, to_trainer = [(Slept, "trainer"), (Woke, "engine")], [(Slept, "engine"), (Woke, "trainer")]
    assert turns == [*to_engine, *(to_trainer + to_engine) * 6], "two changes a step"
    assert len(world.facts.of(StepTrained)) == 6 and len(world.facts.of(WeightsLive)) == 7
    assert max(world.trained_lags()) <= 1
    woken = False
    for fact in facts:
        if isinstance(fact, Woke):
            woken = fact.who == "trainer"
        assert woken or not isinstance(fact, StepTrained), "a step of a trainer that sleeps"
        assert not (woken and isinstance(fact, WeightsLive)), "weights went live in an engine that sleeps"


def rows(world: FakeWorld) -> list[Any]:
    return [[row.tokens for row in batch.rows] for batch in world.trainer.batches]


@pytest.mark.parametrize("kv", ["host", "drop"])
def test_without_lag_a_run_trains_on_the_tokens_that_it_would_have(tmp_path: Path, kv: Any) -> None:
    settings = {"staleness": StalenessConfig(groups_per_step=3, max_lag=0), "evaluate_every": 1}
    assert rows(trained(tmp_path, kv=kv, **settings)) == rows(trained(tmp_path, **settings))


def test_skipped_steps_give_the_devices_back_too(tmp_path: Path) -> None:
    world = trained(tmp_path, kv="host", trainer=FakeTrainer(skip=lambda attempt: attempt in (1, 2)))
    assert len(world.trainer.batches) == 6


def test_a_run_that_is_interrupted_while_its_engine_hangs_leaves_its_checkpoint(tmp_path: Path) -> None:
    """Saving needs no devices, so that nobody has to fall asleep for it."""
    engine = FakeEngine(seconds_per_token=0.1, load_seconds=0.1)
    world = FakeWorld(tmp_path / "run", kv="host", engine=engine, steps=50)

    async def go() -> None:
        pipeline = world.build()
        await world.go_live()
        asyncio.get_running_loop().call_later(2.0, setattr, engine, "stopped", True)
        asyncio.get_running_loop().call_later(3.0, pipeline.interrupt)
        async with asyncio.timeout(60):
            await pipeline.run()

    virtual_time.run(go())
    assert world.trainer.saves == 1


class Recorded:
    """A worker of `SharedDevices` that does what it is told, or not."""

    def __init__(self, name: str, told: list[str], *, fails: bool = False, hangs: str = "") -> None:
        self._name, self._told, self._fails, self._hangs = name, told, fails, hangs

    async def _do(self, what: str) -> Any:
        self._told.append(f"{self._name} {what}")
        if self._fails:
            raise WorkerDied(self._name, "is lost")
        if what == self._hangs:
            self._hangs = ""
            await asyncio.Event().wait()
        return SleepReport()

    async def sleep(self, keep: bool = True) -> Any:
        return await self._do("sleep")

    async def wake(self, replaced: bool = False) -> Any:
        return await self._do("wake")


def devices(engine: Recorded, trainer: Recorded) -> SharedDevices:
    facts, clock = FactList(), asyncio.get_running_loop().time
    return SharedDevices(
        engine, trainer, keep=True, telemetry=Telemetry(facts.record, clock, Waits(facts.record, clock, 10, 20))
    )


def test_a_change_that_was_cut_off_is_made_again_from_its_beginning() -> None:
    async def go() -> list[str]:
        told: list[str] = []
        turns = DeviceShare(devices(Recorded("engine", told, hangs="wake"), Recorded("trainer", told)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await turns.over()
        async with turns.take(asyncio.get_running_loop().time):
            told.append("step")
        return told

    told = virtual_time.run(go())
    assert told == ["trainer sleep", "engine wake", "engine sleep", "trainer wake", "step"]


def test_an_engine_that_is_lost_does_not_keep_the_trainer_from_its_turn() -> None:
    async def go() -> list[str]:
        told: list[str] = []
        shared = devices(Recorded("engine", told, fails=True), Recorded("trainer", told))
        with pytest.raises(WorkerDied):
            await shared.to_engine(False)
        await shared.to_trainer()
        return told

    assert virtual_time.run(go())[-1] == "trainer wake"


@pytest.mark.parametrize(("owner", "hangs"), [("engine", "wake"), ("trainer", "sleep")])
def test_whoever_hangs_in_a_change_is_named(owner: str, hangs: str) -> None:
    async def go() -> None:
        told: list[str] = []
        parts = {name: Recorded(name, told, hangs=hangs if name == owner else "") for name in ("engine", "trainer")}
        await devices(parts["engine"], parts["trainer"]).to_engine(False)

    with pytest.raises(StalledError, match=f"turns has waited 20 s for the {owner} to {hangs}"):
        virtual_time.run(go())


# --- faults ------------------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    """A worker dies before each of its turns of a short run, and hangs before some; the controller is killed at some writes."""
    found = []
    for kv in ("host", "drop"):
        for who in ("engine", "trainer"):
            found += [
                pytest.param(kv, (Fault(f"{who}_dies", 0, at),), id=f"{kv}-{who}-dies-{at}") for at in range(0, 60, 4)
            ]  # type: ignore[arg-type]
        found += [
            pytest.param(kv, (Fault("kill", 0, at, 0.5), Fault("kill", 1, at // 2, 0.5)), id=f"{kv}-kill-{at}")
            for at in range(5, 95, 15)
        ]
    return found


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(("kv", "faults"), few(cases(), keep=7))
def test_every_contract_holds_whenever_a_worker_dies(kv: Any, faults: tuple[Fault, ...]) -> None:
    """Without lag, the weights are those of the undisturbed run: `trial` compares them."""
    for max_lag in (0, 1):
        trial(Case(5, max_lag=max_lag, steps=3, evaluate_every=1, faults=faults, shared=kv))


def test_the_simulation_notices_two_at_once() -> None:
    one = OneAtATime(shared=True)
    engine, trainer = (type("P", (), {"who": who, "alive": True})() for who in ("engine", "trainer"))
    one.take(trainer)
    one.use(trainer, "train")
    one.use(engine, "load weights")
    one.take(engine)
    assert one.wrong == [
        "the engine is asleep, and is asked to load weights",
        "the engine takes devices that the trainer has",
    ]
    one.leave(trainer)
    trainer.alive, before = False, len(one.wrong)
    one.take(engine)
    assert len(one.wrong) == before
