"""What filters cost: CPU time of drawing from the logits of one decoding step, beside the step itself, in turns in one process.

    python benchmarks/filters.py [--model smollm2-135m-instruct] [--sequences 64] [--rounds 9]

Prints, for each kind of request, milliseconds for all rows by the kernels and by PyTorch's sampler, and the step with it over the step with
a plain draw. Sequences decode different texts, so that their distributions are those of language.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from engine import tokenised
from engine_loads import Text

from headrace.engine.config import EngineConfig
from headrace.engine.native.draws import DrawDetails, Settings
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput, Runner
from headrace.engine.native.model_loading import read_model
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.engine.native.sampler import draw
from headrace.models.resolve import resolve_model

KINDS: dict[str, tuple[dict[str, float], bool, int]] = {
    "plain": ({}, False, 0),
    "temperature 0": ({"temperature": 0}, False, 0),
    "top-p 0.95": ({"top_p": 0.95}, False, 0),
    "top-p 0.95, mask": ({"top_p": 0.95}, True, 0),
    "top-k 50, mask": ({"top_k": 50}, True, 0),
    "min-p 0.05, mask": ({"min_p": 0.05}, True, 0),
    "all three, mask": ({"top_p": 0.95, "top_k": 50, "min_p": 0.05}, True, 0),
    "top-p 0.95 at temperature 3": ({"top_p": 0.95, "temperature": 3}, True, 0),
    "8 top log-probs": ({}, False, 8),
}
"""Sampling settings, whether the mask is wanted, top log-probs."""


def step_of(model_dir: Path, sequences: int) -> tuple[Runner, ForwardInput]:
    """A runner with prompts of 32 tokens in its cache, and the next step of all of them."""
    config = EngineConfig(device="cpu", dtype="bfloat16", kv_gib=1.0, context_length=64, path="kernels")
    model = read_model(model_dir, config)
    runner, text = model.runner, Text(tokenised(model_dir), 1)
    runner.allocate(2 * sequences)
    runner.use(model.prepare(parameters_from_dir(model_dir, torch.bfloat16)))
    prompts = [text.cut(BLOCK) for _ in range(sequences)]
    tables = np.arange(2 * sequences, dtype=np.int32).reshape(sequences, 2)
    batch = {"tables": tables, "adapters": np.full(sequences, -1, np.int32)}
    nothing, each = np.zeros(sequences, np.int32), np.arange(sequences + 1, dtype=np.int32)
    first = ForwardInput(
        tokens=np.array(prompts).ravel(),
        starts=each * BLOCK,
        context=nothing,
        rows=each[1:] * np.int64(BLOCK) - 1,
        **batch,
    )
    tokens = runner.forward(first).logits.argmax(-1).numpy()
    return runner, ForwardInput(tokens=tokens, starts=each, context=nothing + BLOCK, rows=np.arange(sequences), **batch)


def settings_of(rows: int, *, temperature: float = 1, top_k: float = 0, top_p: float = 1, min_p: float = 0) -> Settings:
    column = lambda value, dtype=np.float64: np.full(rows, value, dtype)  # noqa: E731
    return Settings(
        temperature=column(temperature),
        top_k=column(top_k, np.int64),
        top_p=column(top_p),
        min_p=column(min_p),
        seed=np.arange(rows, dtype=np.uint64),
        counter=column(0, np.int64),
    )


def milliseconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = options.sequences
    runner, batch = step_of(Path(resolve_model(options.model)), rows)
    steps, ours, theirs = [], {name: [] for name in KINDS}, {name: [] for name in KINDS}
    for _ in range(options.rounds):
        steps.append(milliseconds(lambda: runner.forward(batch)))
        forward = runner.forward(batch)
        for name, (filters, masked, top) in KINDS.items():
            settings = settings_of(rows, **filters)
            wanted = DrawDetails(masks=np.full(rows, masked), tops=np.full(rows, top))
            for found, whose in ((ours, forward), (theirs, ForwardOutput(forward.logits))):
                found[name].append(milliseconds(lambda: draw(whose, settings, None, wanted)))  # noqa: B023
    step = statistics.median(steps)
    plain = step + statistics.median(ours["plain"])
    print(f"{rows} sequences, a pass without drawing: {step:.1f} ms of CPU time (medians of {options.rounds})")
    print(
        "| | kernels, ms | PyTorch and numpy, ms | step, of a plain one | the same by PyTorch |\n|---|---|---|---|---|"
    )
    for name in KINDS:
        a, b = statistics.median(ours[name]), statistics.median(theirs[name])
        print(f"| {name} | {a:.1f} | {b:.1f} | {(step + a) / plain:.3f} | {(step + b) / plain:.3f} |")


if __name__ == "__main__":
    main()
