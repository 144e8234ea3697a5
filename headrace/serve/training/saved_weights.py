"""Saved weights of clients: what a path `tinker://MODEL/KIND/NAME` names, as directories.

    DIRECTORY/MODEL/weights/NAME           adapter, optimizer and version (trainer/step/checkpoint.py): to be trained further
    DIRECTORY/MODEL/sampler_weights/NAME   the adapter in the serving dtype with its fingerprint (weight_sync/files.py): to be sampled from
    .../checkpoint.json                    what it is

A directory is written under another name and renamed, so that whoever finds it finds all of it. Should the server be killed before the renaming
of one that takes the place of another, the next server finishes that.

**Lifetimes** are counted by the clock of the process that serves, which never jumps, and the count goes on with the next server. The time of day
would do otherwise: a clock that is set (or that was wrong when the machine started) makes a minute a year, and all is deleted at the next look.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.types import Struct
from headrace.core.weights import WeightUpdate
from headrace.durable.atomic_files import replace_file, sync_to_disk
from headrace.serve.training.tinker_messages import LoraBody
from headrace.web.errors import Refused
from headrace.weight_sync.files import RECORD, UpdateRecord

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The kinds of paths, and the API's words for them."""

SCHEME = "tinker://"
FACTS = "checkpoint.json"
COMING = ".coming"
"""The end of the name of a directory that is being written."""
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,200}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class CheckpointFacts(Struct, frozen=True, kw_only=True):
    path: str
    kind: Kind
    base_model: str
    lora: LoraBody
    version: int
    saved_at: float
    """Seconds since 1970."""
    served_until: float | None = None
    """The seconds for which the directory is served before it expires; None: it never does."""
    nbytes: int = 0
    user_metadata: dict[str, Any] | None = None


NOTED = 600.0
"""Seconds after which the time of serving is written down again. A server that is killed forgets as much of it."""


class ServedTime:
    """The time for which a directory has been served, by all servers that it had."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock, self._began = file, clock, clock()
        try:
            before = float(file.read_bytes())
        except (OSError, ValueError):
            before = 0.0
        self._before = self._noted = before if 0.0 <= before < math.inf else 0.0

    def now(self) -> float:
        """Seconds."""
        now = self._before + self._clock() - self._began
        if now > self._noted + NOTED:
            self._noted = now
            with suppress(HeadraceError):  # what is saved lives longer then
                replace_file(self._file, str(now).encode(), flush=False)
        return now


class Store:
    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds since any time, which never jump."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._served = ServedTime(directory / ".served", clock)
        for coming in directory.glob(f"*/*/.*{COMING}"):
            if _facts_in(coming):  # they are written last
                self._give_name(coming, coming.with_name(coming.name.removeprefix(".").removesuffix(COMING)))

    def place(self, path: str) -> Path:
        """The directory that a path names. Raises Refused for one that names none."""
        model, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        good = path.startswith(SCHEME) and kind in KINDS and _MODEL.fullmatch(model) and _NAME.fullmatch(name)
        if not good:
            raise Refused(400, f"{path} is no path of weights; one looks like tinker://MODEL/weights/NAME")
        return self._directory / model / kind / name

    def coming(self, path: str, overwrite: bool) -> Path:
        """An empty place beside that of `path`, to be written and then `put`. Raises Refused where the name is taken."""
        place = self.place(path)
        if place.exists() and not overwrite and self._find(place):
            raise Refused(400, f"{path} is there already; choose another name, or overwrite it")
        coming = place.with_name(f".{place.name}{COMING}")
        shutil.rmtree(coming, ignore_errors=True)
        coming.parent.mkdir(parents=True, exist_ok=True)
        return coming

    def put(self, coming: Path, facts: CheckpointFacts, lifetime: float | None = None) -> Path:
        """Gives what was written its name. `lifetime`: seconds until it expires."""
        place = self.place(facts.path)
        size = sum(path.stat().st_size for path in coming.iterdir())
        until = self._served.now() + lifetime if lifetime else None
        file = coming / FACTS
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, nbytes=size, served_until=until)))
        sync_to_disk(file)
        sync_to_disk(coming)
        self._give_name(coming, place)
        return place

    def _give_name(self, coming: Path, place: Path) -> None:
        old = place.with_name(f".{place.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if place.exists():
            place.rename(old)
        coming.rename(place)
        sync_to_disk(place.parent)
        shutil.rmtree(old, ignore_errors=True)

    def expires_at(self, facts: CheckpointFacts) -> float | None:
        """Seconds since 1970, by the present time of day."""
        return None if facts.served_until is None else time.time() + facts.served_until - self._served.now()

    def facts(self, path: str) -> CheckpointFacts:
        """Raises Refused (404) where there is nothing (any more)."""
        found = self._find(self.place(path))
        if found is None:
            raise Refused(404, f"there are no weights {path} here: they were never saved, or have expired", "not_found")
        return found

    def update(self, path: str) -> WeightUpdate:
        """Returns what an engine loads. Raises Refused where there are none."""
        self.facts(path)
        place = self.place(path)
        try:
            record = msgspec.json.decode((place / RECORD).read_bytes(), type=UpdateRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise Refused(
                400, f"{path} cannot be sampled from ({error}); name one that save_weights_for_sampler returned"
            ) from None
        return msgspec.structs.replace(record.update, where={"path": str(place)})

    def of_model(self, model: str) -> Iterator[CheckpointFacts]:
        """All that a model has saved, the oldest first."""
        if not _MODEL.fullmatch(model):
            return
        found = [self._find(place) for kind in KINDS for place in (self._directory / model / kind).glob("[!.]*")]
        yield from sorted(
            (checkpoint for checkpoint in found if checkpoint), key=lambda checkpoint: checkpoint.saved_at
        )

    def remove(self, path: str) -> None:
        shutil.rmtree(self.place(path), ignore_errors=True)

    def _find(self, place: Path) -> CheckpointFacts | None:
        facts = _facts_in(place)
        if facts is None or facts.served_until is None or facts.served_until > self._served.now():
            return facts
        shutil.rmtree(place, ignore_errors=True)
        return None


def _facts_in(place: Path) -> CheckpointFacts | None:
    try:
        return msgspec.json.decode((place / FACTS).read_bytes(), type=CheckpointFacts)
    except (OSError, msgspec.DecodeError):
        return None


def path_of(model: str, kind: Kind, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"
