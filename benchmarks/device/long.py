"""Long contexts, on a card with more than 100 GB: decoding behind 32k and 128k tokens, a prompt of 128k, a training row of 64k."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import PRODUCTS, TRAINED, decoding, trained
from headrace.commands.plan.rates.hardware import Gpu
from headrace.commands.plan.rates.shapes import SHAPES

MODEL = SHAPES["1.5b"]
MANY, SHORTER, LONGER, ROW = 8, 32_000, 128_000, 65_536
TOKENS = 48


def _prompt(chip: Gpu) -> float:
    operations = 2 * MODEL.active + 2 * MODEL.layers * MODEL.heads * MODEL.head * LONGER
    return PRODUCTS * chip.compute / operations


def measure(bench: Bench) -> Iterator[Figure]:
    for name, sequences, context in (("8 behind 32k", MANY, SHORTER), ("1 behind 128k", 1, LONGER)):
        count, length, tokens = bench.size(sequences, 2), bench.size(context, 60), bench.size(TOKENS, 4)
        core = loads.engine(bench, "1.5b", count, context_length=length + tokens + 8, kv_gib=0.05 if bench.tiny else 16)
        found = loads.sample(core, loads.prompts(count, length), tokens)
        decoded = count * tokens
        yield Figure(
            name,
            count / found.seconds,
            share=loads.share_of_roofline(bench, "1.5b", count, length, found.seconds),
            rates={"model": "1.5b", "sequences": count, "context": length, "pass": found.seconds}
            if not bench.tiny
            else {},
        )
        if sequences == 1:
            seconds = decoded / found.overall - tokens * found.seconds / count
            yield Figure("a prompt of 128k", count * length / max(seconds, 1e-9), note="decoding subtracted")
        del core
        bench.forget()
    learner = loads.trainer(bench, "1.5b", gradient_checkpointing=True)
    with bench.most_memory() as most:
        row = loads.train(bench, learner, steps=2, groups=1, rollouts=1, prompt=1024, tokens=ROW - 1024)
    yield Figure(
        "a row of 64k",
        row.rate,
        note=f"{row.tokens:,} tokens in {row.seconds:.2f} s, {most():.0f} GB",
        share=loads.share_of_peak(bench, "1.5b", row.rate),
    )


BY = "n / (overhead + roofline / 80 %): weights and caches read once"
ENTRY = Entry(
    name="long",
    about="1.5b with random weights; tokens/s",
    limit=180,
    lines=(
        Line(name="8 behind 32k", predicted=decoding("1.5b", MANY, context=SHORTER), formula=BY),
        Line(name="1 behind 128k", predicted=decoding("1.5b", 1, context=LONGER), formula=BY),
        Line(
            name="a prompt of 128k",
            predicted=_prompt,
            formula="55 % of the data sheet / (products, and attention to half of the prompt)",
        ),
        Line(
            name="a row of 64k",
            predicted=trained("1.5b", ROW, passes=4),
            formula=f"{TRAINED}, four passes instead of three",
        ),
    ),
    measure=measure,
    least_memory=100e9,
)
