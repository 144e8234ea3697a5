"""The cost of the native engine's capabilities, as a share of its throughput without them.

    python benchmarks/capabilities.py [--model smollm2-135m-instruct] [--rounds 5] [--sequences 64] [--tokens 64] [--only masks lora]

Every group compares ways of serving the same load with its first row, interleaved in rounds. The load is questions
through the chat template, whose prompts are in the cache after the warm-up round; temperature 1, ends of sequence
ignored, bfloat16. Every engine has a process of its own, which sleeps while another is timed. Ratios are of one round,
medians and extremes over the rounds. The last group measures saved work: prompt tokens forwarded in conversations of
several turns, with and without the cache of earlier turns.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from swap_accuracy import ASKED
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from headrace.core.types import Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.processes.launch.local import environment

CONTEXT = 1024
RANK = 16
EXPERTS, CHOSEN, NOISE = 4, 2, 0.05
TURNS, TURN_PROMPT = 4, 24

Tensors = Mapping[str, torch.Tensor]
Options = Mapping[str, Any]
"""Settings of a request, in addition to those that all have."""


@dataclass(frozen=True)
class Variant:
    name: str
    sampling: Options = field(default_factory=dict)
    options: Callable[[int], Options] = lambda index: {}
    """Settings by the number of the request."""
    config: Options = field(default_factory=dict)
    """Variants of equal settings share an engine."""
    adapters: int = 0
    """Adapters that are loaded."""


@dataclass(frozen=True)
class Comparison:
    name: str
    limit: str
    variants: tuple[Variant, ...]
    """Variants; the first is the baseline of the others."""
    experts: bool = False


COMPARISONS = (
    Comparison(
        "masks",
        "returned: 5 %",
        (
            Variant("top-p 0.95", {"top_p": 0.95}),
            Variant("top-p 0.95, mask returned", {"top_p": 0.95}, lambda index: {"return_mask": True}),
            Variant("no filter"),
        ),
    ),
    Comparison("top", "-", (Variant("plain"), Variant("8 top log-probs", {}, lambda index: {"top_logprobs": 8}))),
    Comparison(
        "lora",
        "1 adapter: 25 %",
        (
            Variant("no adapter"),
            Variant("room for 4, none used", config={"max_adapters": 4}),
            Variant("1 adapter", {}, lambda index: {"adapter": "a0"}, {"max_adapters": 4}, 4),
            Variant("4 adapters", {}, lambda index: {"adapter": f"a{index % 4}"}, {"max_adapters": 4}, 4),
        ),
    ),
    Comparison(
        "exact",
        "-",
        (
            Variant("exact = false"),
            Variant("exact = true", config={"exact": True}),
            Variant("exact = false, in PyTorch", config={"path": "fused"}),
            Variant("exact = true, in PyTorch", config={"path": "fused", "exact": True}),
        ),
    ),
    Comparison(
        "routing",
        "5 %",
        (
            Variant("mixture of experts"),
            Variant("routing returned", {}, lambda index: {"return_routing": True}, {"routing": True}),
        ),
        experts=True,
    ),
)


class Bench:
    """An engine over one model, made when first used."""

    def __init__(self, model_dir: Path, prompts: list[tuple[int, ...]], tokens: int) -> None:
        self._model_dir, self.prompts, self.tokens = model_dir, prompts, tokens
        self._parameters = parameters_from_dir(model_dir, torch.bfloat16)
        self._engine: NativeEngine | None = None

    def engine(self, variant: Variant) -> NativeEngine:
        if self._engine is None:
            self._engine = self.fresh(variant.config)
            for number in range(variant.config.get("max_adapters", 0)):
                spec = AdapterSpec(f"a{number}", RANK, 2.0 * RANK)
                update = WeightUpdate(version=1, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec)
                self._engine.swap(self._engine.prepare(update, adapter(self._parameters, number)))
        return self._engine

    def fresh(self, config: Options) -> NativeEngine:
        settings = EngineConfig(
            dtype="bfloat16", kv_gib=1.0, max_running=len(self.prompts), context_length=CONTEXT, **config
        )
        engine = NativeEngine(self._model_dir, settings)
        self.publish(engine, 0)
        return engine

    def publish(self, engine: NativeEngine, version: int) -> None:
        engine.swap(
            engine.prepare(
                WeightUpdate(version=version, kind="full", fingerprint="", nbytes=0, seconds=0.0), self._parameters
            )
        )

    def rate(self, variant: Variant, seed: int) -> float:
        """Sampled tokens per second."""
        engine, started = self.engine(variant), time.perf_counter()
        for index, prompt in enumerate(self.prompts):
            drawn_by = seed * len(self.prompts) + index
            sampling = Sampling(max_tokens=self.tokens, ignore_eos=True, seed=drawn_by, **variant.sampling)
            engine.add(Request(str(index), prompt, sampling, **variant.options(index)))
        drawn = sum(len(tokens) for tokens in finish(engine).values())
        assert drawn == len(self.prompts) * self.tokens
        return drawn / (time.perf_counter() - started)


class Processes:
    """Runs one engine per process, because the second one in a process is slower, whatever it is. Variants of equal
    settings share an engine."""

    def __init__(self, model_dir: Path, prompts: list[tuple[int, ...]], tokens: int) -> None:
        self._load = (model_dir, prompts, tokens)
        self._started: dict[tuple[tuple[str, Any], ...], ProcessPoolExecutor] = {}

    def measured(self, comparison: Comparison, index: int, seed: int) -> tuple[float, str]:
        """(sampled tokens a second, the engine's path)"""
        key = tuple(sorted(comparison.variants[index].config.items()))
        if key not in self._started:
            self._started[key] = self.fresh()
        return self._started[key].submit(_measured, comparison.name, index, seed).result()

    def fresh(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=self._load)

    def close(self) -> None:
        for process in self._started.values():
            process.shutdown()
        self._started.clear()


_bench: Bench | None = None
"""Settings of a process."""


def _begin(*load: Any) -> None:
    global _bench
    _bench = Bench(*load)


def _measured(comparison: str, index: int, seed: int) -> tuple[float, str]:
    assert _bench is not None
    variant = next(one for one in COMPARISONS if one.name == comparison).variants[index]
    return _bench.rate(variant, seed), _bench.engine(variant).capabilities.path


def _conversations(reuse: bool) -> tuple[int, float]:
    assert _bench is not None
    return conversations(_bench, reuse)


def finish(engine: NativeEngine) -> dict[str, list[int]]:
    """Returns the tokens that all requests sample until all have ended."""
    sampled: dict[str, list[int]] = {}
    while engine.has_work():
        output = engine.step()
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            sampled.setdefault(request_id, []).append(token)
        for finished in output.finished:
            assert finished.stop == "length", finished
    return sampled


def adapter(parameters: Tensors, seed: int) -> dict[str, torch.Tensor]:
    """Makes a random adapter on every linear layer of attention and MLP, in peft's names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in parameters.items():
        if name.endswith("_proj.weight"):
            out, into = tensor.shape
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, into, generator=generator) / into**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.01
    return tensors


def upcycle(model_dir: Path, to: Path, noise: float = NOISE) -> None:
    """Makes a mixture of experts that produces text: every expert is the dense model's MLP with a little noise
    (Komatsuzaki et al., sparse upcycling, arXiv:2212.05055), and the router is random."""
    dense = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "eos_token_id",
    )
    settings = {name: getattr(dense.config, name) for name in same}
    torch.manual_seed(0)
    sparse = MixtralForCausalLM(MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, **settings))
    weights = dense.state_dict()
    gates = {name: tensor for name, tensor in weights.items() if ".mlp." in name}
    new = {name: tensor for name, tensor in weights.items() if name not in gates}
    for layer in range(dense.config.num_hidden_layers):
        gate, up, down = (gates[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        new[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = noisy(torch.cat([gate, up]), noise)
        new[f"model.layers.{layer}.mlp.experts.down_proj"] = noisy(down, noise)
    missing, unexpected = sparse.load_state_dict(new, strict=False)
    assert not unexpected and all(name.endswith("mlp.gate.weight") for name in missing), (missing, unexpected)
    sparse.to(torch.bfloat16).save_pretrained(to)


def noisy(weight: torch.Tensor, noise: float) -> torch.Tensor:
    """[E, ...]"""
    return weight + noise * weight.std() * torch.randn(EXPERTS, *weight.shape)


def compare(engines: Processes, comparison: Comparison, rounds: int) -> Iterator[str]:
    """Yields the rows of the table."""
    rates: list[list[float]] = [[] for _ in comparison.variants]
    paths = [""] * len(rates)
    for number in range(rounds + 1):  # the first is to warm up
        for index in range(len(rates)):
            rate, paths[index] = engines.measured(comparison, index, number)
            if number:
                rates[index].append(rate)
    engines.close()
    for variant, found, path in zip(comparison.variants, rates, paths, strict=True):
        ratios = [rate / of for rate, of in zip(found, rates[0], strict=True)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        yield f"| {variant.name} | {path} | {statistics.median(found):.0f} | {ratio} | {comparison.limit} |"


def conversations(bench: Bench, reuse: bool) -> tuple[int, float]:
    """Returns (prompt tokens forwarded, seconds). Without reuse, the weights are published again before every turn,
    after which no request may use earlier cache entries."""
    engine, rng = bench.fresh({}), random.Random(0)
    histories = {str(index): prompt for index, prompt in enumerate(bench.prompts)}
    started = time.perf_counter()
    for turn in range(TURNS):
        if turn and not reuse:
            bench.publish(engine, turn)
        for index, history in histories.items():
            sampling = Sampling(max_tokens=bench.tokens, ignore_eos=True, seed=turn * len(histories) + int(index))
            engine.add(Request(index, history, sampling))
        for index, sampled in finish(engine).items():
            asked = (rng.randrange(100, 40_000) for _ in range(TURN_PROMPT))
            histories[index] += (*sampled, *asked)
    return engine.stats().prompt_tokens, time.perf_counter() - started


def reused(engines: Processes, count: int) -> Iterator[str]:
    yield f"| {count} conversations of {TURNS} turns | prompt tokens forwarded | s |"
    yield "|---|---|---|"
    for name, reuse in (("cache of earlier turns used", True), ("not used", False)):
        with engines.fresh() as process:
            forwarded, seconds = process.submit(_conversations, reuse).result()
        yield f"| {name} | {forwarded} | {seconds:.1f} |"


def questions(model_dir: Path, count: int) -> list[tuple[int, ...]]:
    encoder = ChatEncoder(model_dir)
    asked = itertools.islice(itertools.cycle(ASKED), count)
    return [encoder.encode_messages([{"role": "user", "content": text}])[1] for text in asked]


def main() -> None:
    names = [comparison.name for comparison in COMPARISONS] + ["prefix"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    model_dir = resolve_model(arguments.model)
    load = (questions(model_dir, arguments.sequences), arguments.tokens)
    print(
        f"{arguments.sequences} sequences of {arguments.tokens} tokens, {torch.get_num_threads()} threads, {arguments.rounds} rounds\n"
    )
    print("| | path | tokens/s | of the first row (min-max) | may cost |\n|---|---|---|---|---|", flush=True)
    os.environ.update(environment(sorted(os.sched_getaffinity(0))))  # of the processes, as in a run
    engines = Processes(model_dir, *load)
    with tempfile.TemporaryDirectory() as folder:
        for comparison in (comparison for comparison in COMPARISONS if comparison.name in arguments.only):
            if comparison.experts:
                upcycle(model_dir, Path(folder))
            on = Processes(Path(folder), *load) if comparison.experts else engines
            for line in compare(on, comparison, arguments.rounds):
                print(line, flush=True)
    if "prefix" in arguments.only:
        print("\n" + "\n".join(reused(engines, len(load[0]))))


if __name__ == "__main__":
    main()
