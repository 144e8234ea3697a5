"""C1, C2 and C7 over a bus: the real pipeline and real rollout hosts over fakes, in virtual time, under the faults of a bus."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError, HeadraceError, IdentityError
from headrace.core.reports import EngineStats
from headrace.core.types import Completion, Prompt, Request, RolloutKey
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import EngineSample, FleetSample, GroupEnded, StepTrained, Warned, Withdrawn, WorkerJoined
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import PlayedGroup, Suspects
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.processes.joining.greeting import SILENCE
from headrace.processes.wire import VERDICT
from headrace.run.hosts.bus.bus_port import Bus, Posting
from headrace.run.hosts.bus.directory_bus import JsonlBus
from headrace.run.hosts.bus_messages import (
    ANSWERS,
    RUN,
    SUSPECTS,
    TICKETS,
    WEIGHTS,
    ErrandReply,
    GroupErrand,
    RunNotice,
    WeightsNotice,
    letter_of,
)
from headrace.run.hosts.bus_run import NO_HOST, BusDesk
from headrace.run.hosts.rollout_host import Deserted, HostPatience
from headrace.run.rollout_hosting import overtaken
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.faulty_bus import BusFaults, FaultyBus
from headrace.testing.memory_bus import MemoryBus, MemoryServer
from headrace.version import __version__
from support.bus.bus_world import TICKET_DEATHS, BusWorld, Fleet, bus_engine, bus_world

NO_FAULTS = BusFaults()
STALENESS = StalenessConfig(groups_per_step=3, max_lag=1)


def in_memory(server: MemoryServer | None = None, faults: BusFaults = NO_FAULTS, seed: int = 0) -> Callable[[], Bus]:
    shared, chance = server or MemoryServer(), random.Random(seed)
    return lambda: FaultyBus(MemoryBus(shared), faults, chance)


def checked(world: BusWorld) -> None:
    """C1 and C2."""
    lags = world.trained_lags()
    assert max(lags) <= world.staleness.lag_bound
    trained = Counter(group.ticket for batch in world.trainer.batches for group in batch.groups)
    assert set(trained.values()) == {1}, "each ticket is trained at most once"
    assert len(trained) == world.steps * world.staleness.groups_per_step
    counted = world.buffer.accounting()
    assert counted.balance() == 0 and counted.trained == len(trained)


def warnings(world: BusWorld) -> list[str]:
    return [fact.message for fact in world.facts.of(Warned)]


async def a_run(fleet: Fleet, hosts: int = 2, **settings: Any) -> BusWorld:
    for _ in range(hosts):
        fleet.join()
    world = await bus_world(None, fleet, **settings)
    try:
        await world.run()
    finally:
        await world.engine.close()
    return world


def unheard() -> Telemetry:
    clock = asyncio.get_running_loop().time
    return Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e5, 1e6))


def test_two_hosts_carry_a_run_and_leave_when_it_is_over():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS)
        world = await a_run(fleet, evaluate_every=2, trainer=FakeTrainer(seconds_per_step=2.0))
        checked(world)
        await asyncio.sleep(10.0)
        assert fleet.ended == {"host-0": None, "host-1": None} and fleet.said == ["the run is over"] * 2
        assert all(engine._sampled for engine in fleet.engines.values()), "both had a share"
        assert len(world.facts.of(WorkerJoined)) == 2 and not warnings(world)
        assert world.engine._desk.repeated == 0 == world.engine._desk.reposted
        last = world.facts.of(FleetSample)[-1]
        assert [member.name for member in last.members] == ["host-0", "host-1"]
        sampled: EngineStats = world.facts.of(EngineSample)[-1].stats
        assert 0 < sampled.sampled_tokens <= sum(engine._sampled for engine in fleet.engines.values())

    virtual_time.run(case())


def test_a_run_that_is_refused_at_its_start_leaves_its_hosts_to_the_next_one():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS)
        fleet.join()
        refused = await bus_world(None, fleet)
        await asyncio.sleep(5.0)
        await refused.engine.close()
        await asyncio.sleep(20.0)
        assert not fleet.ended and fleet.said == ["the run ended before it began: waiting for its next start"]
        checked(await a_run(fleet, hosts=0))
        await asyncio.sleep(10.0)
        assert fleet.ended == {"host-0": None} and fleet.said[-1] == "the run is over"

    virtual_time.run(case())


def test_hosts_of_a_run_whose_trainer_has_died_wait_for_it_to_go_on():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS)
        fleet.join()
        world = await bus_world(None, fleet)
        world.engine._begun = world.engine.trainer_died = True
        await world.engine.close()
        await asyncio.sleep(20.0)
        assert not fleet.ended
        assert fleet.said == ["the trainer has died: waiting for the run to go on from its checkpoint"]
        checked(await a_run(fleet, hosts=0))
        await asyncio.sleep(10.0)
        assert fleet.ended == {"host-0": None} and fleet.said[-1] == "the run is over"

    virtual_time.run(case())


def test_a_run_with_a_bus_trains_what_a_run_without_one_trains():
    """With one version at a time nothing depends on who samples: the same prompts, seeds and tokens."""
    from support.fake_world import FakeWorld

    def trained(world: Any) -> list[Any]:
        return [
            [(group.ticket, [row.tokens for row in group.rows]) for group in batch.groups]
            for batch in world.trainer.batches
        ]

    async def with_bus() -> list[Any]:
        fleet = Fleet(open_bus=in_memory(), staleness=StalenessConfig(groups_per_step=3, max_lag=0))
        return trained(await a_run(fleet, hosts=3))

    async def without() -> list[Any]:
        world = FakeWorld(None, StalenessConfig(groups_per_step=3, max_lag=0))
        await world.run()
        return trained(world)

    assert virtual_time.run(with_bus()) == virtual_time.run(without())


def test_what_a_killed_host_had_in_hand_goes_to_others():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS, engine=lambda: FakeEngine(seconds_per_token=1.0))
        victim = fleet.join()
        asyncio.get_running_loop().call_later(20.0, fleet.kill, victim)
        world = await a_run(fleet, hosts=1)
        checked(world)
        [lost] = [warning for warning in warnings(world) if "is lost" in warning]
        assert re.fullmatch(
            r"the rollout host host-0 on .+ is lost: it was silent for 10 s\. Others get the [1-3] errands that it had; 1 left",
            lost,
        )

    virtual_time.run(case())


def test_a_run_waits_for_its_first_host_and_for_another_when_it_has_none():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS)
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, fleet.join)
        loop.call_later(55.0, lambda: fleet.kill("host-0"))
        loop.call_later(300.0, fleet.join)
        world = await a_run(fleet, hosts=0, steps=40, trainer=FakeTrainer(seconds_per_step=1.0))
        checked(world)
        assert (
            "no rollout host serves this run yet; start one, on any machine: headrace rollouts --bus a bus"
            in warnings(world)
        )
        assert any("none is left: start one with headrace rollouts" in warning for warning in warnings(world))
        begun = [fact.t for fact in world.facts.of(Withdrawn) if fact.key == NO_HOST]
        assert len(begun) == 2 and begun[0] == pytest.approx(50, abs=2) and begun[1] == pytest.approx(300, abs=2), (
            "each is taken back"
        )
        assert max(fact.t for fact in world.facts.of(StepTrained)) > 300

    virtual_time.run(case())


def test_a_host_that_drains_finishes_or_gives_back():
    async def case(seconds: float) -> tuple[BusWorld, Fleet]:
        fleet = Fleet(
            open_bus=in_memory(MemoryServer(lease=1e6)),  # nothing is inherited by silence
            staleness=STALENESS,
            engine=lambda: FakeEngine(seconds_per_token=1.0, length=lambda rng: 8),
            patience=HostPatience(drain=seconds),
        )
        leaver = fleet.join()
        host, _ = fleet.hosts[leaver]
        asyncio.get_running_loop().call_later(5.0, host.drain)
        world = await a_run(fleet, hosts=1)
        checked(world)
        assert fleet.ended[leaver] is None
        assert "the rollout host host-0 has left; 1 left" in warnings(world)
        return world, fleet

    patient, _ = virtual_time.run(case(30.0))
    hasty, _ = virtual_time.run(case(1.0))
    assert patient.engine._desk.repeated == 0 == hasty.engine._desk.repeated


def test_letters_that_the_bus_has_lost_are_posted_again():
    async def case() -> None:
        server = MemoryServer()
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS, engine=lambda: FakeEngine(seconds_per_token=1.0))
        asyncio.get_running_loop().call_later(10.0, server.lose)
        world = await a_run(fleet, steps=12)
        checked(world)
        assert world.engine._desk.reposted > 0 and any(
            "is no longer on the bus" in warning for warning in warnings(world)
        )
        late = fleet.join()  # the notices are there again
        await asyncio.sleep(5.0)
        assert fleet.ended[late] is None and fleet.said[-1] == "the run is over"

    virtual_time.run(case())


@pytest.mark.parametrize("since", ["before the run", "two versions ago"])
def test_a_bus_that_has_an_earlier_state_again_costs_no_host(since: str):
    """Its server lost its last writes, or a replica took over that did not have them. Hosts loaded the older weights that it named then, which
    ended every one of them, or waited for an earlier process of the run."""

    async def case() -> None:
        server, loop = MemoryServer(), asyncio.get_running_loop()
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS, engine=lambda: FakeEngine(seconds_per_token=1.0))
        if since == "before the run":
            await fleet.open_bus().pin(RUN, msgspec.msgpack.encode(RunNotice("earlier", __version__)))
            await fleet.open_bus().pin(WEIGHTS, msgspec.msgpack.encode(WeightsNotice("earlier")))
            loop.call_later(20.0, server.state())
        else:
            loop.call_later(12.0, lambda: loop.call_later(24.0, server.state()))
        async with asyncio.timeout(600.0):
            world = await a_run(fleet, steps=12)
        checked(world)
        await asyncio.sleep(2.0)  # for their goodbye
        assert list(fleet.ended.values()) == [None, None]
        assert loop.time() > 40.0, "the run went on behind it"

    virtual_time.run(case())


def test_suspects_that_the_bus_has_forgotten_are_named_again():
    """An earlier state of a board named fewer: a host took what others had died of."""

    async def case() -> None:
        server = MemoryServer()
        suspects = Suspects(2)
        clock = asyncio.get_running_loop().time
        telemetry = Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e5, 1e6))
        desk = BusDesk(MemoryBus(server), "now", telemetry, lambda: asyncio.sleep(0.0), suspects)
        suspects.charge(["7"])
        await desk._say_suspects()
        again = server.state()
        suspects.charge(["7", "8"])
        await desk._say_suspects()
        newest = server.board[SUSPECTS]
        again()
        working = asyncio.ensure_future(desk.run())
        await asyncio.sleep(15.0)
        assert server.board[SUSPECTS].body == newest.body
        id = server.board[SUSPECTS].id
        await asyncio.sleep(15.0)
        assert server.board[SUSPECTS].id == id, "once"
        working.cancel()

    virtual_time.run(case())


class FullBus(FaultyBus):
    """Takes nothing while its server is full."""

    room = asyncio.Event()

    async def pin(self, name: str, body: bytes) -> None:
        await self.room.wait()
        await super().pin(name, body)

    async def sign(self, who: str, body: bytes) -> None:
        await self.room.wait()
        await super().sign(who, body)


def test_a_bus_that_takes_nothing_for_a_while_costs_no_host_and_blames_no_errand():
    async def case() -> None:
        FullBus.room = asyncio.Event()
        FullBus.room.set()
        server, chance = MemoryServer(), random.Random(0)
        fleet = Fleet(
            open_bus=lambda: FullBus(MemoryBus(server), NO_FAULTS, chance),
            staleness=STALENESS,
            engine=lambda: FakeEngine(seconds_per_token=1.0),
        )
        asyncio.get_running_loop().call_later(20.0, FullBus.room.clear)
        asyncio.get_running_loop().call_later(80.0, FullBus.room.set)
        world = await a_run(fleet)
        checked(world)
        assert not [warning for warning in warnings(world) if "is lost" in warning]
        assert not world.engine._suspects.suspects

    virtual_time.run(case())


def test_a_host_whose_weights_are_wrong_serves_nobody():
    class Forged(FakeEngine):
        async def load(self, update: Any, parts: int = 1) -> Any:
            raise IdentityError("its fingerprint differs")

    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS, engine=Forged)
        forged = fleet.join()
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, lambda: setattr(fleet, "engine", FakeEngine))
        loop.call_later(2.0, fleet.join)
        world = await a_run(fleet, hosts=0, steps=40, trainer=FakeTrainer(seconds_per_step=1.0))
        checked(world)
        assert isinstance(fleet.ended[forged], IdentityError)
        assert "the rollout host host-0 has left: its fingerprint differs; 1 left" in warnings(world)

    virtual_time.run(case())


def test_weights_that_newer_ones_have_replaced_are_skipped():
    """The trainer keeps two versions: a slow host asks for one that is gone, and takes the next."""
    failed: list[int] = []

    class Slow(FakeEngine):
        async def load(self, update: Any, parts: int = 1) -> Any:
            if update.version in (1, 3) and update.version not in failed:
                failed.append(update.version)
                raise IdentityError("the trainer no longer has them")
            return await super().load(update, parts)

    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=StalenessConfig(groups_per_step=1, max_lag=6), engine=Slow)
        world = await a_run(fleet, hosts=1, steps=12)
        checked(world)
        assert failed == [1, 3] and fleet.engines["host-0"].version > 3

    virtual_time.run(case())


def test_hosts_leave_a_run_that_gives_no_sign():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS, patience=HostPatience(run=60.0))
        early = fleet.join()
        await asyncio.sleep(61.0 + 2.0)
        assert isinstance(fleet.ended[early], Deserted)
        fleet.join()
        world = await bus_world(None, fleet)
        world.engine.kill()  # as SIGKILL: it says nothing
        await asyncio.sleep(100.0)
        assert isinstance(fleet.ended["host-1"], Deserted)
        with pytest.raises(HeadraceError):
            raise fleet.ended["host-1"]

    virtual_time.run(case())


def test_hosts_stay_while_a_run_waits_for_its_own_workers():
    """Before it is announced, and between two attempts to go on after its trainer's death, for longer than hosts wait without a sign."""

    async def waits(fleet: Fleet, seconds: float) -> None:
        engine = bus_engine(fleet, unheard())
        await engine.launch()
        await asyncio.sleep(seconds)
        await engine.close()

    async def case() -> None:
        server = MemoryServer()
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS, patience=HostPatience(run=60.0))
        who = fleet.join()
        await waits(fleet, 200.0)
        assert who not in fleet.ended
        world = await bus_world(None, fleet, steps=1)
        await world.run()
        world.engine.trainer_died = True
        await world.engine.close()
        for _ in range(20):
            await asyncio.sleep(10.0)
            await waits(fleet, 0.5)
        assert who not in fleet.ended
        assert fleet.said == ["the trainer has died: waiting for the run to go on from its checkpoint"]
        await bus_world(None, fleet, steps=1)
        assert who not in fleet.ended

    virtual_time.run(case())


def test_a_run_that_was_refused_leaves_the_letters_of_the_one_before_to_the_next():
    async def case() -> None:
        server = MemoryServer()
        bus = MemoryBus(server)
        await bus.post(Posting("answers", "12", b"sampled"))
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS)
        engine = bus_engine(fleet, unheard())
        await engine.launch()
        await engine.close()
        await engine.close()
        assert await bus.unsettled("answers") == {"12"} and await bus.newer("run") is None

    virtual_time.run(case())


def test_a_host_leaves_a_bus_that_is_silent():
    class Silent(MemoryBus):
        is_silent = False

        async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Any:
            if Silent.is_silent:
                await asyncio.Event().wait()
            return await super().newer(name, than, wait)

    async def case() -> None:
        server = MemoryServer()
        fleet = Fleet(open_bus=lambda: Silent(server), staleness=STALENESS, patience=HostPatience(run=60.0))
        who = fleet.join()
        await bus_world(None, fleet)
        await asyncio.sleep(100.0)
        assert who not in fleet.ended
        Silent.is_silent = True
        await asyncio.sleep(70.0)
        assert isinstance(fleet.ended[who], Deserted)

    virtual_time.run(case())


def test_a_host_waits_for_a_run_that_was_killed_before_its_weights_could_be_fetched():
    """It may be resumed. The host that cannot fetch what a living run offers leaves (above)."""

    class Orphaned(FakeEngine):
        is_dead = False

        async def load(self, update: Any, parts: int = 1) -> Any:
            if Orphaned.is_dead:
                raise IdentityError("connection refused")
            return await super().load(update, parts)

    async def case() -> None:
        server = MemoryServer()
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS, engine=Orphaned)
        who = fleet.join()
        world = await bus_world(None, fleet, steps=1)
        await world.run()
        Orphaned.is_dead = True
        await world.engine.load(WeightUpdate(version=7, kind="full", fingerprint="fake-7", nbytes=0, seconds=0.0))
        world.engine.kill()
        await asyncio.sleep(120.0)
        assert who not in fleet.ended
        Orphaned.is_dead = False
        checked(await a_run(fleet, hosts=0))
        await asyncio.sleep(2.0)
        assert fleet.ended == {who: None}

    virtual_time.run(case())


@pytest.mark.parametrize("trainer", ["local", "elsewhere"])
def test_a_host_that_cannot_fetch_waits_until_the_run_has_noticed_the_death_of_its_trainer(trainer: str) -> None:
    """Ranks elsewhere are missed by their silence: a host that left before would not serve the run that goes on."""

    class Cut(FakeEngine):
        async def load(self, update: Any, parts: int = 1) -> Any:
            if update.version == 7:
                raise IdentityError("connection refused")
            return await super().load(update, parts)

    async def case() -> None:
        server, place = MemoryServer(), {"trainer": trainer, "reconnect": 5.0}
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS, engine=Cut, overtaken=overtaken(place))
        who = fleet.join()
        world = await bus_world(None, fleet, steps=1)
        await world.run()
        await world.engine.load(WeightUpdate(version=7, kind="full", fingerprint="fake-7", nbytes=0, seconds=0.0))
        await asyncio.sleep(0.5 if trainer == "local" else SILENCE + 5.0 + VERDICT + 1.0)
        world.engine.trainer_died = True
        await world.engine.close()
        await asyncio.sleep(60.0)
        assert who not in fleet.ended
        checked(await a_run(fleet, hosts=0))

    virtual_time.run(case())


def test_a_host_that_cannot_serve_the_run_tells_it_why():
    class Unable(Fleet):
        async def _parts(self, who: str) -> Any:
            if who == "host-0":
                raise ConfigError("its files are not the run's")
            return await super()._parts(who)

    async def case() -> None:
        fleet = Unable(open_bus=in_memory(), staleness=STALENESS)
        asyncio.get_running_loop().call_later(60.0, fleet.join)
        world = await a_run(fleet, hosts=1)
        checked(world)
        assert isinstance(fleet.ended["host-0"], ConfigError)
        [said] = [warning for warning in warnings(world) if "has left" in warning]
        assert said.startswith("the rollout host host-0 has left: its files are not the run's; none is left: start one")

    virtual_time.run(case())


def test_groups_that_take_longer_than_the_lease_are_sampled_once():
    async def case() -> None:
        fleet = Fleet(
            open_bus=in_memory(MemoryServer(lease=3.0)),
            staleness=STALENESS,
            engine=lambda: FakeEngine(seconds_per_token=2.0, length=lambda rng: 8),
        )
        world = await a_run(fleet, hosts=3)
        checked(world)
        assert world.engine._desk.repeated == 0

    virtual_time.run(case())


def test_a_reply_stays_on_the_bus_until_its_group_is_in_the_journal():
    """However long that takes: a run that is resumed repeats steps before it asks for the groups that were in flight."""

    async def case() -> None:
        server = MemoryServer(lease=1.0)
        host = MemoryBus(server)
        clock = asyncio.get_running_loop().time
        telemetry = Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e5, 1e6))

        async def nothing() -> None:
            pass

        desk = BusDesk(MemoryBus(server), "session", telemetry, nothing, Suspects(3))
        desk.expect(["5"])
        working = asyncio.ensure_future(desk.run())
        errand = GroupErrand(5, Prompt("p", "", (1,)), at_least=0)
        answer = ErrandReply("host", PlayedGroup(), asked=letter_of("earlier", errand).asked)
        await host.post(Posting("answers", "5", msgspec.msgpack.encode(answer)))
        await asyncio.sleep(10.0)
        assert await host.unsettled("answers") == {"5"} and desk.repeated == 0
        reply = await desk.ask("5", errand)
        assert reply.who == "host"
        await asyncio.sleep(10.0)
        assert await host.unsettled("answers") == {"5"}
        desk.forget("5")
        await asyncio.sleep(10.0)
        assert await host.unsettled("answers") == set()
        working.cancel()

    virtual_time.run(case())


def test_a_group_that_was_played_under_other_settings_is_played_again():
    """It waited on the bus while the run was resumed with them."""

    async def case() -> None:
        server = MemoryServer(lease=1.0)
        host, said = MemoryBus(server), list[str]()
        clock = asyncio.get_running_loop().time
        telemetry = Telemetry(lambda fact: said.append(str(fact)), clock, Waits(lambda fact: None, clock, 1e5, 1e6))

        async def nothing() -> None:
            pass

        desk = BusDesk(MemoryBus(server), "session", telemetry, nothing, Suspects(3))
        desk.mark = "new"
        desk.expect(["5"])
        working = asyncio.ensure_future(desk.run())

        errand = GroupErrand(5, Prompt("p", "", (1,)), at_least=0)

        async def answer(mark: str) -> None:
            reply = ErrandReply("host", PlayedGroup(), mark=mark, asked=letter_of("earlier", errand).asked)
            await host.post(Posting("answers", "5", msgspec.msgpack.encode(reply)))

        await answer("old")
        asked = asyncio.ensure_future(desk.ask("5", errand))
        await asyncio.sleep(30.0)
        assert not asked.done() and await host.unsettled("tickets") == {"5"}, "it is on the bus again"
        assert any("under settings that have changed" in one for one in said)
        assert not any("has lost letters" in one for one in said), "it was taken off by this run"
        await answer("new")
        assert (await asked).mark == "new"
        working.cancel()

    virtual_time.run(case())


def test_the_last_notice_is_of_the_newest_weights():
    """Though an older one takes longer to be pinned."""

    class Sticky(MemoryBus):
        seconds = 5.0

        async def pin(self, name: str, body: bytes) -> None:
            if name == "weights":
                self.seconds, mine = self.seconds / 5, self.seconds
                await asyncio.sleep(mine)
            await super().pin(name, body)

    async def case() -> None:
        fleet = Fleet(open_bus=lambda: Sticky(server), staleness=STALENESS)
        fleet.join()
        world = await bus_world(None, fleet)
        await world.engine.load(await FakeTrainer().publish())
        world.engine._bus.seconds = 5.0  # type: ignore[union-attr]
        newer = FakeTrainer()
        newer.versions[""] = 1
        older = asyncio.ensure_future(world.engine._hosts_changed())
        await asyncio.sleep(0.1)
        await world.engine.load(await newer.publish())
        await older
        found = await fleet.open_bus().newer("weights")
        assert found and msgspec.msgpack.decode(found.body, type=WeightsNotice).updates[""].version == 1
        await world.engine.close()
        await fleet.end()

    server = MemoryServer()
    virtual_time.run(case())


def test_a_host_of_another_version_ends_with_a_sentence():
    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS)
        await fleet.open_bus().pin("run", msgspec.msgpack.encode({"session": "a", "version": "0.0.1", "field": "new"}))
        who = fleet.join()
        await asyncio.sleep(1.0)
        with pytest.raises(
            ConfigError, match=r"the run has headrace 0\.0\.1, and this host .+; install the same version"
        ):
            raise fleet.ended[who]

    virtual_time.run(case())


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage",
        b"\x80",
        b"",
        b"\xc1" * 40,
        msgspec.msgpack.encode({"type": "group", "ticket": "a"}),
        b"\x84\xa4type\xa1\xff\xa7session\xa1\xff\xa7version\xa1\xff\xa3who\xa1\xff",  # no UTF-8
    ],
)
def test_what_cannot_be_read_ends_no_host(garbage: bytes):
    async def case() -> None:
        server = MemoryServer()
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS, engine=lambda: FakeEngine(seconds_per_token=0.5))

        async def poison() -> None:
            bus = fleet.open_bus()
            for at in range(8):
                await asyncio.sleep(1.0)
                for queue, key in ((TICKETS, "zzz"), (TICKETS, "0"), (ANSWERS, "zzz"), (ANSWERS, "1")):
                    await bus.post(Posting(queue, key, garbage))
                for notice in (RUN, WEIGHTS, SUSPECTS):
                    await bus.pin(notice, garbage)
                await bus.sign(f"evil-{at}", garbage)

        poisoning = asyncio.ensure_future(poison())
        world = await a_run(fleet, steps=12)
        await poisoning
        checked(world)
        assert not any(fleet.ended.values()), fleet.ended
        message = " ".join(fleet.said)
        assert all(
            f"{what} on the bus cannot be read" in message
            for what in ("errand zzz", "the notice of the run", "the notice of weights")
        )

    virtual_time.run(case())


# --- tickets that end their hosts -----------------------------------------------------------------------------------------


class Poisoned(FakeEngine):
    """`kill`: called when a request of the ticket is begun; the host is dead then."""

    def __init__(self, ticket: int, kill: Callable[[FakeEngine], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._ticket, self._kill = ticket, kill

    async def generate(self, request: Request) -> Completion:
        key = RolloutKey.read(request.id)
        if key and key.ticket == self._ticket:
            self._kill(self)
            await asyncio.Event().wait()
        return await super().generate(request)


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_ticket_that_ends_every_host_is_given_up_and_no_other_one_is_lost(hosts: int):
    deaths: list[str] = []

    async def case() -> None:
        def kill(engine: FakeEngine) -> None:
            (who,) = [name for name, one in fleet.engines.items() if one is engine]
            if who in fleet.hosts:  # else its other requests: it is dead already
                deaths.append(who)
                fleet.kill(who)
                fleet.join()

        def engine() -> FakeEngine:
            return Poisoned(4, kill, seconds_per_token=1.0, length=lambda rng: 8)

        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS, engine=engine)
        world = await a_run(fleet, hosts=hosts)
        checked(world)
        assert len(deaths) == TICKET_DEATHS
        failed = [fact for fact in world.facts.of(GroupEnded) if fact.outcome == "failed"]
        assert [(fact.ticket, fact.reason, fact.failures) for fact in failed] == [
            (4, "engine_died", {"engine_died": 2})
        ]
        assert world.buffer.accounting().failed == {"engine_died": 1}
        [said] = [warning for warning in warnings(world) if "given up" in warning]
        assert said == (
            "t4 is given up: 3 rollout hosts died while they worked on it (engine.ticket_deaths). Its rollouts are counted as failed"
        )
        await fleet.end()

    virtual_time.run(case())


def test_a_host_that_an_errand_ends_with_an_error_says_which_ones_it_had_begun():
    async def case() -> None:
        def fail(engine: FakeEngine) -> None:
            raise MemoryError("no room")

        fleet = Fleet(
            open_bus=in_memory(), staleness=STALENESS, engine=lambda: Poisoned(4, fail, seconds_per_token=1.0)
        )
        loop = asyncio.get_running_loop()
        for moment in range(1, 20):
            loop.call_later(30.0 * moment, fleet.join)
        world = await a_run(fleet, hosts=1)
        checked(world)
        assert world.buffer.accounting().failed == {"engine_died": 1}
        assert sum("has left: MemoryError('no room')" in warning for warning in warnings(world)) == TICKET_DEATHS
        await fleet.end()

    virtual_time.run(case())


# --- a run that is killed ----------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_goes_on_with_what_is_on_the_bus(tmp_path: Path):
    """C7: nothing is lost or trained twice, and groups that were finished while the run was away are not sampled again."""

    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS, engine=lambda: FakeEngine(seconds_per_token=0.5))
        fleet.join()
        first = await bus_world(tmp_path / "run", fleet, steps=12, trainer=FakeTrainer(0.5))
        running = asyncio.ensure_future(first.run())
        await asyncio.sleep(12.0)
        running.cancel()
        first.engine.kill()
        await asyncio.gather(running, return_exceptions=True)
        done = len(first.trainer.batches)
        assert 0 < done < 12
        await asyncio.sleep(8.0)  # hosts finish what they have meanwhile
        answers = await fleet.open_bus().unsettled("answers")
        assert answers, "groups were finished while nobody was there"
        second = await bus_world(tmp_path / "run", fleet, steps=12, trainer=FakeTrainer(0.5))
        await second.run(resume=True)
        await second.engine.close()
        trained = Counter(group.ticket for batch in second.trainer.batches for group in batch.groups)
        assert set(trained.values()) == {1} and len(trained) == 36
        assert max(second.trained_lags()) <= 1
        assert second.buffer.accounting().balance() == 0
        kept = [fact for fact in second.facts.of(GroupEnded) if str(fact.ticket) in answers and fact.outcome == "ready"]
        assert kept and min(fact.seconds for fact in kept) == 0.0, "they were taken as they were"

    virtual_time.run(case())


def test_letters_of_an_earlier_process_hold_nobody_up_and_are_answered_by_nobody():
    """A run that goes on from a checkpoint finds letters of the steps that it has set aside. They ask for versions that it may not come to
    for long, and perhaps for other prompts. They took all places of the hosts, and their answers were taken for those of its own tickets."""

    async def case() -> None:
        fleet = Fleet(open_bus=in_memory(), staleness=STALENESS)
        bus = fleet.open_bus()
        for ticket in range(6):
            old = letter_of("earlier", GroupErrand(ticket, Prompt("old", "", (9,)), at_least=50))
            await bus.post(Posting(TICKETS, str(ticket), msgspec.msgpack.encode(old)))
        async with asyncio.timeout(600.0):
            world = await a_run(fleet)
        checked(world)
        contexts = {row.tokens[:1] for batch in world.trainer.batches for group in batch.groups for row in group.rows}
        assert (9,) not in contexts and world.engine._desk.repeated == 0 == world.engine._desk.reposted
        assert not warnings(world)

    virtual_time.run(case())


def test_a_letter_of_a_later_process_is_left_for_it():
    """A host that has not heard of it yet claims the letter, and gives it back."""

    async def case() -> None:
        server = MemoryServer()
        fleet = Fleet(open_bus=in_memory(server), staleness=STALENESS)
        who = fleet.join()
        world = await bus_world(None, fleet, trainer=FakeTrainer(0.5))
        running = asyncio.ensure_future(world.run())
        await asyncio.sleep(3.0)
        session = fleet.hosts[who][0]._session
        assert session
        server.board[RUN] = server.board[RUN]._replace(
            body=msgspec.msgpack.encode(RunNotice("later", __version__)), id=server.board[RUN].id
        )
        letter = letter_of("later", GroupErrand(900, Prompt("p", "", (1,)), at_least=0))
        await fleet.open_bus().post(Posting(TICKETS, "900", msgspec.msgpack.encode(letter)))
        await asyncio.sleep(20.0)
        assert "900" in await fleet.open_bus().unsettled(TICKETS)
        assert msgspec.msgpack.decode(server.board[RUN].body, type=RunNotice).session == "later", "nor is its notice"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fleet.end()

    virtual_time.run(case())


# --- properties --------------------------------------------------------------------------------------------------------

SCHEDULES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "groups": st.integers(1, 4),
        "max_lag": st.integers(0, 3),
        "token": st.sampled_from([0.01, 0.1, 1.0]),
        "step": st.sampled_from([0.05, 0.5, 5.0]),
        "load": st.sampled_from([0.0, 0.2, 3.0]),
        "lost": st.sampled_from([0.0, 0.05, 0.2]),
        "repeated": st.sampled_from([0.0, 0.3]),
        "late": st.sampled_from([0.0, 0.3]),
        "unsettled": st.sampled_from([0.0, 0.1]),
        "hosts": st.integers(1, 4),
        "deaths": st.lists(st.floats(0.0, 120.0), max_size=4),
        "goes_back": st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0)), max_size=3),
    }
)


async def _survives(schedule: dict[str, Any], open_bus: Callable[[], Bus]) -> None:
    s = schedule
    staleness = StalenessConfig(groups_per_step=s["groups"], max_lag=s["max_lag"])
    fleet = Fleet(
        open_bus=open_bus,
        staleness=staleness,
        engine=lambda: FakeEngine(
            s["token"], s["load"], lambda rng: min(8, int(rng.paretovariate(0.7))), seed=s["seed"]
        ),
    )
    loop, chance = asyncio.get_running_loop(), random.Random(s["seed"])

    def replace() -> None:
        fleet.join()
        if alive := sorted(fleet.hosts):
            fleet.kill(chance.choice(alive))

    for when in s["deaths"]:
        loop.call_later(when, replace)
    world = await a_run(fleet, hosts=s["hosts"], steps=5, trainer=FakeTrainer(s["step"], publish_seconds=s["load"] / 3))
    checked(world)
    await fleet.end()


def _faults(s: dict[str, Any]) -> BusFaults:
    names = ("lost", "repeated", "late", "unsettled")
    return BusFaults(**{name: s[name] for name in names}, shuffled=True)


@settings(max_examples=25)
@given(schedule=SCHEDULES)
def test_every_contract_holds_whatever_the_bus_does(schedule: dict[str, Any]):
    async def case() -> None:
        server, loop = MemoryServer(), asyncio.get_running_loop()
        for begun, later in schedule["goes_back"]:  # to an earlier state
            loop.call_later(begun, lambda later=later: loop.call_later(later, server.state()))
        await _survives(schedule, in_memory(server, _faults(schedule), schedule["seed"]))

    virtual_time.run(case())


@settings(max_examples=8)
@given(schedule=SCHEDULES)
def test_every_contract_holds_in_files_too(tmp_path_factory: pytest.TempPathFactory, schedule: dict[str, Any]):
    directory, chance = tmp_path_factory.mktemp("bus"), random.Random(schedule["seed"])

    async def case() -> None:
        clock = asyncio.get_running_loop().time
        await _survives(
            schedule, lambda: FaultyBus(JsonlBus(directory, poll=0.5, clock=clock), _faults(schedule), chance)
        )

    virtual_time.run(case())
