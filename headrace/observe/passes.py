"""`passes/step-<s>.bin`: every forward pass of the engine since the checkpoint of step s, as the engine told it.

What was sampled of groups that are not finished is in no checkpoint; from here it is put together again. A file is begun with
every checkpoint, and goes when its checkpoint does. Frames: length, checksum, the encoded `StepOutput`; written at once and
never flushed: a kill of this process loses none, a loss of power costs tokens that are then sampled again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from headrace.errors import HeadraceError
from headrace.observe.files import AppendFile
from headrace.steps import StepOutput

_HEAD = struct.Struct("<IQ")
_output = msgspec.msgpack.Decoder(StepOutput)


class PassLog:
    """The end that writes. A disk that does not take it costs nothing but what a kill would: it says so, and ends."""

    def __init__(self, run_dir: Path, step: int, warn: Callable[[str], None]) -> None:
        self._directory, self._warn = run_dir / "passes", warn
        self._file: AppendFile | None = None
        later = [_step_of(path) for path in self._directory.glob("step-*.bin")]
        self.begin(max([step, *later]))  # a checkpoint that could not be written has begun one too

    def begin(self, step: int) -> None:
        """What follows came after the checkpoint of `step`."""
        if self._file:
            self._file.close()
        try:
            self._directory.mkdir(exist_ok=True)
            self._file = AppendFile(_path(self._directory, step), whole=whole_frames)
        except OSError as error:
            self._give_up(f"{self._directory} cannot be written ({error})")

    def write(self, output: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.append(_HEAD.pack(len(output), xxhash.xxh3_64_intdigest(output)) + output)
        except HeadraceError as error:
            self._give_up(str(error))

    def prune(self, oldest: int) -> None:
        """No checkpoint before that of `oldest` is kept."""
        for path in self._directory.glob("step-*.bin"):
            if _step_of(path) < oldest:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _give_up(self, problem: str) -> None:
        self._file = None
        self._warn(
            f"{problem}: until the next checkpoint, rollouts that are not finished when the run is killed begin anew"
        )


def read_passes(run_dir: Path, step: int) -> Iterator[StepOutput]:
    """Those since the checkpoint of `step`, in order. A file ends where a frame is torn or does not match its checksum."""
    paths = [path for path in (run_dir / "passes").glob("step-*.bin") if _step_of(path) >= step]
    for path in sorted(paths, key=_step_of):
        data = path.read_bytes()
        for start, end in _frames(data):
            yield _output.decode(data[start:end])


def discard_passes(run_dir: Path, step: int) -> None:
    """Forgets what came after the checkpoint of `step`."""
    for path in (run_dir / "passes").glob("step-*.bin"):
        if _step_of(path) >= step:
            path.unlink()


def whole_frames(path: Path) -> int:
    """Bytes of a file that are whole."""
    return max((end for _, end in _frames(path.read_bytes())), default=0)


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + _HEAD.size <= len(data):
        length, found = _HEAD.unpack_from(data, at)
        start, end = at + _HEAD.size, at + _HEAD.size + length
        if end > len(data) or xxhash.xxh3_64_intdigest(data[start:end]) != found:
            return
        yield start, end
        at = end


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.bin"


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
