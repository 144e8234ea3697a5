"""The candidates that `auto` chooses from, and the choice as a function of measured figures.

A new dtype or implementation needs one row of `CANDIDATES` and nothing else: a candidate that this machine or this model does not
support is absent from the figures, and is not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from headrace.core.types import Struct
from headrace.engine.config import EngineConfig
from headrace.trainer.config import TrainConfig

Part = Literal["engine", "trainer"]


class Candidate(NamedTuple):
    part: Part
    dtype: str
    path: str
    """A value of `engine.path` or `train.path`."""

    @property
    def name(self) -> str:
        """The key in `Figures.tokens`."""
        return f"{self.part} {self.dtype} {self.path}"

    @property
    def words(self) -> str:
        return f"{self.dtype} {_WORDS[self.path]}"


_WORDS = {
    "kernels": "kernels",
    "fused": "PyTorch",
    "torch": "PyTorch",
    "hf": "Hugging Face",
    "cache": "Hugging Face over its own cache",
}

CANDIDATES = (
    Candidate("engine", "bfloat16", "kernels"),
    Candidate("engine", "float32", "kernels"),
    Candidate("engine", "bfloat16", "fused"),
    Candidate("engine", "float32", "fused"),
    Candidate("engine", "bfloat16", "hf"),
    Candidate("engine", "float32", "hf"),
    Candidate("engine", "bfloat16", "cache"),
    Candidate("engine", "float32", "cache"),
    Candidate("trainer", "bfloat16", "kernels"),
    Candidate("trainer", "float32", "kernels"),
    Candidate("trainer", "bfloat16", "torch"),
    Candidate("trainer", "float32", "torch"),
)
NEAR: dict[Part, float] = {"engine": 0.95, "trainer": 0.9}
"""Candidates that reach this share of the fastest count as equal, and the first of them in the table is taken. Two measurements of
one candidate differ by a few percent. The trainer may be slower by a few more, because its kernels compute what the engine's do: with
PyTorch in the trainer a run of the demo in bfloat16 had probes that differ by 0.05 nats, and with the kernels by 1e-7."""


class Figures(Struct, frozen=True):
    """The measurements of one model on one machine, scaled to the whole model, on one core."""

    tokens: dict[str, float] = {}
    """Tokens per CPU-second by `Candidate.name`: sampled by the engine with `rows` sequences, or trained by the trainer."""
    update: float = 0.0
    """CPU-seconds of one optimizer update."""
    threads: dict[int, float] = {}
    """Seconds of one engine pass by the number of threads; empty if there is only one number to choose from."""
    rows: int = 0
    """Sequences that the engine decoded at once."""
    seconds: float = 0.0
    """Seconds that the measurement took."""
    problem: str = ""
    """The reason why nothing could be measured; empty if all went well."""


class PartChoice(Struct, frozen=True):
    """The values that replace `auto` in the settings of engine or trainer."""

    part: Part
    dtype: str
    """`auto` if nothing was measured: the part then decides when it is built."""
    path: str
    """`auto` if that leads to the chosen one."""
    threads: int
    """0 if nothing was chosen: one per core."""
    rate: float
    """Tokens per CPU-second; 0 if unknown."""
    why: str
    """A sentence with the figures."""


def candidates(engine: EngineConfig, train: TrainConfig, wide: bool = True) -> list[Candidate]:
    """Returns the candidates that the settings allow. `wide`: whether the memory holds float32 weights in the engine."""
    allowed = []
    for candidate in CANDIDATES:
        config = engine if candidate.part == "engine" else train
        fits = config.dtype in ("auto", candidate.dtype) and config.path in ("auto", candidate.path)
        if candidate.part == "engine" and not _serves(candidate, engine.weights):
            fits = False
        if candidate.part == "engine" and config.dtype == "auto" and candidate.dtype == "float32" and not wide:
            fits = False
        if (
            candidate.part == "trainer"
            and "bfloat16" in (train.weights, train.parallel.gather)
            and candidate.dtype == "float32"
        ):
            fits = False
        if (
            candidate.part == "trainer" and train.parallel.ranks > 1 and candidate.path == "kernels"
        ):  # they read whole weights
            fits = False
        if fits:
            allowed.append(candidate)
    return allowed


def _serves(candidate: Candidate, weights: str) -> bool:
    """Whether the candidate is a way to serve `engine.weights`."""
    if weights == "fp8":
        return (candidate.dtype, candidate.path) == ("bfloat16", "fused")
    return weights == "published" or candidate.path == "kernels"


def choose(
    part: Part, config: EngineConfig | TrainConfig, allowed: Sequence[Candidate], figures: Figures, threads: int
) -> PartChoice:
    """Returns the fastest candidate that is `allowed` and was measured. `threads`: the result of `choose_threads`, or 0 for no choice."""
    mine = [candidate for candidate in allowed if candidate.part == part and figures.tokens.get(candidate.name)]
    threads = 0 if config.cores or config.threads else threads
    if not mine:
        why = figures.problem or "nothing was measured for what the settings ask for"
        return PartChoice(
            part=part, dtype=config.dtype, path=config.path, threads=threads, rate=0.0, why=f"not measured: {why}"
        )
    rates = {candidate: figures.tokens[candidate.name] for candidate in mine}
    best = next(candidate for candidate in mine if rates[candidate] >= NEAR[part] * max(rates.values()))
    alone = [candidate for candidate in mine if candidate.dtype == best.dtype]
    path = config.path if best == alone[0] else best.path  # `auto` leads to the first of the table
    return PartChoice(
        part=part,
        dtype=best.dtype,
        path=path,
        threads=threads,
        rate=rates[best],
        why=_why(part, best, rates, figures.rows),
    )


def choose_threads(counts: Sequence[int], figures: Figures) -> int:
    """Returns the fastest of the possible numbers of threads; the smaller one if two are about equal."""
    timed = {count: seconds for count, seconds in figures.threads.items() if count in counts}
    if not timed:
        return counts[0]
    return min(count for count, seconds in timed.items() if seconds * NEAR["engine"] <= min(timed.values()))


def _why(part: Part, best: Candidate, rates: dict[Candidate, float], rows: int) -> str:
    """`bfloat16 kernels: 410 tokens a second of one core at 32 sequences (float32 PyTorch 260, bfloat16 PyTorch 120)`"""
    others = sorted((candidate for candidate in rates if candidate != best), key=lambda candidate: -rates[candidate])
    beside = ", ".join(f"{candidate.words} {rates[candidate]:,.3g}" for candidate in others)
    at = f" at {rows} sequences" if part == "engine" else " trained"
    return f"{best.words}: {rates[best]:,.3g} tokens a second of one core{at}" + (f" ({beside})" if beside else "")
