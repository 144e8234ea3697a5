"""`pool.json`: the servers of a run after a person has added or removed some. A resumed run goes on with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.core.types import Struct
from headrace.durable.atomic_files import replace_file

FILE = "pool.json"


class Roster(Struct, frozen=True):
    """The content of the file."""

    settings: tuple[str, ...]
    """`engine.urls` when it was written. A resume with other ones means those, and ignores the file."""
    urls: tuple[str, ...]
    """The servers since."""


def urls_of(run_dir: Path, settings: Sequence[str]) -> tuple[str, ...]:
    """Returns the servers that a run starts with. `settings`: its `engine.urls`."""
    try:
        roster = msgspec.json.decode((run_dir / FILE).read_bytes(), type=Roster)
    except (OSError, msgspec.MsgspecError):
        return tuple(settings)
    return roster.urls if roster.settings == tuple(settings) and roster.urls else tuple(settings)


def keep(run_dir: Path, settings: Sequence[str], urls: Sequence[str]) -> None:
    replace_file(run_dir / FILE, msgspec.json.encode(Roster(tuple(settings), tuple(urls))))
