"""The real pipeline joined to parts that are fakes or simulated, in virtual time: for the planner and for tests.

Buffer, staleness, partial rollouts, accounting, journal, recovery and pipeline are those of a run; engine, trainer, task and
scorer are handed in, and the clock is the event loop's. Run a world inside `virtual_time.run`:

    world = World(tmp_path, engine=FakeEngine(), trainer=FakeTrainer(), task=FakeTask(), scorer=FakeScorer())
    virtual_time.run(world.run())
    world.facts.of(StepTrained)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.algo.config import AlgoConfig
from headrace.algo.noise import NoiseWatch
from headrace.algo.training_rows import algorithm_of
from headrace.core.protocols import Engine, EnvironmentKind, Observer, Scorer, Task, Trainer
from headrace.durable.journal import Journal
from headrace.durable.pass_log import PassLog
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.rollout_session import Decode
from headrace.facts.facts import Fact
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.assembly import assemble, go_live, restore_state
from headrace.loop.buffer import Buffer
from headrace.loop.checkpoints import UNCHANGED, ChangedSettings, Checkpoints, Moment, Snapshots, load_controller
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.evaluation import IdentityProbe, Quantised
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import GroupSource
from headrace.loop.partial import PartialConfig
from headrace.loop.pipeline import EarlierMetrics, Pipeline
from headrace.loop.recovery import SavedRun, read_saved_run
from headrace.loop.staleness import StalenessConfig
from headrace.loop.turns import DeviceShare, SharedDevices
from headrace.settings.process_config import EvalConfig, WatchConfig
from headrace.weight_sync.delta.efficiency import DeltaWatch


@dataclass
class FactList:
    """An observer that keeps every fact."""

    facts: list[Fact] = field(default_factory=list)

    def record(self, fact: Any) -> None:
        self.facts.append(fact)

    def of(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@dataclass(kw_only=True)
class World:
    """One process of a run. A second world over the same directory, built with `resume`, is the process that resumes it."""

    directory: Path | None = field(kw_only=False)
    """The directory of journal, passes and checkpoints; None writes none, which is much faster."""
    staleness: StalenessConfig = field(default=StalenessConfig(groups_per_step=3, max_lag=1), kw_only=False)
    engine: Engine
    trainer: Trainer
    task: Task
    scorer: Scorer
    environment: EnvironmentKind = SINGLE_TURN
    observer: Observer = field(default_factory=FactList)
    steps: int = 6
    seed: int = 0
    rollout: RolloutConfig = RolloutConfig(group_size=2, max_tokens=8, patience=200)
    algo: AlgoConfig = AlgoConfig(name="dr_grpo")
    partial: PartialConfig = PartialConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    watch: WatchConfig = WatchConfig()
    decode: Decode = lambda tokens: " ".join(map(str, tokens))
    stop_after: float = 1e6
    """Seconds that a wait may last before it stops the run."""
    checkpoint_every: int = 0
    evaluate_every: int = 0
    identity_every: int = 2
    quantised: Quantised | None = None
    mark: str = ""
    """Stands for the settings that make rows, as `resume_rules.meaning` tells them."""
    earlier: EarlierMetrics = EarlierMetrics()
    """The metrics of the worlds before this one."""
    noise: NoiseWatch = field(default_factory=NoiseWatch)
    deltas: DeltaWatch = field(default_factory=DeltaWatch)
    sentinels: Sequence[Callable[[], Awaitable[None]]] = ()
    shared: Callable[[Telemetry], SharedDevices] | None = None
    """Makes the devices that engine and trainer share; None if each has its own."""
    elsewhere: Callable[[Collection[int]], GroupSource] | None = None
    """Makes the source of groups from the tickets in flight, where they are not sampled by `engine`."""

    @property
    def facts(self) -> FactList:
        assert isinstance(self.observer, FactList), "the observer keeps no facts"
        return self.observer

    def build(self, resume: bool = False) -> Pipeline:
        """`resume`: from what an earlier world left in the directory."""
        wanted = self.steps * self.staleness.groups_per_step
        self.buffer = Buffer(
            self.staleness, wanted, remembers=self.algo.remembers, experience=self.algo.recipe.experience
        )
        clock, record = asyncio.get_running_loop().time, self._record
        telemetry = Telemetry(record, clock, Waits(record, clock, self.stop_after / 2, self.stop_after))
        self.plan = plan = LoopPlan(
            steps=self.steps,
            staleness=self.staleness,
            rollout=self.rollout,
            seed=self.seed,
            max_skipped_steps=3,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
            curriculum=self.curriculum,
            watch=self.watch,
        )
        self._saved = self._read_saved() if resume else None
        self.restored = restore_state(
            plan=plan,
            task=self.task,
            engine=self.engine,
            partial=self.partial,
            telemetry=telemetry,
            saved=self._saved,
            buffer=self.buffer,
        )
        journal, snapshots = self._storage(telemetry, self.restored.step)
        self.parts = assemble(
            plan=plan,
            restored=self.restored,
            telemetry=telemetry,
            engine=self.engine,
            trainer=self.trainer,
            environment=self.environment,
            scorer=self.scorer,
            evaluated_by=self.scorer,
            held_out=self.task.held_out(2) if self.evaluate_every else [],
            evaluation=EvalConfig(samples=2),
            algorithm=algorithm_of(self.algo, self.rollout.max_tokens),
            decode=self.decode,
            journal=journal,
            snapshots=snapshots,
            probe=IdentityProbe([1, 2, 3], self.identity_every, "float32", telemetry, quantised=self.quantised),
            turns=DeviceShare(self.shared(telemetry) if self.shared else None),
            noise=self.noise,
            deltas=self.deltas,
            sentinels=self.sentinels,
            elsewhere=self.elsewhere(self.restored.buffer.in_flight) if self.elsewhere else None,
        )
        self.pipeline = Pipeline(self.parts, plan, self.restored.step, self.earlier)
        return self.pipeline

    async def go_live(self) -> None:
        await go_live(self.parts)

    async def run(self, resume: bool = False, interrupt_after: float | None = None) -> None:
        """Runs from the first publish to the last step. `interrupt_after`: seconds until the run is asked to stop."""
        pipeline = self.build(resume)
        if self._saved:
            pipeline.discard(self._saved.outdated)
        await pipeline.redo(self.restored.redo)
        await self.go_live()
        if interrupt_after is not None:
            asyncio.get_running_loop().call_later(interrupt_after, pipeline.interrupt)
        await pipeline.run()

    def _record(self, fact: Fact) -> None:
        self.observer.record(fact)
        assert self.buffer.accounting().balance() == 0, "C2 holds at every instant, not only at the end"

    def _read_saved(self) -> SavedRun:
        assert self.directory is not None, "nothing was written that could be resumed"
        checkpoint, _ = Checkpoints(self.directory / "checkpoints", keep=2).newest_good()
        state = load_controller(checkpoint) if checkpoint else None
        made_by = state.made_by if state else {}
        other = tuple(name for name, value in self._made_by.items() if made_by.get(name, value) != value)
        changed = ChangedSettings(steps=other, groups=other) if other else UNCHANGED
        saved = read_saved_run(self.directory, state, True, changed, self.rollout.max_tokens)
        assert not saved.complaints, saved.complaints
        return saved

    @property
    def _made_by(self) -> dict[str, str]:
        return {"algo.advantage": self.mark}

    def _storage(self, telemetry: Telemetry, step: int) -> tuple[Journal, Snapshots]:
        if self.directory is None:
            return _Unwritten(), _Unsaved()
        self.directory.mkdir(exist_ok=True)
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep=2)
        passes = PassLog(self.directory, step, _fail)
        self.engine.listen(passes.write)
        self.restored.notebook.listen(passes.note)
        saved_step = step if self._saved and self._saved.state else -1
        snapshots = Snapshots(self.checkpoints, passes, telemetry, saved_step=saved_step, made_by=self._made_by)
        return Journal(self.directory, flushes=False), snapshots


def _fail(message: str) -> None:
    raise AssertionError(message)


class _Unwritten(Journal):
    """A journal that counts its records and keeps none."""

    def __init__(self) -> None:
        self.position = 0

    def write(self, record: Any) -> None:
        self.position += 1

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Unsaved(Snapshots):
    def __init__(self) -> None:
        self.saved_step = -1

    async def capture(self, step: int, parts: Any) -> Moment:
        return Moment(step=step, seconds=0.0, stopped=0.0, state=(), digest=b"", short="", save=parts.trainer.save)

    async def write(self, moment: Moment) -> str:
        self.saved_step = moment.step
        return ""
