"""Ways to fit a model into one GPU, and their cost: weights in bfloat16, the optimizer on the host, adapters, at 1.5 and 7 billion parameters."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import EAGER, TRAINED, Prediction, trained
from headrace.commands.plan.rates.hardware import Gpu
from headrace.commands.plan.rates.shapes import SHAPES
from headrace.models.lora import LoraConfig

MICROBATCH, ROWS, ROW = 8192, 16, 2048
HOST = 1.4
"""Seconds in which the host updates 1.5b: 28 bytes a parameter at 50 GB/s, and 6 GB each way at 25 GB/s. Assumptions."""
ADAPTED = 1.15
"""An adapter's products, and two forward passes instead of three for all others: an assumption is the factor on the kernels beside them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: str
    bytes: float
    """Per parameter: weights, gradients and the optimizer's state on the device."""
    rate: Prediction
    formula: str
    train: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None

    def held(self, chip: Gpu) -> float:
        """Gigabytes: the above, and activations of a microbatch, 2 · (16 · hidden + 6 · inner) bytes a layer and token, or the hidden states alone
        and those of one layer where they are computed again."""
        shape = SHAPES[self.model]
        layer = MICROBATCH * 2 * (16 * shape.hidden + 6 * shape.inner)
        again = self.train.get("gradient_checkpointing")
        kept = layer + shape.layers * MICROBATCH * 2 * shape.hidden if again else shape.layers * layer
        return (self.bytes * shape.parameters + kept) / 1e9


def _offloaded(chip: Gpu) -> float:
    tokens = ROWS * ROW
    return tokens / (tokens / trained("1.5b", ROW)(chip) + HOST)


def _adapted(model: str, passes: float) -> Prediction:
    shape = SHAPES[model]
    products = trained(model, ROW, passes)
    return lambda chip: 1 / (1 / products(chip) + (ADAPTED - passes / 3) * EAGER * shape.layers * shape.hidden)


CASES = (
    Case(name="1.5b, bfloat16 weights", model="1.5b", bytes=12, rate=trained("1.5b", ROW), formula=TRAINED, train={"weights": "bfloat16"}),
    Case(
        name="1.5b, optimizer on the host",
        model="1.5b",
        bytes=8,
        rate=_offloaded,
        formula="tokens / (seconds as with all on the device + 1.4 s for the host's update, assumed)",
        train={"offload_optimizer": True},
    ),
    Case(
        name="1.5b, LoRA 32",
        model="1.5b",
        bytes=2,
        rate=_adapted("1.5b", 2),
        formula="two forward passes of three for the products, 1.15 times the rest (assumed)",
        lora=LoraConfig(rank=32),
    ),
    Case(
        name="7b, LoRA 32, checkpointing",
        model="7b",
        bytes=2,
        rate=_adapted("7b", 3),
        formula="three forward passes (one is computed again), 1.15 times the rest (assumed)",
        train={"gradient_checkpointing": True},
        lora=LoraConfig(rank=32),
    ),
)  # fmt: skip


FILLED = "1.5b, sizes by what is free"
CONTEXT = 2048


def _filled(bench: Bench) -> Iterator[Figure]:
    """An engine whose sizes are left open: all sequences that it has rows for decode, in the memory that it took."""
    left = {"kv_gib": "auto", "max_running": "auto", "prefill_chunk": "auto"}
    with bench.most_memory() as most:
        core = loads.engine(bench, "1.5b", 0, context_length=bench.size(CONTEXT, 64), **left)
        rows = bench.size(core.capabilities.rows, 4)
        loads.sample(core, loads.prompts(rows, bench.size(256, 8)), bench.size(32, 4))
    room = f"{core.capabilities.rows} rows, {core.capabilities.kv_tokens:,} tokens of cache"
    yield Figure(FILLED, True, note=room)
    held = most() or None
    yield Figure(f"{FILLED}: memory", held, note="a CPU has none of its own" if bench.device == "cpu" else room)
    del core
    bench.forget()


def measure(bench: Bench) -> Iterator[Figure]:
    yield from _filled(bench)
    for case in CASES:
        if case.lora and importlib.util.find_spec("peft") is None:
            yield from (Figure(name, None, "peft is not here") for name in (case.name, f"{case.name}: memory"))
            continue
        learner = loads.trainer(
            bench, case.model, lora=case.lora, microbatch_tokens=MICROBATCH, dtype="bfloat16", **case.train
        )
        with bench.most_memory() as most:
            found = loads.train(bench, learner, steps=2, groups=ROWS // 8, rollouts=8, prompt=256, tokens=ROW - 256)
        yield Figure(
            case.name,
            found.rate,
            note=f"{found.tokens:,} tokens in {found.seconds:.2f} s",
            share=loads.share_of_peak(bench, case.model, found.rate),
        )
        yield Figure(
            f"{case.name}: memory", most() or None, note="a CPU has none of its own" if bench.device == "cpu" else ""
        )
        del learner
        bench.free()


ENTRY = Entry(
    name="memory",
    about="tokens/s of a step with rows of 2k, and the most memory that it held; random weights",
    limit=180,
    lines=(
        Line(
            name=FILLED,
            unit="check",
            formula="an engine alone takes what is free, and as many sequences as it has rows for decode at once",
        ),
        Line(
            name=f"{FILLED}: memory",
            unit="GB",
            predicted=lambda chip: 0.95 * chip.memory / 1e9 - 2,
            formula="all but 5 % of the memory and a gigabyte for CUDA, of which a second one is for passes that need less (assumed)",
        ),
        *(
            line
            for case in CASES
            for line in (
                Line(name=case.name, predicted=case.rate, formula=case.formula),
                Line(
                    name=f"{case.name}: memory",
                    unit="GB",
                    predicted=case.held,
                    formula=f"{case.bytes:g} bytes a parameter, and activations of 8,192 tokens: 2 × (16 hidden + 6 inner) bytes a layer and token",
                ),
            )
        ),
    ),
    measure=measure,
    least_memory=70e9,
)
