"""The settings that a run's directory keeps: those of its last process in `config.toml`, and in `config.until-step-<n>.toml` those before a resume that
changed them. What is told of a step is told by the settings that it was made with.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.settings.toml import read_toml

CONFIG = "config.toml"
_DIGEST = re.compile(r"^# contents of (\S+): ([0-9a-f]{32})$", re.MULTILINE)
CONTENTS = "contents of "
"""Put before a setting that names files, to name what is in them."""


def configs_until(run_dir: Path) -> list[tuple[int, Path]]:
    """The earlier settings of a run, in order. Each pair is (n, file): the settings of the steps before n, from the previous n on."""
    found = run_dir.glob("config.until-step-*.toml")
    return sorted((int(file.stem.removeprefix("config.until-step-")), file) for file in found)


def config_at(run_dir: Path, step: int) -> Path:
    """The settings of the process that wrote the checkpoint of `step`."""
    return next((file for until, file in configs_until(run_dir) if until >= step), run_dir / CONFIG)


def settings_of(run_dir: Path) -> dict[str, Any]:
    """Returns the config of a run's last process as plain values; empty if it has none. Raises ConfigError if it cannot be read."""
    path = run_dir / CONFIG
    return read_toml(path) if path.exists() else {}


def settings_by_step(run_dir: Path) -> Callable[[int], dict[str, Any]]:
    """Returns a function that gives the settings of a step, counted from 0. Raises ConfigError if a config cannot be read."""
    earlier, last = [(until, read_toml(path)) for until, path in configs_until(run_dir)], settings_of(run_dir)
    return lambda step: next((settings for until, settings in earlier if step < until), last)


def resolved_config(run_dir: Path) -> str:
    """Returns the text of `config.toml`, and before it, as comments, what a setting was before a resume changed it; empty if there is none.
    Raises ConfigError if a config cannot be read."""
    path = run_dir / CONFIG
    if not path.is_file():
        return ""
    changed = changes_before(run_dir, sys.maxsize)
    told = "".join(f"# {name}: {text}\n" for name, text in changed.items() if not name.startswith("chosen."))
    return f"{told}\n" * bool(told) + path.read_text(encoding="utf-8", errors="replace")


def contents_in(config_toml: Path) -> dict[str, str]:
    """Returns the digests of the files that settings name, by the setting, as a run has written them; none if an earlier version wrote the file."""
    return dict(_DIGEST.findall(config_toml.read_text(encoding="utf-8")))


NOT_SET = "not set"


def settings_over(run_dir: Path, word: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
    """Returns each setting by its dotted name, and each digest of files by `contents of` its setting: its value, as `word` says it, or a text with all that it
    was, if a resume changed it: `1e-6 until step 40, then 1e-5`. Raises ConfigError if a config cannot be read."""
    return {
        name: values[0][1] if len(values) == 1 else _told(values)
        for name, values in _stretches(run_dir, None, word).items()
    }


def changes_before(run_dir: Path, step: int) -> dict[str, str]:
    """Returns all that a setting was until the checkpoint of `step`, by the dotted name of each that a resume had changed by then."""
    return {name: _told(values) for name, values in _stretches(run_dir, step, str).items() if len(values) > 1}


def _stretches(run_dir: Path, step: int | None, word: Callable[[Any], Any]) -> dict[str, list[tuple[int | None, Any]]]:
    """Pairs of the first step that a value did not make, None for the last value, and the value, by the name. `step`: of the last that counts; None: all do."""
    earlier = [(until, path) for until, path in configs_until(run_dir) if step is None or until < step]
    last = run_dir / CONFIG if step is None else config_at(run_dir, step)
    kept = [
        (until, _flat(read_toml(path)) | _contents(path)) for until, path in (*earlier, (None, last)) if path.exists()
    ]
    found = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(settings for _, settings in kept)):
        values = [(until, word(settings[name]) if name in settings else NOT_SET) for until, settings in kept]
        found[name] = [list(alike)[-1] for _, alike in itertools.groupby(values, key=lambda one: one[1])]
    return found


def _told(values: Sequence[tuple[int | None, Any]]) -> str:
    return ", then ".join(f"{value}" if until is None else f"{value} until step {until}" for until, value in values)


def _contents(path: Path) -> dict[str, str]:
    return {f"{CONTENTS}{name}": digest[:8] for name, digest in contents_in(path).items()}


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found
