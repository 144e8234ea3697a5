"""The engine and the trainer on one device: checked against the CPU, then timed. Called by device.sh.

Random weights of SmolLM2-135M's shape (tiny ones with `--device cpu`), so that nothing has to be fetched. Reports

- the largest difference of log-probs, device in bf16 against CPU in fp32, and the agreement of greedy tokens;
- whether graphs are captured while another thread moves and verifies new weights, as it does in a run;
- tokens sampled a second at 1, 64, 256 and 1,024 sequences, prompts included, against transformers' continuous batching of the same
  load; and while decoding alone, with CUDA graphs and without, against the roofline: what reading the weights once a step and the
  KV cache once a sequence takes at the device's bandwidth, or the arithmetic at its peak, whichever is more;
- tokens trained a second and the share of the peak that 6 x parameters x tokens is.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Literal

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.steps import PromptScores
from headrace.core.types import Prompt, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import Core
from headrace.engine.native.model_loading import read_model
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.request_book import scoring
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer

Device = Literal["cpu", "cuda"]

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
"""bf16 FLOP/s without sparsity and bytes/s, from the vendor's data sheets."""

COLUMNS = (
    "sequences",
    "tokens/s",
    "transformers",
    "ratio",
    "decoding, graphs",
    "decoding, no graphs",
    "roofline",
    "share",
    "bound by",
)
PROMPT = 32
NO_PEAKS = (float("nan"), float("nan"))


@dataclass(frozen=True)
class Bench:
    directory: Path
    weights: LlamaForCausalLM
    device: Device
    small: bool
    """Tiny shapes, to check the script."""

    @property
    def tokens(self) -> int:
        return 8 if self.small else 128

    @property
    def counts(self) -> tuple[int, ...]:
        return (1, 8) if self.small else (1, 64, 256, 1024)


def model(small: bool) -> LlamaConfig:
    sizes = (512, 64, 128, 2, 4, 2) if small else (49152, 576, 1536, 30, 9, 3)
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return LlamaConfig(
        **dict(zip(names, sizes, strict=True)), max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2
    )


# -- the engine -------------------------------------------------------------------------------------------------------------


def engine(
    bench: Bench, running: int, device: Device, dtype: Literal["bfloat16", "float32"], graphs: bool | None = None
) -> Core:
    """`graphs`: CUDA graphs on or off; None is the engine's own choice. On a CPU the fused decoder has neither: "on"
    then does everything that graphs need except the capture."""
    config = EngineConfig(
        device=device,
        dtype=dtype,
        max_running=running,
        context_length=256,
        kv_gib=8 if device == "cuda" else 0.5,
        prefill_chunk=8192,
        path="fused",
    )
    read = read_model(bench.directory, config)
    if graphs is not None:
        assert isinstance(read.runner, FusedRunner)
        read.runner.decode_with_graphs(capture=graphs and device == "cuda")
    core = Core(read, config)
    served = {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in bench.weights.named_parameters()}
    core.swap(core.prepare(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), served))
    return core


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, 500) for _ in range(PROMPT)) for _ in range(count)]


@dataclass(frozen=True)
class Sampled:
    overall: float
    """Tokens per second, prompts included."""
    decoding: float
    """Tokens per second in the median pass in which every sequence gets a token."""
    tokens: dict[str, list[int]]


def sample(core: Core, count: int, tokens: int, seed: int = 0, temperature: float = 1.0) -> Sampled:
    out: dict[str, list[int]] = {str(i): [] for i in range(count)}
    seconds: list[float] = []
    started = time.perf_counter()
    for i, prompt in enumerate(prompts(count, seed)):
        core.add(Request(str(i), prompt, Sampling(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=i)))
    while core.has_work():
        before = time.perf_counter()
        step = core.step()
        if len(step.tokens) == count:
            seconds.append(time.perf_counter() - before)
        for request_id, token in zip(step.request_ids, step.tokens, strict=True):
            out[request_id].append(token)
    drawn = sum(map(len, out.values()))
    assert drawn == count * tokens
    return Sampled(drawn / (time.perf_counter() - started), count / statistics.median(seconds), out)


def score(core: Core, tokens: list[int]) -> list[float]:
    core.add(scoring("score", tokens))
    scores: list[PromptScores] = []
    while core.has_work():
        scores += core.step().scores
    return list(scores[0].logprobs)


def check(bench: Bench) -> None:
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if bench.device == "cuda" else "float32"
    there, here = engine(bench, 8, bench.device, dtype), engine(bench, 8, "cpu", "float32")
    tokens = [random.Random(1).randrange(3, 500) for _ in range(100)]
    worst = max(abs(a - b) for a, b in zip(score(there, tokens), score(here, tokens), strict=True))
    greedy = [sample(core, 1, 32, temperature=0.0).tokens["0"] for core in (there, here)]
    same = sum(a == b for a, b in zip(*greedy, strict=True))
    print(
        f"log-probs {bench.device} {dtype} against cpu float32: max |difference| {worst:.2g}; greedy tokens equal {same} of 32\n"
    )
    assert worst < (0.5 if dtype == "bfloat16" else 1e-4), "the device does not compute what the CPU does"


def capture_beside_weights(bench: Bench) -> None:
    """Captures a graph for each of many sizes while weights arrive all the time. A capture that another thread could break would end the
    engine's process."""
    core = engine(bench, 32, bench.device, "bfloat16")
    served = {name: tensor.detach().bfloat16() for name, tensor in bench.weights.named_parameters()}
    update, over, errors = WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), Event(), []

    def arrive() -> None:
        try:
            while not over.is_set():
                core.prepare(update, served)
                for tensor in served.values():
                    tensor.to(bench.device).cpu()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=arrive)
    thread.start()
    try:
        for count in range(1, 33):
            sample(core, count, 4)
    finally:
        over.set()
        thread.join()
    assert not errors, errors
    print("graphs of 32 batch sizes captured while weights arrived\n", flush=True)


def continuous_batching(bench: Bench, count: int) -> float:
    """Tokens per second of transformers' own continuous batching, prompts included, log-probs on; the second of two
    runs."""
    served = LlamaForCausalLM.from_pretrained(bench.directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    served.to(bench.device).eval()
    served.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=-1
    )
    config = ContinuousBatchingConfig(max_requests_per_batch=count, return_logprobs=True, max_memory_percent=0.5)
    if bench.device == "cpu":  # where it finds no sizes by itself
        config = replace(config, page_size=PROMPT, num_blocks=16 * count, max_batch_tokens=1024)
    with served.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        for seed in (0, 1):
            started, drawn = time.perf_counter(), 0
            for prompt in prompts(count, seed):
                manager.add_request(list(prompt), max_new_tokens=bench.tokens, eos_token_id=-1)
            for _ in range(count):
                output = manager.get_result(timeout=120)
                assert output is not None and not output.error, output
                drawn += len(output.generated_tokens)
    assert drawn == count * bench.tokens
    return drawn / (time.perf_counter() - started)


def free() -> None:
    """Frees the KV cache and the graphs of an engine that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def roofline(weights: LlamaForCausalLM, count: int, context: float, peaks: tuple[float, float]) -> tuple[float, str]:
    """Returns (most tokens per second while `count` sequences of `context` tokens decode, what limits them), in bf16."""
    (flops, bandwidth), config = peaks, weights.config
    parameters = sum(tensor.numel() for tensor in weights.parameters())
    head, layers = config.hidden_size // config.num_attention_heads, config.num_hidden_layers
    read = 2 * parameters + count * context * 2 * 2 * layers * config.num_key_value_heads * head
    computed = count * (2 * parameters + 4 * layers * config.num_attention_heads * head * context)
    reading, computing = read / bandwidth, computed / flops
    return count / max(reading, computing), "bandwidth" if reading >= computing else "arithmetic"


def rows(bench: Bench, peaks: tuple[float, float]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
    for count in bench.counts:
        found = []
        for graphs in (True, False):
            core = engine(bench, count, bench.device, "bfloat16", graphs)
            sample(core, count, bench.tokens)
            found.append(sample(core, count, bench.tokens, seed=1))
            del core
            free()
        other = continuous_batching(bench, count)
        most, bound = roofline(bench.weights, count, PROMPT + bench.tokens / 2, peaks)
        on, off = found
        cells = (count, on.overall, other, f"{on.overall / other:.2f}", on.decoding, off.decoding, most)
        shown = " | ".join(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in cells)
        free()
        yield f"| {shown} | {on.decoding / most:.1%} | {bound} |"


# -- the trainer ------------------------------------------------------------------------------------------------------------


def batch(step: int, groups: int, rollouts: int, tokens: int, vocabulary: int) -> Batch:
    rng = random.Random(step)

    def row(prompt: tuple[int, ...], sign: float) -> Row:
        drawn = tuple(rng.randrange(3, vocabulary) for _ in range(tokens))
        return Row(prompt, drawn, (-6.0,) * tokens, (sign,) * tokens, (True,) * tokens, (0,) * tokens)

    made = []
    for i in range(groups):
        prompt = tuple(rng.randrange(3, vocabulary) for _ in range(64))
        rows = tuple(row(prompt, (-1.0) ** j) for j in range(rollouts))
        made.append(Group(i, Prompt(str(i), "", prompt), (), rows))
    return Batch(step, tuple(made))


def train(bench: Bench, flops: float) -> str:
    trainer = TorchTrainer(bench.directory, TrainConfig(device=bench.device, microbatch_tokens=16384), AlgoConfig(), 0)
    shape = (2, 4, 16) if bench.small else (16, 16, 256)
    for step in range(4):
        report = trainer.step(batch(step, *shape, vocabulary=bench.weights.config.vocab_size))
    rate = report.forward_tokens / report.seconds
    used = 6 * sum(tensor.numel() for tensor in bench.weights.parameters()) * rate / flops
    return f"trainer: {report.forward_tokens} tokens a step, {rate:.0f} tokens/s, MFU {used:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device: Device = parser.parse_args().device
    small = device == "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu (tiny shapes: the figures mean nothing)"
    peaks = next((peak for key, peak in PEAKS.items() if key in name), NO_PEAKS)
    print(f"{name}, torch {torch.__version__}")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), LlamaForCausalLM(model(small)), device, small)
        bench.weights.save_pretrained(folder)
        check(bench)
        capture_beside_weights(bench)
        for row in rows(bench, peaks):
            print(row, flush=True)
        print("\n" + train(bench, peaks[0]))


if __name__ == "__main__":
    main()
