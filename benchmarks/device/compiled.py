"""Compiled layers where they were eager before: those of a mixture, around its experts, and those that FSDP2 has split over two ranks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device import loads, mixture
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench, Gpu
from benchmarks.device.predictions import EAGER, Prediction
from benchmarks.device.ranks import alone, compared
from headrace.commands.plan.rates.hardware import TRAINS_MIXTURE

LOAD = {"groups": 4, "rollouts": 8, "prompt": 64, "tokens": 192}
COMPILED = 0.4
"""Share of the seconds beside the products that is left where layers are compiled, as docs/decisions/0034 predicts; of a dense model's, which a mixture has
beside its experts. An assumption."""


def _trained(left: float) -> Prediction:
    """`left`: share of a dense model's seconds beside the products."""
    shape = mixture.SHAPE

    def predicted(chip: Gpu) -> float:
        beside = EAGER * shape.layers * shape.hidden * (mixture.KERNELS - 1 + left)
        return 1 / (6 * shape.active / (TRAINS_MIXTURE * chip.compute) + beside)

    return predicted


def measure(bench: Bench) -> Iterator[Figure]:
    yield from _mixture(bench)
    yield compared(bench, "FSDP2 of two over gloo, compiled: as one rank", "gloo", alone(bench), compiled=True)


def _mixture(bench: Bench) -> Iterator[Figure]:
    learner = loads.trainer(bench, "mixture", compile=False, path="torch")
    first = learner.step(loads.batch(bench, 0, **LOAD))
    rate = loads.train(bench, learner, **LOAD)
    yield Figure("mixture, eager", rate.rate, f"{rate.tokens:,} tokens in {rate.seconds:.2f} s")
    del learner
    bench.free()
    learner = loads.trainer(bench, "mixture", compile=False, path="torch")
    reason = loads.compile_layers(bench, learner)
    yield Figure("mixture: layers are compiled", not reason, reason)
    again = learner.step(loads.batch(bench, 0, **LOAD))
    near = all(
        abs(a - b) <= 0.05 * max(abs(b), 1e-3)
        for a, b in ((again.loss, first.loss), (again.grad_norm, first.grad_norm))
    )
    yield Figure(
        "mixture, compiled: as eager", near, f"gradient's norm {again.grad_norm:.6g}, eager {first.grad_norm:.6g}"
    )
    rate = loads.train(bench, learner, **LOAD)
    yield Figure("mixture, compiled", rate.rate, f"{rate.tokens:,} tokens in {rate.seconds:.2f} s")
    del learner
    bench.forget()


ENTRY = Entry(
    name="compiled",
    about="`train.compile` around the experts of a mixture (1.8 billion parameters, 0.4 active), and with FSDP2; random weights, tokens/s of a step",
    limit=180,
    lines=(
        Line(
            name="mixture, eager",
            predicted=_trained(1.0),
            formula="1 / (operations / 15 % of the data sheet + twice a dense model's seconds beside the products), as for *mixture*",
        ),
        Line(
            name="mixture: layers are compiled",
            unit="check",
            formula="they pass their trial (`trainer/forward/compiled.py`)",
        ),
        Line(
            name="mixture, compiled: as eager",
            unit="check",
            formula="loss and gradient's norm of the first step within 5 %, in bfloat16",
        ),
        Line(
            name="mixture, compiled",
            predicted=_trained(COMPILED),
            formula="the same, and of a dense model's seconds beside the products 40 % (assumed); experts stay as they are",
        ),
        Line(
            name="FSDP2 of two over gloo, compiled: as one rank",
            unit="check",
            formula="loss and gradient's norm within 0.1 % of one rank's, eager, in float32",
        ),
    ),
    measure=measure,
)
