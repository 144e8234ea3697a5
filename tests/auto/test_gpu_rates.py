"""Sizes on a GPU by measured rates: none is larger than brings anything, the cache takes what is left, and a run names what was not tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.run.auto.candidates import Figures
from headrace.run.auto.gpu_rates import GpuRates, enough, slower_compiled, worthwhile
from headrace.run.choosing import Settled, settle, settle_sizes
from headrace.run.config import RunConfig, load_config
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import ModelShape
from headrace.testing.fake_measurer import FakeMeasurer
from support.tiny_run import tiny_config

GIB = 2**30
MIDDLE = ModelShape(
    parameters=1_500_000_000, matrices=(), layers=28, hidden=1536, inner=8960, experts=0, cached=2 * 28 * 256, positions=32768, vocabulary=151_936
)  # fmt: skip
RATES = GpuRates(
    rows={64: 9e3, 128: 15e3, 256: 24e3, 512: 24.5e3, 1024: 25e3},
    passes={512: 20e3, 1024: 38e3, 2048: 40e3, 4096: 40e3, 8192: 39e3},
    microbatches={2048: 16e3, 4096: 16.5e3, 8192: 16.6e3},
    compiled={2048: 12e3},
)


def gpu(free: float = 79.0) -> Machine:
    return Machine(8, 256 * GIB, 256 * GIB, ("a GPU", 80 * GIB), {"free": int(free * GIB), "bfloat16": True})


def busy(tmp_path: Path, engine: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> RunConfig:
    """A run with 64 groups of 16 under way, which leaves all sizes open but those that are given."""
    tree = tiny_config(
        tmp_path,
        tmp_path,
        staleness={"groups_per_step": 64},
        rollout={"max_tokens": 2048, "group_size": 16},
        engine={"dtype": "bfloat16", "context_length": 4096},
        train={"dtype": "bfloat16", "steps": 5},
    )
    for name in ("kv_gib", "max_running", "prefill_chunk"):
        tree["engine"].pop(name, None)
    tree["train"].pop("microbatch_tokens", None)
    tree["engine"].update(engine or {})
    tree["train"].update(train or {})
    return load_config(tree)


def test_the_smallest_size_that_is_about_as_fast_as_the_fastest_is_enough():
    assert enough(RATES.rows) == 256 and enough(RATES.passes) == 1024 and enough({64: 1.0}) == 64
    assert worthwhile(RATES) == {
        "engine.max_running": 256,
        "engine.prefill_chunk": 1024,
        "train.microbatch_tokens": 2048,
    }
    assert worthwhile(GpuRates(rows={64: 1.0, 128: 2.0})) == {}, "more might bring more"
    assert (
        slower_compiled(RATES)
        and not slower_compiled(replace_rates(compiled={2048: 17e3}))
        and not slower_compiled(GpuRates())
    )


def replace_rates(**changes: Any) -> GpuRates:
    return GpuRates(
        **{**{name: getattr(RATES, name) for name in ("rows", "passes", "microbatches", "compiled")}, **changes}
    )


def test_no_size_is_larger_than_brings_anything_and_the_cache_takes_the_rest(tmp_path: Path):
    config = busy(tmp_path)
    memory, both = settle_sizes(config, MIDDLE, gpu()), settle_sizes(Settled(config, rates=RATES), MIDDLE, gpu())
    assert (both.engine.max_running, both.engine.prefill_chunk, both.train.microbatch_tokens) == (256, 1024, 2048)
    assert both.engine.sizes.kv_gib >= memory.engine.sizes.kv_gib and memory.engine.sizes.max_running > 256
    assert both.train.compile is False and both.chosen.wishes["train.compile"] == "auto"
    assert set(memory.chosen.wishes) < set(both.chosen.wishes) and both.chosen.wishes["engine.max_running"] == "auto"
    assert "256 2.4e+04" in both.chosen.why["gpu measured"] and "placement" in both.chosen.why["gpu measured"]
    assert settle_sizes(Settled(both, rates=RATES), MIDDLE, gpu()) == both


def test_what_is_set_is_kept_and_what_was_not_measured_is_said(tmp_path: Path):
    config = busy(tmp_path, engine={"max_running": 700}, train={"compile": True})
    found = settle_sizes(Settled(config, rates=RATES), MIDDLE, gpu())
    assert found.engine.max_running == 700 and found.train.compile is True
    broken = settle_sizes(Settled(config, rates=GpuRates(problem="the device is lost")), MIDDLE, gpu())
    assert broken.chosen.why["gpu measured"] == "not measured: the device is lost"
    assert broken.engine.prefill_chunk == settle_sizes(config, MIDDLE, gpu()).engine.prefill_chunk


@pytest.mark.parametrize(
    ("engine", "train", "asked"),
    [
        ({}, {}, (True, True)),
        ({"device": "cpu", "path": "fused"}, {}, (False, True)),
        ({}, {"microbatch_tokens": 4096, "compile": False}, (True, False)),
    ],
)
def test_what_is_on_the_gpu_and_open_is_measured(tmp_path: Path, engine: Any, train: Any, asked: tuple[bool, bool]):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    measurer = FakeMeasurer(Figures(problem="no CPU is measured here"), rates=RATES)
    settled = settle(busy(tmp_path, engine=engine, train=train), tmp_path, gpu(), 1, measurer)
    ((request, card),) = measurer.asked_gpu
    assert settled.rates == RATES and card == "a GPU" and (bool(request.rows), bool(request.microbatches)) == asked


def test_without_a_gpu_or_anything_open_nothing_is_measured(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    measurer = FakeMeasurer(Figures(problem="none"), rates=RATES)
    plain = Machine(2, 64 * GIB, 64 * GIB, None, None)
    fixed = busy(
        tmp_path, engine={"max_running": 8, "prefill_chunk": 64}, train={"microbatch_tokens": 64, "compile": False}
    )
    for config, machine in ((busy(tmp_path), plain), (fixed, gpu())):
        assert settle(config, tmp_path, machine, 1, measurer).rates == GpuRates()
    assert measurer.asked_gpu == []
