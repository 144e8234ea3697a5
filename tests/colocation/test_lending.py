"""A trainer that lends its devices while it waits, in virtual time: who has them when, and what a run makes of it. Random misfortunes are in
`tests/fleet/test_fleet_property.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError
from headrace.core.reports import EngineStats
from headrace.engine.fleet.fleet import Fleet, Totals, samples
from headrace.engine.fleet.member import Member
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import FleetSample, MemberMoved, Slept, StepTrained, Warned, Woke
from headrace.facts.records import summarise
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import Costs
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList, World
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_task import FakeTask
from headrace.testing.faultsim.case import MODES, Case
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.lives import trial
from headrace.testing.makers import update
from support.fact_stream import FactStream
from support.fake_world import LendingTrainer, OnLentDevices, lends
from support.few import few

TOKEN, LENGTH, GIVE_WAY = 0.1, 8, 3.0
STEPS = 6


def engine(kind: type[FakeEngine] = FakeEngine, **options: Any) -> Any:
    return kind(**{"seconds_per_token": TOKEN, "length": lambda rng: LENGTH, "rows": 2, **options})


def trained(
    directory: Path | None,
    lent: OnLentDevices | None,
    *,
    at: dict[float, Callable[[], object]] | None = None,
    trainer: LendingTrainer | None = None,
    own: FakeEngine | None = None,
    max_lag: int = 1,
) -> World:
    """`at`: what happens, by its time. The trainer waits for most of each step: two rows sample for twelve rollouts."""
    world = World(
        directory,
        StalenessConfig(groups_per_step=3, max_lag=max_lag),
        engine=own or engine(),
        trainer=trainer or LendingTrainer(0.5, sleep_seconds=0.05),
        task=FakeTask(),
        scorer=FakeScorer(),
        steps=STEPS,
    )

    async def go() -> None:
        loop, record = asyncio.get_running_loop(), world.observer.record
        telemetry = Telemetry(record, loop.time, Waits(record, loop.time, 1e6, 1e6))
        if lent is not None:
            parts = {"1": world.engine, "lent": lent}
            world.engine = fleet = Fleet(parts, FleetPatience(1e5, 1e5), telemetry, "lent")  # type: ignore[arg-type]
            lends(world, fleet, lent, GIVE_WAY)
            await fleet.open()
            with pytest.raises(ConfigError, match="resume the run with orchestration.lend = false"):
                await fleet.remove("lent")
        for time, act in (at or {}).items():
            loop.call_at(time, act)
        await world.run()

    virtual_time.run(go())
    return world


def end(world: World) -> float:
    return float(world.facts.of(StepTrained)[-1].t)


def rows(world: World) -> list[Any]:
    return [[row.tokens for row in batch.rows] for batch in world.trainer.batches]  # type: ignore[attr-defined]


def tokens(world: World) -> list[int]:
    """The tokens of each loan."""
    return [fact.report.tokens for fact in world.facts.of(Slept) if fact.who == "lent engine"]


def test_it_generates_while_the_trainer_waits_and_has_given_way_before_each_step(tmp_path: Path) -> None:
    lent = engine(OnLentDevices)
    world, alone = trained(tmp_path / "lent", lent), trained(tmp_path / "alone", None)
    assert end(world) < 0.8 * end(alone), "twice as many rows, for most of the time"
    kinds = [(type(fact), fact.who) for fact in world.facts.facts if isinstance(fact, Slept | Woke)]
    lend, back = [(Slept, "trainer"), (Woke, "lent engine")], [(Slept, "lent engine"), (Woke, "trainer")]
    loans = kinds.count((Woke, "lent engine"))
    assert kinds[: 4 * loans] == (lend + back) * loans and loans >= STEPS - 1, "two changes a loan, none beside another"
    assert sum(tokens(world)) == lent._sampled > 100, "every token that it sampled was accepted, and counted once"
    assert not world.facts.of(Warned) and not world.facts.of(MemberMoved), "it goes as it is meant to"
    state = RunState()
    for fact in world.facts.facts:
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)
    assert state.naps.loans == loans and state.naps.lent_tokens == sum(tokens(world))
    assert 0 < state.naps.lent_seconds < end(world) - STEPS * 0.5
    assert state.naps.lent_words.startswith(f"lent {loans} times while the trainer waited, ")
    lags = [batch.step - version for batch in world.trainer.batches for row in batch.rows for version in row.versions]  # type: ignore[attr-defined]
    assert max(lags) <= 1


def test_without_lag_a_run_trains_on_the_tokens_that_it_would_have(tmp_path: Path) -> None:
    lent = trained(tmp_path / "lent", engine(OnLentDevices), max_lag=0)
    assert rows(lent) == rows(trained(tmp_path / "alone", None, max_lag=0)) and sum(tokens(lent)) > 0


def test_one_that_hangs_is_killed_in_time_and_serves_again_at_the_next_loan(tmp_path: Path) -> None:
    lent = engine(OnLentDevices)
    world = trained(tmp_path / "run", lent, at={0.5: lambda: setattr(lent, "stopped", True)})
    assert len(world.facts.of(StepTrained)) == STEPS and lent.kills == 1
    (warned,) = [fact.message for fact in world.facts.of(Warned)]
    assert warned.startswith(
        f"engine lent has not given the trainer's devices back within {GIVE_WAY:g} s (orchestration.give_way)"
    )
    first, second = [fact for fact in world.facts.of(Slept) if fact.who == "lent engine"][:2]
    (waited,) = [fact.t for fact in world.facts.of(Warned)]
    assert first.t == waited, "the trainer's turn begins when it is killed"
    assert second.report.tokens > 0


def test_one_that_hangs_while_it_wakes_holds_nobody_up(tmp_path: Path) -> None:
    lent = engine(OnLentDevices)
    lent.stopped = True
    world = trained(tmp_path / "run", lent)
    assert len(world.facts.of(StepTrained)) == STEPS and lent.kills == 1 and sum(tokens(world)) > 0


def test_one_that_dies_costs_no_token_and_one_that_is_lost_no_more_turns(tmp_path: Path) -> None:
    lent, gone = engine(OnLentDevices), engine(OnLentDevices)
    acts = {0.5: lambda: lent.vanish("was killed (fake)"), 2.0: lent.reappear}
    world = trained(tmp_path / "dies", lent, at=acts, max_lag=0)
    assert rows(world) == rows(trained(tmp_path / "alone", None, max_lag=0)) and tokens(world)[-1] > 0
    assert [(fact.member, fact.state) for fact in world.facts.of(MemberMoved)] == [
        ("lent", "away"),
        ("lent", "serving"),
    ]
    world = trained(tmp_path / "lost", gone, at={0.5: gone.die}, max_lag=0)
    assert rows(world) == rows(trained(tmp_path / "alone too", None, max_lag=0))
    moved = world.facts.of(MemberMoved)
    assert [fact.state for fact in moved] == ["lost"]
    after = [fact for fact in world.facts.of(Slept) if fact.who == "trainer" and fact.t > moved[0].t]
    assert len(after) <= 1, "nothing is lent to one that does not come back"


def test_a_wait_that_is_shorter_than_what_a_loan_cost_lends_nothing(tmp_path: Path) -> None:
    trainer = LendingTrainer(0.5, sleep_seconds=1.5)
    world = trained(tmp_path / "run", engine(OnLentDevices), trainer=trainer)
    assert len(world.facts.of(StepTrained)) == STEPS
    assert trainer.naps == 1, "the first showed what it costs"


def test_without_any_other_engine_it_does_not_keep_the_run_waiting(tmp_path: Path) -> None:
    """Its own engine is lost while the other one serves: when that gives way, nobody is left, and the run says so."""
    own = engine()
    with pytest.raises(Exception, match="fleet has no member left"):
        trained(tmp_path / "run", engine(OnLentDevices), own=own, at={0.5: own.die})


def test_one_that_has_died_is_not_waited_for_until_devices_are_lent_again(tmp_path: Path) -> None:
    """Its successor sleeps until the next step is over, and nobody is left to sample for that step."""
    own, lent = engine(), engine(OnLentDevices)
    acts = {0.5: lambda: lent.vanish("was killed (fake)"), 0.6: lent.reappear, 0.7: own.die}
    with pytest.raises(Exception, match="fleet has no member left: 1: .*; lent: was killed"):
        trained(tmp_path / "run", lent, own=own, at=acts)


def test_it_may_be_called_back_at_any_moment_of_its_way_into_the_rotation() -> None:
    async def main(turns: int) -> tuple[str, str]:
        facts, clock = FactList(), asyncio.get_running_loop().time
        telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 1e6, 1e6))
        parts = {"1": engine(), "lent": engine(OnLentDevices)}
        fleet = Fleet(parts, FleetPatience(1e5, 1e5), telemetry, "lent")
        await fleet.open()
        await fleet.load(update(0))
        lent = fleet.on_lent_devices(GIVE_WAY)
        await lent.wake(True)
        for _ in range(turns):
            await asyncio.sleep(0)
        before = fleet.members[-1].state
        await lent.sleep(False)
        after = fleet.members[-1].state
        await fleet.close()
        return before, after

    found = [virtual_time.run(main(turns)) for turns in range(60)]
    assert {before for before, _ in found} == {"away", "serving"} and {after for _, after in found} == {"resting"}


# --- faults ------------------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    """An engine or the trainer dies or hangs before some of its turns; the controller is killed at some writes."""
    kinds = [("engine_dies", 4), ("engine_hangs", 16), ("trainer_dies", 12), ("engine_slow", 16)]
    faults = [Fault(kind, 0, at) for kind, every in kinds for at in range(0, 80, every)]  # type: ignore[arg-type]
    found = [pytest.param((fault,), id=f"{fault.kind}-{fault.at}") for fault in faults]
    for at in range(5, 95, 15):
        killed = Fault("kill", 0, at, 0.5), Fault("kill", 1, at // 2, 0.5)
        found.append(pytest.param(killed, id=f"kill-{at}"))
    return found


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("faults", few(cases(), keep=5))
def test_every_contract_holds_whoever_dies_or_hangs(faults: tuple[Fault, ...]) -> None:
    """Without lag, the weights are those of the undisturbed run: `trial` compares them."""
    for max_lag in (0, 1):
        trial(Case(5, max_lag=max_lag, steps=3, evaluate_every=1, faults=faults, lent=True))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fleet_that_drains_does_not_wait_for_one_that_rests() -> None:
    """The only other engine is lost while devices are lent, and they are given back while the fleet drains for a version."""
    faults = (
        Fault("kill", 1, 3, 0.2881707540410958),
        Fault("kill", 2, 87, 0.49803374494356367),
        Fault("kill", 3, 164, 0.18972940726707754),
        Fault("power", 4, 0, 0.47799815096296117),
        Fault("engine_dies", 0, 19, 0.2609288656684886),
        Fault("engine_lost", 5, 1977),
    )
    case = Case(21087, mode="drain", groups=1, max_lag=2, steps=4, checkpoint_every=0, stragglers=2, faults=faults)
    trial(msgspec.structs.replace(case, lent=True, served=True))


@pytest.mark.parametrize("mode", few(MODES, keep=3))
def test_the_weights_are_those_of_a_run_that_lends_nothing(mode: Any) -> None:
    for seed in range(3):
        case = Case(seed, mode=mode, groups=3, max_lag=0, steps=4, group_size=4)
        weights = {trial(msgspec.structs.replace(case, lent=lent)).weights for lent in (False, True)}
        assert len(weights) == (1 if case.synchronous else len(weights))


# -- numbers --------------------------------------------------------------------------------------------------------------


def test_the_engine_on_lent_devices_is_neither_idle_nor_paid_for() -> None:
    async def main() -> tuple[float, tuple[Any, ...]]:
        own, lent = Member(name="1", engine=engine()), Member(name="lent", engine=engine(), lent=True)
        own.stats, lent.stats = EngineStats(busy_seconds=3.0), EngineStats(busy_seconds=1.0, sampled_tokens=5)
        taken = Totals().taken([own, lent])
        assert taken.sampled_tokens == 5
        return taken.busy_seconds, samples([own, lent])

    busy, found = virtual_time.run(main())
    assert busy == 3.0, "the share of time in which the engine is idle is that of the run's own"
    costs = Costs()
    costs.fold(msgspec.structs.replace(next(FactStream(steps=1).facts()), t=0.0, prices={"engine": 1.0}))
    for t in (0.0, 3600.0):
        costs.fold(FleetSample(t, found))
    assert costs.spent["engine"] == pytest.approx(1.0)
