"""What `auto` chooses from, and the choice as a function of measured figures.

A row of `CANDIDATES` is all that another dtype or another implementation needs: what this machine or this model has not is absent
from the figures, and is not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from headrace.engine.config import EngineConfig
from headrace.trainer.config import TrainConfig
from headrace.types import Struct

Part = Literal["engine", "trainer"]


class Candidate(NamedTuple):
    part: Part
    dtype: str
    path: str
    """As `engine.path` and `train.path` call it."""

    @property
    def name(self) -> str:
        """Its key in the figures."""
        return f"{self.part} {self.dtype} {self.path}"

    @property
    def words(self) -> str:
        return f"{self.dtype} {_WORDS[self.path]}"


_WORDS = {"kernels": "kernels", "fused": "PyTorch", "torch": "PyTorch", "hf": "Hugging Face"}

CANDIDATES = (
    Candidate("engine", "bfloat16", "kernels"),
    Candidate("engine", "float32", "kernels"),
    Candidate("engine", "bfloat16", "fused"),
    Candidate("engine", "float32", "fused"),
    Candidate("engine", "bfloat16", "hf"),
    Candidate("engine", "float32", "hf"),
    Candidate("trainer", "bfloat16", "kernels"),
    Candidate("trainer", "float32", "kernels"),
    Candidate("trainer", "bfloat16", "torch"),
    Candidate("trainer", "float32", "torch"),
)
NEAR = 0.95
"""Of the fastest: what reaches this share of it is as good, and the first of these in the table is taken. Two measurements of one
candidate differ by a few percent."""


class Figures(Struct, frozen=True):
    """What was measured of one model on one machine. All of it is for the whole model, and for one core."""

    tokens: dict[str, float] = {}
    """Tokens a CPU-second, by `Candidate.name`: sampled by the engine at `rows` sequences, trained by the trainer."""
    update: float = 0.0
    """CPU-seconds of one optimizer update."""
    threads: dict[int, float] = {}
    """Seconds of one engine pass by the number of threads; empty where there is one number to choose from."""
    rows: int = 0
    """Sequences that the engine decoded at once."""
    seconds: float = 0.0
    """That the measurement took."""
    problem: str = ""
    """Why nothing could be measured."""


class PartChoice(Struct, frozen=True):
    """What a part of a run is given where its settings say `auto`."""

    part: Part
    dtype: str
    """`auto` where nothing was measured: the part decides as it is built."""
    path: str
    """`auto` where that comes to the chosen one."""
    threads: int
    """0 where nothing was chosen: as many as there are cores."""
    rate: float
    """Tokens a CPU-second; 0 where it is not known."""
    why: str
    """For people, with the figures."""


def candidates(engine: EngineConfig, train: TrainConfig, wide: bool = True) -> list[Candidate]:
    """Those that the settings allow. `wide`: whether the memory holds float32 weights in the engine."""
    allowed = []
    for one in CANDIDATES:
        config = engine if one.part == "engine" else train
        fits = config.dtype in ("auto", one.dtype) and config.path in ("auto", one.path)
        if one.part == "engine" and config.dtype == "auto" and one.dtype == "float32" and not wide:
            fits = False
        if one.part == "trainer" and train.weights == "bfloat16" and one.dtype == "float32":
            fits = False
        if fits:
            allowed.append(one)
    return allowed


def choose(
    part: Part, config: EngineConfig | TrainConfig, allowed: Sequence[Candidate], figures: Figures, threads: int
) -> PartChoice:
    """The fastest of those that are `allowed` and were measured. `threads`: as `choose_threads` has it, 0 to leave it."""
    mine = [one for one in allowed if one.part == part and figures.tokens.get(one.name)]
    threads = 0 if config.cores or config.threads else threads
    if not mine:
        why = figures.problem or "nothing was measured for what the settings ask for"
        return PartChoice(
            part=part, dtype=config.dtype, path=config.path, threads=threads, rate=0.0, why=f"not measured: {why}"
        )
    rates = {one: figures.tokens[one.name] for one in mine}
    best = next(one for one in mine if rates[one] >= NEAR * max(rates.values()))
    alone = [one for one in mine if one.dtype == best.dtype]
    path = config.path if best == alone[0] else best.path  # `auto` takes the first of the table too
    return PartChoice(
        part=part,
        dtype=best.dtype,
        path=path,
        threads=threads,
        rate=rates[best],
        why=_why(part, best, rates, figures.rows),
    )


def choose_threads(counts: Sequence[int], figures: Figures) -> int:
    """Of the numbers that can be had, the fastest; the smaller one where they are alike."""
    timed = {count: seconds for count, seconds in figures.threads.items() if count in counts}
    if not timed:
        return counts[0]
    return min(count for count, seconds in timed.items() if seconds * NEAR <= min(timed.values()))


def _why(part: Part, best: Candidate, rates: dict[Candidate, float], rows: int) -> str:
    """`bfloat16 kernels: 410 tokens a second of one core at 32 sequences (float32 PyTorch 260, bfloat16 PyTorch 120)`"""
    others = sorted((one for one in rates if one != best), key=lambda one: -rates[one])
    beside = ", ".join(f"{one.words} {rates[one]:,.3g}" for one in others)
    at = f" at {rows} sequences" if part == "engine" else " trained"
    return f"{best.words}: {rates[best]:,.3g} tokens a second of one core{at}" + (f" ({beside})" if beside else "")
