"""Decoding: many sequences and few, with what RL needs beside it (an adapter, sequences of unlike lengths, prompts that arrive, a filter)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import SHAPES, Bench, Gpu
from benchmarks.device.predictions import OVERHEAD, PRODUCTS, UNGRAPHED, decoding, overhead
from headrace.core.types import Request, Sampling
from headrace.core.weights import AdapterSpec
from headrace.engine.native.core import Core

PROMPT, TOKENS = 32, 128
LONG = 8_000
"""Tokens of the one long sequence among short ones."""
CHUNK = 512
"""Tokens of a prompt that is computed in a pass beside those that decode."""
LORA = 0.3
"""An adapter adds two small products to each of seven: a share of a pass. An assumption."""
FILTERED = 5e-4
"""Seconds in which the largest 1,024 logits of each of 64 rows are found and sorted, and some thirty small kernels run. An assumption."""
ROOFLINE = f"n / ({OVERHEAD} + roofline / 80 %)"


MEAN = (LONG + 63 * PROMPT) / 64 + TOKENS / 2
"""Tokens in each cache where one of 64 sequences is long."""


def _beside_prompt(chip: Gpu) -> float:
    return 64 / (64 / decoding("135m", 64)(chip) + 2 * SHAPES["135m"].active * CHUNK / (PRODUCTS * chip.compute))


LINES = (
    *(Line(name=f"135m, {n:,}", predicted=decoding("135m", n), formula=ROOFLINE) for n in (1, 64, 256, 1024)),
    Line(
        name="135m, 64, no pass ahead",
        predicted=decoding("135m", 64),
        formula=f"{ROOFLINE}: as in November the GPU waits for the host between two passes; what the lines above gain over it is not predicted",
    ),
    Line(name="135m, 64, no graphs", predicted=lambda chip: 64 / UNGRAPHED, formula="as on the H100 of November"),
    *(
        Line(
            name=f"135m, {n}, adapter",
            predicted=decoding("135m", n, more=LORA * overhead(n, SHAPES["135m"].layers)),
            formula=f"{ROOFLINE}, and 30 % of the former for the adapter's products, in the same graph (assumed)",
        )
        for n in (64, 256)
    ),
    Line(
        name="135m, 64, one of 8,000 tokens",
        predicted=decoding("135m", 64, context=MEAN),
        formula=f"{ROOFLINE}, of the tokens that there are: attention reads pages where they lie, and no sequence pays for the length of another",
    ),
    Line(
        name="135m, 64, prompts arriving",
        predicted=_beside_prompt,
        formula=f"{ROOFLINE}, and the products of 512 tokens at 55 % of the data sheet: a pass with a prompt in it is replayed too",
    ),
    Line(
        name="135m, 64, top-p 0.9",
        predicted=decoding("135m", 64, more=FILTERED),
        formula="as with graphs, and half a millisecond for the filter, on the device (assumed)",
    ),
    *(Line(name=f"1.5b, {n}", predicted=decoding("1.5b", n), formula=ROOFLINE) for n in (1, 64, 256)),
)


def measure(bench: Bench) -> Iterator[Figure]:
    for model, counts in (("135m", (1, 64, 256, 1024)), ("1.5b", (1, 64, 256))):
        for count in counts:
            yield _figure(bench, f"{model}, {count:,}", model, count, rates=True)
        if model == "135m":
            yield from _beside(bench)
        bench.forget()


def _beside(bench: Bench) -> Iterator[Figure]:
    yield _figure(bench, "135m, 64, no pass ahead", "135m", 64, ahead=False)
    yield _figure(bench, "135m, 64, no graphs", "135m", 64, graphs=False)
    for count in (64, 256):
        yield _figure(bench, f"135m, {count}, adapter", "135m", count, adapter=True)
    yield _figure(bench, "135m, 64, one of 8,000 tokens", "135m", 64, longest=LONG)
    yield _figure(bench, "135m, 64, prompts arriving", "135m", 64, arriving=True)
    yield _figure(bench, "135m, 64, top-p 0.9", "135m", 64, top_p=0.9)


def _figure(
    bench: Bench,
    name: str,
    model: str,
    count: int,
    *,
    rates: bool = False,
    graphs: bool = True,
    ahead: bool | None = None,
    adapter: bool = False,
    longest: int = 0,
    arriving: bool = False,
    **sampling: Any,
) -> Figure:
    sequences, tokens = bench.size(count, min(count, 4)), bench.size(TOKENS, 6)
    begins = loads.prompts(sequences, bench.size(PROMPT, 5))
    if longest:
        begins[0] = loads.prompts(1, bench.size(longest, 40), seed=1)[0]
    room = max(len(begins[0]), bench.size(CHUNK, 12) if arriving else 0) + tokens + 8
    core = loads.engine(
        bench,
        model,
        sequences + arriving,
        graphs=graphs,
        ahead=ahead,
        context_length=max(room, bench.size(256, 64)),
        max_adapters=int(adapter),
        **({"prefill_chunk": bench.size(CHUNK, 12)} if arriving else {}),
    )
    if adapter:
        _load_adapter(bench, core, model)
    asked = {"adapter": "a"} if adapter else None
    beside = _arrivals(bench) if arriving else None
    for _ in range(bench.size(2, 1)):  # the first one captures
        found = loads.sample(core, begins, tokens, beside=beside, request=asked, **sampling)
    del core
    bench.free()
    context = sum(map(len, begins)) / sequences + tokens / 2
    return Figure(
        name,
        sequences / found.seconds,
        note=f"{found.overall:,.0f} tokens/s with prompts",
        share=loads.share_of_roofline(bench, model, sequences, context, found.seconds),
        rates={"model": model, "sequences": sequences, "context": context, "pass": found.seconds} if rates else {},
    )


def _load_adapter(bench: Bench, core: Core, model: str, rank: int = 32) -> None:
    """Random matrices of an adapter of all linear layers, as peft names them."""
    spec, tensors = AdapterSpec("a", rank=rank, alpha=32.0), {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in bench.weights(model).items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not module.endswith("_proj"):
            continue
        rows, columns = weight.shape
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            values = torch.randn(shape, generator=generator) * 0.01
            tensors[f"base_model.model.{module}.{part}.weight"] = values.to(bench.device, torch.bfloat16)
    core.swap(core.prepare(loads.update(kind="adapter", adapter=spec), tensors))


def _arrivals(bench: Bench) -> Callable[[Core, int], None]:
    """Adds a prompt before every pass, of which one token is sampled: each pass then computes a prompt beside the tokens."""
    numbers = random.Random(2)

    def arrive(core: Core, passes: int) -> None:
        begin = tuple(numbers.randrange(3, 500) for _ in range(bench.size(CHUNK, 12) - 1))
        core.add(Request(f"arrived {numbers.random()}", begin, Sampling(max_tokens=1, ignore_eos=True)))

    return arrive


ENTRY = Entry(
    name="decode",
    about="tokens/s while all sequences decode; random weights in bfloat16, prompts of 32 tokens, 128 sampled",
    limit=180,
    lines=LINES,
    measure=measure,
)
