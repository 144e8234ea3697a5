"""A whole run of a tiny model: its settings, what it wrote, and what is done to it from outside while it is under way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.durable.journal import count_steps
from headrace.observe.records import read_metrics

Config = dict[str, Any]

REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def share_of_e(prompts, completions, **columns):
    return [text.count("e") / max(len(text), 1) for text in completions]

def share_of_o(prompts, completions, **columns):
    return [text.count("o") / max(len(text), 1) for text in completions]

def held(prompts, completions, **columns):
    metrics = HERE / "runs" / "tiny" / "metrics.jsonl"
    while metrics.exists() and metrics.read_text().count('"StepTrained"') >= 2 and not (HERE / "released").exists():
        time.sleep(0.05)
    return share_of_e(prompts, completions)
"""


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


def held_reward(directory: Path) -> Config:
    """The table `reward` of a run that does not get far beyond its second step until `release` is called, however slow the machine is."""
    return {"function": f"{directory / 'reward.py'}:held", "timeout": 900.0}


def release(directory: Path) -> None:
    (directory / "released").write_text("")


def of(directory: Path, kind: type) -> list[Any]:
    """What the metrics have of that kind."""
    return [fact for fact in read_metrics(directory) if isinstance(fact, kind)]


def seconds_to_import(module: str) -> float:
    """In a process of its own, on the machine as busy as it is now."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.monotonic() - began


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
        if parent == pid and b"headrace.orchestration.workers.worker" in words:
            yield words[words.index(b"headrace.orchestration.workers.worker") + 1].decode(), int(entry.name)


def ranks_of(pid: int) -> list[int]:
    """The processes of a controller's trainer, in the order of their ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, stat = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        parent, *_ = stat.rsplit(")", 1)[1].split()[1:]
        if int(parent) == pid and b"headrace.orchestration.workers.worker" in words and b"trainer" in words:
            found.append(int(entry.name))
    return sorted(found)


def when_step(directory: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Does something from outside as soon as the metrics show that step."""

    def watch() -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            metrics = directory / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count('"StepTrained"') >= step:
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


_CHILD = """
import json, sys, headrace
headrace.train(json.loads(sys.argv[1]))
"""


@contextmanager
def killed_at_end(config: Config) -> Iterator[subprocess.Popen[bytes]]:
    """Runs it in a process of its own, which SIGKILL ends with the context."""
    child = subprocess.Popen([sys.executable, "-c", _CHILD, json.dumps(config)], stdout=subprocess.DEVNULL)
    try:
        yield child
        assert child.poll() is None, "it ended before it was killed"
    finally:
        child.kill()
        child.wait()


def has_step(directory: Path) -> bool:
    """Whether its journal has a step."""
    return (directory / "journal.jsonl").is_file() and count_steps(directory) > 0


def kill_after_a_step(config: Config, directory: Path) -> None:
    """Runs it in a process of its own, and kills that with SIGKILL as soon as its journal has a step."""
    deadline = time.monotonic() + 400
    with killed_at_end(config) as child:
        while not has_step(directory):
            assert child.poll() is None and time.monotonic() < deadline, "it ended before it was killed"
            time.sleep(0.01)


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
