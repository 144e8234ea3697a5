"""What does `train.parity = "bitwise"` cost for a whole optimizer step?

    python benchmarks/parity_step.py [--dtype float32] [--mixture] [--prompts 4] [--samples 4] [--rounds 5]

SmolLM2-135M-Instruct, or a mixture made of it. The engine samples from the weights that train; two trainers, one with the mode and one
without, step on the same rows in turns. After each step, outside of the clock, the weights are put back, so that the next one is proven
too. Seconds of CPU time on one thread, medians of rounds after one that warms up; the ratio is the median of those within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from capabilities import upcycle
from engine import tokenised
from engine_loads import Text
from trainer_headrace import batch_of, sampled_groups

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch
from headrace.models.resolve import resolve_model
from headrace.native.memory import keep_freed_memory
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer

MODES = ("off", "bitwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--mixture", action="store_true")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as directory:
        model = resolve_model("smollm2-135m-instruct")
        text = Text(tokenised(model), seed=0)
        if options.mixture:
            upcycle(model, Path(directory))
            model = Path(directory)
        trainers = {mode: trainer_of(model, options.dtype, mode) for mode in MODES}
        dtype = getattr(torch, options.dtype)
        weights = {name: one.detach().to(dtype) for name, one in trainers["bitwise"].parameters()}
        groups = sampled_groups(model, weights, text, options.prompts, options.samples)
        before = {name: one.detach().clone() for name, one in trainers["bitwise"].parameters()}
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(options.rounds + 1):
            for mode in MODES if number % 2 else MODES[::-1]:
                found[mode].append(seconds(trainers[mode], batch_of(groups, number), mode == "bitwise"))
                put_back(trainers[mode], before)
    off, bitwise = (found[mode][1:] for mode in MODES)
    ratios = sorted(one / other for one, other in zip(bitwise, off, strict=True))
    print(f"{options.dtype}: {statistics.median(off):.2f} s off, {statistics.median(bitwise):.2f} bitwise")
    print(f"within a round {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def trainer_of(model: Path, dtype: str, mode: str) -> TorchTrainer:
    config = TrainConfig(learning_rate=1e-6, dtype=dtype, parity=mode)  # type: ignore[arg-type]
    return TorchTrainer(model, config, AlgoConfig(name="grpo"), seed=0)


def seconds(trainer: TorchTrainer, batch: Batch, proves: bool) -> float:
    begin = time.process_time()
    report = trainer.step(batch)
    spent = time.process_time() - begin
    assert not proves or report.bitwise_tokens == report.loss_tokens, "every token is proven"
    return spent


def put_back(trainer: TorchTrainer, before: dict[str, torch.Tensor]) -> None:
    """In place, as an optimizer writes: what was made of the weights is made anew."""
    with torch.no_grad():
        for name, one in trainer.parameters():
            one.copy_(before[name])


if __name__ == "__main__":
    main()
