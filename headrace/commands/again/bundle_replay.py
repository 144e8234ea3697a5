"""`headrace replay FILE`: does the step of a bundle again, stage by stage, and names the first one whose result differs."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from headrace.algo.config import AlgoConfig
from headrace.commands.again.bundle import CODE, STATE, Bundle, read_bundle
from headrace.commands.again.rerun import with_threads_of
from headrace.commands.again.stages import (
    StageName,
    StageResult,
    advantage_stage,
    not_done,
    reward_stage,
    trained_stages,
)
from headrace.core.errors import ConfigError
from headrace.models.lora import LoraConfig
from headrace.models.resolve import resolve_model
from headrace.run.config import RunConfig
from headrace.settings.paths import resolve_paths
from headrace.settings.toml import build
from headrace.version import __version__
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, texts

TRAINED: tuple[StageName, ...] = ("loss", "backward", "optimizer")


def replay_bundle(file: Path, model: str = "", trust: bool = False, console: Console | None = None) -> int:
    """Returns 0 if no stage that could be done differs, else 1. `model`: the base model here, if the bundle's was a directory. `trust`:
    whether code in the bundle may run. Raises ConfigError if the file is no bundle, or holds code that nobody trusts."""
    console = console or Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        bundle = read_bundle(file, folder)
        code = sorted(path.name for path in folder.glob(f"{CODE}/*"))
        if code and not trust:
            raise ConfigError(
                f"{file} holds code that a replay runs ({', '.join(code)}): read it (unzip -p {file} '{CODE}/*'), then add --trust"
            )
        console.print(_headline(bundle))
        results = asyncio.run(_stages(bundle, folder, model=model, scratch=Path(scratch)))
    console.print(_table(results))
    for sentence in bundle.left_out:
        console.print(Text(f"not in the bundle: {sentence}", "dim"))
    if bundle.made_anew:
        console.print(Text(f"its state before the step is not the run's, only near it: {bundle.made_anew}", "dim"))
    return _conclude(results, console)


def _headline(bundle: Bundle) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in bundle.packages.items())
    where = f"on {bundle.machine.get('cpu', 'an unknown machine')}"
    here = "" if bundle.headrace == __version__ else f" (here {__version__})"
    return f"step {bundle.step}, done with headrace {bundle.headrace}{here} and {versions}, {where}"


async def _stages(bundle: Bundle, folder: Path, *, model: str, scratch: Path) -> list[StageResult]:
    code = folder / CODE
    config = with_threads_of(build(RunConfig, resolve_paths(_tree(bundle), code)), bundle.machine)
    made, algorithm = advantage_stage(bundle, config.algo, config.train)
    results = [await reward_stage(bundle, config, code), made]
    problem = _cannot_train(bundle, folder, config.algo, config.lora, model)
    if problem or algorithm is None:
        why = problem or "the advantages cannot be made"
        return [*results, *(not_done(name, why) for name in TRAINED)]
    model_dir = resolve_model(model or bundle.model)
    where = {"folder": folder, "model_dir": model_dir, "scratch": scratch}
    return [*results, *await trained_stages(bundle, config, algorithm, **where)]


def _tree(bundle: Bundle) -> dict[str, object]:
    """The settings of a config, which needs a model and a task; neither is used."""
    return {**bundle.settings, "model": {"path": bundle.model}, "task": {"kind": "python", "rows": "a bundle"}}


def _cannot_train(bundle: Bundle, folder: Path, algo: AlgoConfig, lora: LoraConfig, model: str) -> str:
    """Returns why the trainer cannot do the step, or an empty string."""
    if bundle.step > 1 and not (folder / STATE).is_dir():
        kind = "adapter" if lora.rank else "weights"
        return f"the bundle has no state before the step (--include {kind} packs it)"
    if bundle.local and not model:
        return f"the model was a directory called {bundle.model}: --model DIR names it here"
    if missing := [one for one in (algo.loss,) if one and ".py:" in one and not Path(one.rpartition(":")[0]).is_file()]:
        return f"the bundle has no code of {Path(missing[0]).name} (--include code packs it)"
    return ""


def _table(results: list[StageResult]) -> FittedTable:
    drawn = FittedTable(texts("stage", "done again", ""))
    for one in results:
        verdict = f"DIFFERS: {one.problem}" if one.problem else "the same" if one.done else "not done"
        drawn.add_row(one.name, one.did, verdict, style="bold red" if one.problem else "" if one.done else "dim")
    return drawn


def _conclude(results: list[StageResult], console: Console) -> int:
    first = next((one for one in results if one.problem), None)
    if first:
        console.print(Text(f"{first.name} is the first stage that differs", "bold red"))
        return 1
    done = [one.name for one in results if one.done]
    console.print(
        Text(f"the same result in {', '.join(done)}", "green")
        if done
        else Text("no stage could be done again", "yellow")
    )
    return 0
