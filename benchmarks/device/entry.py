"""An entry of the queue, its figures with their predictions and verdicts, and the file that keeps what was measured.

Imports no torch: the page of results is made without it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.commands.plan.rates.hardware import GPUS, Gpu

if TYPE_CHECKING:
    from benchmarks.device.loads import Bench

RESULTS = Path(__file__).with_name("results")
ORDER = (
    "smoke",
    "decode",
    "training",
    "demo",
    "memory",
    "mixture",
    "ranks",
    "kernels",
    "long",
    "vllm",
    "fp8",
    "compiled",
    "sizes",
)
"""Modules of this package, in the order in which a machine that comes by is spent on them."""
BASIS = "measured by an earlier script; predictions are made of it"
"""`Result.ended` of figures to which predictions cannot be compared."""
NEAR = 1.5
"""Factor within which a figure is as predicted."""
LESS_IS_BETTER = {"s", "ms", "GB", "nats"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure that an entry measures."""

    name: str
    unit: str = "tokens/s"
    """`check`: the figure is true or false, and true is predicted."""
    predicted: Callable[[Gpu], float] | None = None
    formula: str
    """The prediction in words: what is multiplied and divided, and where its constants were measured."""
    most: float | None = None
    """A larger figure is wrong, and not only other than predicted."""


@dataclass(frozen=True)
class Figure:
    """A line's measured value."""

    name: str
    value: float | bool | None
    """None: not measured, for the reason in `note`."""
    note: str = ""
    share: float | None = None
    """Share of the roofline, or of the peak in training."""
    rates: dict[str, Any] = field(default_factory=dict)
    """What the planner can use: {model, sequences, context, pass} or {model, tokens, step}, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    about: str
    limit: int
    """Seconds after which it is ended on a device."""
    lines: tuple[Line, ...]
    measure: Callable[[Bench], Iterator[Figure]]
    """Yields a figure for every line, each as soon as it is known."""
    least_memory: float = 0.0
    """Bytes of the device's memory without which the entry is not begun."""

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)


def entry_of(name: str) -> Entry:
    """Loads an entry. Raises KeyError with those there are."""
    if name not in ORDER:
        raise KeyError(f"there is no entry {name}; the queue has {', '.join(ORDER)}")
    entry = importlib.import_module(f"benchmarks.device.{name}").ENTRY
    assert isinstance(entry, Entry) and entry.name == name
    return entry


def chip_of(card: str) -> str:
    """Returns the planner's key of a card by the name that torch gives it, or an empty string.

    >>> chip_of("NVIDIA H200"), chip_of("cpu")
    ('h200', '')
    """
    return next((key for key in GPUS if key.upper() in card.upper()), "")


@dataclass(kw_only=True)
class Result:
    """The figures of one run of an entry so far."""

    entry: str
    card: str
    date: str
    commit: str
    torch: str
    seconds: float = 0.0
    ended: str = "under way"
    """finished, `under way` (it was killed if that stands in a file), or the reason of its failure."""
    note: str = ""
    figures: list[Figure] = field(default_factory=list)

    @property
    def chip(self) -> Gpu | None:
        return GPUS.get(chip_of(self.card))

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.date}-{chip_of(self.card) or 'other'}-{self.entry}.json"

    def figure(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)

    def write(self, directory: Path) -> Path:
        """Writes or replaces the file at once, so that a kill leaves the figures there were."""
        directory.mkdir(parents=True, exist_ok=True)
        path, values = directory / self.name, dataclasses.asdict(self)
        values["figures"] = [
            {key: value for key, value in figure.items() if key in ("name", "value") or value not in (None, "", {})}
            for figure in values["figures"]
        ]
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
        return path


def read(path: Path) -> Result:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Result(**{**values, "figures": [Figure(**figure) for figure in values["figures"]]})


def all_results(directory: Path = RESULTS) -> list[Result]:
    """Returns every result, the oldest first."""
    return [read(path) for path in sorted(directory.glob("*.json"))]


# --- verdicts ------------------------------------------------------------------------------------------------------------------


def verdict(line: Line, figure: Figure, chip: Gpu | None) -> str:
    """Returns a measured value against its prediction, in words.

    >>> line = Line(name="64", predicted=lambda chip: 1000.0, formula="")
    >>> [verdict(line, Figure("64", value), GPUS["h100"]) for value in (1200.0, 400.0)]
    ['as predicted', 'slower: 0.40 of the prediction']
    """
    if figure.value is None:
        return f"not measured: {figure.note}"
    if line.unit == "check":
        return "holds" if figure.value else "FAILS"
    if line.most is not None and figure.value > line.most:
        return f"FAILS: more than {line.most:g}"
    if line.predicted is None or chip is None:
        return "no prediction"
    ratio = float(figure.value) / line.predicted(chip)
    if 1 / NEAR <= ratio <= NEAR:
        return "as predicted"
    if line.unit in LESS_IS_BETTER:
        return f"{'better' if ratio < 1 else 'worse'}: {ratio:.2f} times the prediction"
    return f"{'faster' if ratio > 1 else 'slower'}: {ratio:.2f} of the prediction"


def failed(line: Line, figure: Figure) -> bool:
    """Whether a figure is wrong, and not only slow."""
    wrong = line.unit == "check" and figure.value is False
    return wrong or (line.most is not None and figure.value is not None and figure.value > line.most)


def written(value: float | bool | None, unit: str) -> str:
    """Returns a value with its unit.

    >>> written(18117.2, "tokens/s"), written(0.00524, "nats"), written(True, "check")
    ('18,117 tokens/s', '0.00524 nats', 'yes')
    """
    if value is None:
        return "–"
    if unit == "check":
        return "yes" if value else "NO"
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
