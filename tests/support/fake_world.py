"""The shipped world over the shipped fakes, and random schedules for it: what tests of the loops stand on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from headrace.core.batches import Batch
from headrace.core.errors import WorkerDied
from headrace.core.reports import SleepReport, TrainReport
from headrace.engine.fleet.fleet import Fleet
from headrace.facts.facts import StepTrained
from headrace.facts.records import summarise
from headrace.facts.run_state import RunState
from headrace.facts.telemetry import Telemetry
from headrace.loop.pipeline import EarlierMetrics, Pipeline, earlier_metrics
from headrace.loop.staleness import StalenessConfig
from headrace.loop.turns import SharedDevices
from headrace.loop.world.world import World
from headrace.settings.process_config import WatchConfig
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_task import FakeTask
from headrace.testing.fake_trainer import FakeTrainer

PATIENT = WatchConfig(failed_pause=1.0, outages=1000)
"""For worlds in which rollouts are made to fail: no share of failures pauses the run."""


@dataclass(kw_only=True)
class FakeWorld(World):
    engine: FakeEngine = field(default_factory=FakeEngine)
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    scorer: FakeScorer = field(default_factory=FakeScorer)
    task: FakeTask = field(default_factory=FakeTask)
    kv: Literal["", "host", "drop"] = ""
    """What becomes of the KV cache while the trainer works, if both share their devices."""

    def build(self, resume: bool = False) -> Pipeline:
        """A resumed trainer has the version of its checkpoint, and an engine serves nothing until it has been given weights."""
        if self.kv:
            keep, engine, trainer = self.kv == "host", self.engine, self.trainer
            self.shared = lambda telemetry: SharedDevices(engine, trainer, keep=keep, telemetry=telemetry)
        pipeline = super().build(resume)
        if resume:
            self.trainer.versions[""] = pipeline.step
        self.engine.version = -1
        return pipeline

    def in_metrics(self, until: int | None = None) -> EarlierMetrics:
        """What the metrics would hold after the first `until` facts."""
        state = RunState()
        for fact in self.facts.facts[:until]:
            state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)
        return earlier_metrics(state)

    def trained_lags(self) -> list[int]:
        """Lag of every trained token."""
        return [
            batch.step - version for batch in self.trainer.batches for row in batch.rows for version in row.versions
        ]


schedules = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "groups": st.integers(1, 5),
        "max_lag": st.integers(0, 4),
        "window": st.integers(1, 6),
        "token": st.sampled_from([0.0, 0.01, 0.1, 1.0]),
        "step": st.sampled_from([0.0, 0.05, 0.5, 5.0]),
        "load": st.sampled_from([0.0, 0.2, 3.0]),
        "score": st.sampled_from([0.0, 0.1, 2.0]),
        "failures": st.sampled_from([0.0, 0.2, 0.5]),
        "outages": st.sampled_from([0.0, 0.0, 0.1]),
    }
)
"""Settings, speeds (seconds) and shares of failures."""


def scheduled_world(directory: Path, schedule: dict[str, Any]) -> FakeWorld:
    s = schedule
    window = min(s["window"], s["max_lag"] * s["groups"] + 1)
    heavy_tail = lambda rng: min(8, int(rng.paretovariate(0.7)))  # noqa: E731
    return FakeWorld(
        directory,
        StalenessConfig(groups_per_step=s["groups"], max_lag=s["max_lag"], window=window),
        engine=FakeEngine(
            s["token"], s["load"], heavy_tail, failure_rate=s["failures"] / 2, outage_rate=s["outages"], seed=s["seed"]
        ),
        trainer=FakeTrainer(s["step"], publish_seconds=s["load"] / 3),
        scorer=FakeScorer(seconds=s["score"], failure_rate=s["failures"] / 2, seed=s["seed"]),
        watch=PATIENT,
    )


class OnLentDevices(FakeEngine):
    """A member of a fleet that begins asleep, also after a death, as an engine process on lent devices does."""

    dead = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end_process()

    @property
    def holds(self) -> bool:
        """Whether it has the devices."""
        return self._awake.is_set() and not self._away and not self.dead

    def _end_process(self) -> None:
        self._awake.clear()
        self._asked.clear()
        self.version = -1

    async def sleep(self, keep: bool) -> SleepReport:
        self._if_alive()
        return await super().sleep(keep)

    async def wake(self, replaced: bool) -> SleepReport:
        self._if_alive()
        return await super().wake(replaced)

    async def ended(self) -> str:
        return await self.absence()

    def _if_alive(self) -> None:
        if self.dead:
            raise WorkerDied("engine lent", "was killed too often (fake)")

    def vanish(self, how: str) -> None:
        super().vanish(how)
        self._end_process()

    def reappear(self) -> None:
        self._away = ""
        self._set_presence()

    def kill(self) -> None:
        self._end_process()
        super().kill()

    def die(self) -> None:
        """It does not come back. Nobody watches it while it sleeps."""
        self.dead = True
        self._awake.clear()
        if self._died is not None and not self._died.done():
            super().die()


class LendingTrainer(FakeTrainer):
    """Asserts that it never steps beside the engine on its devices."""

    lent: OnLentDevices | None = None
    naps = 0
    """How often it was asked to sleep."""

    async def sleep(self) -> SleepReport:
        self.naps += 1
        return await super().sleep()

    async def step(self, batch: Batch) -> TrainReport:
        self._check()
        report = await super().step(batch)
        self._check()
        return report

    def _check(self) -> None:
        assert self.lent is None or not self.lent.holds, "a step beside the engine on the trainer's devices"
        assert self.lent is None or not self.lent.unfinished(), "requests wait at an engine that sleeps"


def lends(world: World, fleet: Fleet, lent: OnLentDevices, give_way: float) -> None:
    """Has the trainer lend its devices to the last member of a fleet."""
    trainer = world.trainer
    assert isinstance(trainer, LendingTrainer)
    trainer.lent = lent

    def shared(telemetry: Telemetry) -> SharedDevices:
        return SharedDevices(fleet.on_lent_devices(give_way), trainer, keep=False, telemetry=telemetry, lent=True)

    world.shared = shared
