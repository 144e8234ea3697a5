"""A day of a cluster: the real controller over hundreds of simulated engines and ranks, with failures. Here a small cluster, and a few hours of it."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from planted import hunt_days
from planted_faults import PLANTED

from headrace.loop.world.surroundings import Distribution
from headrace.testing.faultsim.cluster.day import run_day
from headrace.testing.faultsim.cluster.mishaps import DAY, GPU_HOURS, GPU_KINDS, PER_DAY, mishaps_of
from headrace.testing.faultsim.cluster.sizing import ClusterSize

SMALL = ClusterSize().on(96)

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # a kill leaves such


def test_every_contract_holds_on_a_bad_day() -> None:
    """Months of failures in a few hours: workers, nodes, network, clock and controller."""
    bad = run_day(SMALL, 4.0, 0, 100.0)
    kinds = {mishap.kind for mishap in bad.mishaps}
    assert {"node_lost", "network_flap", "slow_link", "message_repeated", "controller_killed"} <= kinds
    assert bad.ends and bad.deaths and bad.absences and bad.steps > 5
    assert 0 < bad.lag <= SMALL.staleness.lag_bound
    assert bad.books.balance() == 0 and bad.books.in_checkpoint > 0


@pytest.mark.parametrize(("beats", "lost"), [(5.0, 56), (600.0, 0)])
def test_engines_of_one_gpu_behind_a_switch_that_is_silent_are_lost_as_in_real_runs(beats: float, lost: int) -> None:
    """The seed has a switch that lets nothing pass for two minutes, after three."""
    small = ClusterSize.of_one_gpu().on(64)
    size = msgspec.structs.replace(small, beats=beats, trainer_boot=20.0, engine_boot=10.0)
    day = run_day(size, 0.06, 292, 400.0)
    assert size.engines == 56 and "network_flap" in {mishap.kind for mishap in day.mishaps}
    assert day.deaths == lost and day.books.balance() == 0


@pytest.mark.slow
def test_every_contract_holds_over_a_bus() -> None:
    """Short completions, because a host looks at the bus every second."""
    short = msgspec.structs.replace(
        SMALL.on(64),
        completions=Distribution("lognormal", mean=3000, sigma=0.6),
        max_tokens=8192,
        grain=1024,
        trainer_boot=20.0,
        engine_boot=10.0,
    )
    day = run_day(short, 0.3, 4, 200.0, bus=True)
    assert day.mishaps and day.steps > 2 and day.books.balance() == 0


@pytest.mark.slow
def test_equal_days_run_equally() -> None:
    one, other = (run_day(SMALL, 1.5, 3, 100.0) for _ in range(2))
    assert msgspec.structs.replace(one, cpu=0.0) == msgspec.structs.replace(other, cpu=0.0)


def test_failures_come_at_their_rates() -> None:
    size, days = ClusterSize(), 2000
    counts = Counter(mishap.kind for mishap in mishaps_of(size, days * DAY, 0))
    for kind, per_day in PER_DAY.items():
        assert counts[kind] == pytest.approx(days * per_day, rel=0.3)
    gpus = sum(counts[kind] for kind in GPU_KINDS)
    assert gpus == pytest.approx(days * size.gpus * 24 / GPU_HOURS, rel=0.1)


def test_a_cluster_of_another_size_keeps_its_shares() -> None:
    size = ClusterSize()
    half = size.on(512)
    assert half.gpus == 512 and half.ranks / half.engines == pytest.approx(size.ranks / size.engines, rel=0.05)
    with pytest.raises(ValueError, match="simulate at least 64"):
        size.on(32)


AT_THIS_SIZE = ("slots_off_by_one", "release_before_live", "release_nothing", "first_suffices", "moved_from_the_start")
"""Planted faults that a day of a cluster has to find too. Those of recovery need kills at moments that days of hours do not have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_THIS_SIZE)
def test_planted_faults_are_found_in_a_cluster(name: str) -> None:
    planted = next(one for one in PLANTED if one.name == name)
    assert hunt_days(planted).schedule is not None, f"{planted.mistake}, and no day fails"
