"""What a run does for its rollout hosts is in proportion to what changes, not to their number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.reports import EngineStats
from headrace.facts.facts import EngineSample, FleetSample
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.run.hosts.bus_messages import SILENT, WEIGHTS, HostEntry, beat_of
from headrace.run.hosts.bus_run import SAMPLES, HostList
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.memory_bus import MemoryBus, MemoryServer
from support.bus.bus_world import Fleet, bus_world

SESSION = "now"


def entry(beat: int, tokens: int = 0, version: int = 0, **more: Any) -> HostEntry:
    stats = EngineStats(
        running=more.pop("running", 1), kv_used=more.pop("kv", 0.0), sampled_tokens=tokens, busy_seconds=tokens / 8
    )
    return HostEntry(SESSION, "machine", 1, beat, version, stats=stats, **more)


def written(entries: dict[str, HostEntry]) -> dict[str, bytes]:
    return {who: msgspec.msgpack.encode(one) for who, one in entries.items()}


step = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from(["sign", "sign", "sign", "leave", "again"]),
    st.integers(0, 50),
    st.integers(-1, 3),
    st.sampled_from([0.0, 0.25, 0.5]),
)


@settings(max_examples=200)
@given(st.lists(step, max_size=30))
def test_sums_that_follow_changes_are_those_that_are_counted_anew(
    steps: list[tuple[str, str, int, int, float]],
) -> None:
    known, signed, gone = HostList(SESSION), dict[str, HostEntry](), list[EngineStats]()
    for now, (who, what, tokens, version, kv) in enumerate(steps):
        before = signed.get(who)
        if what == "sign":
            total = tokens + (before.stats.sampled_tokens if before else 0)
            signed[who] = entry(now, total, version, kv=kv, running=tokens % 5)
        elif what == "leave" and before:
            gone.append(before.stats)
            del signed[who]
        known.read(written(signed), float(now))
        for one in known.missing(signed, float(now)):
            known.part_with(one)
        silent = [one for one in signed if one not in known.hosts]
        there = [one for name, one in signed.items() if name not in silent]
        if silent:
            return  # it was silent for long: its sums are those of the hosts that are gone
        stats = known.stats
        assert stats.sampled_tokens == sum(one.stats.sampled_tokens for one in there) + sum(
            one.sampled_tokens for one in gone
        )
        assert stats.running == sum(one.stats.running for one in there)
        assert stats.kv_used == max((one.stats.kv_used for one in there), default=0.0)
        assert stats.version == min((one.version for one in there), default=-1)
        mean = sum(one.stats.busy_seconds for one in there) / max(1, len(there))
        assert stats.busy_seconds == pytest.approx(mean)


@pytest.mark.slow
def test_single_hosts_are_recorded_the_less_often_the_more_there_are() -> None:
    """A thousand of them: 20 a second, as in a fleet; and all of them at once when one comes or goes."""
    known, count = HostList(SESSION), 1000
    recorded = Counter[int]()
    for second in range(200):
        known.read(written({f"h{i}": entry(second, second) for i in range(count)}), float(second))
        if (found := known.samples(float(second))) is not None:
            recorded[second] = len(found)
    assert sum(recorded.values()) <= SAMPLES * 200 + count and set(recorded.values()) == {count}
    known.part_with("h7")
    gone = known.samples(199.5)
    assert gone is not None and len(gone) == count - 1


def test_hosts_are_not_lost_for_the_time_in_which_the_run_was_stopped() -> None:
    """Their errands would be charged with their deaths. They have the rest of their time to be heard."""
    known, signed = HostList(SESSION), written({"a": entry(1), "b": entry(1)})
    for second in range(4):
        known.read(signed, float(second))
    known.read(signed, 1000.0)
    assert known.missing(signed, 1000.0) == []
    for second in range(1001, 1008):
        known.read(signed | written({"b": entry(second)}), float(second))
    assert known.missing(signed, 1007.0) == [] and known.missing(signed, 1007.5) == ["a"]


def test_an_entry_that_has_not_changed_is_not_read_again() -> None:
    known = HostList(SESSION)
    known.read(written({"a": entry(1), "b": entry(1)}), 0.0)
    before = known.hosts["a"].entry
    came, moved = known.read(written({"a": entry(1), "b": entry(2, version=1)}), 1.0)
    assert not came and moved and known.hosts["a"].entry is before and known.hosts["a"].heard == 0.0
    assert known.missing({"a", "b"}, SILENT + 0.5) == ["a"], "and it is silent"


def test_hosts_write_less_often_the_more_there_are_and_never_too_seldom() -> None:
    assert [beat_of(n) for n in (1, 400, 600, 1000, 10**6)] == [1.0, 1.0, 1.5, 2.5, 2.5]
    assert 3 * beat_of(10**6) < SILENT, "three entries in a row may be lost"


def test_nothing_is_announced_that_hosts_know() -> None:
    """All hosts read an announcement. One that merely serves other weights than before changes nothing for the others."""

    async def case() -> None:
        server = MemoryServer()
        pinned = Counter[str]()

        class Watched(MemoryBus):
            async def pin(self, name: str, body: bytes) -> None:
                pinned[name] += 1
                await super().pin(name, body)

        fleet = Fleet(open_bus=lambda: Watched(server), staleness=StalenessConfig(groups_per_step=3, max_lag=1))
        for _ in range(4):
            fleet.join()
        world = await bus_world(None, fleet, steps=20, trainer=FakeTrainer(seconds_per_step=1.0))
        try:
            await world.run()
        finally:
            await world.engine.close()
        assert pinned[WEIGHTS] <= 20 + 1 + 4 + 1, "a version each, and one for each host that came"
        samples = world.facts.of(FleetSample)
        assert len(samples) <= len(world.facts.of(EngineSample)) and len(samples[-1].members) == 4

    virtual_time.run(case())


def test_the_list_of_a_run_is_its_own() -> None:
    known = HostList("another")
    assert known.read(written({"a": entry(1)}), 0.0) == ([], False) and not known.hosts
    assert known.read({"a": b"\xc1"}, 0.0) == ([], False), "an entry that cannot be read"
