"""`passes/step-<s>.bin`: every forward pass of the engine since the checkpoint of step s, as the engine told it.

What was sampled of groups that are not finished is in no checkpoint; from here it is put together again. A file is begun with
every checkpoint, and goes when its checkpoint does. Frames: length, number, checksum, the encoded `StepOutput`; written at once
and never flushed: a kill of this process loses none, a loss of power costs tokens that are then sampled again. Numbers count
passes, whether they could be written or not: what lies behind a hole is not used, for a completion with a hole would be wrong.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from headrace.durable.files import AppendFile
from headrace.errors import HeadraceError
from headrace.steps import StepOutput

_HEAD = struct.Struct("<IQQ")
_output = msgspec.msgpack.Decoder(StepOutput)


class PassLog:
    """The end that writes. A disk that does not take it costs nothing but what a kill would: it says so, and ends."""

    def __init__(self, run_dir: Path, step: int, warn: Callable[[str], None], number: int = 0) -> None:
        """`step`, `number`: of the checkpoint that the run goes on from, and of the first pass that is not in it."""
        self._directory, self._warn = run_dir / "passes", warn
        self._file: AppendFile | None = None
        later = _files(run_dir, step)  # a checkpoint that could not be written has begun one too
        self.number = max([number, *(known + 1 for path in later for known, _, _ in _frames(path))])
        """Of the pass to come."""
        self.begin(max([step, *map(_step_of, later)]))

    def begin(self, step: int) -> None:
        """What follows came after the checkpoint of `step`."""
        self.close()
        try:
            self._directory.mkdir(exist_ok=True)
            self._file = AppendFile(self._directory / f"step-{step:06d}.bin", whole=whole_frames)
        except (OSError, HeadraceError) as error:
            self._give_up(f"{self._directory} cannot be written ({error})")

    def write(self, output: bytes) -> None:
        number, self.number = self.number, self.number + 1
        if self._file is None:
            return
        try:
            self._file.append(_HEAD.pack(len(output), number, _sum(number, output)) + output)
        except HeadraceError as error:
            self._give_up(str(error))

    def prune(self, oldest: int) -> None:
        """No checkpoint before that of `oldest` is kept."""
        for path in self._directory.glob("step-*.bin"):
            if _step_of(path) < oldest:
                with suppress(OSError):  # costs room, and is tried again with the next one
                    path.unlink()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _give_up(self, problem: str) -> None:
        self.close()
        self._warn(
            f"{problem}: until the next checkpoint, rollouts that are not finished when the run is killed begin anew"
        )


def read_passes(run_dir: Path, step: int, first: int | None = None) -> Iterator[StepOutput]:
    """Those since the checkpoint of `step`, in order, up to the first that is missing, torn, or not what was written.

    `first`: number of the first that is not in the checkpoint. Where one is written anew its file holds older ones too."""
    files = _files(run_dir, step)
    if not files or _step_of(files[0]) != step:
        return  # its file could not be written: what others hold came after a hole
    expected = first
    for path in files:
        for number, content, _ in _frames(path):
            if number < (first or 0):
                continue
            if expected not in (None, number):
                return
            yield _output.decode(content)
            expected = number + 1


def discard_passes(run_dir: Path, step: int) -> None:
    """Forgets what came after the checkpoint of `step`."""
    for path in _files(run_dir, step):
        path.unlink()


def whole_frames(path: Path) -> int:
    """Bytes of a file that are whole."""
    return max((end for _, _, end in _frames(path)), default=0)


def _frames(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Number, content, and where it ends in the file. One at a time: a file may be larger than the memory."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at + _HEAD.size <= size:
            length, number, found = _HEAD.unpack(file.read(_HEAD.size))
            if length > size - at - _HEAD.size:
                return
            content = file.read(length)
            if _sum(number, content) != found:
                return
            at += _HEAD.size + length
            yield number, content, at


def _sum(number: int, output: bytes) -> int:
    return xxhash.xxh3_64_intdigest(output, seed=number)


def _files(run_dir: Path, step: int) -> list[Path]:
    """From the checkpoint of `step` on."""
    found = [path for path in (run_dir / "passes").glob("step-*.bin") if _step_of(path) >= step]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
