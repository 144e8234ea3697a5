"""Steps of the trainer: short rows and long ones, a small model and one of a size that people train on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import TRAINED, trained


@dataclass(frozen=True)
class Load:
    model: str
    words: str
    groups: int
    rollouts: int
    prompt: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.words}"

    @property
    def row(self) -> int:
        return self.prompt + self.tokens


LOADS = (
    Load("135m", "256 rows of 64 + 256 tokens", 16, 16, 64, 256),
    Load("135m", "rows of 400", 24, 8, 64, 336),
    Load("135m", "rows of 2k", 4, 8, 256, 1792),
    Load("135m", "rows of 8k", 2, 4, 512, 7680),
    Load("1.5b", "rows of 400", 12, 8, 64, 336),
    Load("1.5b", "rows of 2k", 2, 8, 256, 1792),
    Load("1.5b", "rows of 8k", 1, 4, 512, 7680),
)
"""The first is the load of the first measurement on an H100."""
MICROBATCH = {"1.5b": 8192}
"""Tokens at once, where activations of more would not fit into 80 GB by estimate (120 kB a layer and token)."""


def measure(bench: Bench) -> Iterator[Figure]:
    for model in ("135m", "1.5b"):
        settings = {"microbatch_tokens": MICROBATCH[model]} if model in MICROBATCH else {}
        learner = loads.trainer(bench, model, **settings)
        for load in LOADS:
            if load.model != model:
                continue
            with bench.most_memory() as most:
                found = loads.train(
                    bench, learner, groups=load.groups, rollouts=load.rollouts, prompt=load.prompt, tokens=load.tokens
                )
            yield Figure(
                load.name,
                found.rate,
                note=f"{found.tokens:,} tokens in {found.seconds:.2f} s, {most():.0f} GB",
                share=loads.share_of_peak(bench, model, found.rate),
                rates={"model": model, "tokens": found.tokens, "step": found.seconds},
            )
        del learner
        bench.forget()


ENTRY = Entry(
    name="training",
    about="tokens/s of an optimizer step and its share of the peak (6 × parameters × tokens); random weights, all of them trained, AdamW",
    limit=180,
    lines=tuple(Line(name=load.name, predicted=trained(load.model, load.row), formula=TRAINED) for load in LOADS),
    measure=measure,
)
