"""Checkpoints on disk: written whole or not at all, verified before they are used.

    runs/<name>/checkpoints/step-000050/   the trainer's files, controller.msgpack, files.json (sizes and checksums)

A checkpoint is written into a temporary directory, flushed, described by `files.json` (its seal), and renamed. One that goes
loses its seal first. Whatever has no seal, or does not match it, is no checkpoint: saves and removals that were interrupted
leave such directories, and the process that holds the run's lock removes them.
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

from headrace.durable.files import sync_to_disk
from headrace.errors import CheckpointError

FILES = "files.json"

BIG = 100_000_000
"""Bytes. What an interrupted save left is worth a word from here on."""

_NAME = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"(?:\.writing-)?step-\d+")


class FileEntry(msgspec.Struct, frozen=True):
    nbytes: int
    xxh3: str


class Checkpoints:
    """The last `keep` checkpoints under one directory."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self._keep = root, keep

    async def save(self, step: int, write: Callable[[Path], Awaitable[None]]) -> Path:
        """`write` fills a temporary directory. Raises `CheckpointError` (disk full, say); older ones are untouched then."""
        final = self.root / f"step-{step:06d}"
        temporary = self.root / f".writing-{final.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            if not self.root.exists():
                self.root.mkdir()  # without its parents: a run that was deleted does not come back
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
        """Removes what interrupted saves and removals left. Only for the process that holds the run's lock: to another one a
        save that is under way looks the same. A sentence where that was big, or is there still; else empty."""
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
        """Oldest first; sealed ones only."""
        return sorted(filter(_is_checkpoint, self.root.glob("step-*")), key=step_of)

    @property
    def oldest_step(self) -> int:
        """Of those that are kept; 0 where there is none."""
        return min(map(step_of, self.all()), default=0)

    def newest_good(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that matches its checksums, and what is wrong with newer ones."""
        complaints: list[str] = []
        for path in reversed(self.all()):
            complaint = damage(path)
            if not complaint:
                return path, complaints
            complaints.append(complaint)
        return None, complaints

    def _prune(self) -> None:
        for path in self.all()[: -self._keep]:
            with suppress(OSError):  # one too many, which is tried again with the next one
                _remove(path)


def _is_checkpoint(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and (path / FILES).exists()


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that are in it."""
    return int(checkpoint.name.removeprefix("step-"))


def _remove(checkpoint: Path) -> None:
    """The seal first, and on the disk: whatever interrupts this, what is left is no checkpoint, and not a damaged one. Raises
    OSError while it is sealed; what is left behind that is `clear`'s."""
    if (checkpoint / FILES).exists():
        (checkpoint / FILES).unlink()
        sync_to_disk(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _size(directory: Path) -> int:
    """Bytes; of what is there no more, none."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def damage(path: Path) -> str:
    """Empty when the checkpoint is what was written; otherwise a sentence that names the first bad file."""
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
