"""Whole runs on one GPU, each a process of `headrace train`, and what is done to them while they are under way.

The demo's model and its task are used where they are (`headrace demo` fetches them); else random weights of its shape and a task that needs nothing, with which every check
holds and only the reward says less.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.device import loads
from benchmarks.device.loads import Bench
from headrace.core.errors import ConfigError
from headrace.facts.records import METRICS, StepRow, read_metrics
from headrace.models.resolve import resolve_model

ROOT = Path(__file__).parent.parent.parent
STEPS, SHORT = 40, 6
LIMIT, REHEARSED = 75.0, 600.0
"""Seconds of one run."""
KILL_AT = 3
"""Steps after which a process is killed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    sets: tuple[str, ...]
    formula: str
    gpu: bool = False
    """Whether only a GPU has it."""
    kills: str = ""
    """`engine` (of headrace's own, or a server that the run starts) or `run`."""
    package: str = ""
    """One that it needs beside headrace."""
    limit: float = LIMIT
    """Seconds that it may take on a device."""

    @property
    def run_name(self) -> str:
        return self.name.replace(" ", "-").replace(",", "")


def recipe(bench: Bench) -> tuple[Path, str]:
    """Returns a config, and what it is if it is not the demo's."""
    if not bench.tiny and importlib.util.find_spec("reasoning_gym"):
        try:
            resolve_model("smollm2-135m-instruct")
            return ROOT / "recipes" / "demo" / "demo.toml", ""
        except ConfigError as error:
            words = f"random weights: {str(error)[:100]}"
    else:
        words = "random weights and another task: reasoning-gym is not here"
    return own_config(bench), words


def own_config(bench: Bench) -> Path:
    """A task of letters on random weights, with nothing that has to be fetched. The model is beside it."""
    folder = bench.folder / "own"
    if (path := folder / "own.toml").exists():
        return path
    folder.mkdir()
    save_model(bench, folder / "model")
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{number} + {number}?"}) for number in range(200))
    )
    reward = "def share_of_e(prompts, completions, **columns):\n    return [text.count('e') / max(len(text), 1) for text in completions]\n"
    (folder / "reward.py").write_text(reward)
    config = f"""
model.path = "{folder / "model"}"
task = {{ kind = "jsonl", path = "{folder / "rows.jsonl"}", held_out = 16 }}
reward.function = "{folder / "reward.py"}:share_of_e"
rollout = {{ group_size = 4, max_tokens = {bench.size(24, 8)} }}
train = {{ steps = {STEPS}, learning_rate = 1e-3 }}
engine = {{ kv_gib = {bench.size(1, 1) if bench.device == "cuda" else 0.02}, context_length = 64, max_running = 16 }}
staleness = {{ groups_per_step = 4, max_lag = 1 }}
eval = {{ prompts = 8 }}
"""
    path.write_text(config)
    return path


def save_model(bench: Bench, directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "<end>", "<user>", "<assistant>", "<system>"]
    vocabulary = {
        word: number for number, word in enumerate([*special, *"0123456789abcdefghijklmnopqrstuvwxyz +-=?.,:\n"])
    }
    settings = {**loads.MODELS["135m"], **(loads.TINY if bench.tiny else {}), "vocab_size": len(vocabulary)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **settings, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    turns = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    (directory / "chat_template.jinja").write_text(turns + "{% if add_generation_prompt %}<assistant>{% endif %}")


# --- runs ----------------------------------------------------------------------------------------------------------------------


def sets(bench: Bench, steps: int) -> list[str]:
    prompts = bench.size(32, 4)
    return [
        "train.minutes=0",
        f"train.steps={steps}",
        f"eval.prompts={prompts}",
        "observe.terminal=off",
        f"out={bench.folder / 'runs'}",
    ]


def checked(bench: Bench, recipe: Path, case: Case) -> tuple[bool | None, str]:
    """Returns whether the run came to its end with all its steps, and what it said otherwise. None: it cannot be tried here."""
    if case.gpu and bench.device == "cpu":
        return None, "needs a GPU"
    if case.package and importlib.util.find_spec(case.package) is None:
        return None, f"{case.package} is not here"
    name = case.run_name
    run = start(bench, recipe, name, [*sets(bench, SHORT), *case.sets])
    if case.kills:
        if (
            not _until(lambda: len(steps(bench, name)) >= KILL_AT or run.poll() is not None, bench.size(60, 600))
            or run.poll() is not None
        ):
            return False, f"it did not come to step {KILL_AT}: {ended(bench, run, name, case.limit)[1]}"
        victims = [run.pid] if case.kills == "run" else _engines(run.pid)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if case.kills == "run":
            run.wait()
            run = start(bench, None, name, ["--resume", str(bench.folder / "runs" / name)])
        elif not victims:
            return False, "no engine was found"
    code, said = ended(bench, run, name, case.limit)
    done = max((row.report.step + 1 for row in steps(bench, name)), default=0)
    return (
        code == 0 and done == SHORT,
        "" if code == 0 and done == SHORT else f"{done} steps, exit status {code}: {said}",
    )


def start(bench: Bench, recipe: Path | None, name: str, words: list[str]) -> subprocess.Popen[bytes]:
    """`words`: settings, or with no recipe the arguments as they are."""
    arguments = (
        [str(recipe), "--name", name, *(word for setting in words for word in ("--set", setting))] if recipe else words
    )
    log = (bench.folder / f"{name}.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", *arguments],
        cwd=bench.folder,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
    )


def ended(bench: Bench, run: subprocess.Popen[bytes], name: str, limit: float = LIMIT) -> tuple[int, str]:
    """Waits for the end of a run, up to its limit. Returns the exit status and its last words."""
    try:
        code = run.wait(REHEARSED if bench.tiny else limit)
    except subprocess.TimeoutExpired:
        run.terminate()
        try:
            run.wait(10)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
        code = 124
    return code, (bench.folder / f"{name}.log").read_text(errors="replace").strip()[-300:].replace("\n", " ")


def steps(bench: Bench, name: str) -> list[StepRow]:
    directory = bench.folder / "runs" / name
    return (
        [fact for fact in read_metrics(directory) if isinstance(fact, StepRow)]
        if (directory / METRICS).exists()
        else []
    )


def _engines(parent: int) -> list[int]:
    """The processes of a run's own engines, or of the servers that it has started, whose parent is their guard."""
    own = _children(parent, b"headrace.run.worker.worker", b"engine")
    return own or [
        pid for guard in _children(parent, b"headrace.engine.servers.server_guard") for pid in _children(guard)
    ]


def _children(parent: int, *words: bytes) -> list[int]:
    """The children of a process in whose command these words are."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == parent and all(word in command for word in words):
            found.append(int(entry.name))
    return found


def _until(holds: Callable[[], Any], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if holds():
            return True
        time.sleep(0.2)
    return False
