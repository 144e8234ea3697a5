"""`passes/step-<s>.bin`: the output of every forward pass of the engine since the checkpoint of step s, and the notes of environments.

Tokens that were sampled for unfinished groups after a checkpoint are recovered from here, and with them the states of their environments. Each checkpoint begins a new file, which is
removed together with it. A frame holds length, number, checksum and the encoded `StepOutput` or `PassNote`. It is written at once and never flushed: a
kill of this process loses none, and a loss of power costs tokens, which are sampled again. All frames are numbered, also those that could
not be written: frames after a gap are not used, because a completion with a gap would be wrong.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from headrace.core.errors import HeadraceError
from headrace.core.steps import LabelledRows, StepOutput, TokenRuns, encoded
from headrace.core.types import Struct
from headrace.durable.atomic_files import AppendFile

_HEAD = struct.Struct("<IQQ")
_NOTE = 1 << 31
"""Added to the length of a frame that holds a note."""


class PassNote(Struct, frozen=True):
    """A note that an environment keeps of a rollout. It follows all tokens that the environment knew."""

    rollout: str
    """The key of the rollout's first turn."""
    note: bytes


class _EarlierRuns(Struct, frozen=True):
    """`TokenRuns` as logs of November 2026 have it: [requests, count], with the labels beside the tokens."""

    request_ids: tuple[str, ...]
    count: int
    tokens: bytes
    logprobs: bytes
    versions: tuple[int, ...]
    kv_versions: tuple[int, ...]

    def now(self) -> TokenRuns:
        tokens, logprobs = memoryview(self.tokens).cast("i"), memoryview(self.logprobs).cast("d")
        return TokenRuns(
            encoded(LabelledRows(self.request_ids, self.versions, self.kv_versions)),
            self.count,
            b"".join(tokens[at :: self.count].tobytes() for at in range(self.count)),
            b"".join(logprobs[at :: self.count].tobytes() for at in range(self.count)),
        )


_output = msgspec.msgpack.Decoder(StepOutput)
_earlier = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_note = msgspec.msgpack.Decoder(PassNote)


class PassLog:
    """Writes the log. If the disk cannot be written, it warns and stops until the next checkpoint; the run loses nothing by that unless it is
    killed."""

    def __init__(self, run_dir: Path, step: int, warn: Callable[[str], None], number: int = 0) -> None:
        """`step`: the checkpoint from which the run is resumed. `number`: the first pass that is not in it."""
        self._directory, self._warn = run_dir / "passes", warn
        self._file: AppendFile | None = None
        later = _files(run_dir, step)  # a checkpoint that could not be written has begun a file too
        self.number = max([number, *(known.number + 1 for path in later for known in _frames(path))])
        """Number of the next frame."""
        self.begin(max([step, *map(_step_of, later)]))

    def begin(self, step: int) -> None:
        """Begins the file of the passes after the checkpoint of `step`."""
        self.close()
        try:
            self._directory.mkdir(exist_ok=True)
            self._file = AppendFile(self._directory / f"step-{step:06d}.bin", whole=whole_frames)
        except (OSError, HeadraceError) as error:
            self._give_up(f"{self._directory} cannot be written ({error})")

    def write(self, output: StepOutput) -> None:
        self._append(msgspec.msgpack.encode(output), 0)

    def note(self, rollout: str, note: bytes) -> None:
        self._append(msgspec.msgpack.encode(PassNote(rollout, note)), _NOTE)

    def _append(self, content: bytes, mark: int) -> None:
        number, self.number = self.number, self.number + 1
        if self._file is None:
            return
        try:
            self._file.append(_HEAD.pack(len(content) | mark, number, _sum(mark, number, content)) + content)
        except HeadraceError as error:
            self._give_up(str(error))

    def prune(self, oldest: int) -> None:
        """Removes the files of checkpoints before step `oldest`."""
        for path in self._directory.glob("step-*.bin"):
            if _step_of(path) < oldest:
                with suppress(OSError):  # it only takes space; tried again after the next checkpoint
                    path.unlink()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _give_up(self, problem: str) -> None:
        self.close()
        self._warn(f"{problem}: if the run is killed before the next checkpoint, its unfinished rollouts start again")


def read_passes(run_dir: Path, step: int, first: int | None = None) -> Iterator[StepOutput | PassNote]:
    """The passes and notes since the checkpoint of `step`, in order, up to the first that is missing, incomplete or damaged.

    `first`: number of the first frame that is not in the checkpoint. A file can hold earlier ones, if its checkpoint was written twice."""
    files = _files(run_dir, step)
    if not files or _step_of(files[0]) != step:
        return  # its file could not be written, so there is a gap before the passes of the other files
    expected = first
    for path in files:
        for frame in _frames(path):
            if frame.number < (first or 0):
                continue
            if expected not in (None, frame.number):
                return
            yield _note.decode(frame.content) if frame.is_note else _read_output(frame.content)
            expected = frame.number + 1


def _read_output(content: bytes) -> StepOutput:
    try:
        return _output.decode(content)
    except msgspec.ValidationError:
        fields = _earlier.decode(content)
        runs = msgspec.msgpack.decode(fields.pop("runs"), type=_EarlierRuns)
        return msgspec.structs.replace(_output.decode(msgspec.msgpack.encode(fields)), runs=runs.now())


def discard_passes(run_dir: Path, step: int) -> None:
    """Deletes all passes after the checkpoint of `step`."""
    for path in _files(run_dir, step):
        path.unlink()


def whole_frames(path: Path) -> int:
    """Number of bytes up to the end of the last complete frame."""
    return max((frame.end for frame in _frames(path)), default=0)


class _Frame(NamedTuple):
    number: int
    content: bytes
    end: int
    """Its byte position."""
    is_note: bool


def _frames(path: Path) -> Iterator[_Frame]:
    """Yields the whole frames. They are read one at a time, since a file may be larger than the memory."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at + _HEAD.size <= size:
            marked, number, found = _HEAD.unpack(file.read(_HEAD.size))
            length = marked & ~_NOTE
            if length > size - at - _HEAD.size:
                return
            content = file.read(length)
            if _sum(marked & _NOTE, number, content) != found:
                return
            at += _HEAD.size + length
            yield _Frame(number, content, at, bool(marked & _NOTE))


def _sum(mark: int, number: int, content: bytes) -> int:
    """Returns the checksum of a frame, the length aside: content of another length does not match it."""
    return xxhash.xxh3_64_intdigest(content, seed=number) ^ mark


def _files(run_dir: Path, step: int) -> list[Path]:
    """The files of the checkpoint of `step` and of later ones, in order."""
    found = [path for path in (run_dir / "passes").glob("step-*.bin") if _step_of(path) >= step]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
