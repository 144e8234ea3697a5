"""Machines elsewhere that run the user's code, in virtual time: where calls and rollouts go, and what a lost machine costs."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, RolloutFailed, StalledError
from headrace.episodes.environments.workers import episode_frames
from headrace.episodes.environments.workers.environment_pool import (
    Beginning,
    EnvironmentPool,
    FunctionSettings,
    RolloutAsked,
)
from headrace.episodes.environments.workers.episode_frames import (
    ChatAsked,
    ChatReply,
    FunctionLoaded,
    Play,
    RolloutDone,
)
from headrace.episodes.scoring.functions import LIVES, SpreadPool
from headrace.episodes.scoring.job import ScoringJob, Values
from headrace.episodes.scoring.workers.processes import PrivatePool, SharedProcess
from headrace.episodes.scoring.workers.reward_messages import Call, Ready, Reply, pack
from headrace.facts.facts import Warned, WorkerJoined, WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.processes.asked_process import OwnSite, Site, Sites
from headrace.processes.frames import receive_frame
from headrace.processes.joining.greeting import LEAVE, LEAVING, Kind
from headrace.processes.joining.joined import JoinLauncher, invitation
from headrace.processes.joining.same_model import agree_to, code_problem, code_terms
from headrace.run.config import RunConfig, load_config
from headrace.run.seats import UserSites, seats_of, start_of, terms_of_code, user_sites
from headrace.testing.fake_arrivals import FakeArrivals
from headrace.testing.fake_user_host import FakeUserHost, Say

JOB = ScoringJob("2 + 2 =", ("4", "5"), ((1,), (2,)), {})


def config_of(directory: Path, **place: Any) -> RunConfig:
    (directory / "reward.py").write_text("def exact(completions, **columns):\n    return [1.0] * len(completions)\n")
    (directory / "token").write_text("0123456789abcdef")
    (directory / "token").chmod(0o600)
    return load_config(
        {
            "model": {"path": "smollm2-135m-instruct"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "reward": {"function": f"{directory / 'reward.py'}:exact"},
            "orchestration": {"token_file": str(directory / "token"), **place},
        }
    )


class World:
    """A run's machines, and the hosts that offer themselves."""

    def __init__(self, config: RunConfig, stop_after: float = 1000.0) -> None:
        self.facts = FactList()
        clock = asyncio.get_running_loop().time
        self.telemetry = Telemetry(self.facts.record, clock, Waits(self.facts.record, clock, 10.0, stop_after))
        self.arrivals, self.config = FakeArrivals(), config
        self.sites: UserSites = user_sites(config.orchestration, self.telemetry, config.code_files)

    def offer(
        self, program: Callable[[asyncio.StreamReader, Say], Awaitable[None]], host: str, kind: Kind
    ) -> FakeUserHost:
        process = FakeUserHost(program)
        self.arrivals.offer(process, host, kind=kind)
        return process

    async def open(self) -> None:
        await self.sites.open(JoinLauncher(self.arrivals, self.telemetry), self.config)


class RewardMachine:
    """A program that answers each call after `seconds`, and counts them. It may freeze or end its host in the middle of one."""

    def __init__(self, seconds: float = 1.0, value: float = 1.0) -> None:
        self.seconds, self.value = seconds, value
        self.calls = self.now = self.most = 0
        self.host: FakeUserHost | None = None
        self.then: Callable[[RewardMachine], object] = lambda own: None

    async def __call__(self, orders: asyncio.StreamReader, say: Say) -> None:
        say(pack(Ready()))
        while True:
            call = msgspec.msgpack.decode(await receive_frame(orders), type=Call)
            self.calls, self.now = self.calls + 1, self.now + 1
            self.most = max(self.most, self.now)
            self.then(self)
            await asyncio.sleep(self.seconds)
            if self.host and self.host.frozen:
                await asyncio.Event().wait()
            self.now -= 1
            say(pack(Reply(call.id, [self.value] * len(call.job.completions))))


def private(sites: Sites, width: int = 2, timeout: float = 30.0) -> SpreadPool:
    return SpreadPool(sites, lambda site: PrivatePool(["sandbox", "f"], width, timeout, None, site), width)


async def opened(config: RunConfig, *machines: RewardMachine) -> World:
    world = World(config)
    for number, machine in enumerate(machines):
        machine.host = world.offer(machine, f"host-{number}", "scorer")
    await world.open()
    return world


def values(*given: float) -> list[Values]:
    return [[one] * len(JOB.completions) for one in given]


# --- calls of reward functions ------------------------------------------------------------------------------------------------


def test_calls_go_to_the_machine_that_has_the_least_and_others_wait_for_a_turn(tmp_path: Path) -> None:
    async def go() -> None:
        one, two = RewardMachine(1.0), RewardMachine(2.0)
        world = await opened(config_of(tmp_path, scorers=2), one, two)
        pool = private(world.sites.scorers, width=2)
        answers = await asyncio.gather(*(pool.call(0, JOB) for _ in range(12)))
        assert answers == values(*[1.0] * 12)
        assert (one.most, two.most) == (2, 2) and (one.calls, two.calls) == (8, 4)
        assert asyncio.get_running_loop().time() < 5.0, "a machine that is done takes what waits for the other"
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_a_machine_that_comes_takes_what_waits_for_a_turn_elsewhere(tmp_path: Path) -> None:
    async def go() -> None:
        dead, slow, late = RewardMachine(), RewardMachine(1000.0), RewardMachine(value=2.0)
        dead.then = lambda own: own.host and own.host.die("was killed by SIGKILL")
        world = await opened(config_of(tmp_path, scorers=2), slow, dead)
        pool = private(world.sites.scorers, width=1, timeout=2000.0)
        calls = [asyncio.ensure_future(pool.call(0, JOB)) for _ in range(2)]
        await asyncio.sleep(10.0)
        assert (slow.calls, dead.calls) == (1, 1) and not any(call.done() for call in calls)
        late.host = world.offer(late, "late", "scorer")
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert asyncio.get_running_loop().time() < 20.0 and late.calls == 1
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_calls_that_a_lost_machine_had_in_hand_are_made_on_another_one(tmp_path: Path) -> None:
    async def go() -> FactList:
        one, two = RewardMachine(1.0, value=1.0), RewardMachine(1.0, value=2.0)
        one.then = lambda own: own.host and own.calls == 2 and own.host.die("was killed by SIGKILL")
        world = await opened(config_of(tmp_path, scorers=2), one, two)
        pool = private(world.sites.scorers)
        answers = await asyncio.gather(*(pool.call(0, JOB) for _ in range(4)))
        assert answers == values(2.0, 2.0, 2.0, 2.0)
        three = RewardMachine(1.0, value=3.0)
        three.host = world.offer(three, "host-2", "scorer")
        await asyncio.sleep(1.0)
        assert sorted(await asyncio.gather(*(pool.call(0, JOB) for _ in range(4)))) == values(2.0, 2.0, 3.0, 3.0)
        await pool.close()
        await world.sites.close()
        await asyncio.sleep(1.0)
        assert [frame.method for frame in three.host.inbox][-1:] in ([LEAVE], [])
        return world.facts

    facts = virtual_time.run(go())
    assert [worker.host for worker in facts.of(WorkerJoined)] == ["host-0", "host-1", "host-2"]
    assert [worker.who for worker in facts.of(WorkerJoined)] == ["scorer host 1", "scorer host 2", "scorer host 1"]
    (lost,) = facts.of(WorkerLost)
    assert lost.who == "scorer host 1" and lost.how == "on host-0 (process 1) is lost: its connection has ended"


def test_a_machine_that_was_asked_to_end_costs_nothing_and_is_no_death(tmp_path: Path) -> None:
    async def go() -> FactList:
        one, two = RewardMachine(1.0), RewardMachine(1.0, value=2.0)
        one.then = lambda own: own.host and own.host.push(LEAVING, None)
        world = await opened(config_of(tmp_path, scorers=2), one, two)
        pool = private(world.sites.scorers)
        assert await pool.call(0, JOB) == [2.0, 2.0]
        await pool.close()
        await world.sites.close()
        return world.facts

    (lost,) = virtual_time.run(go()).of(WorkerLost)
    assert "has left: it was asked to end there" in lost.how and lost.deaths == 0


@pytest.mark.parametrize("shared", [False, True])
def test_silence_of_a_machine_is_no_part_of_a_deadline(shared: bool, tmp_path: Path) -> None:
    """The function may take 3 s, and a stopped machine is noticed after 5. Its calls must not be too late by then."""

    async def go() -> None:
        one, two = RewardMachine(1.0), RewardMachine(1.0, value=2.0)

        def freeze(own: RewardMachine) -> None:
            assert own.host
            own.host.frozen = True

        one.then = freeze
        world = await opened(config_of(tmp_path, scorers=2), one, two)
        pool = private(world.sites.scorers, timeout=3.0)
        if shared:
            pool = SpreadPool(world.sites.scorers, lambda site: SharedProcess(["sandbox", "f"], 3.0, None, site))
        assert await pool.call(0, JOB) == [2.0, 2.0]
        assert asyncio.get_running_loop().time() > 5.0
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_time_without_a_core_there_is_no_part_of_a_deadline(tmp_path: Path) -> None:
    async def go() -> None:
        one = RewardMachine(5.0)
        world = await opened(config_of(tmp_path, scorers=1), one)
        assert one.host
        one.host.starved = 4.0
        pool = private(world.sites.scorers, timeout=3.0)
        assert await pool.call(0, JOB) == [1.0, 1.0]
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_a_function_that_is_too_late_elsewhere_is_too_late(tmp_path: Path) -> None:
    async def go() -> None:
        one = RewardMachine(100.0)
        world = await opened(config_of(tmp_path, scorers=1), one)
        pool = private(world.sites.scorers, timeout=3.0)
        (first, _) = await pool.call(0, JOB)
        assert isinstance(first, Failure) and first.reason == "reward_timeout"
        assert 3.0 <= asyncio.get_running_loop().time() < 4.0
        one.seconds = 1.0
        assert await pool.call(0, JOB) == [1.0, 1.0], "its process was killed there, and another one was started"
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_a_call_that_ends_every_machine_fails_with_the_reason_of_a_dead_process(tmp_path: Path) -> None:
    async def go() -> None:
        machines = [RewardMachine() for _ in range(LIVES + 1)]
        for machine in machines:
            machine.then = lambda own: own.host and own.host.die("was killed by SIGKILL")
        world = await opened(config_of(tmp_path, scorers=1), *machines)
        pool = private(world.sites.scorers)
        (first, _) = await pool.call(0, JOB)
        assert isinstance(first, Failure) and first.reason == "reward_worker_died"
        assert "3 processes that ran it were lost with their machines" in first.detail
        assert "the scorer host on host-2 (process 1) is lost" in first.detail
        assert [machine.calls for machine in machines] == [1, 1, 1, 0]
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_calls_wait_by_name_while_there_is_no_machine(tmp_path: Path) -> None:
    async def go() -> None:
        one = RewardMachine()
        one.then = lambda own: own.host and own.host.die("was killed by SIGKILL")
        world = await opened(config_of(tmp_path, scorers=1), one)
        pool = private(world.sites.scorers)
        two = RewardMachine(value=2.0)
        asyncio.get_running_loop().call_later(50.0, world.offer, two, "later", "scorer")
        assert await pool.call(0, JOB) == [2.0, 2.0]
        messages = [warning.message for warning in world.facts.of(Warned)]
        assert "the user's code has waited 10 s for a worker that offers scorer (the run stops at 1000 s)" in messages
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_without_a_machine_for_too_long_the_run_stops(tmp_path: Path) -> None:
    async def go() -> None:
        one = RewardMachine()
        one.then = lambda own: own.host and own.host.die("was killed by SIGKILL")
        world = await opened(config_of(tmp_path, scorers=1), one)
        pool = private(world.sites.scorers)
        with pytest.raises(StalledError, match="has waited 1000 s for a worker that offers scorer"):
            await pool.call(0, JOB)
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_processes_that_run_when_the_machines_are_released_end_with_them(tmp_path: Path) -> None:
    """A run that fails while it starts closes the machines before their processes."""

    async def go() -> None:
        world = await opened(config_of(tmp_path, scorers=1), RewardMachine())
        pool = private(world.sites.scorers)
        await pool.call(0, JOB)
        await world.sites.close()
        await pool.close()

    virtual_time.run(go())


@settings(max_examples=40)
@given(
    lives=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    machines=st.integers(1, 3),
    calls=st.integers(1, 12),
)
def test_whatever_is_lost_every_call_has_one_answer_and_none_is_a_zero(
    lives: list[int], machines: int, calls: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Hosts that die at their n-th call, one after the other, then one that lives (C2)."""

    async def go() -> None:
        doomed = [RewardMachine(1.0 + number / 10) for number in range(len(lives))]
        for one, life in zip(doomed, lives, strict=True):
            one.then = lambda own, life=life: own.calls == life and own.host and own.host.die("was killed")  # type: ignore[misc]
        lasting = [RewardMachine(1.0, value=2.0) for _ in range(machines)]
        config = config_of(tmp_path_factory.mktemp("run"), scorers=machines)
        world = await opened(config, *doomed, *lasting)
        pool = private(world.sites.scorers)
        for answer in await asyncio.gather(*(pool.call(0, JOB) for _ in range(calls))):
            assert len(answer) == len(JOB.completions)
            for one in answer:
                assert one in (1.0, 2.0) or (isinstance(one, Failure) and one.reason == "reward_worker_died")
        assert max(Counter(pool._in_hand).values(), default=0) == 0
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


# --- rollouts -------------------------------------------------------------------------------------------------------------------


class EnvironmentMachine:
    """A program that plays each rollout in two turns, and may end its host before the second, or while it loads."""

    def __init__(self, dies: bool = False, loads: bool = True) -> None:
        self.dies, self.loads, self.played = dies, loads, 0
        self.host: FakeUserHost | None = None

    async def __call__(self, orders: asyncio.StreamReader, say: Say) -> None:
        if not self.loads and self.host:
            self.host.die("was killed by SIGKILL")
        say(episode_frames.pack(FunctionLoaded()))
        asked: set[int] = set()
        while True:
            order = msgspec.msgpack.decode(await receive_frame(orders), type=episode_frames.FromController)
            match order:
                case Play(id=id):
                    say(episode_frames.pack(ChatAsked(id, [])))
                case ChatReply(id=id) if self.dies and self.host:
                    self.host.die("was killed by SIGKILL")
                case ChatReply(id=id) if id not in asked:
                    asked.add(id)
                    say(episode_frames.pack(ChatAsked(id, [])))
                case ChatReply(id=id):
                    self.played += 1
                    say(episode_frames.pack(RolloutDone(id=id, rewards={"won": 1.0})))


class Listening:
    """Protocol `RolloutListener`."""

    async def chat(self, asked: ChatAsked) -> ChatReply:
        await asyncio.sleep(1.0)
        return ChatReply(id=asked.id, text="a", stop="stop", tokens=1)

    def rewarded(self, given: object) -> None: ...

    def answered(self, given: object) -> None: ...


FUNCTION = FunctionSettings(
    spec="f", what="environment.function = f", library=None, seconds=0.0, tool_seconds=1.0, tool_characters=10, memory=0
)


async def play(pool: EnvironmentPool) -> tuple[float, int]:
    """Returns the reward, and how often the rollout was begun."""
    begun = 0

    async def begin() -> Beginning:
        nonlocal begun
        begun += 1
        return RolloutAsked("p", {}, 0), Listening()

    done = await pool.play(begin)
    assert done.rewards
    return float(done.rewards["won"]), begun


def environments(directory: Path, count: int) -> RunConfig:
    config = config_of(directory, scorers=count)
    (directory / "env.py").write_text("async def play(agent, prompt):\n    return 1.0\n")
    return load_config(
        config,
        [
            "orchestration.scorers=0",
            f"orchestration.environments={count}",
            f'environment.function="{directory / "env.py"}:play"',
        ],
    )


def test_rollouts_of_a_lost_machine_are_played_again_together_and_none_is_blamed(tmp_path: Path) -> None:
    async def go() -> None:
        one, two = EnvironmentMachine(dies=True), EnvironmentMachine()
        world = World(environments(tmp_path, 2))
        for machine, name in ((one, "one"), (two, "two")):
            machine.host = world.offer(machine, name, "environment")
        await world.open()
        pool = EnvironmentPool(FUNCTION, 1, None, world.sites.environments)
        ended = await asyncio.gather(*(play(pool) for _ in range(32)))
        assert [reward for reward, _ in ended] == [1.0] * 32 and two.played == 32
        assert sorted(begun for _, begun in ended) == [1] * 16 + [2] * 16
        assert asyncio.get_running_loop().time() < 10.0, "not one after the other"
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_a_machine_that_is_lost_while_it_loads_the_code_costs_no_rollout(tmp_path: Path) -> None:
    async def go() -> None:
        world = World(environments(tmp_path, 1))
        for number, machine in enumerate([EnvironmentMachine(loads=False), EnvironmentMachine()]):
            machine.host = world.offer(machine, f"host-{number}", "environment")
        await world.open()
        pool = EnvironmentPool(FUNCTION, 1, None, world.sites.environments)
        assert await play(pool) == (1.0, 2)
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


def test_a_rollout_that_loses_its_machine_again_and_again_has_failed(tmp_path: Path) -> None:
    async def go() -> None:
        world = World(environments(tmp_path, 1))
        for number in range(4):
            machine = EnvironmentMachine(dies=True)
            machine.host = world.offer(machine, f"host-{number}", "environment")
        await world.open()
        pool = EnvironmentPool(FUNCTION, 1, None, world.sites.environments)
        with pytest.raises(RolloutFailed, match="ended 3 times") as caught:
            await play(pool)
        assert caught.value.reason == "environment_died"
        await pool.close()
        await world.sites.close()

    virtual_time.run(go())


# --- settings, terms and files --------------------------------------------------------------------------------------------------


def test_the_user_s_files_are_compared_by_content(tmp_path: Path) -> None:
    config = config_of(tmp_path, scorers=1)
    (terms,) = terms_of_code(config).values()
    path = str(tmp_path / "reward.py")
    assert list(terms.files) == [path] and not agree_to(terms).unable
    assert start_of(config, "scorer").code == terms
    (tmp_path / "reward.py").write_text("def exact(completions, **columns):\n    return [0.5] * len(completions)\n")
    assert "is not the run's: its content differs" in agree_to(terms).unable
    (tmp_path / "reward.py").unlink()
    assert f"the run's file {path} is not on this machine" in code_problem(terms)
    with pytest.raises(ConfigError, match="cannot be read"):
        code_terms([path])


def test_packages_that_the_user_s_files_import_have_the_run_s_versions(tmp_path: Path) -> None:
    """Those of files beside it, and of imports in functions; not Python's own, those beside it and those that are not installed."""
    (tmp_path / "reward.py").write_text(
        "import json, beside, torch.nn\n\ndef exact(completions):\n    import nowhere_at_all\n    from numpy import array\n"
    )
    (tmp_path / "beside.py").write_text("import msgspec\n")
    terms = code_terms([str(tmp_path / "reward.py")])
    installed = {name: importlib.metadata.version(name) for name in ("msgspec", "numpy", "torch")}
    assert terms.packages == {name: version.partition("+")[0] for name, version in installed.items()}
    assert not agree_to(terms).unable
    older = msgspec.structs.replace(terms, packages={**terms.packages, "msgspec": "0.1.2", "no-such-package": "3.4"})
    ours = terms.packages["msgspec"]
    assert agree_to(older).unable == (
        f"packages that the run's files import are others on this machine: msgspec {ours} (the run has 0.1.2), no-such-package none (the run has 3.4); "
        "pip install msgspec==0.1.2 no-such-package==3.4 here"
    )


@pytest.mark.parametrize("also_here", [False, True])
def test_this_machine_works_beside_those_elsewhere_only_if_it_is_asked_to(also_here: bool, tmp_path: Path) -> None:
    async def go() -> None:
        sites = World(config_of(tmp_path, scorers=2, also_here=also_here)).sites
        assert [isinstance(one, OwnSite) for one in sites.scorers.every] == [False, False] + [True] * also_here
        assert [isinstance(one, OwnSite) for one in sites.environments.every] == [True]
        if also_here:
            here: Site = await sites.scorers.least(lambda site: 0)
            assert isinstance(here, OwnSite), "those elsewhere are not there yet"

    asyncio.run(go())


def test_seats_of_every_kind_are_invited_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path, scorers=2)
    place = config.orchestration
    assert seats_of(place, config.engine, config.train) == {"scorer": ["scorer host 1", "scorer host 2"]}
    assert invitation(place, seats_of(place, config.engine, config.train), "h:1") == (
        "missing until they join: scorer host 1, scorer host 2. Start each with: headrace worker --connect h:1 --token-file "
        f"{tmp_path / 'token'} --offers scorer"
    )
    both = load_config(config, ["orchestration.kind=join"])
    assert list(seats_of(both.orchestration, both.engine, both.train)) == ["engine", "scorer"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["orchestration.scorers=0", "orchestration.token_file=''", "orchestration.also_here=true"], "also_here"),
        (["orchestration.token_file=''"], "needs orchestration.token_file"),
        (["orchestration.kind=ray", "orchestration.token_file=''"], "join by hand"),
        (["orchestration.bus=jsonl:/tmp/bus", "orchestration.token_file=''"], "remove orchestration.scorers"),
        (["orchestration.environments=1"], "orchestration.environments play environment.function"),
        (
            ["environment.kind=process", "environment.command=a", "orchestration.environments=1"],
            "remove orchestration.env",
        ),
        (["reward.function=''", "environment.function=/env.py:play"], "orchestration.scorers run reward functions"),
        (["reward.function=python:mine"], "was passed from Python"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(sets: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(config_of(tmp_path, scorers=1), sets)


def test_a_process_that_does_something_alone_uses_none_of_them(tmp_path: Path) -> None:
    alone = config_of(tmp_path, scorers=2, listen="127.0.0.1:7400", also_here=True).orchestration.at_home
    assert not alone.hosts and not alone.joined
    assert load_config(config_of(tmp_path, scorers=1), ["orchestration.kind=join"]).orchestration.at_home.joined
