"""Procedural problems with verifiers, from the `reasoning-gym` package: endless, and without files."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import ConfigError, nearest
from headrace.core.types import Prompt
from headrace.durable.spelling import jsonable
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.prompts import (
    Encoder,
    PromptMaker,
    checked_cursor,
    digest_of,
    seed_from,
    take,
)
from headrace.settings.extras import absent

BLOCK = 1000
"""The number of problems of one dataset object. Some families prepare `size` problems in advance, so that one endless dataset is not
possible; and problem i of seed s is often problem 0 of seed s + i, so that each block has its own seed, far from the others."""

PATIENCE = 1000
"""The number of known problems in a row after which a family is assumed to have no others."""


BY_HASH = frozenset(("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"))
"""Families of reasoning-gym 0.1.25 that walk through sets of texts: with the same seed, each process of Python has other problems, because it
hashes texts in its own way."""
ALIKE = 3
"""Drawn problems that must be those of the process before, beside the held-out ones."""


class ReasoningGymTask:
    """Draws `train/<index>` for ever. Held-out problems are the same for every run seed and are never drawn."""

    def __init__(self, config: TaskConfig, seed: int, encoder: Encoder) -> None:
        """Raises ConfigError for an unknown family, options it does not take, or a family with too few problems."""
        self._family, self._options, self._seed, self._next = config.name, dict(config.options), seed, 0
        self._block: tuple[tuple[object, ...], Any] = ((), None)
        self._source = digest_of([config.name, json.dumps(config.options, sort_keys=True, default=str), str(seed)])
        _check_family(config.name, config.options)
        _check_hashes(config.name)
        held = self._distinct("held-out", config.held_out, "task.held_out", avoid=set())
        self._known = {entry["question"] for entry in held}
        shown = self._distinct("examples", config.examples, "task.examples", avoid=self._known)
        self._known |= {entry["question"] for entry in shown}
        self._maker = PromptMaker(config, encoder, [_solved(entry, config.name) for entry in shown])
        self._held = [self._prompt(f"held-out/{i}", entry) for i, entry in enumerate(held)]
        self._peek()
        drawn = (str(self._entry(index, "train", self._seed)["question"]) for index in range(ALIKE))
        self._problems = digest_of([*(prompt.text for prompt in self._held), *drawn])
        """A digest of what the family makes in this process of Python."""

    def draw(self) -> Prompt:
        for index in range(self._next, self._next + PATIENCE):
            entry = self._entry(index, "train", self._seed)
            if entry["question"] not in self._known:
                self._next = index + 1
                return self._prompt(f"train/{index}", entry)
        raise self._too_few(f"{PATIENCE} problems in a row were held-out ones", "task.held_out")

    def held_out(self, count: int) -> list[Prompt]:
        return take(self._held, count)

    def remarks(self) -> list[str]:
        return self._maker.remarks()

    def state(self) -> dict[str, Any]:
        return {"next": self._next, "source": self._source, "problems": self._problems}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for the state of another task, and where this process makes other problems of it."""
        self._next = int(checked_cursor(state, self._source)["next"])
        if state.get("problems", self._problems) != self._problems:
            raise ConfigError(
                f"reasoning_gym {self._family} makes other problems in this process than in the one that wrote the checkpoint; resume with the "
                "version of reasoning-gym and the PYTHONHASHSEED of that one, or start a new run from the exported weights"
            )

    def _peek(self) -> None:
        """Checks at the start that there is a problem to train on."""
        self.draw()
        self._next = 0

    def _entry(self, index: int, *stream: object) -> dict[str, Any]:
        block, place = divmod(index, BLOCK)
        key = (*stream, block)
        if self._block[0] != key:
            self._block = (key, _dataset(self._family, {**self._options, "size": BLOCK, "seed": seed_from(*key)}))
        try:
            return self._block[1][place]
        except Exception as error:  # some settings are found impossible only when a problem is made
            raise ConfigError(
                f"reasoning_gym {self._family} could not make a problem: {error}; change task.options"
            ) from None

    def _distinct(self, stream: str, count: int, setting: str, avoid: set[str]) -> list[dict[str, Any]]:
        """The first `count` problems of a stream with different questions."""
        found: dict[str, dict[str, Any]] = {}
        misses = index = 0
        while len(found) < count:
            entry = self._entry(index, stream)
            known = entry["question"] in found or entry["question"] in avoid
            misses = misses + 1 if known else 0
            if not known:
                found[entry["question"]] = entry
            if misses > PATIENCE:
                raise self._too_few(
                    f"only {len(found)} different problems were found where {count} are needed", setting
                )
            index += 1
        return list(found.values())

    def _too_few(self, what: str, setting: str) -> ConfigError:
        return ConfigError(f"reasoning_gym {self._family}: {what}; lower {setting}, or widen task.options")

    def _prompt(self, id: str, entry: dict[str, Any]) -> Prompt:
        return self._maker.make(id, str(entry["question"]), columns_of(entry))


def columns_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns `answer` and `metadata` for reward functions of users, and `entry` for the family's own verifier.

    JSON turns tuples into lists and keys into strings, with which some verifiers (ARC's) return another score without an error. So
    the entry is passed as a Python literal, which keeps both.
    """
    columns = {"answer": jsonable(entry["answer"]), "metadata": jsonable(entry["metadata"])}
    literal = repr(dict(entry))
    return {**columns, "entry": literal} if _reads_back(literal, entry) else columns


def _reads_back(literal: str, entry: Mapping[str, Any]) -> bool:
    try:
        return bool(ast.literal_eval(literal) == entry)
    except (ValueError, SyntaxError):
        return False


def _solved(entry: Mapping[str, Any], family: str) -> tuple[str, str]:
    if not isinstance(entry["answer"], str):
        raise ConfigError(f"reasoning_gym {family} gives no answers that could be shown; set task.examples = 0")
    return entry["question"], entry["answer"]


def _check_family(family: str, options: Mapping[str, Any]) -> None:
    families = _families()
    if family not in families:
        raise ConfigError(
            f"task.name = {family} is not a reasoning_gym dataset{nearest(family, families)} ({len(families)} are there: "
            "python -c 'from reasoning_gym.factory import DATASETS; print(*DATASETS)')"
        )
    known = {field.name for field in dataclasses.fields(families[family][1])} - {"size", "seed"}
    for option in options:
        if option in ("size", "seed"):
            raise ConfigError(
                f"task.options.{option} is decided by the run (problems never end, `seed` is the run's); remove it"
            )
        if option not in known:
            near = nearest(option, known)
            raise ConfigError(
                f"task.options.{option} is not an option of reasoning_gym {family}{near or '; there are ' + ', '.join(sorted(known))}"
            )
    _dataset(family, {**options, "size": 1, "seed": 0})


def _check_hashes(family: str) -> None:
    """Raises ConfigError for a family whose problems would be others in the next process of the same run."""
    if family in BY_HASH and (os.environ.get("PYTHONHASHSEED") or "random") == "random":
        raise ConfigError(
            f"reasoning_gym {family} makes other problems in each process, also after a resume, unless texts are hashed alike; start with "
            "PYTHONHASHSEED=0 in the environment"
        )


def _families() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        asked = "task.kind = reasoning_gym"
        raise ConfigError(absent(asked, "reasoning-gym", "reasoning_gym", error, "tasks")) from None
    return DATASETS


def _dataset(family: str, options: Mapping[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(family, **options)
    except Exception as error:  # the families validate with assert, ValueError, TypeError, ...
        given = ", ".join(f"{key} = {value}" for key, value in options.items() if key not in ("size", "seed"))
        raise ConfigError(f"reasoning_gym {family} refuses task.options ({given or 'none given'}): {error}") from None
