"""Settings of the views and sinks of a run. The journal, the metrics and the report are always written."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.settings.extras import EXTRAS, install


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ObserveConfig:
    terminal: Literal["auto", "live", "plain", "off"] = "auto"
    """`live` redraws one view, `plain` prints a line per step; `auto` is live on a terminal and in a notebook, plain in
    a log."""
    tensorboard: bool = False
    """Write scalars for TensorBoard to `runs/<name>/tensorboard`."""
    trackio: bool = False
    """Write scalars for a local trackio dashboard; nothing leaves the machine."""

    @property
    def sinks(self) -> list[str]:
        """The sinks that are switched on: settings that are true or false, each with a file of its name in `observe/sinks/`."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is True]


def check_installed(config: ObserveConfig, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raises `ConfigError` with the pip command if `find` does not find the package of a requested sink."""
    for name in config.sinks:
        if name in EXTRAS and find(EXTRAS[name].module) is None:
            raise ConfigError(
                f"observe.{name} = true needs the package {name}, which is not installed: "
                f"{install(name)}, or set observe.{name} = false"
            )
