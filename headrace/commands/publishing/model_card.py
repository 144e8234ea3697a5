"""The card of an exported model: what it was trained on and how, what held during the run, and versions. Made from the run's files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from headrace.algo.config import AlgoConfig
from headrace.commands.again.bundle_export import CodeFiles, portable_settings
from headrace.commands.publishing.curve_picture import curve_picture
from headrace.episodes.tasks.config import TaskConfig
from headrace.facts.run_state import RunState
from headrace.facts.verdicts import all_verdicts
from headrace.models.resolve import KNOWN_MODELS
from headrace.run.config import RunConfig, config_of_run, read_config
from headrace.settings.toml import dump
from headrace.version import __version__
from headrace.views.report.data import ReportData, load
from headrace.views.report.side_by_side import ComparedRun, final_numbers

CARD, PICTURE = "README.md", "reward.png"
MARKS = {"good": "✓", "bad": "✗", "plain": "•", "unknown": "?"}
PACKAGES = ("torch", "transformers", "peft")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def write_card(run_dir: Path, folder: Path, step: int, name: str) -> None:
    """Writes the card and its picture beside an exported model. `step`: that of the checkpoint; `name`: the model's title."""
    config, data = read_config(config_of_run(run_dir)), load(run_dir)
    line = [(one.x, one.mean(lambda row: row.reward_drawn)) for one in data.bins]
    held_out = [(float(one.step), one.reward_mean) for one in data.state.evals if math.isfinite(one.reward_mean)]
    (folder / PICTURE).write_bytes(curve_picture(line, held_out))
    adapter = (folder / "adapter_config.json").exists()
    (folder / CARD).write_text(
        "\n".join(_lines(config, data, step=step, name=name, adapter=adapter)) + "\n", encoding="utf-8"
    )


def _lines(config: RunConfig, data: ReportData, *, step: int, name: str, adapter: bool) -> Iterator[str]:
    base = config.model.path if _is_on_the_hub(config.model.path) else ""
    yield from _front_matter(config.algo, base, adapter)
    yield f"# {name}\n"
    yield (
        f"{_model(config.model.path)}, trained by reinforcement learning with headrace {__version__}: {step:,} optimizer steps of "
        f"{config.algo.name} on {_data(config.task)}.\n"
    )
    reader = "peft.AutoPeftModelForCausalLM" if adapter else "transformers.AutoModelForCausalLM"
    yield f"It is {'an adapter' if adapter else 'a whole model'}: `{reader}.from_pretrained` loads it.\n"
    yield "## Result\n"
    yield from _numbers(data)
    yield f"\n![Reward by optimizer step]({PICTURE})\n"
    yield "Reward by optimizer step: the line is the mean over all rollouts that were drawn, the dots are prompts that were held out.\n"
    yield "## Data and reward\n"
    yield from _sources(config)
    yield "\n## What held during the run\n"
    yield from _contracts(data.state)
    yield "\n## Settings\n"
    yield from _settings(config)
    yield "\n## Versions\n"
    yield from _versions(data.state)


def _is_on_the_hub(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).is_dir()


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
    return f"`{path}`" if _is_on_the_hub(path) else f"A local model called `{Path(path).name}`"


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


def _sources(config: RunConfig) -> Iterator[str]:
    task = config.task
    yield f"- Prompts: {_data(task)}; {task.held_out} of them were held out for evaluation."
    if task.options:
        yield f"- Its options: {', '.join(f'{key} = {value}' for key, value in task.options.items())}."
    for spec in config.reward.specs:
        extract = f", given the {spec.extract.replace('_', ' ')}" if spec.extract else ""
        yield f"- Reward: `{spec.name}`, weight {spec.weight:g}{extract}."
    for one in config.reward.endpoints:
        yield f"- Reward: `{one.name}`, a service, weight {one.weight:g}."
    for teacher in config.teachers:
        yield f"- Teacher: `{teacher.name}`, by {teacher.mode}."


def _contracts(state: RunState) -> Iterator[str]:
    yield "| | | |\n|---|---|---|"
    for one in all_verdicts(state):
        cells = (f"{MARKS[one.mood]} {one.title}", one.value, one.detail)
        yield f"| {' | '.join(text.replace('|', chr(92) + '|').replace(chr(10), ' ') for text in cells)} |"


def _settings(config: RunConfig) -> Iterator[str]:
    """The settings that a step depends on, as TOML. Places of the machine are not among them."""
    settings, _ = portable_settings(config, CodeFiles())
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
