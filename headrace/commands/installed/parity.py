"""`headrace doctor --parity MODEL`: does the engine compute the policy that the trainer trains?

The trainer's weights are published as in a run. Every engine path that can serve the model here samples completions of a few prompts, and
the trainer computes the log-probs of the same tokens. A difference is rounding or an error. With top-p or top-k the sampler's log-probs
are normalised over the part of the vocabulary that was kept; they agree only if the trainer gets that part (the sampling mask). With a
mixture of experts the same holds for the experts that were chosen.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.status import Status

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Row
from headrace.core.errors import ConfigError
from headrace.core.protocols import EngineCore, TrainerCore
from headrace.core.steps import Transcript, write_down
from headrace.core.types import Completion, Request, Sampling
from headrace.core.weights import Manifest, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.run.worker.build import build_engine_core, build_trainer_core
from headrace.run.worker.worker_messages import EngineStart, TrainerStart
from headrace.trainer.config import TrainConfig
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, numbers, texts
from headrace.weight_sync.shared_memory import SharedMemory

Dtype = Literal["bfloat16", "float32"]
Path_ = Literal["kernels", "fused", "hf"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
PATHS: tuple[Path_, ...] = ("kernels", "fused", "hf")

LIMITS: dict[str, tuple[float, float]] = {"float32": (1e-3, 1e-2), "bfloat16": (0.06, 0.4)}
"""Limits of the mean and the 99th percentile of |Δ log-prob|, in nats, by serving dtype. In bfloat16 a mean of 0.01 to 0.04 is usual; a
wrong mask, position or norm gives 0.3 and more."""

SAMPLES, TOKENS, CONTEXT, PROMPT_TOKENS = 2, 48, 256, 16
PROMPTS = (
    "What is 17 + 25?",
    "Write one sentence about the sea.",
    "List three colours of the rainbow.",
    "Explain in a few words why the sky is blue.",
    "def fibonacci(n):",
    "Translate to French: good morning.",
    "A train goes 60 km in 45 minutes. How fast is it?",
    "Name the capital of Japan and one of its rivers.",
)
FILTERS: dict[str, dict[str, float]] = {"top-p 0.95": {"top_p": 0.95}, "top-k 50": {"top_k": 50}}
EXPERTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """|Δ log-prob| between engine and trainer over some sampled tokens, in nats."""

    dtype: Dtype
    path: str
    """The path of the engine."""
    sampling: str
    replayed: str
    """The sampler's choices that the trainer replayed; empty if there were none."""
    judged: bool
    """False if a difference is expected, and the row is only shown for comparison."""
    tokens: int = 0
    mean: float = 0.0
    p99: float = 0.0
    largest: float = 0.0
    absent: str = ""
    """The reason why the row has no numbers; empty if it has."""

    @property
    def ok(self) -> bool:
        """Whether the differences are within the limits. NaN is not."""
        mean, p99 = LIMITS[self.dtype]
        return not self.judged or bool(self.absent) or (self.mean <= mean and self.p99 <= p99)


def measure(model_dir: Path, dtypes: Sequence[Dtype] = DTYPES, tokens: int = TOKENS) -> Iterator[ParityRow]:
    """Yields each row as soon as it is measured. `tokens`: length of each completion. Raises ConfigError for a model that cannot be trained."""
    asked = _Asked(_prompts(model_dir), tokens)
    for dtype in dtypes:
        with _Published(model_dir, dtype) as published:
            yield from _of_dtype(published, asked)


@dataclass(frozen=True)
class _Asked:
    prompts: Sequence[tuple[int, ...]]
    tokens: int


def _of_dtype(published: _Published, asked: _Asked) -> Iterator[ParityRow]:
    served = []
    for path in PATHS:
        try:
            engine = published.engine(path)
        except ConfigError as error:
            yield ParityRow(
                dtype=published.dtype, path=path, sampling="plain", replayed="", judged=False, absent=str(error)
            )
            continue
        served.append(path)
        rows = _rows(engine, asked, {}, published.routed)
        yield from _rows_of(published, engine, "plain", rows)
    for name, options in FILTERS.items() if served else ():
        engine = published.engine(served[0])
        yield from _rows_of(published, engine, name, _rows(engine, asked, options, published.routed))


def _rows_of(published: _Published, engine: EngineCore, sampling: str, rows: Sequence[Row]) -> Iterator[ParityRow]:
    """One row with everything that was recorded, and one without each single record."""
    recorded = {"experts": "routing"} if published.routed else {}
    if sampling in FILTERS:
        recorded["mask"] = "sampling_mask"
    variants: list[tuple[str, list[str]]] = [(" and ".join(recorded), [])]
    variants += [(_without(name, recorded), [column]) for name, column in recorded.items()]
    for replayed, dropped in variants:
        stripped = [msgspec.structs.replace(row, **dict.fromkeys(dropped)) for row in rows]
        differences = _differences(rows, published.rescore(stripped))
        yield ParityRow(
            dtype=published.dtype,
            path=engine.capabilities.path,
            sampling=sampling,
            replayed=replayed,
            judged=not dropped,
            tokens=len(differences),
            mean=sum(differences) / len(differences),
            p99=differences[int(0.99 * (len(differences) - 1))],
            largest=differences[-1],
        )


def _without(name: str, recorded: Iterable[str]) -> str:
    kept = [kind for kind in recorded if kind != name]
    return f"{' and '.join(kept)}, no {name}" if kept else f"no {name}"


def _differences(rows: Sequence[Row], scored: Sequence[Sequence[float]]) -> list[float]:
    """Ascending; one that is no number comes last."""
    pairs = (pair for row, ours in zip(rows, scored, strict=True) for pair in zip(row.logprobs, ours, strict=True))
    return sorted((abs(a - b) for a, b in pairs), key=lambda difference: (difference != difference, difference))


# -- both sides -------------------------------------------------------------------------------------------------------------


class _Published:
    """A trainer whose weights are published for engines to load."""

    def __init__(self, model_dir: Path, dtype: Dtype) -> None:
        self.model_dir, self.dtype = model_dir, dtype
        self.routed = _has_experts(model_dir)
        self._transport = SharedMemory.open()
        self._trainer: TrainerCore
        self._manifests: dict[str, Manifest]
        self._update: WeightUpdate

    def __enter__(self) -> _Published:
        train, algo = dataclasses.asdict(TrainConfig(dtype=self.dtype)), dataclasses.asdict(AlgoConfig())
        start = TrainerStart(
            model_dir=str(self.model_dir),
            train=train,
            algo=algo,
            seed=0,
            serving_dtype=self.dtype,
            keep_routing=self.routed,
            transport=self._transport,
        )
        self._trainer, sender, self._manifests = build_trainer_core(start)
        self._update = sender.send(0, self._trainer.parameters())
        return self

    def __exit__(self, *error: object) -> None:
        self._transport.close()

    def engine(self, path: Path_) -> EngineCore:
        config = EngineConfig(
            dtype=self.dtype, kv_gib=0.5, max_running=16, context_length=CONTEXT, routing=self.routed, path=path
        )
        start = EngineStart(str(self.model_dir), dataclasses.asdict(config), self._manifests, self._transport)
        core, receiver = build_engine_core(start)
        core.swap(core.prepare(self._update, receiver.receive(self._update)))
        return core

    def rescore(self, rows: Sequence[Row]) -> list[list[float]]:
        from headrace.trainer.step.trainer import rescore

        return rescore(self._trainer, rows, 1.0)


def _has_experts(model_dir: Path) -> bool:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return any((config.get(name) or 0) > 1 for name in EXPERTS)


def _rows(engine: EngineCore, asked: _Asked, options: dict[str, Any], routed: bool) -> list[Row]:
    requests = [
        Request(
            f"{number}/{sample}",
            prompt,
            Sampling(max_tokens=asked.tokens, seed=number * SAMPLES + sample, ignore_eos=True, **options),
            return_mask=bool(options),
            return_routing=routed,
        )
        for number, prompt in enumerate(asked.prompts)
        for sample in range(SAMPLES)
    ]
    completions = _sampled(engine, requests)
    return [_row(request, completions[request.id]) for request in requests]


def _sampled(engine: EngineCore, requests: Sequence[Request]) -> dict[str, Completion]:
    transcripts = {request.id: Transcript(request=request) for request in requests}
    completions = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        output = engine.step()
        write_down(output, transcripts.get)
        for end in output.finished:
            completions[end.request_id] = transcripts[end.request_id].completion(end)
    return completions


def _row(request: Request, completion: Completion) -> Row:
    count = len(completion.tokens)
    if not count:
        raise ConfigError(f"the engine sampled nothing: {completion.stop} {completion.error}".rstrip())
    return Row(
        prompt=request.prompt,
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        advantages=(0.0,) * count,
        mask=(True,) * count,
        versions=(0,) * count,
        sampling_mask=completion.mask,
        routing=completion.routing,
    )


def _prompts(model_dir: Path) -> list[tuple[int, ...]]:
    """The prompts, in the model's chat template if it has one. A model without a tokenizer gets random tokens."""
    try:
        encoder = ChatEncoder(model_dir)
    except ConfigError:
        return _random_prompts(model_dir)
    encode: Callable[[str], tuple[int, ...]] = encoder.encode_text
    if encoder.has_template:
        encode = lambda text: encoder.encode_messages([{"role": "user", "content": text}])[1]  # noqa: E731
    encoded = [encode(text) for text in PROMPTS]
    return encoded if all(encoded) else _random_prompts(model_dir)  # transformers can return an empty tokenizer


def _random_prompts(model_dir: Path) -> list[tuple[int, ...]]:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    size, numbers = int({**config.get("text_config", {}), **config}["vocab_size"]), random.Random(0)
    return [tuple(numbers.randrange(size) for _ in range(PROMPT_TOKENS)) for _ in PROMPTS]


# --- The output of `headrace doctor --parity`
# A table of differences, their limits, and the verdict.


COLUMNS = (
    *texts("dtype", "engine", "sampling", "replayed in the trainer"),
    *numbers("tokens", "mean", "p99", "max"),
    *texts(""),
)


def report(model: str, dtypes: Sequence[Dtype] = DTYPES, console: Console | None = None) -> int:
    """Measures and prints. Returns 0 if engine and trainer agree, else 1. `model`: a directory or a known name."""
    console = console or Console()
    directory = (
        Path(model) if (Path(model) / "config.json").is_file() else resolve_model(model)
    )  # no tokenizer is needed
    found: list[ParityRow] = []
    with console.status(Text(f"{Path(model).name}: publishing, sampling, scoring ...")) as status:
        for row in measure(directory, dtypes):
            found.append(row)
            _progress(status, found)
    console.print(
        Text("|Δ log-prob| between engine and trainer, nats", "bold").append(f" · {Path(model).name}", "not bold")
    )
    console.print(table(found))
    return _verdict(found, console)


def _progress(status: Status, found: Sequence[ParityRow]) -> None:
    status.update(Text(f"{len(found)} rows, the last: {found[-1].dtype} {found[-1].path} {found[-1].sampling} ..."))


def table(found: Sequence[ParityRow]) -> FittedTable:
    drawn = FittedTable(COLUMNS)
    for row in found:
        drawn.add_row(*_cells(row), style="" if row.judged else "dim")
    return drawn


def _cells(row: ParityRow) -> tuple[str | Text, ...]:
    if row.absent:
        return (row.dtype, row.path, row.sampling, "", "", "", "", "", "not here")
    numbers = (f"{value:.5f}" for value in (row.mean, row.p99, row.largest))
    return (row.dtype, row.path, row.sampling, row.replayed, str(row.tokens), *numbers, _mark(row))


def _mark(row: ParityRow) -> str | Text:
    if not row.judged:
        return "for comparison"
    return Text("✓", "green") if row.ok else Text("✗ too far", "bold red")


def _verdict(found: Sequence[ParityRow], console: Console) -> int:
    dtypes = dict.fromkeys(row.dtype for row in found)
    limits = "; ".join(f"{name}: mean {LIMITS[name][0]:g}, p99 {LIMITS[name][1]:g}" for name in dtypes)
    console.print(Text(f"\nLimits of what rounding can cause: {limits}.", "dim"))
    bad = [row for row in found if not row.ok]
    judged = [row for row in found if row.judged]
    if bad:
        where = ", ".join(dict.fromkeys(f"{row.path} in {row.dtype}" for row in bad))
        console.print(
            Text("Engine and trainer do not compute the same policy:", "bold red").append(
                f' {where}. Set engine.path to one that agrees ("hf" is Hugging Face\'s own forward), and please report it.',
                "default not bold",
            )
        )
    elif not judged:
        console.print(Text("Nothing could be measured: no engine path serves this model here.", "bold red"))
    else:
        console.print(Text("Engine and trainer agree.", "green"))
    return 1 if bad or not judged else 0
