"""Checkpoints on disk: written whole or not at all, verified before they are used.

    runs/<name>/checkpoints/step-000050/   the trainer's files, controller.msgpack, files.json (sizes and checksums)

A checkpoint is written into a temporary directory, flushed, described by `files.json`, and renamed. Whatever has no
`files.json`, or does not match it, is not a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import xxhash

from headrace.errors import CheckpointError

FILES = "files.json"


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
            temporary.mkdir(parents=True)
            await write(temporary)
            await asyncio.to_thread(_seal, temporary)
            _remove(final)
            temporary.rename(final)
            _flush(self.root)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.all()[-1].name if self.all() else "none"
            raise CheckpointError(
                f"could not write the checkpoint of step {step} ({error}); the last good one is {last}. Free disk space, "
                "or lower checkpoint.keep"
            ) from error
        self._prune()
        return final

    def all(self) -> list[Path]:
        """Oldest first; sealed ones only."""
        return sorted(path for path in self.root.glob("step-*") if (path / FILES).exists())

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
            _remove(path)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that it has behind it."""
    return int(checkpoint.name.removeprefix("step-"))


def _remove(checkpoint: Path) -> None:
    """The seal first: killed in the middle, what is left is no checkpoint, and not a damaged one."""
    (checkpoint / FILES).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


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
        _flush(path)
    entries = {str(path.relative_to(directory)): FileEntry(path.stat().st_size, _checksum(path)) for path in files}
    (directory / FILES).write_bytes(msgspec.json.encode(entries))
    _flush(directory / FILES)
    _flush(directory)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
