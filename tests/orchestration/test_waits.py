"""C6: nothing hangs in silence. A stall at every named wait, a loop that is blocked, processes that do not answer."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace
from headrace.core.errors import IdentityError, StalledError
from headrace.core.protocols import EnvironmentKind, Job
from headrace.core.types import Completion, Episode, Prompt, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.headrace import HeadraceDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.rollout_session import Notebook
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.reward_scorer import RewardScorer
from headrace.episodes.scoring.services.config import ServiceConfig
from headrace.episodes.scoring.teacher.stage import Teacher, TraceScorer
from headrace.episodes.scoring.teacher.text_teacher import TextScorer, TextTeacher
from headrace.facts.facts import Waited, Warned
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Lasting, Waits, counted
from headrace.facts.waits import Testimony as Told
from headrace.loop.evaluation import Evaluator, HeldOutSet
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import OwnGroups
from headrace.loop.partial import Interrupts, PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.turns import DeviceShare, Utilisation
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.processes.health import stacks
from headrace.processes.health.family import Child, Family, family
from headrace.processes.health.live_status import blame, read_live
from headrace.processes.health.patience import Starvation
from headrace.processes.health.stacks import VARIABLE
from headrace.processes.health.watchdog import STALLED, Watchdog
from headrace.processes.joining.greeting import Terms
from headrace.processes.joining.joined import JoinLauncher
from headrace.processes.launch.local import LocalLauncher
from headrace.processes.placed.placed import NodeShare, PlacedLauncher
from headrace.run.build import open_telemetry
from headrace.run.config import RunConfig, load_config
from headrace.run.open_parts import _serve_base, open_parts
from headrace.run.pools import close_within, open_pools
from headrace.run.seats import user_sites
from headrace.run.session import BuiltRun, report_unhandled
from headrace.run.teaching import SelfTeaching, TeacherEngines
from headrace.settings.process_config import EvalConfig
from headrace.testing.fake_arrivals import FakeArrivals
from headrace.testing.fake_cluster import FakeCluster
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_service import ScriptedPost
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.memory_bus import MemoryBus, MemoryServer
from support.bus.bus_world import Fleet, bus_world
from support.fake_world import FakeWorld
from support.runs.beside import until

PACKAGE = Path(headrace.__file__).parent


def here(record: Callable[[Any], None], warn_after: float = 10.0, stop_after: float = 20.0) -> Waits:
    return Waits(record, asyncio.get_running_loop().time, warn_after, stop_after)


# --- what a wait does --------------------------------------------------------------------------------------------------


def test_many_that_wait_for_one_thing_are_reported_once_with_their_number() -> None:
    """Groups begin one after the other, and each has its own deadline."""
    facts: list[Any] = []

    async def main() -> None:
        waits = here(facts.append, stop_after=1000.0)
        over = asyncio.Event()

        async def group(number: int) -> None:
            await asyncio.sleep(number)
            async with waits.named("scorer", "a turn", endless=number % 2 == 0):
                await over.wait()

        groups = [asyncio.ensure_future(group(number)) for number in range(8)]
        late = asyncio.ensure_future(group(13))  # it was not there yet when the others were reported
        await asyncio.sleep(19.5)
        told = [fact.message for fact in facts if isinstance(fact, Warned)]
        assert told == ["scorer has waited 10 s for a turn (× 8)"]
        await asyncio.sleep(6)
        told = [fact.message for fact in facts if isinstance(fact, Warned)]
        assert told[1:] == ["scorer has waited 20 s for a turn (× 9)"], "again, for those without an end"
        over.set()
        await asyncio.gather(*groups, late)
        await asyncio.sleep(100)
        assert len([fact for fact in facts if isinstance(fact, Warned)]) == 2

    virtual_time.run(main())


def test_a_wait_is_reported_then_stopped_and_says_who_waits_for_whom():
    facts: list[Any] = []

    async def main() -> None:
        waits = here(facts.append)

        async def other() -> None:
            async with waits.named("admission", "a free slot"):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(other())
        await asyncio.sleep(3)
        try:
            async with waits.named("trainer", "8 scored groups"):
                await asyncio.sleep(1e6)
        finally:
            task.cancel()

    with pytest.raises(StalledError) as caught:
        virtual_time.run(main())
    # The one that began earlier is stopped in its own task; here it is only in the picture.
    assert str(caught.value) == (
        "stopped: trainer has waited 20 s for 8 scored groups. All waits: trainer has waited 20 s for 8 scored groups"
    )
    warned = [fact.message for fact in facts if isinstance(fact, Warned)]
    assert warned == [
        "admission has waited 10 s for a free slot (the run stops at 20 s)",
        "trainer has waited 10 s for 8 scored groups (the run stops at 20 s)",
    ]
    assert [fact.seconds for fact in facts if isinstance(fact, Waited)] == [20.0, 20.0]


def test_a_body_s_own_timeout_is_its_own():
    async def main() -> None:
        async with here(lambda fact: None).named("a", "b"):
            async with asyncio.timeout(1):
                await asyncio.sleep(2)

    with pytest.raises(TimeoutError):
        virtual_time.run(main())


def test_an_endless_wait_is_reported_again_and_again_and_never_stopped():
    facts: list[Any] = []

    async def main() -> None:
        async with here(facts.append).named("start", "a download", endless=True):
            await asyncio.sleep(35)

    virtual_time.run(main())
    messages = [fact.message for fact in facts if isinstance(fact, Warned)]
    assert messages == [f"start has waited {n}0 s for a download" for n in (1, 2, 3)]


def test_a_process_that_stood_still_blames_nobody():
    facts: list[Any] = []

    async def main() -> float:
        waits = here(facts.append)
        asyncio.get_running_loop().call_later(15, waits.forgive, 12)  # 12 of these 15 s were no time for anybody
        with pytest.raises(StalledError, match="has waited 20 s"):
            async with waits.named("a", "b"):
                await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 32
    assert [fact.t for fact in facts if isinstance(fact, Warned)] == [10, 22]


def test_time_in_which_a_process_had_no_core_puts_off_the_second_deadline_alone():
    facts: list[Any] = []

    async def main() -> float:
        waits = here(facts.append)
        asyncio.get_running_loop().call_later(15, waits.spare, 12)
        asyncio.get_running_loop().call_later(18, waits.spare, 1)
        with pytest.raises(StalledError, match="has waited 33 s"):
            async with waits.named("a", "b"):
                await asyncio.sleep(31)
                assert not waits.overdue()
                await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 33
    assert [fact.t for fact in facts if isinstance(fact, Warned)] == [10]


def test_the_process_that_was_kept_waiting_the_longest_counts():
    waited = {1: 5.0, 2: 3.0}
    starvation = Starvation(waited.__getitem__)
    assert starvation.since_last([1]) == 5.0
    waited |= {1: 5.5, 2: 3.0}
    assert starvation.since_last([1, 2]) == 3.0
    waited |= {1: 6.5, 2: 3.25}
    assert starvation.since_last([1, 2]) == 1.0
    assert starvation.since_last([]) == 0.0


def test_equal_waits_are_said_once():
    waits = [Lasting("rollouts", "the engine", 9.0), Lasting("a", "b", 5.0), Lasting("rollouts", "the engine", 1.0)]
    assert [said for said, _ in counted(waits)] == [
        "rollouts has waited 9 s for the engine (× 2)",
        "a has waited 5 s for b",
    ]


# --- the witness -------------------------------------------------------------------------------------------------------


def stalled(witness: Callable[..., Awaitable[Told]], body: Callable[[], Awaitable[None]]) -> Any:
    """What comes of a wait for `body`, and when."""

    async def main() -> Any:
        waits = here(lambda fact: None)
        waits.witness = witness
        error = None
        try:
            async with waits.named("trainer", "the engine"):
                await body()
        except StalledError as caught:
            error = caught
        return error, asyncio.get_running_loop().time()

    return virtual_time.run(main())


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_the_witness_looks_before_anything_is_cancelled():
    reached: list[str] = []

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reached.append("cancelled")

    async def witness(wait: Lasting, every: Sequence[Lasting]) -> Told:
        await asyncio.sleep(2)
        reached.append(f"seen {wait.owner} {wait.seconds:.0f} {len(every)}")
        return Told("engine, pid 7: asleep", ["--- engine", "  core.py"])

    error, when = stalled(witness, body)
    assert reached == ["seen trainer 20 1", "cancelled"] and when == 22
    assert "has waited 20 s for the engine (engine, pid 7: asleep). All waits" in str(error)
    assert error.__notes__ == ["--- engine", "  core.py"]


def test_what_ends_while_the_witness_looks_is_no_stall():
    async def witness(wait: Lasting, every: Sequence[Lasting]) -> Told:
        await asyncio.sleep(2)
        return Told("late")

    async def body() -> None:
        await asyncio.sleep(21)

    assert stalled(witness, body) == (None, 21)


def test_a_witness_that_fails_does_not_save_the_wait():
    async def witness(wait: Lasting, every: Sequence[Lasting]) -> Told:
        raise OSError("no space")

    error, when = stalled(witness, for_ever)
    assert when == 20 and "no space" in error.__notes__[0]


# --- a stall at every named wait ---------------------------------------------------------------------------------------


def named_waits() -> set[tuple[str, str]]:
    """(owner, what) of every wait in the package, read from its source. What is not literal in an f-string becomes `*`.

    The simulations play stalls of their own, in `commands/plan/` and `testing/faultsim/`.
    """
    found = set()
    for path in (path for path in PACKAGE.rglob("*.py") if not {"plan", "faultsim"} & set(path.parts)):
        if ".named(" not in (text := path.read_text()):  # to read all of them as syntax takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "named":
                found.add((_pattern(node.args[0]), _pattern(node.args[1])))
    return found


def _pattern(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_pattern(part) if isinstance(part, ast.Constant) else "*" for part in values)
    raise AssertionError(f"a wait's name has to be readable in the source: {ast.unparse(node)}")


def stall_at(waits: Waits, owner: str, pattern: str) -> Waits:
    """Whoever comes to that wait, stays there for ever."""
    named, wanted = waits.named, re.compile(re.escape(pattern).replace(r"\*", ".+"))

    @contextlib.asynccontextmanager
    async def stuck(who: str, what: str, endless: bool = False, **more: Any) -> AsyncIterator[None]:
        async with named(who, what, endless, **more):
            if who == owner and wanted.fullmatch(what):
                await asyncio.Event().wait()
            yield

    waits.named = stuck  # type: ignore[method-assign]
    return waits


Scenario = Callable[[Path, Callable[[Waits], Waits]], Awaitable[None]]


def of_pipeline(**settings: Any) -> Scenario:
    async def scenario(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
        world = FakeWorld(tmp / "run", stop_after=600.0, **settings)
        pipeline = world.build()
        spoil(world.parts.telemetry.waits)
        await world.go_live()
        await pipeline.run()

    return scenario


async def of_evaluation(tmp: Path, spoil: Callable[[Waits], Waits], environment: EnvironmentKind = SINGLE_TURN) -> None:
    clock = asyncio.get_running_loop().time
    engine, waits = FakeEngine(), spoil(here(lambda fact: None))
    await engine.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
    plan = LoopPlan(
        steps=1,
        staleness=StalenessConfig(),
        rollout=RolloutConfig(max_tokens=4),
        seed=0,
        max_skipped_steps=1,
        checkpoint_every=0,
        evaluate_every=0,
    )
    groups = OwnGroups(
        plan=plan,
        evaluation=EvalConfig(),
        interrupts=Interrupts(engine, PartialConfig(), waits, clock),
        environment=environment,
        scorer=FakeScorer(),
        evaluated_by=FakeScorer(),
        notebook=Notebook(),
        decode=str,
        waits=waits,
        context_length=1000,
    )
    telemetry = Telemetry(FactList().record, clock, waits)
    evaluator = Evaluator(HeldOutSet("", groups, [Prompt("p", "a text", (1, 2))]), telemetry)
    await evaluator.measure("before", 0)


async def of_statistics(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    waits = spoil(here(lambda fact: None))
    telemetry = Telemetry(FactList().record, asyncio.get_running_loop().time, waits)
    await Utilisation(FakeEngine(), DeviceShare(), telemetry).start()


async def of_start(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    world = FakeWorld(tmp / "run", stop_after=600.0)
    pipeline = world.build()
    spoil(world.parts.telemetry.waits)
    await BuiltRun(
        config=None,  # type: ignore[arg-type]
        adapter="",
        pools=None,  # type: ignore[arg-type]
        teaching=None,  # type: ignore[arg-type]
        parts=world.parts,
        pipeline=pipeline,
        redo=(),
        outdated={},
        utilisation=None,  # type: ignore[arg-type]
        close=for_ever,
    ).go_live()


async def of_teacher_s_start(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    clock = asyncio.get_running_loop().time
    engines = TeacherEngines(LocalLauncher(tmp), Telemetry(FactList().record, clock, spoil(here(lambda fact: None))))
    await engines.open("teacher math", tmp, EngineConfig())


class Publishing:
    """What `SelfTeaching` asks of a trainer."""

    async def publish_shadow(self) -> WeightUpdate:
        return WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0)


async def of_self_teaching(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    teaching = SelfTeaching(Publishing(), FakeEngine(load_seconds=1.0), spoil(here(lambda fact: None)))  # type: ignore[arg-type]
    await teaching.after_publish()
    try:
        await teaching.after_publish()
    finally:
        teaching.close()


PROMPT = Prompt("p", "a text", (1, 2))


def an_episode(text: str = "said") -> Episode:
    said = Completion((5, 6), (-1.0, -1.0), (VersionSpan(0, 0, 0),), "stop", text)
    return Episode((Turn(PROMPT.tokens, said),))


async def of_scoring(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    engine, waits = FakeEngine(), spoil(here(lambda fact: None))
    await engine.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
    everybody: Callable[[Prompt], bool] = lambda prompt: True  # noqa: E731
    text = TextTeacher(
        name="text",
        engine=engine,
        takes=everybody,
        weight=1.0,
        encode_prompt=lambda prompt: (1,),
        encode_messages=lambda messages, prompt: (1,),
        encode_completion=lambda said, ended: (2, 3),
        has_ended=lambda done: True,
    )
    inner = TextScorer(FakeScorer(), [text], waits)
    await TraceScorer(inner, [Teacher("token", engine, everybody)], engine, waits, print).score(PROMPT, [an_episode()])


def a_config(tmp: Path) -> RunConfig:
    reward, task = {"function": "reasoning_gym"}, {"kind": "reasoning_gym", "name": "chain_sum"}
    model = {"path": "smollm2-135m-instruct"}
    return load_config({"name": "x", "out": str(tmp), "model": model, "task": task, "reward": reward})


async def of_loading(tmp: Path, spoil: Callable[[Waits], Waits], facts: FactList, lane: str = "") -> None:
    config = a_config(tmp)
    storage, directory = SimpleNamespace(recorder=facts, checkpoint=None), SimpleNamespace(path=tmp, logs=tmp)
    lanes: Any = {lane: SimpleNamespace(config=config, storage=storage, directory=directory)}
    telemetry = open_telemetry(config.watch, facts, asyncio.get_running_loop().time)
    spoil(telemetry.waits)
    async with open_parts(config, lanes, {"": telemetry, lane: telemetry}, logs=tmp):
        pass


async def of_server(tmp: Path, spoil: Callable[[Waits], Waits], facts: FactList) -> None:
    telemetry = Telemetry(facts.record, asyncio.get_running_loop().time, spoil(here(facts.record, 120.0, 600.0)))
    engine = RemoteEngine(
        Connection("http://127.0.0.1:1"), HeadraceDialect(), patience=1e9, max_deaths=1, telemetry=telemetry
    )
    await engine.open()


async def of_adapter(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    telemetry = Telemetry(FactList().record, asyncio.get_running_loop().time, spoil(here(lambda fact: None)))
    await _serve_base(None, telemetry)  # type: ignore[arg-type]


async def of_service(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    clock, waits = asyncio.get_running_loop().time, spoil(here(lambda fact: None))
    config = RewardConfig(services=(ServiceConfig(name="checked", url="http://service/"),))
    telemetry = Telemetry(FactList().record, clock, waits)
    scorer = RewardScorer(config, poster=ScriptedPost(lambda body: [1.0]), telemetry=telemetry)
    done = Completion((1,), (-1.0,), (VersionSpan(0, 0, 0),), "stop", "a")
    await scorer.score(Prompt("p", "", (1,)), [Episode((Turn((1,), done),))])


async def of_joining(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    telemetry = Telemetry(FactList().record, asyncio.get_running_loop().time, spoil(here(lambda fact: None)))
    launcher = JoinLauncher(FakeArrivals(), telemetry)
    await launcher.worker(Job("engine", "engine 2"), lambda method, payload: None).start()


async def of_user_code(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    config = load_config(a_config(tmp), ["orchestration.scorers=1", f"orchestration.token_file={tmp / 'token'}"])
    telemetry = Telemetry(FactList().record, asyncio.get_running_loop().time, spoil(here(lambda fact: None)))
    await user_sites(config.orchestration, telemetry, config.code_files).scorers.least(lambda site: 0)


def over_bus(hosts: int = 1, weights_after: float = 0.0) -> Scenario:
    async def scenario(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
        waits = spoil(here(lambda fact: None, 300.0, 600.0))
        fleet = Fleet(
            open_bus=functools.partial(MemoryBus, MemoryServer()),
            staleness=StalenessConfig(groups_per_step=3, max_lag=1),
            engine=lambda: FakeEngine(load_seconds=weights_after),
            waits=waits,
        )
        for _ in range(hosts):
            fleet.join()
        try:
            world = await bus_world(None, fleet, evaluate_every=2)
            running = asyncio.ensure_future(world.run())
            await asyncio.wait([running, *fleet.tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in fleet.tasks:
                if task.done() and task.exception():
                    running.cancel()  # and its own error is heard, else it is logged whenever it is collected as garbage
                    await asyncio.wait([running])
                    running.cancelled() or running.exception()
                    task.result()
            await running
        finally:
            await fleet.end()

    return scenario


async def of_placing(tmp: Path, spoil: Callable[[Waits], Waits]) -> None:
    telemetry = Telemetry(FactList().record, asyncio.get_running_loop().time, spoil(here(lambda fact: None)))
    cluster, one = FakeCluster([NodeShare(1)]), NodeShare(1)
    launcher = PlacedLauncher(cluster, FakeArrivals(), bundle=one, terms=Terms("m", {}), logs=tmp, telemetry=telemetry)
    await launcher.open(["engine"])
    await launcher.worker(Job("engine", "engine"), lambda method, payload: None).start()


HANDED_OUT = dataclasses.replace(SINGLE_TURN, players="agents that take them")

STALLS: dict[tuple[str, str], Scenario] = {
    ("admission", "a free slot (weights live, or a group ended)"): of_pipeline(),
    ("rollouts", "the engine"): of_pipeline(),
    ("rollouts", "the engine, or *"): of_pipeline(environment=HANDED_OUT),
    ("rollouts", "the scorer"): of_pipeline(),
    ("rollouts", "the swap in the engine, which interrupted them"): of_pipeline(
        partial=PartialConfig(mode="abort_resume"), engine=FakeEngine(seconds_per_token=0.5, load_seconds=2.0)
    ),
    ("trainer", "* scored groups"): of_pipeline(),
    ("trainer", "the swap in the engine (of *)"): of_pipeline(engine=FakeEngine(load_seconds=5.0)),
    ("delivery", "the trainer (the published weights)"): of_pipeline(),
    ("delivery", "the swap in the engine"): of_pipeline(),
    ("delivery", "the engine (probe)"): of_pipeline(),
    ("controller", "the trainer (*)"): of_pipeline(),
    ("checkpoint", "the trainer (its files)"): of_pipeline(checkpoint_every=2),
    ("trainer", "the checkpoint of step * to be written"): of_pipeline(
        checkpoint_every=1, trainer=FakeTrainer(save_seconds=5.0)
    ),
    ("controller", "room on the disk for the last checkpoint"): of_pipeline(
        trainer=FakeTrainer(full=lambda attempt: True)
    ),
    ("turns", "the * to *"): of_pipeline(kv="host"),
    ("controller", "the engine's statistics"): of_statistics,
    ("evaluation", "the engine"): of_evaluation,
    ("evaluation", "the engine, or *"): functools.partial(of_evaluation, environment=HANDED_OUT),
    ("evaluation", "the scorer"): of_evaluation,
    ("start", "the base weights to be live"): of_adapter,
    ("start", "a worker to join at * as *"): of_joining,
    ("the user's code", "a worker that offers *"): of_user_code,
    ("start", "the bus * to answer"): over_bus(hosts=0),
    ("start", "a rollout host on * (headrace rollouts)"): over_bus(),
    ("rollouts", "a rollout host"): over_bus(),
    ("evaluation", "a rollout host"): over_bus(),
    ("rollouts", "the weights of version *"): over_bus(weights_after=5.0),
    ("start", "the cluster at * to place * (*)"): of_placing,
    ("start", "* to start on *"): of_placing,
    ("start", "the first weights to be live"): of_start,
    ("start", "the *"): of_teacher_s_start,
    ("trainer", "the swap in the teacher (of the version before)"): of_self_teaching,
    ("delivery", "the swap in the teacher"): of_self_teaching,
    ("scoring", "the teacher *"): of_scoring,
    ("scoring", "the reference"): of_scoring,
    ("scoring", "the * *"): of_service,
}
"""In virtual time, with fakes. How to come to each wait of the package."""

ENDLESS: dict[tuple[str, str], Callable[..., Awaitable[None]]] = {
    ("start", "the files of models, task and reward"): of_loading,
    ("start", "the files of models, tasks and rewards"): functools.partial(of_loading, lane="a"),
    ("start", "the server to answer"): of_server,
}
"""What is reported again and again and never stopped."""

WITH_PROCESSES = {
    ("start", "the trainer to load the model"),
    ("start", "the engine to make room for it"),
    ("start", "the engine to load the model"),
    ("start", "the trainer of the warm start to load the model"),
    ("start", "the server to fall asleep"),
}
"""Those that are between the controller and real processes; see below. The last two have no test of their own that stalls them."""

OF_A_CLUSTER = {("cluster", "its head at *")}
"""Stalled in `workers/test_placed.py`."""


LAST = ("controller", "the engine's last word")
"""It has a deadline of its own, and a name so that the watchdog takes it for no hang."""


CLOSING = ("closing", "the worker processes")
"""A stall of it is told, and stops nothing; see below."""


def test_an_engine_without_a_last_word_is_waited_for_in_name_and_not_for_long() -> None:
    async def main() -> float:
        clock = asyncio.get_running_loop().time
        telemetry = Telemetry(FactList().record, clock, stall_at(here(lambda fact: None), *LAST))
        await Utilisation(FakeEngine(), DeviceShare(), telemetry).stop(patience=30.0)
        return clock()

    assert virtual_time.run(main()) == 30.0


def test_every_named_wait_has_a_stall_injected_below():
    covered = STALLS.keys() | ENDLESS.keys() | WITH_PROCESSES | OF_A_CLUSTER | {LAST, CLOSING}
    assert named_waits() == covered, "a new wait needs a scenario here, and one that is gone has none"


@pytest.mark.filterwarnings("ignore:coroutine")  # what was to be awaited in there never is
@pytest.mark.parametrize(("owner", "what"), sorted(STALLS), ids=lambda text: text)
def test_a_stall_at_every_wait_stops_the_run_with_its_name(tmp_path: Path, owner: str, what: str) -> None:
    async def main() -> None:
        await STALLS[owner, what](tmp_path, lambda waits: stall_at(waits, owner, what))

    with pytest.raises(StalledError) as caught:
        virtual_time.run(main())  # which raises Deadlock where nothing would ever happen again
    sentence = re.escape(f"{owner} has waited ") + r"\d+ s for " + re.escape(what).replace(r"\*", ".+")
    assert re.search(sentence, str(caught.value)), str(caught.value)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(("owner", "what"), sorted(ENDLESS), ids=lambda text: text)
def test_a_stall_where_things_are_fetched_is_said_again_and_again(tmp_path: Path, owner: str, what: str) -> None:
    facts = FactList()

    async def main() -> None:
        async with asyncio.timeout(1000):
            await ENDLESS[owner, what](tmp_path, lambda waits: stall_at(waits, owner, what), facts)

    with pytest.raises(TimeoutError):
        virtual_time.run(main())
    messages = [fact.message for fact in facts.of(Warned)]
    assert messages == [f"{owner} has waited {seconds} s for {what}" for seconds in range(120, 1000, 120)]


def test_processes_that_do_not_close_are_told_and_hide_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        await close_within(here(lambda fact: None), for_ever())

    virtual_time.run(main())
    assert "stopped: closing has waited 20 s for the worker processes" in capsys.readouterr().err


# --- processes that hang -----------------------------------------------------------------------------------------------

HANGS = """
import re, sys, threading, time
from headrace.processes.health.stacks import answer_signals

def sleeps():
    time.sleep(100)

def never_lets_go():
    re.match("(a+)+$", "a" * 60 + "b")  # native code that keeps the interpreter's lock

def spins():
    while True:
        pass

answer_signals()
print("ready", flush=True)
globals()[sys.argv[1]]()
"""


def inside(pid: int) -> bool:
    """Whether a process that was ready is in its function by now: asleep, or ten clock ticks of CPU time later."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    begun = ticks.setdefault(pid, int(fields[11]))
    return fields[0] == "S" or int(fields[11]) >= begun + 10


ticks: dict[int, int] = {}


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """A process that hangs in some way."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str, script: str = HANGS) -> Child:
        file = tmp_path / f"{how}.stacks"
        process = subprocess.Popen(
            [sys.executable, "-c", script, how],
            env={**os.environ, VARIABLE: str(file)},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        until(lambda: inside(process.pid))
        return Child(how, process.pid, file)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_every_process_says_where_it_stands_even_one_in_native_code(child: Callable[..., Child]) -> None:
    asked = [child("sleeps"), child("never_lets_go"), child("spins")]
    accounts = stacks.ask(asked)
    for account in accounts:
        assert account.child.who in account.stacks and account.brief.count(":") >= 2
    assert "asleep, 0 % of a core, in <string>:6 sleeps" in accounts[0].brief
    assert "<string>:9 never_lets_go" in accounts[1].brief and "does not answer signals" in accounts[1].brief
    assert accounts[2].state.startswith("running") and not accounts[2].state.startswith("running, 0 %")
    again = stacks.ask(asked[:1])[0]
    assert again.stacks.count("most recent call first") == 1, "what it said before is not said again"


def test_a_stopped_process_is_not_waited_for_and_told_as_the_kernel_sees_it(child: Callable[..., Child]) -> None:
    one = child("sleeps")
    os.kill(one.pid, signal.SIGSTOP)
    (account,) = stacks.ask([one], patience=0.5)
    assert "does not answer signals: stopped by a signal (state T" in account.brief
    assert "in <string>:6 sleeps" in account.brief, "read from outside"


def test_a_process_that_has_no_handler_yet_is_not_killed_by_the_question(child: Callable[..., Child]) -> None:
    one = child("sleeps", "import time; print('ready', flush=True); time.sleep(100)")
    (account,) = stacks.ask([one], patience=0.5)
    assert "cannot be asked for its stacks" in account.state and "asleep" in account.state
    os.kill(one.pid, 0)
    (gone,) = stacks.ask([Child("engine", 2**22 + 1, one.stacks)], patience=0.5)
    assert gone.state.endswith("gone")


def test_blame_goes_to_whom_the_wait_names_and_else_to_whom_the_others_name() -> None:
    def account(who: str) -> stacks.Account:
        return stacks.Account(
            Child(who, 7, None), "asleep", 'x (most recent call first):\n  File "/a/b.py", line 3 in f'
        )

    every = [account(who) for who in ("trainer", "engine", "teacher math", "teacher code", "scorer 1", "scorer 2")]

    def blamed(what: str, *others: str) -> str:
        return blame(Lasting("x", what, 1.0), [Lasting("y", other, 1.0) for other in others], every)[0]

    assert blamed("the engine") == "engine, pid 7: asleep, in b.py:3 f"
    assert blamed("the trainer (step)", "the engine").startswith("trainer,")
    assert blamed("the teacher code").startswith("teacher code,") and ";" not in blamed("the teacher code")
    assert blamed("the scorer").count("scorer") == 2
    assert blamed("8 scored groups", "8 scored groups", "the engine") == "engine, pid 7: asleep, in b.py:3 f"
    assert blamed("8 scored groups") == ""


# --- the real workers --------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> RunConfig:
    return load_config(
        {
            "name": "tiny",
            "model": {"path": str(tiny_llama)},
            "task": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")},
            "reward": {"function": "reasoning_gym"},
            "train": {"dtype": "float32"},
            "rollout": {"max_tokens": 8},
            "engine": {"dtype": "float32", "kv_gib": 0.01, "context_length": 64, "max_running": 4},
        }
    )


def test_a_stopped_trainer_and_a_stopped_engine_are_named_with_what_they_do(config: RunConfig, tmp_path: Path) -> None:
    async def stopped(waits: Waits, who: str, ask: Callable[[], Awaitable[Any]]) -> StalledError:
        pid = next(child.pid for child in watchdog.family.children() if child.who == who)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StalledError) as caught:
                async with waits.named("rollouts", f"the {who}"):
                    await ask()
        finally:
            os.kill(pid, signal.SIGCONT)
        return caught.value

    async def main() -> list[StalledError]:
        patient, tight = here(lambda fact: None, 100, 200), here(lambda fact: None, 0.1, 0.2)
        watchdog.add(tmp_path, tight)
        clock = asyncio.get_running_loop().time
        path = Path(config.model.path)
        telemetry = Telemetry(FactList().record, clock, patient)
        async with open_pools(config, path, tmp_path, telemetry, {}) as pools:
            alive = {
                one.child.who: one.stacks for one in await asyncio.to_thread(stacks.ask, watchdog.family.children())
            }
            assert all("worker.py" in alive[who] for who in ("engine", "trainer")), alive
            return [
                await stopped(tight, "trainer", lambda: pools.trainer.score([1, 2, 3])),
                await stopped(tight, "engine", pools.engine.stats),
            ]

    with Watchdog(tmp_path, warn_after=100, stop_after=200) as watchdog:
        errors = asyncio.run(main())
    for who, error in zip(("trainer", "engine"), errors, strict=True):
        assert re.search(rf"the {who} \({who}, pid \d+: does not answer signals: stopped by a signal", str(error)), (
            error
        )
        picture = Path(error.__notes__[-1].removeprefix("the stacks of all processes are in ")).read_text()
        assert re.search(rf"rollouts has waited \d+ s for the {who}", picture) and "--- controller" in picture
        assert "worker.py" in picture, "the other one has answered"
    assert not watchdog.family.children(), "closed processes are forgotten"


@pytest.mark.parametrize("what", ["the trainer to load the model", "the engine to make room for it"])
def test_a_stall_while_the_workers_start(config: RunConfig, tmp_path: Path, what: str) -> None:
    children = Family()

    async def main() -> None:
        waits, tight = here(lambda fact: None, 30, 60), stall_at(here(lambda fact: None, 0.1, 0.2), "start", what)
        named = waits.named
        waits.named = lambda owner, of, endless=False: (  # type: ignore[method-assign]
            (tight.named if of == what else named)(owner, of, endless)
        )
        clock = asyncio.get_running_loop().time
        path = Path(config.model.path)
        async with open_pools(config, path, tmp_path, Telemetry(FactList().record, clock, waits), {}):
            pass

    with pytest.raises(StalledError, match=rf"start has waited \d+ s for {what}"), family(children):
        asyncio.run(main())
    assert not children.children(), "nothing is left behind"


# --- scorers that sleep ------------------------------------------------------------------------------------------------

SLEEPY = """
import time

def sleeps(completions, **columns):
    if completions == ["said"]:
        time.sleep(1000)
    return [0.0]
"""


over = threading.Event()


def sleeps_in_a_thread(completions: list[str], **columns: Any) -> list[float]:
    while completions == ["said"] and not over.is_set():
        time.sleep(0.1)
    return [0.0]


@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_reward_function_that_sleeps_is_shown_with_its_line(tmp_path: Path, where: str) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    in_process = RewardConfig(function=f"{tmp_path / 'sleepy.py'}:sleeps", timeout=100.0, workers=1)
    if where == "process":
        scorer, place = RewardScorer(in_process, log=tmp_path / "scorer.log"), "sleepy.py:6 sleeps"
    else:
        scorer, place = RewardScorer(RewardConfig(timeout=100.0), [sleeps_in_a_thread]), "sleeps_in_a_thread"

    async def main() -> None:
        waits = here(lambda fact: None, 1.0, 3.0)
        watchdog.add(tmp_path, waits)
        await scorer.score(PROMPT, [an_episode("quick")])  # its process is up
        async with waits.named("rollouts", "the scorer"):
            await scorer.score(PROMPT, [an_episode()])

    async def around() -> None:
        try:
            await main()
        finally:
            over.set()
            await scorer.close()

    over.clear()
    with Watchdog(tmp_path, warn_after=100, stop_after=200) as watchdog, pytest.raises(StalledError) as caught:
        asyncio.run(around())
    assert place in str(caught.value) and any("sleep" in note for note in caught.value.__notes__)


def test_a_swap_in_the_teacher_that_fails_is_raised_when_it_fails(tmp_path: Path) -> None:
    class Wrong:
        """Its second version is not what it says."""

        version = -1

        async def publish_shadow(self) -> WeightUpdate:
            self.version += 1
            return WeightUpdate(version=self.version, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0)

    async def main() -> None:
        teaching = SelfTeaching(Wrong(), FakeEngine(), here(lambda fact: None))  # type: ignore[arg-type]
        watching = asyncio.ensure_future(teaching.watch())
        await teaching.after_publish()
        await asyncio.sleep(1)
        assert not watching.done(), "the first went well"
        await teaching.after_publish()
        with pytest.raises(IdentityError):
            await watching

    virtual_time.run(main())


def test_what_nobody_awaits_is_said(logged: Any) -> None:
    messages: list[str] = []

    def fails() -> None:
        raise RuntimeError("in a callback")

    async def main() -> None:
        report_unhandled(messages.append)
        asyncio.get_running_loop().call_soon(fails)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(messages) == 1 and "RuntimeError('in a callback')" in messages[0] and "fails" in messages[0]
    assert "in a callback" in logged.text, "with its traceback, in the log"


def test_a_worker_survives_any_number_of_questions(child: Callable[..., Child]) -> None:
    one = child("spins")
    for _ in range(500):
        os.kill(one.pid, signal.SIGUSR1)
    (account,) = stacks.ask([one])
    assert "spins" in account.brief and "does not answer" not in account.brief


# --- a loop that is blocked --------------------------------------------------------------------------------------------

BLOCKED = """
import asyncio, ctypes, os, signal, sys, time
from pathlib import Path
from headrace.facts.waits import Waits
from headrace.processes.health.watchdog import Watchdog

def blocks():
    time.sleep(60)

async def main(mode):
    waits = Waits(lambda fact: None, time.monotonic, 1.0, 12.0 if mode == "frozen" else 60.0)
    watchdog.add(path, waits)
    watchdog.attach()
    async with waits.named("trainer", "the engine"):
        await asyncio.sleep(0.3)
        print("ready", flush=True)
        match mode:
            case "frozen":
                for _ in range(12):  # its own time, not the clock's
                    await asyncio.sleep(0.1)
            case "blocks":
                blocks()
            case "native":
                while not (path / "interpreter.stacks").exists():  # the process that looks is only starting
                    ctypes.PyDLL(None).sleep(2)
            case "native for ever":
                ctypes.PyDLL(None).sleep(600)
            case "asked":
                os.kill(os.getpid(), signal.SIGUSR1)
                while not (path / "stacks-1.txt").exists():  # the loop cannot answer
                    time.sleep(0.1)
    if mode == "nameless":
        await asyncio.Event().wait()

path = Path(sys.argv[1])
stop_after = {"native": 60.0, "asked": 60.0, "frozen": 12.0}.get(sys.argv[2], 1.2)
with Watchdog(path, warn_after=0.4, stop_after=stop_after, pulse=0.1, freeze=0.5) as watchdog:
    asyncio.run(main(sys.argv[2]))
"""


def run_blocked(directory: Path, mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, str(directory), mode], capture_output=True, text=True, timeout=600
    )


def test_code_that_blocks_the_loop_is_shown_and_then_ends_the_process(tmp_path: Path) -> None:
    done = run_blocked(tmp_path, "blocks")
    assert done.returncode == STALLED
    said, ended = done.stderr.split("ended by its watchdog", 1)
    assert "the event loop has not turned for" in said and "in blocks" in said
    assert "trainer has waited" in ended and "in blocks" in ended and "task Task-1" in ended
    assert "in blocks" in (tmp_path / "stacks-2.txt").read_text()
    assert "ended by its watchdog: the event loop has not turned" in (tmp_path / "status.json").read_text()


def test_a_wait_without_a_name_is_found_too(tmp_path: Path) -> None:
    done = run_blocked(tmp_path, "nameless")
    assert done.returncode == STALLED
    said, ended = done.stderr.split("ended by its watchdog", 1)
    assert "there has been no named wait for" in said and "in main" in said and "task Task-1" in ended


def test_native_code_that_keeps_the_interpreter_is_written_down_without_it(tmp_path: Path) -> None:
    done = run_blocked(tmp_path, "native")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"the interpreter of the controller, pid \d+, has been blocked for \d+ s; its main thread is in .*main",
        done.stderr,
    )
    assert "in main" in (tmp_path / "interpreter.stacks").read_text()


def test_native_code_that_never_lets_the_interpreter_go_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    done = run_blocked(tmp_path, "native for ever")
    assert done.returncode == -signal.SIGKILL
    verdict = "ended by its watchdog: the interpreter was blocked for"
    assert f"headrace: {verdict}" in done.stderr and verdict in (tmp_path / "status.json").read_text()


def test_a_signal_shows_all_and_the_run_goes_on_even_while_the_loop_is_blocked(tmp_path: Path) -> None:
    done = run_blocked(tmp_path, "asked")
    assert done.returncode == 0, done.stderr
    assert "asked by a signal" in done.stderr and re.search(r"trainer has waited \d+ s for the engine", done.stderr)
    assert "in main" in (tmp_path / "stacks-1.txt").read_text()


@pytest.mark.waits
def test_a_run_that_was_stopped_and_continued_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z: all deadlines have passed meanwhile, and nobody is to blame."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(tmp_path), "frozen"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(14)  # longer than the deadline, which is eight times what the process itself needs
    os.kill(process.pid, signal.SIGCONT)
    _, output = process.communicate(timeout=600)
    assert process.returncode == 0, output


def test_nothing_ends_the_watchdog(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(Waits):
        broken = False

        def lasting(self) -> list[Lasting]:
            if self.broken:
                self.broken = False
                raise RuntimeError("not now")
            return super().lasting()

    async def main() -> None:
        waits = Broken(lambda fact: None, time.monotonic, 100, 200)
        watchdog.add(tmp_path, waits)
        watchdog.attach()
        async with waits.named("trainer", "the engine"):
            waits.broken = True
            while waits.broken:
                await asyncio.sleep(0.01)
            (tmp_path / "status.json").unlink(missing_ok=True)
            while read_live(tmp_path) is None:
                await asyncio.sleep(0.01)

    with Watchdog(tmp_path, warn_after=100, stop_after=200, pulse=0.02) as watchdog:
        asyncio.run(asyncio.wait_for(main(), 300))
    assert "RuntimeError: not now" in capfd.readouterr().err
