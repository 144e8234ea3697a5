"""Saved weights of clients: what a path `tinker://MODEL/KIND/NAME` names, as directories.

    DIRECTORY/MODEL/weights/NAME           adapter, optimizer and version (trainer/step/checkpoint.py): to be trained further
    DIRECTORY/MODEL/sampler_weights/NAME   the adapter in the serving dtype with its fingerprint (weight_sync/files.py): to be sampled from
    .../checkpoint.json                    what it is

A directory is written under another name and renamed, so that whoever finds it finds all of it.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.core.types import Struct
from headrace.core.weights import WeightUpdate
from headrace.durable.atomic_files import sync_to_disk
from headrace.serve.training.tinker_messages import LoraBody
from headrace.web.errors import Refused
from headrace.weight_sync.files import RECORD, UpdateRecord

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The kinds of paths, and the API's words for them."""

SCHEME = "tinker://"
FACTS = "checkpoint.json"
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
    expires_at: float | None = None
    nbytes: int = 0
    user_metadata: dict[str, Any] | None = None


class Store:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

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
        coming = place.with_name(f".{place.name}.coming")
        shutil.rmtree(coming, ignore_errors=True)
        coming.parent.mkdir(parents=True, exist_ok=True)
        return coming

    def put(self, coming: Path, facts: CheckpointFacts) -> Path:
        """Gives what was written its name."""
        place = self.place(facts.path)
        size = sum(path.stat().st_size for path in coming.iterdir())
        file = coming / FACTS
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, nbytes=size)))
        sync_to_disk(file)
        shutil.rmtree(place, ignore_errors=True)
        coming.rename(place)
        return place

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
        yield from sorted((one for one in found if one), key=lambda one: one.saved_at)

    def remove(self, path: str) -> None:
        shutil.rmtree(self.place(path), ignore_errors=True)

    def _find(self, place: Path) -> CheckpointFacts | None:
        try:
            facts = msgspec.json.decode((place / FACTS).read_bytes(), type=CheckpointFacts)
        except (OSError, msgspec.DecodeError):
            return None
        if facts.expires_at is not None and facts.expires_at <= time.time():
            shutil.rmtree(place, ignore_errors=True)
            return None
        return facts


def path_of(model: str, kind: Kind, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"
