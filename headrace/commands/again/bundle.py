"""A bundle: one step of a run in one file, to be attached to an issue and done again elsewhere.

    bundle.json      the step's record (prompts, tokens, log-probs, rewards, advantages, report), settings, versions, fingerprints
    code/<file>.py   the functions that the settings name, if they were asked for
    state/<file>     weights and optimizer before the step, as in a checkpoint, if they were asked for: no pickles

It is a zip file. Nothing in it names a place of the machine: settings are chosen by name (`bundle_export.py`), and `write_bundle` refuses
the values of environment variables that are secrets.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.types import Struct
from headrace.durable.journal import JournalStep
from headrace.durable.spelling import encode

FORMAT = 1
FACTS, CODE, STATE = "bundle.json", "code", "state"
LARGEST = 64 << 30
"""Bytes that a bundle may hold when it is unpacked. Weights and optimizer of 4 billion parameters have 48 GB."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY$|^KEY$|APIKEY")
_SHORT = 8
"""Characters below which the value of a variable is no secret that could be recognised."""


class Bundle(Struct, frozen=True, kw_only=True):
    """The facts of a bundle."""

    format: int
    headrace: str
    packages: dict[str, str]
    """Versions by the name of the package."""
    machine: dict[str, str]
    """The mark of the machine that did the step (`facts/machine_mark.py`); empty if it was not recorded."""
    model: str
    """A known name or a hub id; for a model that was a directory, the directory's own name."""
    local: bool
    """Whether the model was a directory of that machine."""
    settings: dict[str, Any]
    """The settings that the step depends on, as in a config. Paths are names of members under code/."""
    longest: int
    """The most tokens that could be sampled for a rollout."""
    weights: dict[str, float]
    """The weight of every named reward."""
    journaled: JournalStep
    before: str = ""
    """Fingerprint of the weights that the step began with; empty if it was not recorded. If the state before the step is here, it has these."""
    after: str = ""
    made_anew: str = ""
    """The reason why the state before the step is only near the run's, where the exporting machine does not compute what the run's did; empty
    if it is the run's."""
    updates: dict[str, tuple[float, float]] = {}
    """The norms of the change of each trained tensor and of the tensor after it, if the bundle has the state before the step."""
    left_out: tuple[str, ...] = ()
    """Sentences about parts of the step that the bundle does not have."""

    @property
    def step(self) -> int:
        """The number of the step, counted from 1."""
        return self.journaled.step + 1


_decoder: msgspec.json.Decoder[Bundle] = msgspec.json.Decoder(Bundle, strict=False)


def write_bundle(file: Path, bundle: Bundle, code: Mapping[str, str], state: Path | None) -> None:
    """Writes the file. `code`: texts by the name of their file; `state`: the directory of a checkpoint.

    Raises HeadraceError, and writes nothing, if a text holds the value of a secret of the environment."""
    facts = encode(bundle)
    texts = {FACTS: facts, **{f"{CODE}/{name}": text.encode() for name, text in code.items()}}
    if found := next(_secrets_in(texts, os.environ), ""):
        raise HeadraceError(
            f"{found}; nothing was written. Remove it there (--include without code leaves out your files)"
        )
    temporary = file.with_name(f".writing-{file.name}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in texts.items():
                archive.writestr(name, content)
            for path in sorted(state.iterdir()) if state else ():
                archive.write(path, f"{STATE}/{path.name}", zipfile.ZIP_STORED)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _secrets_in(texts: Mapping[str, bytes], environment: Mapping[str, str]) -> Iterator[str]:
    for variable, value in environment.items():
        if _SECRET.search(variable.upper()) and len(value) >= _SHORT:
            for member, text in texts.items():
                if value.encode() in text:
                    yield f"{member} would hold the value of the environment variable {variable}"


def places_named(bundle: Bundle, places: Iterable[Path]) -> list[str]:
    """Returns the directories of this machine that the texts of prompts, columns or completions name: data that cannot be changed."""
    text = encode(bundle.journaled).decode()
    return [str(place) for place in dict.fromkeys(places) if len(place.parts) > 1 and str(place) in text]


def read_bundle(file: Path, folder: Path) -> Bundle:
    """Unpacks a bundle into `folder` and returns its facts. Raises ConfigError if the file is none, or was written by a later version."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = _members(file, archive)
            for one in members:
                archive.extract(one, folder)
            facts = archive.read(FACTS)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        KeyError,
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError: encrypted
        raise ConfigError(f"{file} is no bundle of headrace replay --export: {error}") from None
    try:
        bundle = _decoder.decode(facts)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} was written by another version of headrace, and cannot be read: {error}") from None
    if bundle.format != FORMAT:
        raise ConfigError(
            f"{file} has format {bundle.format}, and this headrace reads {FORMAT}; use headrace {bundle.headrace}"
        )
    return bundle


def _members(file: Path, archive: zipfile.ZipFile) -> Sequence[zipfile.ZipInfo]:
    """Returns the members that a bundle may have: no other folders, no absolute paths, not too large."""
    members = archive.infolist()
    for one in members:
        parts = PurePosixPath(one.filename).parts
        if one.filename != FACTS and not (
            len(parts) == 2 and parts[0] in (CODE, STATE) and parts[1] not in ("..", ".")
        ):
            raise ConfigError(f"{file} is no bundle of headrace replay --export: it holds {one.filename}")
    if sum(one.file_size for one in members) > LARGEST:
        raise ConfigError(f"{file} would unpack to more than {LARGEST >> 30} GiB, which is refused")
    return members
