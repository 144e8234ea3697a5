"""A whole run of a tiny model: its settings, what it wrote, and what is done to it from outside while it is under way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.durable.journal import count_steps
from headrace.facts.records import read_metrics
from support.runs import preloaded_python
from support.runs.beside import Beside, until

Config = dict[str, Any]

HOLD = """
import json, time
from pathlib import Path

HERE = Path(__file__).parent

def is_held():
    if not (HERE / "hold.json").exists():
        return False
    metrics, steps = json.loads((HERE / "hold.json").read_text())
    trained = Path(metrics).read_text().count('"StepTrained"') if Path(metrics).exists() else 0
    return any(trained >= step and not (HERE / f"released-{step}").exists() for step in steps)
"""
"""Code of a user's file with which its functions can hold a run (`hold`)."""

REWARD = (
    HOLD
    + """
def share_of_e(prompts, completions, **columns):
    return [text.count("e") / max(len(text), 1) for text in completions]

def share_of_o(prompts, completions, **columns):
    return [text.count("o") / max(len(text), 1) for text in completions]

def held(prompts, completions, **columns):
    while is_held():
        time.sleep(0.02)
    return share_of_e(prompts, completions)
"""
)


def tiny_config(directory: Path, model: Path, **tables: Any) -> Config:
    """Rows and a reward are written into the directory. `tables`: settings instead of those below, or beside them."""
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(200)]
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "reward.py").write_text(REWARD)
    config: Config = {
        "name": "tiny",
        "out": str(directory / "runs"),
        "model": {"path": str(model)},
        "task": {"kind": "jsonl", "path": str(directory / "rows.jsonl"), "held_out": 16},
        "reward": {"function": f"{directory / 'reward.py'}:share_of_e"},
        "rollout": {"group_size": 4, "max_tokens": 8},
        "train": {"steps": 6, "learning_rate": 1e-2, "dtype": "float32"},
        "engine": {"dtype": "float32", "kv_gib": 0.01, "context_length": 64, "max_running": 16},
        "staleness": {"groups_per_step": 4, "max_lag": 1},
        "checkpoint": {"every": 2},
        "eval": {"prompts": 0},
        "observe": {"terminal": "off"},
    }
    for name, table in tables.items():
        config[name] = {**config.get(name, {}), **table} if isinstance(table, dict) else table
    return config


# -- holding a run, and acting on it from outside -------------------------------------------------------------------------------


def hold(directory: Path, *steps: int, name: str = "tiny") -> None:
    """The run of that name gets little beyond each of these steps until it is released there, however slow the machine is: `is_held` is
    then true in the user's files of that directory. What was scored before is still trained: at most `max_lag` steps more."""
    (directory / "hold.json").write_text(json.dumps([str(directory / "runs" / name / "metrics.jsonl"), steps]))


def release(directory: Path, step: int = 2) -> None:
    (directory / f"released-{step}").touch()


def held_reward(directory: Path, *steps: int, name: str = "tiny") -> Config:
    """The table `reward` of a run that is held at these steps, or at its second one."""
    hold(directory, *(steps or (2,)), name=name)
    return {"function": f"{directory / 'reward.py'}:held", "timeout": 900.0}


def trained_steps(run: Path) -> int:
    """How many steps the metrics show. A step that was trained again after a death counts again."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"StepTrained"') if metrics.exists() else 0


def when_step(run: Path, step: int, act: Callable[[], object]) -> Beside:
    """Does something from outside as soon as the metrics show that step. The run must not be over by then, however long this takes: it has
    no end by itself, or is held (`at_steps`)."""

    def watch() -> None:
        until(lambda: trained_steps(run) >= step)
        act()

    return Beside(watch)


def at_steps(config: Config, acts: Mapping[int, Callable[[], object]]) -> Beside:
    """Does something from outside at each of these steps, while the run goes on. It is held one step later until that is done, so it
    needs `max_lag` + 2 steps behind the last of them."""
    directory, name = Path(config["out"]).parent, config["name"]
    config["reward"] = held_reward(directory, *(step + 1 for step in acts), name=name)

    def watch() -> None:
        for step, act in acts.items():
            try:
                until(lambda step=step: trained_steps(directory / "runs" / name) >= step)  # type: ignore[misc]
                act()
            finally:
                release(directory, step + 1)

    return Beside(watch)


def until_noted(run: Path, kind: type, count: int = 1) -> None:
    """Returns when the metrics have so many facts of that kind."""
    until(lambda: len(of(run, kind)) >= count)


def of(directory: Path, kind: type) -> list[Any]:
    """What the metrics have of that kind."""
    return [fact for fact in read_metrics(directory) if isinstance(fact, kind)]


def workers_of(pid: int) -> dict[str, int]:
    """The worker processes of a controller, by kind."""
    return dict(_workers(pid))


def engines_of(pid: int) -> list[int]:
    """The processes of a controller's own engines."""
    return [worker for kind, worker in _workers(pid) if kind == "engine"]


def _workers(pid: int) -> Iterator[tuple[str, int]]:
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):  # no process, or gone meanwhile
            continue
        if parent == pid and b"headrace.run.worker.worker" in words:
            yield words[words.index(b"headrace.run.worker.worker") + 1].decode(), int(entry.name)


def ranks_of(pid: int) -> list[int]:
    """The processes of a controller's trainer, in the order of their ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, stat = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        parent, *_ = stat.rsplit(")", 1)[1].split()[1:]
        if int(parent) == pid and b"headrace.run.worker.worker" in words and b"trainer" in words:
            found.append(int(entry.name))
    return sorted(found)


_CHILD = """
import json, sys, headrace
headrace.train(json.loads(sys.argv[1]))
"""


@contextmanager
def killed_at_end(config: Config) -> Iterator[subprocess.Popen[bytes]]:
    """Runs it in a process of its own, which SIGKILL ends with the context."""
    child = preloaded_python.Program([sys.executable, "-c", _CHILD, json.dumps(config)], stdout=subprocess.DEVNULL)
    try:
        yield child
        assert child.poll() is None, "it ended before it was killed"
    finally:
        child.kill()
        child.wait()


def has_step(directory: Path) -> bool:
    """Whether its journal has a step."""
    return count_steps(directory) > 0


def kill_when(config: Config, true: Callable[[], object]) -> None:
    """Runs it in a process of its own, and kills that with SIGKILL when it is true. The run has no end before."""
    with killed_at_end(config) as child:
        until(lambda: child.poll() is not None or true())


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint."""
    (last,) = sorted((run / "checkpoints").iterdir())[-1:]
    found: dict[str, torch.Tensor] = {}
    for path in sorted(last.rglob("*.safetensors")):
        found |= load_file(path)
    assert found
    return found


SYNCHRONOUS: dict[str, Any] = {
    "engine": {"exact": True, "threads": 1, "path": "hf"},
    "staleness": {"max_lag": 0, "groups_per_step": 2},
    "train": {"steps": 3, "threads": 1, "path": "torch"},
}
"""Tables with which two runs of the same seed have the same weights, wherever their engines are."""
