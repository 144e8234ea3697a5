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
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash
from msgspec.structs import replace

from headrace.core.errors import CheckpointError
from headrace.core.protocols import Trainer
from headrace.core.types import Completion, RolloutKey, Struct
from headrace.durable.atomic_files import sync_to_disk
from headrace.durable.journal import Journal
from headrace.durable.pass_log import PassLog
from headrace.episodes.rollout_session import Notebook
from headrace.facts.facts import CheckpointSaved
from headrace.facts.index_file import DIGEST
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer, BufferState
from headrace.loop.curriculum import Curriculum, CurriculumState
from headrace.loop.partial import Interrupts, TokensSoFar, shortened

FILES = "files.json"

BIG = 100_000_000
"""Bytes. From this size on, the removal of an interrupted save's files is reported."""

AT_ONCE = 1_000_000
"""Bytes of the controller's state that are encoded in one turn of the event loop: about 10 ms."""

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


# --- The controller's part of a checkpoint, and how it is saved together with the trainer's files


CONTROLLER = "controller.msgpack"


class ControllerState(Struct, frozen=True):
    """The controller's state that no other process could give back (C7)."""

    step: int
    seconds: float
    """Age of the run, in seconds."""
    task: dict[str, Any]
    """The cursor of the task."""
    buffer: BufferState
    begun: dict[str, Completion]
    """The sampled part of each request of a group in flight, with versions, log-probs, masks and routes."""
    journal: int
    """Number of records in the journal at that moment."""
    passes: int = 0
    """Number of the first frame of the pass log that is not in `begun` and `notes`."""
    notes: dict[str, tuple[bytes, ...]] = {}
    """The notes of environments about rollouts in flight (`episodes/rollout_session.py`)."""
    curriculum: CurriculumState | None = None
    """None if prompts are drawn in the order of the task."""
    made_by: dict[str, Any] = {}
    """The settings that groups and rollouts were made under (`resume_rules.meaning`); empty in checkpoints of earlier versions."""


class _Parts(Protocol):
    @property
    def curriculum(self) -> Curriculum: ...
    @property
    def buffer(self) -> Buffer: ...
    @property
    def trainer(self) -> Trainer: ...
    @property
    def interrupts(self) -> Interrupts: ...
    @property
    def notebook(self) -> Notebook: ...
    @property
    def journal(self) -> Journal: ...


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of one moment between two steps, of which the trainer has its part."""

    step: int
    seconds: float
    """Age of the run at that moment."""
    stopped: float
    """Seconds for which the trainer stood still."""
    state: Iterable[bytes]
    """The controller's, encoded in pieces (`encoded_state`), each of the work of some milliseconds."""
    digest: bytes
    """The sums of all facts so far; empty if there can be none."""
    short: str
    """The reason why the trainer has to stand still until it is written; empty if it has a copy."""
    save: Callable[[Path], Awaitable[None]]
    """Writes the trainer's files."""


UNSAVED = "the checkpoint cannot be written"
"""The key of warnings about it."""


class Snapshots:
    """Saves controller and trainer together, as they are between two optimizer steps."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        passes: PassLog,
        telemetry: Telemetry,
        *,
        adapter: str = "",
        saved_step: int = -1,
        made_by: Mapping[str, Any] | None = None,
        digest: Callable[[], bytes] = bytes,
    ) -> None:
        """`adapter`: the one that the trainer saves; empty for the whole model. `saved_step`: the step of the checkpoint from which the
        run is resumed. It is not written again: it holds the same weights, and everything later is in journal and passes.
        `made_by`: see `ControllerState`. `digest`: returns the sums of all facts so far (`Recorder.digest`), from which a resume goes on."""
        self._checkpoints, self._passes = checkpoints, passes
        self._telemetry, self._adapter = telemetry, adapter
        self.made_by, self._digest = dict(made_by or {}), digest
        self.saved_step = saved_step
        self._failed = False
        """Whether the last checkpoint could not be written."""
        """The step of the newest checkpoint."""

    async def capture(self, step: int, parts: _Parts) -> Moment:
        """Takes the state of this moment. The trainer may do nothing else meanwhile."""
        started, adapter = self._telemetry.clock(), self._adapter
        # The state is taken before the first await, because generation continues while the trainer copies.
        state, digest = self._encoded(step, started, parts), self._digest()
        parts.journal.flush()
        self._passes.begin(step)
        captured = await parts.trainer.capture(adapter)
        return Moment(
            step=step,
            seconds=started,
            stopped=self._telemetry.clock() - started,
            state=state,
            digest=digest,
            short=captured.short,
            save=lambda directory: parts.trainer.save(directory, adapter),
        )

    async def write(self, moment: Moment) -> str:
        """Writes what was captured, one at a time. Returns an empty string, or the error: it is recorded and warned of, but not raised,
        because a full disk must not end a run."""
        step, started = moment.step, moment.seconds

        async def write(directory: Path) -> None:
            await write_in_pieces(directory / CONTROLLER, moment.state)
            (directory / DIGEST).write_bytes(moment.digest)
            async with self._telemetry.waits.named("checkpoint", "the trainer (its files)"):
                await moment.save(directory)

        path, failure = "", ""
        if message := self._checkpoints.clear():
            self._telemetry.warn(message)
        try:
            path = str(await self._checkpoints.save(step, write))
            self.saved_step = step
            if self._failed:
                self._telemetry.withdraw(UNSAVED)
            self._passes.prune(self._checkpoints.oldest_step)
        except CheckpointError as error:
            failure = str(error)
            self._telemetry.warn(failure, UNSAVED)
        self._failed = bool(failure)
        now = self._telemetry.clock()
        stopped = now - started if moment.short else moment.stopped
        self._telemetry.record(CheckpointSaved(now, step, path, now - started, failure, stopped=stopped))
        return failure

    def _encoded(self, step: int, seconds: float, parts: _Parts) -> Iterator[bytes]:
        buffer, tokens = parts.buffer.state(), parts.interrupts.tokens
        task, position = dict(parts.curriculum.task.state()), parts.journal.position
        state = ControllerState(
            step=step,
            seconds=seconds,
            task=task,
            buffer=buffer,
            begun={},
            journal=position,
            passes=self._passes.number,
            notes=parts.notebook.state(buffer.in_flight),
            curriculum=parts.curriculum.state(),
            made_by=self.made_by,
        )
        return encoded_state(state, tokens.captured(chain.from_iterable(map(tokens.names, buffer.in_flight))))


def encoded_state(state: ControllerState, begun: Mapping[str, TokensSoFar]) -> Iterator[bytes]:
    """Returns the pieces of the encoded state with all that is begun. What changes from now on is encoded at once; each finished group and the
    tokens of each request when their piece is asked for, because a large run has a hundred million of them."""
    encode = msgspec.msgpack.Encoder().encode
    ready = state.buffer.ready
    heads = [
        _without_last(state, "begun", "buffer"),
        encode("buffer") + _without_last(state.buffer, "ready"),
        encode("ready") + b"\xdd" + struct.pack(">I", len(ready)),  # an array, of groups
        encode("begun") + b"\xdf" + struct.pack(">I", len(begun)),  # a map, of completions
    ]
    groups = map(encode, ready)
    completions = (encode(name) + encode(part.completion()) for name, part in begun.items())
    return chain(heads[:3], groups, heads[3:], completions)


def _without_last(noun: Struct, *last: str) -> bytes:
    """Encodes a noun as msgpack's map of its fields, but for the fields of `last`, which have to be appended."""
    columns = {field.encode_name: getattr(noun, field.name) for field in msgspec.structs.fields(noun)}
    for name in last:
        del columns[name]
    # maps of up to fifteen keys are marked by one byte, in which their length is
    return bytes([0x80 | len(columns) + len(last)]) + msgspec.msgpack.encode(columns)[1:]


async def write_in_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes the pieces. Between two megabytes of them the event loop has its turns."""
    with path.open("wb") as file:
        made, size = list[bytes](), 0
        for piece in pieces:
            made.append(piece)
            size += len(piece)
            if size > AT_ONCE:
                await asyncio.to_thread(file.writelines, made)
                made, size = [], 0
        file.writelines(made)


def load_controller(checkpoint: Path) -> ControllerState:
    try:
        return msgspec.msgpack.decode((checkpoint / CONTROLLER).read_bytes(), type=ControllerState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name}: {CONTROLLER} cannot be read ({error})") from error


# --- The settings that differ at a resume
# And what goes on of the rollouts that were under way. `resume_rules.py` decides which.


class ChangedSettings(NamedTuple):
    """The names of the settings that have changed, by what becomes of what they made."""

    refused: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    """Because of which the steps since the checkpoint are set aside."""
    groups: tuple[str, ...] = ()
    """Because of which its finished groups are dropped."""
    anew: tuple[str, ...] = ()
    """Because of which rollouts under way begin anew."""
    prompts: tuple[str, ...] = ()
    """Because of which the groups under way are dropped."""


UNCHANGED = ChangedSettings()


def carried_over(
    state: ControllerState, changed: ChangedSettings, max_tokens: int
) -> tuple[ControllerState, list[str]]:
    """Returns the state with what of its rollouts goes on, and sentences about the rest. `max_tokens`: the most tokens of a completion now."""
    if why := changed.anew or changed.prompts:
        tokens = sum(len(completion.tokens) for completion in state.begun.values())
        message = f"rollouts under way begin anew, because of changes in {' and '.join(why)}; {tokens} tokens of theirs are lost"
        is_said = bool(changed.prompts)  # where the groups are dropped
        return replace(state, begun={}, notes={}), [message] if (state.begun or state.notes) and not is_said else []
    longer = {key.ticket for key in _keys(state) if len(state.begun[str(key)].tokens) > max_tokens}
    if not longer:
        return state, []
    begun, cut = {}, set()
    for key in sorted(_keys(state), key=lambda key: key.turn):
        done = state.begun[str(key)]
        if (key.ticket, key.index) in cut:
            continue  # it came after a turn that is another now
        if len(done.tokens) > max_tokens:
            cut.add((key.ticket, key.index))
            done = shortened(done, max_tokens)
        begun[str(key)] = done
    # A state that an environment exported has seen the whole turn: its turns are given to it again.
    notes = {
        name: kept for name, kept in state.notes.items() if (of := RolloutKey.read(name)) and of.ticket not in longer
    }
    return replace(state, begun=begun, notes=notes), [
        f"{len(cut)} rollouts under way are longer than rollout.max_tokens = {max_tokens}: they are cut off there"
    ]


def _keys(state: ControllerState) -> list[RolloutKey]:
    return [key for name in state.begun if (key := RolloutKey.read(name))]
