"""Checkpoints are written whole or not at all, and verified before use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import CheckpointError
from headrace.orchestration.checkpoint import FILES, Checkpoints, damage


def _save(checkpoints: Checkpoints, step: int, content: bytes = b"x" * 1000) -> Path:
    async def write(directory: Path) -> None:
        (directory / "weights.bin").write_bytes(content)

    return asyncio.run(checkpoints.save(step, write))


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        _save(checkpoints, step)
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000010"]
    assert checkpoints.newest_good() == (tmp_path / "step-000010", [])


def test_a_half_written_one_is_never_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    _save(checkpoints, 1)

    async def killed(directory: Path) -> None:
        (directory / "weights.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(checkpoints.save(2, killed))
    (tmp_path / "step-000003").mkdir()  # renamed, but never sealed
    assert checkpoints.newest_good()[0] == tmp_path / "step-000001"
    _save(checkpoints, 2)  # what the killed writer left is no obstacle
    assert checkpoints.newest_good()[0] == tmp_path / "step-000002"


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: (path / "weights.bin").write_bytes(b"x" * 999), "999 bytes instead of 1000"),
        (lambda path: (path / "weights.bin").write_bytes(b"y" * 1000), "checksum"),
        (lambda path: (path / "weights.bin").unlink(), "missing"),
        (lambda path: (path / FILES).write_text('{"weights'), "cannot be read"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path, spoil, complaint: str) -> None:  # type: ignore[no-untyped-def]
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, 1)
    newest = _save(checkpoints, 2)
    assert damage(newest) == ""
    spoil(newest)
    good, complaints = checkpoints.newest_good()
    assert good == tmp_path / "step-000001"
    assert len(complaints) == 1 and "step-000002" in complaints[0] and complaint in complaints[0]


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    _save(checkpoints, 1)

    async def full(directory: Path) -> None:
        (directory / "weights.bin").write_bytes(b"some")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left.*last good one is step-000001"):
        asyncio.run(checkpoints.save(2, full))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
