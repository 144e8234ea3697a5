"""The checks of `environment.name` and `environment.options` that environments of all libraries share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from headrace.core.errors import ConfigError
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.settings.extras import install


def known_options(settings: LibrarySettings, kind: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the options, and the defaults of those that are not set. Raises ConfigError for one that is not known, or is of another
    type than its default."""
    for name, value in settings.options.items():
        if name not in defaults:
            raise ConfigError(
                f'environment.options.{name} is not an option of environment.kind = "{kind}"{near(name, defaults)}'
            )
        wanted = (int, float) if isinstance(defaults[name], float) else type(defaults[name])
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ConfigError(
                f"environment.options.{name} = {value!r} is of another type than its default {defaults[name]!r}"
            )
    return defaults | settings.options


def near(name: str, names: Iterable[str]) -> str:
    """Returns `; did you mean x?` with similar names, or else some of those that are there."""
    names = list(names)
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if found:
        return f"; did you mean {' or '.join(found)}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"; there are {', '.join(names[:12])}{more}" if names else ""


def not_installed(kind: str, extra: str, package: str) -> ConfigError:
    return ConfigError(
        f'environment.kind = "{kind}" needs the package {package}, which is not installed: {install(extra)}'
    )


# --- The state of an environment that follows from its row
# The state of an environment that follows from its row, its seed and the replies to it: the replies. It is restored by giving it the same
# ones again. A digest of what it said shows whether it went the same way.


class Replies:
    """The replies that one environment was given."""

    def __init__(self) -> None:
        self._given: list[str] = []
        self._said = xxhash.xxh3_64()

    def given(self, reply: str) -> None:
        self._given.append(reply)

    def said(self, *answer: Any) -> None:
        """Counts an answer of the environment: plain values."""
        self._said.update(msgspec.json.encode(answer))

    def state(self) -> dict[str, Any]:
        return {"replies": self._given, "said": self._said.hexdigest()}

    def again(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields the replies of an exported state, for an environment that was just made. Raises ValueError at the end if it has not said the
        same to them."""
        yield from state["replies"]
        if self.state() != state:
            raise ValueError(
                "given the same replies, the environment says something else than before: it depends on more than its row, its seed and these; "
                'set environment.resumes = "restarted"'
            )
