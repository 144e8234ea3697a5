"""The processes of busy.py: `busy_child.py KIND [NUMBER]`. Workers read seconds from stdin, one number per line, and
answer with their output in about that time ("inf": until the next line). Loads never end by themselves.

    engine N     decodes N sequences                      -> tokens
    trainer N    optimizer steps on N completions         -> tokens trained
    count        counts, in Python, in one thread         -> the result of a core that is free half of the time
    loop         never rests
    take MS      works MS of every 10 ms before all others (real-time priority), and sleeps for the rest
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, NEW = 32, 128
VOCABULARY = 40_000
"""Token ids of prompts are below this."""


def main() -> None:
    kind, number = sys.argv[1], int((sys.argv[2:3] or ["0"])[0])
    if kind in ("loop", "take"):
        load(number if kind == "take" else 10)
    work = {"engine": engine, "trainer": trainer, "count": lambda _: count}[kind](number)
    print("ready", flush=True)
    for line in sys.stdin:
        started, done = time.perf_counter(), 0
        until = started + float(line)  # inf: until another line comes, which is lost
        while time.perf_counter() < until and not (until == float("inf") and select.select([sys.stdin], [], [], 0)[0]):
            done += work()
        if until == float("inf"):
            sys.stdin.readline()
        print(json.dumps([done, time.perf_counter() - started]), flush=True)


def load(of_ten: int) -> None:
    if of_ten < 10:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    while True:
        until = time.perf_counter() + of_ten / 1000
        while time.perf_counter() < until:
            pass
        if of_ten < 10:
            time.sleep((10 - of_ten) / 1000)


def count() -> int:
    total = 0
    for _ in range(200_000):
        total += 1
    return total


def model() -> Path:
    from headrace.models.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct", lambda line: print(line, file=sys.stderr))


def engine(sequences: int) -> Callable[[], int]:
    import torch

    from headrace.core.types import Request, Sampling
    from headrace.core.weights import WeightUpdate
    from headrace.engine.config import EngineConfig
    from headrace.engine.native.core import NativeEngine
    from headrace.engine.native.runners.skeleton import parameters_from_dir

    made = NativeEngine(model(), EngineConfig(dtype="bfloat16", kv_gib=0.5, max_running=sequences, context_length=256))
    weights = parameters_from_dir(model(), torch.bfloat16)
    made.swap(made.prepare(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), weights))
    numbers, sent = random.Random(0), 0

    def add(tokens: int) -> None:
        nonlocal sent
        prompt = tuple(numbers.randrange(VOCABULARY) for _ in range(PROMPT))
        made.add(Request(str(sent), prompt, Sampling(max_tokens=tokens, ignore_eos=True, seed=sent)))
        sent += 1

    def step() -> int:
        output = made.step()
        for _ in output.finished:
            add(NEW)
        return len(output.tokens)

    for i in range(sequences):
        add(1 + NEW * (i + 1) // sequences)  # they end one after the other, so that every window looks the same
    for _ in range(4):
        step()
    return step


def trainer(completions: int) -> Callable[[], int]:
    from headrace.algo.config import AlgoConfig
    from headrace.core.batches import Batch, Group, Row
    from headrace.core.types import Prompt
    from headrace.trainer.config import TrainConfig
    from headrace.trainer.step.trainer import TorchTrainer

    numbers = random.Random(0)
    made = TorchTrainer(model(), TrainConfig(learning_rate=1e-9), AlgoConfig(name="grpo"), seed=0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(VOCABULARY) for _ in range(count))

    def group(ticket: int) -> Group:
        prompt = Prompt(str(ticket), "", tokens(PROMPT))
        rows = []
        for i in range(8):
            new = tokens(numbers.randint(12, 24))
            flat = [(value,) * len(new) for value in (-9.0, (-1.0) ** i, True, made.version)]
            rows.append(Row(prompt.tokens, new, *flat))  # type: ignore[arg-type]
        return Group(ticket, prompt, (), tuple(rows))

    def step() -> int:
        batch = Batch(made.version, tuple(group(ticket) for ticket in range(completions // 8)))
        return made.step(batch).loss_tokens

    step()
    return step


if __name__ == "__main__":
    main()
