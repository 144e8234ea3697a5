"""Checkpoints on the disk. They are written completely or not at all, and verified before use.

    runs/<name>/checkpoints/step-000050/   the trainer's files, controller.msgpack, state.digest, files.json (sizes and checksums)

A checkpoint is written into a temporary directory, flushed, sealed by `files.json`, and renamed. A checkpoint that is removed loses its
seal first. A directory without a seal, or one that does not match its seal, is no checkpoint. Interrupted saves and removals leave such
directories; the process that holds the run's lock removes them.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from headrace.core.errors import CheckpointError
from headrace.durable.atomic_files import sync_to_disk

FILES = "files.json"

BIG = 100_000_000
"""Bytes. From this size on, the removal of an interrupted save's files is reported."""

_NAME = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"(?:\.writing-)?step-\d+")


class FileEntry(msgspec.Struct, frozen=True):
    nbytes: int
    xxh3: str


class Checkpoints:
    """The checkpoints under one directory, of which the last `keep` are kept."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self._keep = root, keep

    async def save(self, step: int, write: Callable[[Path], Awaitable[None]]) -> Path:
        """`write` fills a temporary directory. Raises `CheckpointError`, for instance for a full disk; older checkpoints stay as they are."""
        final = self.root / f"step-{step:06d}"
        temporary = self.root / f".writing-{final.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            if not self.root.exists():
                self.root.mkdir()  # not its parents: a run that the user deleted must not reappear
            temporary.mkdir()
            await write(temporary)
            await asyncio.to_thread(_seal, temporary)
            _remove(final)
            temporary.rename(final)
            sync_to_disk(self.root)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.all()[-1].name if self.all() else "none"
            raise CheckpointError(
                f"could not write the checkpoint of step {step} ({error}); the last good one is {last}. Free disk space, "
                "or lower checkpoint.keep"
            ) from error
        self._prune()
        return final

    def clear(self) -> str:
        """Removes what interrupted saves and removals left. Only the process that holds the run's lock may call it, because a save in
        progress looks the same. Returns a sentence if that was large or cannot be removed; else an empty string."""
        found = [path for path in self.root.glob("*") if _LEFT.fullmatch(path.name) and not _is_checkpoint(path)]
        sizes = {path: _size(path) for path in found}
        for path in found:
            with suppress(OSError):
                _remove(path)
        if stuck := [path for path in found if path.exists()]:
            return f"{', '.join(map(str, stuck))}: left by an interrupted checkpoint, and cannot be removed; remove it by hand"
        if (total := sum(sizes.values())) < BIG:
            return ""
        names = ", ".join(sorted(path.name for path in found))
        return f"removed {total / 1e9:.1f} GB that an interrupted checkpoint had left ({names})"

    def all(self) -> list[Path]:
        """The sealed checkpoints, oldest first."""
        return sorted(filter(_is_checkpoint, self.root.glob("step-*")), key=step_of)

    @property
    def oldest_step(self) -> int:
        """The step of the oldest checkpoint; 0 if there is none."""
        return min(map(step_of, self.all()), default=0)

    def newest_good(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that matches its checksums, and a complaint about each newer one."""
        complaints: list[str] = []
        for path in reversed(self.all()):
            complaint = damage(path)
            if not complaint:
                return path, complaints
            complaints.append(complaint)
        return None, complaints

    def _prune(self) -> None:
        for path in self.all()[: -self._keep]:
            with suppress(OSError):  # tried again after the next checkpoint
                _remove(path)


def _is_checkpoint(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and (path / FILES).exists()


def step_of(checkpoint: Path) -> int:
    """Number of optimizer steps in the checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def _remove(checkpoint: Path) -> None:
    """Removes the seal first, and flushes that. If this is interrupted, the rest has no seal and does not count as a damaged checkpoint.
    Raises OSError if the seal cannot be removed; files that remain afterwards are left to `clear`."""
    if (checkpoint / FILES).exists():
        (checkpoint / FILES).unlink()
        sync_to_disk(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _size(directory: Path) -> int:
    """Bytes of all files. A file that vanishes meanwhile counts zero."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def damage(path: Path) -> str:
    """An empty string if the checkpoint matches its seal; otherwise a sentence that names the first bad file."""
    try:
        entries = msgspec.json.decode((path / FILES).read_bytes(), type=dict[str, FileEntry])
    except (OSError, msgspec.DecodeError) as error:
        return f"checkpoint {path.name}: {FILES} cannot be read ({error})"
    for name, entry in entries.items():
        file = path / name
        if not file.exists():
            return f"checkpoint {path.name}: {name} is missing"
        if file.stat().st_size != entry.nbytes:
            return (
                f"checkpoint {path.name}: {name} has {file.stat().st_size} bytes instead of {entry.nbytes} (truncated?)"
            )
        if _checksum(file) != entry.xxh3:
            return f"checkpoint {path.name}: {name} does not match its checksum"
    return ""


def _seal(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        sync_to_disk(path)
    entries = {str(path.relative_to(directory)): FileEntry(path.stat().st_size, _checksum(path)) for path in files}
    (directory / FILES).write_bytes(msgspec.json.encode(entries))
    sync_to_disk(directory / FILES)
    sync_to_disk(directory)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
