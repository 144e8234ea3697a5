"""What does `train.parity = "bitwise"` cost for a whole optimizer step?

    python benchmarks/parity_step.py [--dtype float32] [--mixture] [--prompts 4] [--samples 4] [--rounds 5]

SmolLM2-135M-Instruct, or a mixture made of it. The engine samples from the weights that train; two trainers, one with the mode and one
without, step on the same rows in turns. After each step, outside of the clock, the weights are put back, so that the next one is proven
too. Seconds of CPU time on one thread, medians of rounds after one that warms up; the ratio is the median of those within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from capabilities import upcycle
from engine import tokenised
from engine_loads import Text
from trainer_headrace import advantages, batch_of, completion_length

from headrace.algo.config import AlgoConfig
from headrace.batches import Batch
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.models.resolve import resolve_model
from headrace.native.memory import keep_freed_memory
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer
from headrace.types import Request, Sampling
from headrace.weights import WeightUpdate

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
        numbers = random.Random(0)
        prompts = [text.cut(numbers.randint(180, 220)) for _ in range(options.prompts)]
        counts = [completion_length(numbers) for _ in range(options.prompts * options.samples)]
        groups = sampled(model, trainers["bitwise"], prompts, counts)
        before = {name: one.detach().clone() for name, one in trainers["bitwise"].parameters()}
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(options.rounds + 1):
            for mode in MODES if number % 2 else MODES[::-1]:
                found[mode].append(seconds(trainers[mode], batch_of(groups, number), mode == "bitwise"))
                put_back(trainers[mode], before)
    off, bitwise = (statistics.median(found[mode][1:]) for mode in MODES)
    print({mode: [round(one, 2) for one in some] for mode, some in found.items()})
    print(
        f"{options.dtype}, {sum(counts):,} tokens in the loss: {off:.2f} s off, {bitwise:.2f} bitwise, {bitwise / off:.2f}"
    )


def trainer_of(model: Path, dtype: str, mode: str) -> TorchTrainer:
    config = TrainConfig(learning_rate=1e-6, dtype=dtype, parity=mode)  # type: ignore[arg-type]
    return TorchTrainer(model, config, AlgoConfig(name="grpo"), seed=0)


def sampled(model: Path, trainer: TorchTrainer, prompts: list[list[int]], counts: list[int]) -> list[dict]:
    dtype = getattr(torch, trainer.dtype)
    engine = NativeEngine(model, EngineConfig(dtype=trainer.dtype, kv_gib=2.0, max_running=64, context_length=640))
    update = WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0)
    engine.swap(engine.prepare(update, {name: one.detach().to(dtype) for name, one in trainer.parameters()}))
    samples = len(counts) // len(prompts)
    for index, count in enumerate(counts):
        sampling = Sampling(max_tokens=count, ignore_eos=True, seed=index)
        engine.add(Request(str(index), tuple(prompts[index // samples]), sampling))
    rows: list[dict] = [{"tokens": [], "logprobs": []} for _ in counts]
    while engine.has_work():
        output = engine.step()
        for name, token, logprob in zip(output.request_ids, output.tokens, output.logprobs, strict=True):
            rows[int(name)]["tokens"].append(token)
            rows[int(name)]["logprobs"].append(logprob)
    rewards, groups = random.Random(1), []
    for number, prompt in enumerate(prompts):
        own = rows[number * samples : (number + 1) * samples]
        groups.append({"prompt": prompt, "rows": own, "advantages": advantages([rewards.random() for _ in own])})
    return groups


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
