"""The ceiling of engine.py, as a contender: the model's own matrix products alone, `engine_ceiling.py MODEL_DIR`.

One step is, for every layer, the fused projections (q, k and v; o; gate and up; down) and then the head, each over its own
weights, so that they come from memory as they do in a decoder: bf16, prepacked by oneDNN, one row per running sequence. Nothing
else: no attention, no norms, no sampling, no prompts. Below 8 rows they are padded to 8 where that is faster.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from engine_loads import Load
from engine_serve import Done, Run, serve
from torch import Tensor

SECONDS = 3.0
"""Least seconds of a measurement."""
PADDED = 8


def start(arguments: list[str]) -> Run:
    shapes = products(Path(arguments[0]))

    @torch.inference_mode()
    def run(load: Load) -> Done:
        rows = load.at_once
        step = min(timed_step(shapes, count, SECONDS) for count in {rows, max(rows, PADDED)})
        return Done(step, rows, notes={"ms_per_step": f"{step * 1e3:.1f}"})

    return run


def products(model_dir: Path) -> list[tuple[int, int]]:
    """Returns (inputs, outputs) of every matrix product of one decoding step, in order."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries = config.num_attention_heads * head
    layer = [
        (hidden, queries + 2 * config.num_key_value_heads * head),
        (queries, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]
    return layer * config.num_hidden_layers + [(hidden, config.vocab_size)]


def timed_step(shapes: list[tuple[int, int]], rows: int, seconds: float) -> float:
    """Returns the seconds of the fastest pass over all products: a ceiling is the result of an undisturbed machine."""
    inputs = {width: torch.randn(rows, width, dtype=torch.bfloat16) for width, _ in shapes}
    weights = [prepacked(torch.randn(wide, width, dtype=torch.bfloat16) / width**0.5, rows) for width, wide in shapes]
    work = [(inputs[width], weight) for (width, _), weight in zip(shapes, weights, strict=True)]
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        started = time.perf_counter()
        for rows_in, weight in work:
            torch.ops.mkldnn._linear_pointwise(rows_in, weight, None, "none", [], "")
        times.append(time.perf_counter() - started)
    return min(times)


def prepacked(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


if __name__ == "__main__":
    serve(start)
