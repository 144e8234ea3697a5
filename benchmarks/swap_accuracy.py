"""What does it cost in accuracy that running sequences keep their KV cache when the weights are swapped?

    python benchmarks/swap_accuracy.py [--model smollm2-135m-instruct] [--rates 1e-6 1e-5 1e-4] [--swaps 1 2 4 8]

The real trainer makes a chain of versions (demo task, one AdamW step each, advantages of random sign). They are served
twice: in float32, and rounded to bfloat16 as they are published. If steps are much smaller than the spacing of bfloat16
numbers, rounding mostly decides which weights change at all, and many quantised weights lie on a rounding boundary.

Version 0 samples completions of 128 tokens. The same tokens are then forwarded as in a run that swaps n times at equal
distances, always to the next version, once with the cache as the earlier versions left it and once with the cache
recomputed under the live version. Both times every token's log-prob is that of the version that is live when it is
sampled: their difference is the cost of keeping the cache. The forward pass is in float32, so that nothing but the
cache differs. For comparison, the script also reports how far the same swaps change the log-probs themselves, and how
far serving in bfloat16 does.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch as TrainBatch
from headrace.core.batches import Group, Row
from headrace.core.types import Prompt
from headrace.engine.native.draws import Settings
from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.runners import skeleton
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.engine.native.sampler import sample, token_logprobs
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.reasoning_gym import ReasoningGymTask
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.run.config import load_config
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer

GROUPS, GROUP_SIZE, TRAINED_TOKENS = 8, 4, 24
"""Batch of the trainer: as in the demo, with half as many rollouts per prompt."""
WARM = 4
"""Optimizer steps before version 0: AdamW's first steps are larger than later ones."""
ASKED = (
    "Tell me a story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that merges two sorted lists, and explain it.",
    "What should I see on a week's trip through Portugal?",
    "Describe the water cycle for a child of ten.",
    "Give me a recipe for vegetable soup with all its steps.",
    "Compare the French and the American revolution.",
    "Write a letter of application for a job in a library.",
    "How does a compiler differ from an interpreter?",
    "Write a poem about the first snow.",
    "What are the arguments for and against nuclear power?",
    "Solve step by step: a train goes 60 km in 45 minutes; how fast is it?",
    "Explain supply and demand with an example.",
    "Invent a dialogue between a cat and a clock.",
    "How do vaccines work?",
    "List ten ways to save energy at home, with reasons.",
)

HEAD = (
    "learning rate",
    "weights",
    "swaps",
    "mean difference",
    "99th percentile",
    "max",
    "the swaps themselves move log-probs by",
    "lost by keeping, of that",
)

Pieces = list[np.ndarray]
"""Tokens per sequence."""


class Cache:
    """Several sequences over a paged cache of a runner: forwarded tokens are appended to those forwarded before."""

    def __init__(self, runner: FusedRunner, sequences: int, width: int) -> None:
        self._runner = runner
        self._tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
        self._length = np.zeros(sequences, np.int32)

    def forward(self, pieces: Pieces, every: bool) -> torch.Tensor:
        """Returns the logits after every token of the pieces, or after the last of each."""
        ends = np.cumsum([len(piece) for piece in pieces])
        batch = ForwardInput(
            tokens=np.concatenate(pieces).astype(np.int64),
            starts=np.concatenate([[0], ends]).astype(np.int32),
            context=self._length.copy(),
            tables=self._tables,
            rows=np.arange(ends[-1]) if every else ends - 1,
            adapters=np.full(len(pieces), -1, np.int32),
        )
        self._length += np.diff(batch.starts)
        return self._runner.forward(batch).logits


class Model:
    """A model whose weights can be changed, and runs of it."""

    def __init__(self, model_dir: Path, length: int, sequences: int, dtype: torch.dtype) -> None:
        self._width, self._sequences, self._dtype = -(-length // BLOCK), sequences, dtype
        self.published = torch.bfloat16
        read = skeleton.read(model_dir, dtype, torch.device("cpu"))
        self._runner = FusedRunner(read, length, dtype=dtype, device=torch.device("cpu"), exact=False, max_adapters=0)
        self._runner.allocate(self._width * sequences)

    def use(self, version: Path) -> None:
        served = {name: tensor.to(self.published).to(self._dtype) for name, tensor in load_file(version).items()}
        self._runner.use(self._runner.prepare(served))

    def sample(self, prompts: Pieces, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples [S, T] tokens at temperature 1, past the end of sequence too, and their log-probs."""
        rows, drawn = len(prompts), []
        ones, zeros = np.ones(rows), np.zeros(rows, np.int64)
        cache, pieces = self._cache(rows), prompts
        for position in range(tokens):
            seed = np.arange(rows).astype(np.uint64)
            settings = Settings(
                temperature=ones, top_k=zeros, top_p=ones, min_p=np.zeros(rows), seed=seed, counter=zeros + position
            )
            drawn.append(sample(cache.forward(pieces, every=False), settings))
            pieces = list(drawn[-1].tokens[:, None])
        return np.stack([one.tokens for one in drawn], 1), np.stack([one.logprobs for one in drawn], 1)

    def logprobs(self, prompts: Pieces, tokens: np.ndarray, versions: list[Path], keep: bool) -> np.ndarray:
        """Returns [S, T] log-probs of the tokens [S, T], with the next version live after every 1 / len(versions) of
        them."""
        bounds = np.linspace(0, tokens.shape[1], len(versions) + 1).astype(int)
        cache, found = self._cache(len(prompts)), []
        for version, (start, stop) in zip(versions, itertools.pairwise(bounds), strict=True):
            self.use(version)
            # The token sampled last is forwarded when the next one is sampled: by the new weights, if they came in between.
            if start == 0 or not keep:
                cache = self._cache(len(prompts))
                before = [
                    np.concatenate([prompt, row[:start]])[:-1] for prompt, row in zip(prompts, tokens, strict=True)
                ]
                cache.forward(before, every=False)
            last = [
                prompt[-1:] if start == 0 else row[start - 1 : start]
                for prompt, row in zip(prompts, tokens, strict=True)
            ]
            pieces = [np.concatenate([one, row[start : stop - 1]]) for one, row in zip(last, tokens, strict=True)]
            scores = token_logprobs(cache.forward(pieces, every=True), tokens[:, start:stop].ravel())
            found.append(scores.logprobs.reshape(len(prompts), stop - start))
        return np.concatenate(found, 1)

    def _cache(self, sequences: int) -> Cache:
        assert sequences <= self._sequences
        return Cache(self._runner, sequences, self._width)


def rollouts(model: Model, prompts: list[Prompt], group_size: int, tokens: int) -> list[Group]:
    """Makes groups without advantages, which change with every step."""
    repeated = [np.array(prompt.tokens) for prompt in prompts for _ in range(group_size)]
    drawn, logprobs = model.sample(repeated, tokens)
    rows = [
        Row(prompt.tokens, tuple(a.tolist()), tuple(b.tolist()), (), (True,) * tokens, (0,) * tokens)
        for prompt, a, b in zip((p for p in prompts for _ in range(group_size)), drawn, logprobs, strict=True)
    ]
    return [
        Group(i, prompt, (), tuple(rows[i * group_size : (i + 1) * group_size])) for i, prompt in enumerate(prompts)
    ]


def training(model_dir: Path, rate: float, groups: list[Group], folder: Path) -> Iterator[Path]:
    """Writes version 0, 1, 2, ... in float32, each to a file: in memory they would take gigabytes."""
    trainer = TorchTrainer(model_dir, TrainConfig(learning_rate=rate, device="cpu"), AlgoConfig(), 0)
    rng = random.Random(0)
    while True:
        if trainer.version >= WARM:
            yield write(folder / f"{trainer.version}.safetensors", dict(trainer.parameters()))
        signed = [
            Group(group.ticket, group.prompt, (), tuple(_signed(row, rng.choice((-1.0, 1.0))) for row in group.rows))
            for group in groups
        ]
        report = trainer.step(TrainBatch(trainer.version, tuple(signed)))
        assert not report.skipped, report


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file(dict(tensors), path)
    return path


def _signed(row: Row, sign: float) -> Row:
    return Row(row.prompt, row.tokens, row.logprobs, (sign,) * len(row.tokens), row.mask, row.versions)


@dataclass(frozen=True)
class Measured:
    rate: float
    published: torch.dtype
    swaps: int
    mean: float
    p99: float
    largest: float
    moved: float
    """Returns the mean |difference| of version n's log-probs (cache recomputed) from those of version 0, over the
    tokens sampled after a swap."""

    def cells(self) -> tuple[str, ...]:
        numbers = (f"{value:.1e}" for value in (self.mean, self.p99, self.largest, self.moved))
        weights = str(self.published).removeprefix("torch.")
        return (f"{self.rate:.0e}", weights, str(self.swaps), *numbers, f"{self.mean / self.moved:.1%}")


def measure(
    model: Model, prompts: Pieces, chain: list[Path], rate: float, swaps: list[int], tokens: int
) -> list[Measured]:
    model.use(chain[0])
    drawn, _ = model.sample(prompts, tokens)
    base = model.logprobs(prompts, drawn, chain[:1], keep=True)
    measured = []
    for count in swaps:
        versions = chain[: count + 1]
        anew = model.logprobs(prompts, drawn, versions, keep=False)
        kept = model.logprobs(prompts, drawn, versions, keep=True)
        after = slice(tokens // (count + 1), None)
        lost, moved = np.abs(kept - anew)[:, after], np.abs(anew - base)[:, after]
        measured.append(
            Measured(rate, model.published, count, lost.mean(), np.quantile(lost, 0.99), lost.max(), moved.mean())
        )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "recipes" / "demo" / "demo.toml")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--swaps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=len(ASKED))
    arguments = parser.parse_args()
    started, model_dir, tokens = time.perf_counter(), resolve_model(arguments.model), arguments.tokens
    encoder = ChatEncoder(model_dir)
    asked = itertools.islice(itertools.cycle(ASKED), arguments.sequences)
    prompts = [np.array(encoder.encode_messages([{"role": "user", "content": text}])[1]) for text in asked]
    trained = draw_prompts(load_config(arguments.config).task, encoder, GROUPS)
    length = max(*map(len, prompts), *(len(prompt.tokens) for prompt in trained)) + max(tokens, TRAINED_TOKENS)
    sizes = (model_dir, length, max(len(prompts), GROUPS * GROUP_SIZE))
    exact = Model(*sizes, torch.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = write(folder / "first.safetensors", parameters_from_dir(model_dir, torch.float32))
        exact.use(first)
        groups = rollouts(exact, trained, GROUP_SIZE, TRAINED_TOKENS)
        drawn, _ = exact.sample(prompts, tokens)
        floor = exact.logprobs(prompts, drawn, [first], True)
        floor = np.abs(Model(*sizes, torch.bfloat16).logprobs(prompts, drawn, [first], True) - floor)
        print(
            f"{len(prompts)} completions of {tokens} tokens, prompts of {min(map(len, prompts))} to {max(map(len, prompts))}"
        )
        print(f"serving in bfloat16 moves a log-prob by {floor.mean():.1e} in the mean, {floor.max():.1e} at most\n")
        print("|", " | ".join(HEAD), "|\n" + "|---" * len(HEAD) + "|", flush=True)
        for rate in arguments.rates:
            chain = list(itertools.islice(training(model_dir, rate, groups, folder), max(arguments.swaps) + 1))
            for published in (torch.bfloat16, torch.float32):
                exact.published = published
                for measured in measure(exact, prompts, chain, rate, arguments.swaps, tokens):
                    print("|", " | ".join(measured.cells()), "|", flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")


def draw_prompts(config: TaskConfig, encoder: ChatEncoder, count: int) -> list[Prompt]:
    task = ReasoningGymTask(config, 0, encoder)
    return [task.draw() for _ in range(count)]


if __name__ == "__main__":
    main()
