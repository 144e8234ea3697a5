"""The card of an exported model: what it was trained on and how, what held during the run, and versions. Made from the run's files."""

from __future__ import annotations

import itertools
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from headrace.algo.config import AlgoConfig
from headrace.commands.replay.bundle import SECTIONS, CodeFiles, portable_settings
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.episodes.tasks.config import TaskConfig
from headrace.facts.kept_settings import changes_before, config_at
from headrace.facts.run_state import RunState
from headrace.facts.verdicts import all_verdicts, comparable
from headrace.models.images import SERVED, type_of
from headrace.models.resolve import KNOWN_MODELS, hub_model
from headrace.run.config import RunConfig, read_config
from headrace.settings.toml import dump
from headrace.version import __version__
from headrace.views.report.data import ReportData, load
from headrace.views.report.side_by_side import ComparedRun, final_numbers
from headrace.views.report.svg import extent, labels, ticks

# --- The class that loads it


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def reader_of(folder: Path) -> str:
    """Returns the name of the class whose `from_pretrained` loads the directory."""
    if is_adapter(folder):
        return "peft.AutoPeftModelForCausalLM"
    return f"transformers.{'AutoModelForImageTextToText' if type_of(folder) in SERVED else 'AutoModelForCausalLM'}"


# --- A PNG of one curve, without a plotting library
# Pages that show model cards do not all show SVG.


WIDTH, HEIGHT = 960, 360
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 18, 34
SCALE = 2
"""Pixels of a dot of a glyph."""
PAPER, INK, GRID, LINE, DOT = (255, 255, 255), (90, 100, 115), (226, 230, 236), (37, 99, 201), (224, 115, 15)
_FONT = {
    "0": ("111", "101", "101", "101", "111"), "1": ("010", "110", "010", "010", "111"), "2": ("111", "001", "111", "100", "111"),
    "3": ("111", "001", "111", "001", "111"), "4": ("101", "101", "111", "001", "001"), "5": ("111", "100", "111", "001", "111"),
    "6": ("111", "100", "111", "101", "111"), "7": ("111", "001", "001", "010", "010"), "8": ("111", "101", "111", "101", "111"),
    "9": ("111", "101", "111", "001", "111"), ".": ("0", "0", "0", "0", "1"), "-": ("000", "000", "111", "000", "000"),
    ",": ("00", "00", "00", "01", "10"), "e": ("000", "111", "111", "100", "111"),
}  # fmt: skip
"""The digits, each a bitmap five rows high."""

Point = tuple[float, float]


def curve_picture(line: Sequence[Point], dots: Sequence[Point] = ()) -> bytes:
    """Returns a PNG of a line and of dots above it, with numbers at the axes. Points that are not finite are left out."""
    points = [point for point in (*line, *dots) if math.isfinite(point[1])]
    xs = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    xs = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[0] + 0.5)
    ys = extent(y for _, y in points)
    canvas = np.full((HEIGHT, WIDTH, 3), PAPER, np.uint8)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - ys[0]) / (ys[1] - ys[0]) * (HEIGHT - TOP - BOTTOM),
        )

    rows, columns = ticks(*ys), ticks(*xs, 8, whole=True)
    for value, text in zip(rows, labels(rows), strict=True):
        row = round(place(xs[0], value)[1])
        canvas[row, LEFT : WIDTH - RIGHT] = GRID
        _write(canvas, text, right=LEFT - 10, top=row - 5)
    for value, text in zip(columns, labels(columns), strict=True):
        _write(canvas, text, right=round(place(value, ys[0])[0]) + _width(text) // 2, top=HEIGHT - BOTTOM + 12)
    finite = [place(x, y) for x, y in line if math.isfinite(y)]
    for a, b in itertools.pairwise(finite):
        _segment(canvas, a, b)
    for x, y in (place(x, y) for x, y in (*dots, *(line if len(finite) == 1 else ())) if math.isfinite(y)):
        _disc(canvas, x, y, radius=6, colour=DOT)
    return _png(canvas)


def _segment(canvas: np.ndarray, a: tuple[float, float], b: tuple[float, float]) -> None:
    count = max(2, math.ceil(math.dist(a, b)) * 2)
    for share in np.linspace(0.0, 1.0, count):
        _disc(canvas, a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]), radius=1.4, colour=LINE)


def _disc(canvas: np.ndarray, x: float, y: float, *, radius: float, colour: tuple[int, int, int]) -> None:
    top, left = max(0, math.floor(y - radius)), max(0, math.floor(x - radius))
    patch = canvas[top : math.ceil(y + radius) + 1, left : math.ceil(x + radius) + 1]
    rows, columns = np.ogrid[: patch.shape[0], : patch.shape[1]]
    patch[(rows + top - y) ** 2 + (columns + left - x) ** 2 <= radius**2] = colour


def _width(text: str) -> int:
    return sum(SCALE * (len(_FONT[character][0]) + 1) for character in text if character in _FONT)


def _write(canvas: np.ndarray, text: str, *, right: int, top: int) -> None:
    """Writes digits that end at the column `right`."""
    left = max(0, right - _width(text))
    for character in text:
        if character not in _FONT:
            continue
        bits = np.array([[bit == "1" for bit in row] for row in _FONT[character]]).repeat(SCALE, 0).repeat(SCALE, 1)
        patch = canvas[max(0, top) : max(0, top) + bits.shape[0], left : left + bits.shape[1]]
        patch[bits[: patch.shape[0], : patch.shape[1]]] = INK
        left += bits.shape[1] + SCALE


def _png(canvas: np.ndarray) -> bytes:
    """The canvas [rows, columns, 3] as a PNG with 8 bits a channel (RFC 2083)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = canvas.shape
    rows = b"".join(b"\0" + row.tobytes() for row in canvas)
    head = struct.pack(">II", width, height) + bytes((8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


# --- model card ------------------------------------------------------------


CARD, PICTURE = "README.md", "reward.png"
MARKS = {"good": "✓", "bad": "✗", "plain": "•", "unknown": "?"}
PACKAGES = ("torch", "transformers", "peft")


def write_card(run_dir: Path, folder: Path, step: int, name: str) -> None:
    """Writes the card and its picture beside an exported model. `step`: that of the checkpoint; `name`: the model's title."""
    config, data = read_config(config_at(run_dir, step)), load(run_dir, until=step)
    line = [(point.x, point.mean(lambda row: row.reward_drawn)) for point in data.bins]
    held_out = [
        (float(evaluation.step), evaluation.reward_mean)
        for evaluation in comparable(data.state.evals)
        if math.isfinite(evaluation.reward_mean)
    ]
    (folder / PICTURE).write_bytes(curve_picture(line, held_out))
    adapter, reader = is_adapter(folder), reader_of(folder)
    changed = changes_before(run_dir, step)
    lines = _lines(config, data, changed, step=step, name=name, adapter=adapter, reader=reader)
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(
    config: RunConfig, data: ReportData, changed: Mapping[str, str], *, step: int, name: str, adapter: bool, reader: str
) -> Iterator[str]:
    warm = data.state.warm
    model = warm.model if warm else config.model.path
    hub = hub_model(model)
    base = hub.repo if hub and not (warm and adapter) else ""
    yield from _front_matter(config.algo, base, adapter)
    yield f"# {name}\n"
    yield (
        f"{_model(model)}, {f'first by cross-entropy on answers ({warm.words}), then ' if warm else ''}trained by reinforcement learning with headrace {__version__}: {step:,} optimizer steps of "
        f"{config.algo.name} on {_data(config.task)}.\n"
    )
    yield f"It is {'an adapter' if adapter else 'a whole model'}: `{reader}.from_pretrained` loads it.\n"
    yield "## Result\n"
    yield from _numbers(data)
    yield f"\n![Reward by optimizer step]({PICTURE})\n"
    yield "Reward by optimizer step: the line is the mean over all rollouts that were drawn, the dots are prompts that were held out.\n"
    yield "## Data and reward\n"
    yield from _sources(config.task, config.reward, config.teachers, config.algo.recipe.distill.model)
    yield "\n## What held during the run\n"
    yield from _contracts(data.state)
    yield "\n## Settings\n"
    yield from _settings(config, changed)
    yield "\n## Versions\n"
    yield from _versions(data.state)


def _front_matter(algo: AlgoConfig, base: str, adapter: bool) -> Iterator[str]:
    yield "---"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    if base:
        yield f"base_model: {base}"
    tags = [
        "headrace",
        "reinforcement-learning",
        re.sub(r"[^a-z0-9-]+", "-", algo.name).strip("-"),
        *(["lora"] if adapter else []),
    ]
    yield "tags:"
    yield from (f"- {tag}" for tag in tags)
    yield "---\n"


def _model(path: str) -> str:
    if path in KNOWN_MODELS:
        return f"`{path}` ({KNOWN_MODELS[path].about}; {KNOWN_MODELS[path].licence})"
    if hub := hub_model(path):
        return f"`{hub.repo}`" + (f" (revision `{hub.revision}`)" if hub.revision else "")
    return f"A local model called `{Path(path).name}`"


def _data(task: TaskConfig) -> str:
    if task.facts.library:
        return f"`{task.name}` of {task.facts.library}"
    return (
        f"`{Path(task.path).name}`"
        if task.path
        else "rows that were passed from Python"
        if task.rows
        else "prompts of its environment"
    )


def _numbers(data: ReportData) -> Iterator[str]:
    yield "| | |\n|---|---|"
    for name, value in final_numbers(ComparedRun(data, "")).items():
        if name != "state" and value != "–":
            yield f"| {name} | {value} |"


def _sources(
    task: TaskConfig, reward: RewardConfig, teachers: Sequence[TeacherConfig], held: str = ""
) -> Iterator[str]:
    """`held`: the teacher that the trainer holds."""
    yield f"- Prompts: {_data(task)}; {task.held_out} of them were held out for evaluation."
    if task.options:
        yield f"- Its options: {', '.join(f'{key} = {value}' for key, value in task.options.items())}."
    for spec in reward.specs:
        extract = f", given the {spec.extract.replace('_', ' ')}" if spec.extract else ""
        yield f"- Reward: `{spec.name}`, weight {spec.weight:g}{extract}."
    for endpoint in reward.endpoints:
        yield f"- Reward: `{endpoint.name}`, a service, weight {endpoint.weight:g}."
    for teacher in teachers:
        yield f"- Teacher: `{teacher.name}`, by {teacher.mode}."
    if held:
        yield f"- Teacher: `{held}`, held by the trainer."


def _contracts(state: RunState) -> Iterator[str]:
    yield "| | | |\n|---|---|---|"
    for verdict in all_verdicts(state):
        cells = (f"{MARKS[verdict.mood]} {verdict.title}", verdict.value, verdict.detail)
        yield f"| {' | '.join(text.replace('|', chr(92) + '|').replace(chr(10), ' ') for text in cells)} |"


def _settings(config: RunConfig, changed: Mapping[str, str]) -> Iterator[str]:
    """The settings that a step depends on, as TOML, and what they were before a resume. Places of the machine are not among them."""
    settings, _ = portable_settings(config, CodeFiles())
    told = {name: text for name, text in changed.items() if name.partition(".")[0] in SECTIONS}
    if told:
        yield "A resume changed settings of this run; below are the last.\n"
        yield from (f"- `{name}`: {text}" for name, text in told.items())
        yield ""
    yield f"<details><summary>everything that a step depends on</summary>\n\n```toml\n{dump(settings)}```\n\n</details>"


def _versions(state: RunState) -> Iterator[str]:
    found = [f"headrace {__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    machine = state.started.machine if state.started else {}
    yield ", ".join(found) + (f"; trained on {machine['cpu']}" if machine.get("cpu") else "") + "."
