"""Runs whose vLLM 0.32, the real one on the CPU, fetches weights over HTTP by headrace's transfer engine, at vLLM's public extension point."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest
from real_vllm import MARKS, PYTHON, WIDE, config_for, save_model

import headrace
from headrace.facts.facts import IdentityChecked, RunEnded, WeightsLive
from support.stale_kinds import check_named, findings
from support.tiny_run import Config, of

pytestmark = MARKS

ENTRY = "[vllm.general_plugins]\nheadrace = headrace.weight_sync.in_vllm.register:register\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen2-64"), tiny_tokenizer)


def with_headrace(directory: Path) -> Path:
    """vLLM's interpreter as if headrace were installed beside it: with its entry point and the packages that it needs there."""
    site = directory / "site"
    metadata = site / f"headrace-{headrace.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headrace\nVersion: {headrace.__version__}\n")
    (metadata / "entry_points.txt").write_text(ENTRY)
    for package in ("xxhash", "zstandard"):
        found = importlib.util.find_spec(package)
        assert found and found.origin
        (site / package).symlink_to(Path(found.origin).parent)
    python = directory / "python"
    repository = Path(headrace.__file__).parent.parent
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site}:{repository} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return python


def run(directory: Path, config: Config) -> list[WeightsLive]:
    config["engine"] |= {"python": str(with_headrace(directory)), "dtype": "bfloat16"}
    config["train"] |= {"steps": 4}
    assert headrace.train(config).reason == "finished"
    (ended,) = of(directory / "runs" / "tiny", RunEnded)
    probes = of(directory / "runs" / "tiny", IdentityChecked)
    assert ended.accounting.balance() == 0 and all(probe.ok for probe in probes)
    assert {probe.version for probe in probes} == set(range(5)), "every version is probed"
    return of(directory / "runs" / "tiny", WeightsLive)


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_full_copies_and_differences(model: Path, tmp_path: Path, kind: str) -> None:
    ways = {"kind": kind, "encoding": "delta", "anchor_every": 2}
    live = run(tmp_path, config_for(tmp_path, model, weight_sync=ways, train={"learning_rate": 1e-5}))
    differs = ["base" in one.update.where for one in live]
    assert differs == [True, True, False, True, True], (
        "version 0 is sent as what differs from the trial, which was sent whole"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_kind_that_stays_is_named(tiny_tokenizer: Path, tmp_path: Path, dtype: str) -> None:
    model = save_model(tmp_path / "model", tiny_tokenizer, spread=WIDE)
    config = config_for(tmp_path, model, weight_sync={"kind": "http"})
    config["engine"] |= {"python": str(with_headrace(tmp_path)), "dtype": dtype}
    check_named(findings(config, model, tmp_path))


def test_an_adapter_whose_files_are_deleted_when_the_server_ends(model: Path, tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    tables = {"weight_sync": {"kind": "tcp"}, "lora": {"rank": 4}, "train": {"learning_rate": 1e-2}}
    live = run(tmp_path, config_for(tmp_path, model, **tables))
    assert [one.update.kind for one in live] == ["full", *["adapter"] * 5]
    new = set(Path(tempfile.gettempdir()).iterdir()) - before
    assert not [one for one in new if list(one.rglob("adapter_model.safetensors"))]
