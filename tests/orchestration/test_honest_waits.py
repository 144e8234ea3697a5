"""A wait is not stopped as long as what it waits for goes on, however long that takes; and one that hangs is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.errors import HeadraceError, StalledError
from headrace.facts.facts import Waited, Warned
from headrace.facts.waits import Waits
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.processes.health.patience import LITTLE, Reading
from headrace.testing.fake_engine import FakeEngine
from support.fake_world import PATIENT, FakeWorld

WARN, STOP = 50.0, 100.0


def waits_of(facts: FactList) -> Waits:
    return Waits(facts.record, asyncio.get_running_loop().time, WARN, STOP)


def stopped_at(advance: Any, **more: Any) -> float:
    """The time at which a wait is stopped that nothing ends."""

    async def case() -> float:
        loop, waits = asyncio.get_running_loop(), waits_of(FactList())
        with pytest.raises(StalledError, match="trainer has waited"):
            async with waits.named("trainer", "8 groups", advances=advance and (lambda: advance(loop.time())), **more):
                await asyncio.Event().wait()
        return loop.time()

    return virtual_time.run(case())


def test_a_wait_is_stopped_when_what_it_waits_for_has_stopped() -> None:
    assert stopped_at(None) == pytest.approx(STOP)
    assert stopped_at(lambda now: "nothing") == pytest.approx(STOP)
    assert stopped_at(lambda now: min(now, 730.0)) == pytest.approx(900.0), (
        "the look at 800 s was the last that saw something"
    )
    assert stopped_at(None, allows=40.0) == pytest.approx(STOP + 40.0)
    assert stopped_at(lambda now: min(now, 150.0), allows=40.0) == pytest.approx(2 * (STOP + 40.0) + STOP + 40.0)


def test_a_short_wait_does_not_ask_what_advances() -> None:
    """The answer walks all tokens that are under way, and an admission waits once for each group."""

    async def case() -> None:
        waits, asked = waits_of(FactList()), 0

        def advances() -> int:
            nonlocal asked
            asked += 1
            return asked

        async with waits.named("admission", "a free slot", advances=advances):
            await asyncio.sleep(WARN - 1.0)
        assert not asked
        async with waits.named("admission", "a free slot", advances=advances):
            await asyncio.sleep(2 * STOP + 1.0)
        assert asked == 3, "at the first deadline, and at two second ones"

    virtual_time.run(case())


def test_files_that_are_read_put_off_the_end_of_a_start_alone() -> None:
    async def case(owner: str) -> float:
        loop, waits = asyncio.get_running_loop(), waits_of(FactList())

        async def spare() -> None:
            for _ in range(300):  # a second each, as the watchdog does
                await asyncio.sleep(1.0)
                waits.spare(1.0, owner="start")

        reading = asyncio.ensure_future(spare())
        with pytest.raises(StalledError):
            async with waits.named(owner, "the trainer to load the model"):
                await asyncio.Event().wait()
        reading.cancel()
        return loop.time()

    assert virtual_time.run(case("start")) == pytest.approx(300.0 + STOP, abs=2.0)
    assert virtual_time.run(case("trainer")) == pytest.approx(STOP)


def test_a_process_that_reads_is_told_from_one_that_gets_messages() -> None:
    read = {1: 10 * LITTLE, 2: 0}
    reading = Reading(lambda pid: read[pid])
    assert not reading.since_last([1]), "what it has read before is not known to be new"
    read[1] += LITTLE // 2
    read[2] += 5 * LITTLE
    assert not reading.since_last([1, 2])
    read[2] += 2 * LITTLE
    assert reading.since_last([1, 2]) and not reading.since_last([1, 2])


def test_the_bytes_that_this_process_reads_are_seen(tmp_path: Any) -> None:
    import os

    reading, file = Reading(), tmp_path / "weights"
    file.write_bytes(bytes(4 * LITTLE))
    if not os.path.exists("/proc/self/io"):
        pytest.skip("only Linux says what a process reads")
    reading.since_last([os.getpid()])
    file.read_bytes()
    assert reading.since_last([os.getpid()])


class Forgetful(FakeEngine):
    """Never ends one request, of which it has forgotten everything but the first token."""

    async def _sample(self, pending: Any) -> Any:
        if pending.request.id == "t4/0":
            await self._pass(pending, self.seconds_per_token)
            await asyncio.Event().wait()
        return await super()._sample(pending)


def world(engine: FakeEngine, **more: Any) -> FakeWorld:
    staleness = more.pop("staleness", StalenessConfig(groups_per_step=2, max_lag=1))
    return FakeWorld(None, staleness, engine=engine, stop_after=STOP, **more)


def slow(kind: type[FakeEngine] = FakeEngine) -> FakeEngine:
    """A completion takes four times as long as a wait may stand still."""
    return kind(seconds_per_token=STOP / 2, length=lambda rng: 8)


def test_rollouts_that_take_longer_than_a_wait_may_stand_still() -> None:
    made = world(slow(), steps=2)
    virtual_time.run(made.run())
    assert max(wait.seconds for wait in made.facts.of(Waited) if wait.owner == "rollouts") > 3 * STOP
    assert max(wait.seconds for wait in made.facts.of(Waited) if wait.owner == "trainer") > 3 * STOP


def test_groups_that_wait_for_their_turn_at_a_busy_engine() -> None:
    engine = FakeEngine(seconds_per_token=STOP / 8, length=lambda rng: 8, rows=1)
    made = world(engine, steps=2)
    virtual_time.run(made.run())
    assert max(wait.seconds for wait in made.facts.of(Waited) if wait.owner == "rollouts") > 3 * STOP


def test_an_engine_that_hangs_is_stopped() -> None:
    engine = slow()

    async def case() -> float:
        made, loop = world(engine, steps=2), asyncio.get_running_loop()
        loop.call_later(3.2 * STOP, setattr, engine, "stopped", True)
        with pytest.raises((StalledError, ExceptionGroup), match="has waited|unhandled"):
            await made.run()
        return loop.time()

    assert 4 * STOP < virtual_time.run(case()) < 6 * STOP


def test_one_lost_rollout_is_noticed_beside_others_that_go_on() -> None:
    """The trainer takes groups as they end, and throws old ones away: nothing else would ever stop."""
    staleness = StalenessConfig(groups_per_step=1, max_lag=1, overdue="drop", in_flight=6)
    engine = Forgetful(seconds_per_token=1.0, length=lambda rng: 8)

    async def case() -> str:
        made, loop = world(engine, staleness=staleness, steps=10**6, watch=PATIENT), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(100 * STOP):
                await made.run()
        except* StalledError as found:
            message = str(found.exceptions[0])
        assert loop.time() < 5 * STOP
        return message

    assert "rollouts has waited" in virtual_time.run(case())


def test_a_report_that_cannot_be_written_ends_the_wait_with_the_reason() -> None:
    """A full disk. The alarm is a callback, whose error nobody else would hear of; a wait without a bound would go on for ever."""

    def full(fact: Any) -> None:
        if isinstance(fact, Warned):
            raise HeadraceError("no space left")

    async def case(endless: bool) -> float:
        loop = asyncio.get_running_loop()
        waits = Waits(full, loop.time, WARN, STOP)
        with pytest.raises(HeadraceError, match="no space left"):
            async with waits.named("trainer", "8 groups", endless):
                await asyncio.Event().wait()
        return loop.time()

    for endless in (False, True):
        assert virtual_time.run(case(endless)) == pytest.approx(WARN)
