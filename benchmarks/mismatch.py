"""What mismatch between sampler and trainer is safe? Learning from a quantised sampler, from eight bits down to one, with and without a correction.

A random Llama of two layers samples eight letters through the engine's C++ kernels; the reward is the share of those that are the letter which the prompt's
digit asks for. It is trained by the same model in PyTorch, synchronously, so that quantisation is the only difference between the two policies.
`engine.weights = "int8"` has 127 levels on either side of zero; fewer are coarser codes through the same kernels, for which only this
benchmark asks. What is measured are the weights that were *trained*, unquantised.

    nice -n 10 python benchmarks/mismatch.py --rows rows.jsonl [--levels 0 127 31 15 7 3 2 1] [--ways tis mis clip none] [--seeds 0 1 2]
    python benchmarks/mismatch.py --rows rows.jsonl --table

A finished training is a line of `rows.jsonl`, and is not done again; `--table` prints the table of the lines that are there. One thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.kernels.runner import KernelRunner
from headrace.engine.native.runners.skeleton import read

STEPS, EVERY, RATE = 60, 10, 1e-3
"""Steps of a training, steps between two measurements of its weights, and the learning rate of Adam."""
PROMPTS, SAMPLES, NEW = 10, 8, 8
LETTERS, FIRST, TARGETS = 60, 6, (20, 30)
"""Size of the vocabulary, the digit 0 in it, and the two letters that even and odd digits ask for."""
ROLLOUTS = PROMPTS * SAMPLES
CONFIG = LlamaConfig(
    vocab_size=LETTERS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.1,
)
"""Wide weights: with the usual 0.02 the policy is so uniform that no quantisation changes it."""
CPU = torch.device("cpu")


class Sampled(NamedTuple):
    tokens: Tensor
    """[N, 3 + NEW]"""
    logprobs: Tensor
    """[N, NEW, LETTERS] those of the sampler, float64"""

    @property
    def rewards(self) -> Tensor:
        """[N]"""
        target = torch.tensor(TARGETS)[(self.tokens[:, 1] - FIRST) % 2]
        return (self.tokens[:, 3:] == target[:, None]).double().mean(-1)

    def chosen(self, logprobs: Tensor) -> Tensor:
        """[N, NEW] those of the sampled tokens."""
        return logprobs.gather(-1, self.tokens[:, 3:, None])[..., 0]


class Sampler:
    """The engine's forward pass, with weights of so many levels; 0: as they are."""

    def __init__(self, directory: Path, levels: int) -> None:
        self._runner = KernelRunner(
            read(directory, torch.float32, CPU), 64, dtype=torch.float32, device=CPU, levels=levels
        )
        self._runner.allocate(ROLLOUTS)

    def sample(self, model: LlamaForCausalLM, draws: np.random.Generator) -> Sampled:
        self._runner.use(self._runner.prepare({name: value.detach() for name, value in model.named_parameters()}))
        digits = np.repeat(np.arange(PROMPTS), SAMPLES) + FIRST
        tokens = [np.full(ROLLOUTS, 1), digits, np.full(ROLLOUTS, 46)]
        told = []
        for place in range(NEW):
            new = np.stack(tokens, 1)[:, 3 + place - 1 if place else 0 :]
            logits = self._runner.forward(_pass(new, context=len(tokens) - new.shape[1])).logits
            told.append(logits.double().log_softmax(-1))
            below = told[-1].exp().cumsum(-1).numpy() < draws.random(ROLLOUTS)[:, None]
            tokens.append(below.sum(-1).clip(max=LETTERS - 1))
        return Sampled(torch.from_numpy(np.stack(tokens, 1)), torch.stack(told, 1))


def _pass(new: np.ndarray, context: int) -> ForwardInput:
    """The next tokens [N, n] of all rollouts, each of which has a block of the cache."""
    count, each = new.shape
    return ForwardInput(
        tokens=new.ravel().astype(np.int64),
        starts=np.arange(0, count * each + 1, each, dtype=np.int32),
        context=np.full(count, context, np.int32),
        tables=np.arange(count, dtype=np.int32)[:, None],
        rows=np.arange(each - 1, count * each, each, dtype=np.int64),
        adapters=np.full(count, -1, np.int32),
    )


Way = Callable[[Tensor, Tensor], Tensor]
"""(trainer's log-probs [N, T], sampler's) -> the factor of the advantage, with gradient where it has one."""


def tis(now: Tensor, sampled: Tensor) -> Tensor:
    return (now - sampled).exp().detach().clamp(max=2) * now


def mis(now: Tensor, sampled: Tensor) -> Tensor:
    ratio = (now - sampled).exp().detach()
    return ratio * ((ratio >= 0.5) & (ratio <= 2)) * now


def none(now: Tensor, sampled: Tensor) -> Tensor:
    return now


WAYS: dict[str, Way] = {"tis": tis, "mis": mis, "clip": none, "none": none}
"""Token weights truncated at 2; those outside 0.5 to 2 masked; PPO's clip of 0.2 around the sampler's log-probs, as grpo has it; no weights."""


def loss_of(way: str, now: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
    if way == "clip":
        ratio = (now - sampled).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return -(WAYS[way](now, sampled) * advantage).mean()


def train(directory: Path, way: str, levels: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    sampler, judge = Sampler(directory, levels), Sampler(directory, 0)
    curve, gaps, divergences = [], [], []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            of = [judge.sample(model, np.random.default_rng([99, step, again])).rewards.mean() for again in range(3)]
            curve.append(float(sum(of) / 3))
        if step == STEPS:
            break
        found = sampler.sample(model, np.random.default_rng([seed, step]))
        logprobs = model(found.tokens).logits[:, 2:-1].double().log_softmax(-1)
        now, sampled = found.chosen(logprobs), found.chosen(found.logprobs)
        gaps.append(float((now - sampled).abs().mean()))
        divergences.append(float((found.logprobs.exp() * (found.logprobs - logprobs)).sum(-1).mean()))
        rewards = found.rewards.view(PROMPTS, SAMPLES)
        spread = rewards.std(-1, keepdim=True, correction=0) + 1e-4
        advantage = ((rewards - rewards.mean(-1, keepdim=True)) / spread).view(-1, 1)
        optimizer.zero_grad()
        loss_of(way, now, sampled, advantage).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    kept = {"gap": fmean(gaps), "widest": max(gaps), "kl": fmean(divergences)}
    return {"way": way, "levels": levels, "seed": seed, **kept, "curve": curve}


def with_error(values: list[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else "")


def table(rows: list[dict[str, Any]]) -> None:
    places = (2, STEPS // EVERY)
    after = " | ".join(f"after {EVERY * place} steps" for place in places)
    print(
        f"| levels | correction | seeds | mean abs. difference | largest of a step | KL | {after} | mean of all steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    key = lambda row: (-(row["levels"] or math.inf), list(WAYS).index(row["way"]))  # noqa: E731
    for _, cells in itertools.groupby(sorted(rows, key=key), key):
        cell = list(cells)
        gap, widest, kl = (fmean(row[name] for row in cell) for name in ("gap", "widest", "kl"))
        ends = " | ".join(with_error([row["curve"][place] for row in cell]) for place in places)
        whole = with_error([fmean(row["curve"]) for row in cell])
        levels = cell[0]["levels"] or "not quantised"
        print(f"| {levels} | {cell[0]['way']} | {len(cell)} | {gap:.2g} | {widest:.2g} | {kl:.2g} | {ends} | {whole} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 127, 7, 3, 1, 15, 31, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    done = [json.loads(line) for line in told.rows.read_text().splitlines()] if told.rows.exists() else []
    if told.table:
        return table(done)
    there = {(row["way"], row["levels"], row["seed"]) for row in done}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        CONFIG.save_pretrained(name)
        for seed, levels, way in itertools.product(told.seeds, told.levels, told.ways):
            if (way, levels, seed) in there:
                continue
            row = train(Path(name), way, levels, seed)
            with told.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    return None


if __name__ == "__main__":
    main()
