"""A mixture of experts: decoding with the experts recorded, and a step that replays them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import EAGER, READS, always, overhead, pass_floor
from headrace.commands.plan.rates.hardware import TRAINS_MIXTURE, Gpu
from headrace.commands.plan.rates.shapes import Architecture
from headrace.core.batches import Batch, Group, Row
from headrace.core.steps import Transcript, write_down
from headrace.core.types import Prompt, Request, Sampling
from headrace.engine.native.core import Core

SHAPE = Architecture(
    parameters=1.81e9, active=0.40e9, layers=16, heads=16, kv_heads=4, head=64, hidden=1024, inner=4096, outer=0.156e9, experts=1.61e9,
    width=16 * 8 * 1024,
)  # fmt: skip
"""`loads.MODELS["mixture"]`: 64 experts, of which 8 are chosen."""
SEQUENCES, PROMPT, TOKENS = 64, 32, 128
KERNELS = 2.0
"""Kernels of a layer against those of a dense one: router, sorting, grouped products. An assumption."""
AGREES = 0.02
"""Nats between sampler and trainer, root of the mean square, where both go to the same experts in bfloat16. An assumption; without replay it is several times
as much."""


def _decoding(chip: Gpu) -> float:
    beside = overhead(SEQUENCES, SHAPE.layers) * KERNELS
    return SEQUENCES / (beside + pass_floor(chip, SHAPE, SEQUENCES, PROMPT + TOKENS / 2) / READS)


def _training(chip: Gpu) -> float:
    return 1 / (6 * SHAPE.active / (TRAINS_MIXTURE * chip.compute) + KERNELS * EAGER * SHAPE.layers * SHAPE.hidden)


def measure(bench: Bench) -> Iterator[Figure]:
    sequences, prompt, tokens = bench.size(SEQUENCES, 4), bench.size(PROMPT, 5), bench.size(TOKENS, 6)
    begins = loads.prompts(sequences, prompt)
    core = loads.engine(bench, "mixture", sequences, routing=True)
    for name, routing in (("decoding, experts not asked for", False), ("decoding, experts recorded", True)):
        for _ in range(bench.size(2, 1)):
            found = loads.sample(core, begins, tokens, request={"return_routing": routing})
        yield Figure(name, sequences / found.seconds, note=f"{found.overall:,.0f} tokens/s with prompts")
    rows = _sampled(core, begins, tokens)
    assert all(row.routing for row in rows), "an experts' trace is missing"
    del core
    bench.forget()
    yield from _replayed(bench, rows)


def _sampled(core: Core, begins: list[tuple[int, ...]], tokens: int) -> list[Row]:
    """Samples with the experts recorded. Returns training rows."""
    transcripts = {
        str(number): Transcript(
            request=Request(
                str(number), begin, Sampling(max_tokens=tokens, ignore_eos=True, seed=number), return_routing=True
            )
        )
        for number, begin in enumerate(begins)
    }
    for transcript in transcripts.values():
        core.add(transcript.request)
    while core.has_work():
        step = core.step()
        write_down(step, transcripts.get)
        for end in step.finished:
            transcripts[end.request_id].end = end
    rows = []
    for number, transcript in enumerate(transcripts.values()):
        made = transcript.so_far()
        sign, count = (-1.0) ** number, len(made.tokens)
        rows.append(
            Row(
                transcript.request.prompt,
                made.tokens,
                made.logprobs,
                (sign,) * count,
                (True,) * count,
                (0,) * count,
                routing=made.routing,
            )
        )
    return rows


def _replayed(bench: Bench, rows: list[Row]) -> Iterator[Figure]:
    learner = loads.trainer(bench, "mixture", keep_routing=True, path="torch")
    groups = tuple(Group(number, Prompt(str(number), "", row.prompt), (), (row,)) for number, row in enumerate(rows))
    first = learner.step(Batch(0, groups))
    again = learner.step(Batch(1, groups)) if not bench.tiny else first
    yield Figure(
        "a step that replays them",
        again.forward_tokens / again.seconds,
        note=f"{again.forward_tokens:,} tokens in {again.seconds:.2f} s",
    )
    yield Figure("every position has its experts", first.missing_routes == 0 and first.routing_conflicts == 0)
    difference = first.noise.token_rms if first.noise else math.nan
    yield Figure("sampler and trainer agree", difference)


ENTRY = Entry(
    name="mixture",
    about="1.8 billion parameters, 0.4 active (16 layers of 1,024, 8 of 64 experts); random weights, 64 sequences",
    limit=120,
    lines=(
        Line(
            name="decoding, experts not asked for",
            predicted=_decoding,
            formula="n / (overhead of a dense model's pass, by layers, twice as many kernels (assumed) + roofline / 80 %)",
        ),
        Line(
            name="decoding, experts recorded",
            predicted=_decoding,
            formula="the same: experts are recorded in a buffer of the graph",
        ),
        Line(
            name="a step that replays them",
            predicted=_training,
            formula="1 / (operations / 15 % of the data sheet, as others reach with mixtures + twice a dense model's seconds beside the products)",
        ),
        Line(name="every position has its experts", unit="check", formula="none missing, no conflict among rows"),
        Line(name="sampler and trainer agree", unit="nats", predicted=always(AGREES), most=0.2, formula="root mean square in bfloat16 (assumed)"),
    ),
    measure=measure,
)  # fmt: skip
