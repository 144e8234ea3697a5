"""headrace's part of end_to_end.py: the prompts of all systems, its own run, and the evaluation of all weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from end_to_end_reward import right_number
from safetensors.torch import load_file, save_file
from trainer_process import Json, child_main

import headrace
from headrace.core.types import Prompt, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.facts.facts import CheckpointSaved, EngineSample, TicketDrawn, WeightsLive
from headrace.facts.records import StepRow, read_metrics
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_task
from headrace.run.config import load_config
from headrace.trainer.step.checkpoint import MODEL

LOOK = 5.0
"""Seconds between two looks at a run's metrics."""


def main(options: Json) -> Json:
    return {"prompts": prompts, "train": train, "evaluate": evaluate}[options["work"]](options)


# -- prompts ----------------------------------------------------------------------------------------------------------------


def prompts(options: Json) -> Json:
    """Returns the prompts that a run of this seed draws, in order, and the held-out ones."""
    config = load_config(options["config"], [f"task.held_out={options['held_out']}", "eval.prompts=0"])
    task = build_task(config.task, ChatEncoder(options["model"]), options["seed"])
    drawn = [row_of(task.draw()) for _ in range(options["count"])]
    return {"train": drawn, "held_out": [row_of(one) for one in task.held_out(options["held_out"])]}


def row_of(prompt: Prompt) -> Json:
    return {"text": prompt.text, "tokens": prompt.tokens, "answer": prompt.columns["answer"]}


# -- the run ----------------------------------------------------------------------------------------------------------------


def train(options: Json) -> Json:
    folder = Path(options["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    sets = {
        "name": "run",
        "out": str(folder),
        "seed": options["seed"],
        "task.held_out": options["held_out"],
        "rollout.group_size": options["group_size"],
        "rollout.max_tokens": options["max_tokens"],
        "staleness.groups_per_step": options["groups"],
        "staleness.max_lag": options["max_lag"],
        "train.steps": options["steps"],
        "train.learning_rate": options["learning_rate"],
        "train.warmup_steps": options["warmup"],
        "checkpoint.every": options["every"],
        "checkpoint.keep": 10_000,
        "eval.prompts": 0,
        "eval.every": 0,
        "observe.terminal": "off",
    }
    settings = [*(f"{name}={json.dumps(value)}" for name, value in sets.items()), *options["sets"]]
    watch = Watch(folder / "run", options)
    watch.start()
    result = headrace.train(options["config"], sets=settings, reward=right_number)
    watch.done.set()
    found = summary(result.directory, folder / "weights", Path(options["model"]))
    return {**found, "stopped": watch.why or result.reason}


class Watch(threading.Thread):
    """Ends the run, as Ctrl-C does, when its rollouts have been good enough for long enough, or its time is over."""

    def __init__(self, run: Path, options: Json) -> None:
        super().__init__(daemon=True)
        self._run, self._options = run, options
        self.done, self.why = threading.Event(), ""

    def run(self) -> None:
        began = 0.0
        while not self.done.wait(LOOK):
            rewards = [fact.reward_drawn for fact in self._facts() if isinstance(fact, StepRow)]
            began = began or (time.monotonic() if rewards else 0.0)
            last = rewards[-self._options["window"] :]
            if len(last) == self._options["window"] and statistics.mean(last) >= self._options["enough"]:
                self.why = "good enough"
            elif began and time.monotonic() - began > self._options["limit"]:
                self.why = "out of time"
            if self.why:
                os.kill(os.getpid(), signal.SIGINT)
                return

    def _facts(self) -> list[Any]:
        try:
            return list(read_metrics(self._run))
        except (headrace.core.errors.HeadraceError, OSError):  # it has not begun
            return []


def summary(run: Path, weights: Path, model_dir: Path) -> Json:
    facts = read_metrics(run)
    begin = next(fact.t for fact in facts if isinstance(fact, TicketDrawn))
    saves = [fact for fact in facts if isinstance(fact, CheckpointSaved) and not fact.error]
    steps = [fact for fact in facts if isinstance(fact, StepRow)]
    names = parameters_from_dir(model_dir, torch.bfloat16).keys()
    points, spent_saving = [], 0.0
    for save in saves:
        path = lowered(Path(save.path), weights, names)
        points.append(
            {"step": save.step, "seconds": save.t - save.seconds - begin - spent_saving, "weights": str(path)}
        )
        spent_saving += save.held
    training = steps[-1].t - begin - sum(save.held for save in saves if save.t <= steps[-1].t)
    return {
        "points": points,
        "steps": len(steps),
        "seconds": training,
        "rewards": [step.reward_drawn for step in steps],
        "spent": spent(facts, steps),
    }


def lowered(checkpoint: Path, to: Path, names: Any) -> Path:
    """Keeps the weights as they are served, and deletes the checkpoint, which is six times as large."""
    to.mkdir(exist_ok=True)
    path = to / f"{checkpoint.name}.safetensors"
    tensors = load_file(checkpoint / MODEL)
    save_file({name: tensors[name].to(torch.bfloat16) for name in names}, path)
    shutil.rmtree(checkpoint)
    return path


def spent(facts: Any, steps: list[StepRow]) -> Json:
    """Returns the seconds per step. Engine and trainer work at the same time."""
    live = [fact.update.seconds for fact in facts if isinstance(fact, WeightsLive)]
    samples = [fact.stats.busy_seconds for fact in facts if isinstance(fact, EngineSample)]
    return {
        "generation": (samples[-1] - samples[0]) / len(steps) if samples else 0.0,
        "loss, backward, update": statistics.mean(step.report.seconds for step in steps),
        "weight sync": statistics.mean(live),
        "trainer waits": statistics.mean(step.wait_seconds for step in steps),
    }


# -- evaluation -------------------------------------------------------------------------------------------------------------


def evaluate(options: Json) -> Json:
    """Returns the mean reward on the held-out prompts for each of `weights`; an empty one is the initial model."""
    model_dir = Path(options["model"])
    decode = ChatEncoder(model_dir).decode
    rows = json.loads(Path(options["prompts"]).read_text())["held_out"]
    config = EngineConfig(dtype="bfloat16", kv_gib=0.5, max_running=64, context_length=options["context"])
    engine, found = NativeEngine(model_dir, config), []
    for version, path in enumerate(options["weights"]):
        tensors = load_file(path) if path else parameters_from_dir(model_dir, torch.bfloat16)
        engine.swap(
            engine.prepare(WeightUpdate(version=version, kind="full", fingerprint="", nbytes=0, seconds=0.0), tensors)
        )
        found.append(measured(engine, rows, options, decode))
    return {"evaluated": found}


def measured(engine: NativeEngine, rows: list[Json], options: Json, decode: Any) -> Json:
    samples = options["samples"]
    for index, row in enumerate(rows):
        for number in range(samples):
            sampling = Sampling(max_tokens=options["max_tokens"], seed=index * samples + number)
            engine.add(Request(f"{index}/{number}", tuple(row["tokens"]), sampling))
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        output = engine.step()
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            tokens.setdefault(request_id, []).append(token)
    means = []
    for index, row in enumerate(rows):
        texts = [decode(tokens[f"{index}/{number}"]) for number in range(samples)]
        means.append(statistics.mean(right_number(texts, [row["answer"]] * samples)))
    return {"reward": statistics.mean(means), "sem": statistics.stdev(means) / len(means) ** 0.5}


if __name__ == "__main__":
    child_main(main)
