"""Whether the user's files on a worker's machine are those of the run. Files that these import are not compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.processes.joining.greeting import Agreed, Terms
from headrace.processes.joining.same_model import agree


def code_terms(files: Iterable[str]) -> Terms:
    """The terms of a worker that runs these files, which name no model. Raises ConfigError for one that cannot be read."""
    found = {}
    for file in sorted(set(files)):
        try:
            found[file] = _digest(Path(file))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    return Terms("", found)


def agree_to(terms: Terms, own_model: str = "") -> Agreed:
    """The answer of this machine to terms of either kind. `own_model`: as for `agree`."""
    return agree(terms, own_model) if terms.model else Agreed(unable=code_problem(terms.files))


def code_problem(files: Mapping[str, str]) -> str:
    """Returns what is wrong with the user's files on this machine; empty if they are the run's. `files`: their digests there, by path."""
    for file, theirs in files.items():
        try:
            ours = _digest(Path(file))
        except OSError as error:
            return f"the run's file {file} is not on this machine ({error.strerror or error}): copy it here, to the same path"
        if ours != theirs:
            return (
                f"{file} is not the run's: its content differs. Copy the run's file to this machine, or start the run anew if it is that one which "
                "has changed"
            )
    return ""


def _digest(path: Path) -> str:
    """Returns 32 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
