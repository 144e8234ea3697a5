"""The planner's figures of new weights on their way, against measured and published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.commands.plan.command import controller_work
from headrace.commands.plan.rates.rates import (
    CHANGED,
    bytes_per_change,
    changed_share,
    difference,
    pays_below,
    travel_of,
    whole,
)
from headrace.commands.plan.rates.shapes import SHAPES
from headrace.weight_sync.config import WeightSyncConfig

MB, GB = 1e6, 1e9
INDEX_AND_VALUE = 6
"""Bytes of a change as others send it: four of its place, two of its value."""

# verl, issue 7060 and pull request 7085 (H100 nodes, steady state of `timing_s/update_weights`, July 2026); TRL, "Shipping a Trillion
# Parameters With a Hub Bucket" (May 2026).
PUBLISHED_BYTES = [
    ("235b-a22b", 0.0005, 702 * MB),
    ("235b-a22b", 0.0002, 288 * MB),
    ("72b", 0.021, 8.6 * GB),
    ("72b", 0.026, 10.9 * GB),
]
PUBLISHED_SECONDS = [("30b-a3b", 32.2, "235b-a22b", 255.9), ("72b", 28.8, "32b", 14.2)]
"""A model whose full broadcast took so long, and another one through the same code."""


@pytest.mark.parametrize(("model", "share", "nbytes"), PUBLISHED_BYTES)
def test_published_bytes_of_differences_within_a_tenth(model: str, share: float, nbytes: float) -> None:
    found = difference(SHAPES[model].parameters, 1.0, share, INDEX_AND_VALUE)
    assert found.bytes == pytest.approx(nbytes, rel=0.1)


@pytest.mark.parametrize(("one", "took", "other", "seconds"), PUBLISHED_SECONDS)
def test_published_seconds_of_full_copies_follow_from_those_of_another_model(
    one: str, took: float, other: str, seconds: float
) -> None:
    rate = whole(SHAPES[one].parameters, 1.0).bytes / took
    assert whole(SHAPES[other].parameters, rate).seconds == pytest.approx(seconds, rel=0.1)


def test_a_small_model_below_one_percent_as_published() -> None:
    """TRL: 20 to 35 MB of 1.2 GB for Qwen3-0.6B, with fewer than one value in a hundred changed."""
    assert 20 * MB < difference(0.596e9, 1.0, 0.0075, INDEX_AND_VALUE).bytes < 35 * MB
    assert whole(0.596e9, 1.0).bytes == pytest.approx(1.2 * GB, rel=0.01)


@pytest.mark.parametrize(("share", "nbytes"), [(0.0064, 1.57 * MB), (0.0208, 3.92 * MB), (0.123, 16.8 * MB)])
def test_the_size_of_our_own_differences(share: float, nbytes: float) -> None:
    """SmolLM2-135M, measured."""
    assert 134.5e6 * share * bytes_per_change(share) == pytest.approx(nbytes, rel=0.15)


def test_the_share_of_changed_values_goes_through_what_was_measured_and_on() -> None:
    for rate, share in CHANGED:
        assert changed_share(rate) == pytest.approx(share)
    assert 0.0064 < changed_share(3e-6) < 0.0208
    assert 0.001 < changed_share(1e-7) < 0.0064
    assert changed_share(1.0) == 0.5


@pytest.mark.parametrize(
    ("kind", "engines", "times"),
    [
        *[("auto", 8, 1), ("tcp", 1, 1), ("tcp", 8, 2), ("broadcast", 1, 1), ("broadcast", 3, 2), ("broadcast", 8, 4)],
        *[("http", 1, 1), ("http", 2, 2), ("http", 8, 4), ("http", 26, 6)],
    ],
)
def test_how_often_the_bytes_pass_until_all_have_them(kind: str, engines: int, times: int) -> None:
    settings = WeightSyncConfig(kind=kind)
    assert travel_of(settings, 1e-6, 1e9, 1e9, engines=engines).fetch == pytest.approx(2.0 * times)


def test_ranks_that_each_send_their_part_share_the_bytes_and_no_engine_receives_faster_than_its_link() -> None:
    tcp, http = (WeightSyncConfig(kind=kind) for kind in ("tcp", "http"))
    for senders, times in ((1, 2), (2, 1), (64, 1)):
        assert travel_of(tcp, 1e-6, 1e9, 1e9, engines=32, senders=senders).fetch == pytest.approx(2.0 * times)
    assert travel_of(http, 1e-6, 1e9, 1e9, engines=26, senders=4).fetch == pytest.approx(2.0 * 6), "rank 0 sends it"


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_differences_are_sent_to_each_engine_by_the_trainer(kind: Any) -> None:
    way = WeightSyncConfig(kind=kind, encoding="delta")
    one, many = (travel_of(way, 1e-6, 1e9, 1e9, engines=engines).fetch for engines in (1, 30))
    assert many == pytest.approx(30 * one)


def test_a_difference_pays_on_a_slow_network_only() -> None:
    size, share = 8e9, changed_share(1e-6)
    edge = pays_below(size, share)
    assert 1e9 < edge < 4e9
    for network, pays in ((edge / 2, True), (edge * 2, False)):
        assert (difference(size, network, share).seconds < whole(size, network).seconds) is pays
    assert travel_of(WeightSyncConfig(encoding="delta"), 1e-6, size, 1e9) == difference(size, 1e9, share)
    assert travel_of(WeightSyncConfig(), 1e-6, size, 1e9) == whole(size, 1e9)


@pytest.mark.slow
def test_the_command_says_what_weights_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "planned.toml").write_text(
        '[model]\npath = "somewhere"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n[reward]\n'
        'function = "reasoning_gym"\n[train]\nlearning_rate = 1e-6\n'
    )
    arguments = ["plan", str(tmp_path / "planned.toml"), "--hardware", "h100", "--model", "7b", "--steps", "4"]
    assert cli.main([*arguments, "--network", "1"]) == 0
    out = capsys.readouterr().out
    assert "new weights: 15.2 GB whole, 15.2 s at 1 GB/s; as differences" in out
    assert cli.main([*arguments, "--network", "1", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)
    sets = ["--set", 'weight_sync.kind="tcp"', "--set", 'weight_sync.encoding="delta"']
    assert cli.main([*arguments, "--network", "1", "--json", *sets]) == 0
    less = json.loads(capsys.readouterr().out)
    assert less["weights"]["bytes"] < slow["weights"]["bytes"] / 50
    assert less["weights"]["seconds"] < slow["weights"]["seconds"]


def test_the_plan_says_what_the_controller_needs_and_from_which_size_on_a_bus_is_to_be_used() -> None:
    each = 64 * 128
    assert controller_work(1, each) == []
    (some,) = controller_work(100, 100 * each)
    assert some == "  the controller needs 28.0% of a core to receive the tokens of 100 engines"
    (many,) = controller_work(500, 500 * each)
    assert "139.9% of a core" in many and many.endswith("use rollout hosts on a bus (orchestration.bus)")
