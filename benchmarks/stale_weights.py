"""How soon is it found that an engine keeps old weights of one kind?

    python benchmarks/stale_weights.py [--model smollm2-135m-instruct] [--dtype bfloat16] [--engine native] [--way auto] [--learning-rate 1e-6]

The engine of a run is given each version as in a run, but for the parameters that a planted fault leaves at the values that they had first: these
are published in place of the new ones. The trial and the probes of a run (`loop/evaluation.py`) then judge what it computes. A row is
one fault: the share of its effect that the trial found missing with the standard error, and the version at which a probe found it where there
is no trial. The trainer takes real optimizer steps on rows that the engine sampled, with random rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from capabilities import upcycle
from engine import tokenised
from engine_loads import Text
from trainer_headrace import batch_of, sampled_groups
from transformers import AutoTokenizer

from headrace.algo.config import AlgoConfig
from headrace.core.errors import IdentityError
from headrace.core.protocols import Engine, WeightSender
from headrace.core.reports import TrialScores
from headrace.core.types import Completion, VersionSpan
from headrace.core.weights import trial_version
from headrace.facts.facts import IdentityChecked, TrialChecked
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.evaluation import PROBE, ROUNDING, TEXT, IdentityProbe, pieces_of, shares_of
from headrace.models.resolve import resolve_model
from headrace.run import starting
from headrace.run.config import load_config
from headrace.run.worker.build import open_launcher
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.trial import kind_of
from headrace.weight_sync.packed import lay_out

Weights = Mapping[str, torch.Tensor]
Keeps = Callable[[str, torch.Tensor], Any]
"""The part of a tensor that stays as it was: an index, or None."""
CONTEXT = 512


class FaultyEngine:
    """As much of the protocol `Engine` as a probe asks for."""

    def __init__(self, engine: Engine, sender: WeightSender) -> None:
        self._engine, self._sender = engine, sender
        self._loads, self._old = itertools.count(), dict[str, torch.Tensor]()
        self.version = 0
        """The version that it says it serves."""

    async def load(self, version: int, weights: Weights, keeps: Keeps | None = None) -> None:
        """`keeps`: None for weights that are all loaded."""
        loaded = {name: tensor.clone() for name, tensor in weights.items()}
        if keeps:
            for name, tensor in loaded.items():
                if (part := keeps(name, tensor)) is not None:
                    tensor[part] = self._old[name][part]
        self._old = loaded
        await self._engine.load(self._sender.send(next(self._loads), loaded.items()))
        self.version = version

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        found = await self._engine.score(tokens)
        return msgspec.structs.replace(found, spans=(VersionSpan(0, self.version, self.version),))


@asynccontextmanager
async def started(
    model: Path, options: argparse.Namespace, directory: Path, trainer: TorchTrainer
) -> AsyncIterator[FaultyEngine]:
    """The engine that a run would start, and the way of weights to it."""
    engine: dict[str, Any] = {"kind": options.engine, "dtype": options.dtype, "kv_gib": 0.5, "context_length": CONTEXT}
    engine |= {"path": options.path} if options.engine == "native" else {"patience": 1800.0}
    engine |= {"python": options.python} if options.python else {}
    config = load_config(
        {
            "name": "stale",
            "model": {"path": str(model)},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "engine": engine,
            "weight_sync": {"kind": options.way},
        }
    )
    manifests = {"": lay_out(trainer.parameters(), getattr(torch, options.dtype), trainer.tied)}
    transport, record = starting.transport_of(config, directory), lambda fact: None
    begun = starting.start_engine(
        config,
        model_dir=model,
        launcher=open_launcher(directory),
        transport=transport,
        logs=directory,
        telemetry=Telemetry(record, lambda: 0.0, Waits(record, lambda: 0.0, 1e9, 2e9)),
    )
    try:
        await begun.launch()
        await begun.finish(manifests, 0)
        yield FaultyEngine(begun.engine, transport.sender(manifests))
    finally:
        await begun.engine.close()
        transport.close()


def faults(weights: Weights) -> dict[str, Keeps]:
    """Every kind of parameter, and parts of the most common ones in the middle of the model."""
    found: dict[str, Keeps] = {}
    for kind in dict.fromkeys(map(kind_of, weights)):
        found[f"all {kind}"] = lambda name, tensor, kind=kind: slice(None) if kind_of(name) == kind else None  # type: ignore[misc]
    numbers = [int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")]
    middle = f"model.layers.{max(numbers) // 2}."
    found[f"one layer ({middle})"] = lambda name, tensor: slice(None) if name.startswith(middle) else None
    for name in [name for name in weights if name.startswith(middle)]:
        found[f"one {name}"] = lambda other, tensor, name=name: slice(None) if other == name else None  # type: ignore[misc]
    shards = [name for name in weights if name.startswith(middle) and weights[name].dim() > 1]
    for name in shards:
        half = slice(0, len(weights[name]) // 2)
        found[f"half of {name}"] = lambda other, tensor, name=name, half=half: half if other == name else None  # type: ignore[misc]
        if "experts" in name:
            found[f"one expert of {name}"] = lambda other, tensor, name=name: 0 if other == name else None  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--mixture", action="store_true", help="a mixture made of it")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--engine", choices=["native", "headrace", "vllm"], default="native", help="engine.kind")
    parser.add_argument("--python", default="", help="engine.python: vLLM's interpreter")
    parser.add_argument("--way", default="auto", help="weight_sync.kind")
    parser.add_argument("--path", default="auto", help="engine.path; hf rounds otherwise than the trainer's kernels")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        model = resolve_model(options.model)
        if options.mixture:
            upcycle(model, Path(directory))
            for file in model.glob("tokenizer*"):
                (Path(directory) / file.name).symlink_to(file)
            model = Path(directory)
        logs = Path(directory, "logs")
        logs.mkdir()
        asyncio.run(run(model, options, logs))


async def run(model: Path, options: argparse.Namespace, logs: Path) -> None:
    trainer = TorchTrainer(
        model, TrainConfig(learning_rate=options.learning_rate, dtype=options.dtype), AlgoConfig(name="grpo"), seed=0
    )
    dtype = getattr(torch, options.dtype)
    published = lambda: {name: one.detach().to(dtype, copy=True) for name, one in trainer.parameters()}  # noqa: E731
    tokenizer = AutoTokenizer.from_pretrained(model)
    pieces, tokens = pieces_of(tokenizer(TEXT)["input_ids"], CONTEXT), tokenizer(PROBE)["input_ids"]

    first = published()
    trainer.begin_trial()
    changed = published()
    scores = trainer.end_trial(pieces)
    versions, expected = [first], [trainer.score(tokens)]
    groups = sampled_groups(model, first, Text(tokenised(model), seed=0), 4, 4)
    for step in range(options.versions):
        trainer.step(batch_of(groups, step))
        versions.append(published())
        expected.append(trainer.score(tokens))

    print(
        f"{model.name} in {options.dtype}, {options.engine} engine by {options.way}, trainer {trainer.path}, learning rate {options.learning_rate:g}"
    )
    print("| kept | trial: share missing | found | without a trial found at version |\n|---|---|---|---|")
    async with started(model, options, logs, trainer) as engine:
        for label, keeps in {"nothing": lambda name, tensor: None, **faults(first)}.items():
            share, found = await trial_of(engine, first, changed, keeps, pieces, scores)
            later = await found_by_probes(engine, versions, expected, keeps, tokens, options.dtype)
            print(f"| {label} | {share} | {'yes' if found else 'no'} | {later} |", flush=True)


def probe_of(
    tokens: Sequence[int], dtype: str, pieces: Sequence[Sequence[int]], record: Callable[[Any], None]
) -> IdentityProbe:
    telemetry = Telemetry(record, lambda: 0.0, Waits(record, lambda: 0.0, 1e9, 2e9))
    return IdentityProbe(tokens, 1, dtype, telemetry, trial=pieces)


async def trial_of(
    engine: FaultyEngine,
    first: Weights,
    changed: Weights,
    keeps: Keeps,
    pieces: Sequence[Sequence[int]],
    scores: TrialScores,
) -> tuple[str, str]:
    """Returns the most certain share that was found missing, and what it was taken for; empty if the trial was passed."""
    await engine.load(0, first)
    await engine.load(trial_version(0), changed, keeps)
    found = [value for piece in pieces for value in (await engine.score(piece)).prompt_logprobs or ()]
    shares = shares_of(found, scores, ROUNDING["bfloat16"])
    label = max(shares, key=lambda one: share.value / max(share.error, 1e-9) if (share := shares[one]) else 0.0)
    share, facts = shares[label], list[Any]()
    with contextlib.suppress(IdentityError):
        await probe_of((1, 2), "bfloat16", pieces, facts.append).try_weights(engine, engine.version, scores)  # type: ignore[arg-type]
    (fact,) = (fact for fact in facts if isinstance(fact, TrialChecked))
    unseen = f"; unseen: {len(fact.unseen)} of {fact.kinds}" if label and fact.unseen else ""
    return f"{share.value:.3f} ± {share.error:.3f} of {label}{unseen}" if share else "", fact.stale


async def found_by_probes(
    engine: FaultyEngine,
    versions: Sequence[Weights],
    expected: Sequence[list[float]],
    keeps: Keeps,
    tokens: Sequence[int],
    dtype: str,
) -> str:
    facts = list[Any]()
    probe = probe_of(tokens, dtype, (), facts.append)
    await engine.load(0, versions[0])
    await probe.engine_side(engine, 0, expected[0], first=True)  # type: ignore[arg-type]
    for version, weights in enumerate(versions[1:], 1):
        await engine.load(version, weights, keeps)
        try:
            await probe.engine_side(engine, version, expected[version])  # type: ignore[arg-type]
        except IdentityError:
            return str(version)
    largest = max(
        fact.mean_abs_diff / fact.tolerance for fact in facts if isinstance(fact, IdentityChecked) and fact.version
    )
    return f"not in {len(versions) - 1} (at most {largest:.0%} of what is allowed)"


if __name__ == "__main__":
    main()
