"""The checks of `environment.name` and `environment.options` that environments of all libraries share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.environments.workers.loading import LibrarySettings
from headrace.settings.extras import install


def known_options(settings: LibrarySettings, kind: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the options, and the defaults of those that are not set. Raises ConfigError for one that is not known, or is of another
    type than its default."""
    for name, value in settings.options.items():
        if name not in defaults:
            raise ConfigError(
                f'environment.options.{name} is no option of environment.kind = "{kind}"{near(name, defaults)}'
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
