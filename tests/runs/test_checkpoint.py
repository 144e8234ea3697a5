"""Checkpoints are written whole or not at all, and verified before use."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.batches import Group
from headrace.core.errors import CheckpointError
from headrace.core.steps import Finished, StepOutput, Transcript, merged, write_down
from headrace.core.types import Completion, Prompt, Request, Sampling, VersionSpan
from headrace.facts.facts import Accounting
from headrace.loop.buffer import BufferState
from headrace.loop.checkpoints import FILES, Checkpoints, ControllerState, damage, encoded_state
from headrace.loop.partial import TokensSoFar
from headrace.testing.faultsim.faults import Disk, Fault, Killed


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


class WatchedDisk(Disk):
    """Keeps what is changed and flushed, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done: list[str] = []

    def owns(self, path: Any) -> bool:
        if owned := super().owns(path):
            self.done.append(Path(os.fsdecode(path)).name)
        return owned

    def _fsync(self, fd: int) -> None:
        self.done.append(f"{Path(os.readlink(f'/proc/self/fd/{fd}')).name} is flushed")
        super()._fsync(fd)


def test_the_seal_goes_first_and_that_is_on_the_disk_before_anything_else_goes(tmp_path: Path) -> None:
    """A loss of power may keep any prefix of these operations: a seal without its weights would be a damaged checkpoint."""
    for step in (1, 2):
        _save(Checkpoints(tmp_path, keep=2), step)
    disk = WatchedDisk(tmp_path)
    with disk.mounted():
        Checkpoints(tmp_path, keep=1)._prune()
    assert disk.done == [FILES, "step-000001 is flushed", "weights.bin", "step-000001"]


def test_a_checkpoint_is_sealed_last_and_flushed_before_it_has_its_name(tmp_path: Path) -> None:
    disk, temporary = WatchedDisk(tmp_path), ".writing-step-000001"
    with disk.mounted():
        _save(Checkpoints(tmp_path, keep=1), 1)
    assert disk.done == [
        *(temporary, "weights.bin", "weights.bin is flushed"),
        *(FILES, f"{FILES} is flushed", f"{temporary} is flushed"),
        *(temporary, f"{tmp_path.name} is flushed"),
    ], "directory, weights, seal, name"


@pytest.mark.parametrize("operation", range(12))
def test_one_that_is_killed_while_it_removes_another_leaves_no_damaged_one(tmp_path: Path, operation: int) -> None:
    """At every operation of the disk: whatever still has a seal is whole."""
    before = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        _save(Checkpoints(tmp_path, keep=2), step)
    disk = Disk(tmp_path, [Fault("kill", 0, operation)])
    with disk.mounted(), contextlib.suppress(Killed):
        before._prune()
    assert [damage(path) for path in before.all()] == [""] * len(before.all())
    assert before.newest_good() == (tmp_path / "step-000002", [])
    assert disk.dead == (operation < 3), "seal, weights, directory: choose other operations"
    if disk.dead:
        assert (tmp_path / "step-000001").exists()
    _save(before, 3)
    before.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"], "checkpoint.keep does not hold"


def test_what_interrupted_saves_and_removals_left_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, 1)
    for name in (".writing-step-000002", "step-000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_bytes(b"half")
    (tmp_path / "step-000001.mine").mkdir()  # is nobody's of ours
    _save_sealed(tmp_path / ".writing-step-000004")
    assert checkpoints.clear() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000001.mine"]
    (tmp_path / "step-000005").mkdir()
    with (tmp_path / "step-000005" / "weights.bin").open("wb") as file:
        file.truncate(84_000_000_000)  # of holes
    assert checkpoints.clear() == "removed 84.0 GB that an interrupted checkpoint had left (step-000005)"
    assert checkpoints.clear() == ""


def _save_sealed(directory: Path) -> None:
    """Killed before it was renamed."""
    directory.mkdir()
    (directory / FILES).write_text("{}")


def test_they_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (999_999, 1_000_000, 1_000_001):
        _save(checkpoints, step)
    assert [path.name for path in checkpoints.all()] == ["step-1000000", "step-1000001"]
    assert checkpoints.oldest_step == 1_000_000


def test_a_run_that_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        _save(Checkpoints(tmp_path / "gone" / "checkpoints", keep=2), 1)
    assert not (tmp_path / "gone").exists()


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    _save(checkpoints, 1)

    async def full(directory: Path) -> None:
        (directory / "weights.bin").write_bytes(b"some")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left.*last good one is step-000001"):
        asyncio.run(checkpoints.save(2, full))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.booleans(), st.booleans()), max_size=40))
def test_the_encoded_state_is_that_of_its_moment_however_late_its_pieces_are_made(
    said: list[tuple[int, int, bool, bool]],
) -> None:
    """Some requests have tokens of before an interruption, some have ended, and all get more tokens after the moment."""
    prompt = Prompt(id="sums/7", text="2+3=", tokens=(1, 17))
    ready = tuple(Group(ticket, prompt, (), ()) for ticket in range(len(said)))
    buffer = BufferState(50, ready, {4: prompt}, Accounting(drawn=50))
    state = ControllerState(3, 1.5, {"cursor": 7}, buffer, {}, 12, passes=4, made_by={"algo": "grpo"})
    before = {f"t{i}/0": Completion((7,) * i, (-1.0,) * i, (VersionSpan(0, 1, 1),), "interrupted") for i in range(1, 3)}
    running = {f"t{i}/0": Transcript(request=Request(f"t{i}/0", (1,), Sampling())) for i in range(4)}
    for place, count, mixed, ends in said:
        _say(running, place, count, mixed, ends)
    captured = {name: TokensSoFar(before.get(name), transcript.at_present()) for name, transcript in running.items()}
    expected = msgspec.msgpack.encode(
        replace(state, begun={name: part.completion() for name, part in captured.items()})
    )
    pieces = encoded_state(
        state, {name: TokensSoFar(before.get(name), transcript.at_present()) for name, transcript in running.items()}
    )
    for place, count, mixed, ends in said:
        _say(running, 3 - place, count, ends, mixed)
    found = msgspec.msgpack.decode(b"".join(pieces), type=ControllerState)
    assert found == msgspec.msgpack.decode(expected, type=ControllerState)


def _say(running: dict[str, Transcript], place: int, count: int, mixed: bool, ends: bool) -> None:
    name = f"t{place}/0"
    passes = [StepOutput(2, (name,), (count + i,), (-0.5,), (2 - mixed,), mixed=mixed) for i in range(count)]
    write_down(merged(passes) if ends else passes[0], running.get)
    if ends and place == 2:
        running[name].end = Finished(name, "stop")
