"""The directory of a run: what a disk that takes nothing does to a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError, HeadraceError
from headrace.durable.atomic_files import full_disk_as_error
from headrace.facts.facts import Warned
from headrace.facts.records import read_metrics
from headrace.processes.health.watchdog import Watchdog
from headrace.run.config import RunConfig, load_config
from headrace.run.lane import open_lane
from headrace.run.run_directory import RunDirectory
from headrace.testing.faultsim.faults import Disk, Fault
from support.tiny_run import tiny_config


def _start(config: RunConfig) -> None:
    """All that is written before a process is started."""
    path = config.run_dir
    with full_disk_as_error(path), RunDirectory.of(path, False) as directory:
        lane = open_lane(config, directory, False)
        lane.storage.recorder.add(watchdog := Watchdog(directory.logs, warn_after=100.0, stop_after=200.0))
        with watchdog:
            lane.storage.begin()
            lane.storage.close()


def test_a_start_on_a_full_disk_is_a_sentence_and_can_be_made_again(tmp_path: Path) -> None:
    config = load_config(tiny_config(tmp_path, tmp_path / "no-model"))
    said, kept = [], []
    for operation in range(18):
        disk = Disk(Path(config.out), [Fault("full", 0, operation)])
        with disk.mounted():
            try:
                _start(config)
            except HeadraceError as error:
                said.append(str(error))
                kept.append(error)  # as a notebook keeps the last one: it must not keep the lock
        _start(config)
    assert len(said) >= 8, "the directories, the lock, config.toml, metrics, journal, ..."
    assert all("No space left" in one and "ree space on that disk" in one for one in said), said
    assert any("metrics.jsonl" in one for one in said) and any("/journal" in one for one in said)


def test_what_an_interrupted_checkpoint_left_goes_at_the_next_start_and_big_ones_are_said(tmp_path: Path) -> None:
    config = load_config(tiny_config(tmp_path, tmp_path / "no-model"))
    _start(config)
    left = config.run_dir / "checkpoints" / ".writing-step-000050"
    left.mkdir()
    with (left / "model.safetensors").open("wb") as file:
        file.truncate(84_000_000_000)  # of holes
    _start(config)
    assert not left.exists()
    messages = [fact.message for fact in read_metrics(config.run_dir) if isinstance(fact, Warned)]
    assert any("removed 84.0 GB" in one for one in messages)


def test_a_place_that_cannot_be_written_to_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = load_config({**tiny_config(tmp_path, tmp_path / "no-model"), "out": str(tmp_path / "file" / "runs")})
    with pytest.raises(
        ConfigError, match=r"runs.* cannot be written \(Not a directory\): choose another place.*out=DIR"
    ):
        _start(config)
