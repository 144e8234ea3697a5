"""The engine and the trainer on one device: checked against the CPU, then timed. Called by device.sh.

Random weights of SmolLM2-135M's shape (tiny ones with `--device cpu`), so that nothing has to be fetched. Reports

- the largest difference of log-probs, device in bf16 against CPU in fp32, and the agreement of greedy tokens;
- tokens sampled a second at 1, 64, 256 and 1,024 sequences, and the share of the memory bandwidth that reading the weights takes;
- tokens trained a second and the share of the peak that 6 x parameters x tokens is.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.trainer.config import TrainConfig
from headrace.trainer.torch_trainer import TorchTrainer
from headrace.types import Batch, Group, Prompt, Request, Row, Sampling, WeightUpdate

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
"""bf16 FLOP/s without sparsity and bytes/s, from the vendor's data sheets."""


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


def engine(directory: Path, device: str, dtype: str, running: int, weights: LlamaForCausalLM) -> NativeEngine:
    core = NativeEngine(
        directory,
        EngineConfig(
            device=device, dtype=dtype, max_running=running, context_length=256, kv_gib=24 if device == "cuda" else 0.5
        ),
    )
    served = {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in weights.named_parameters()}
    core.swap(core.prepare(WeightUpdate(0, "full", "", 0, 0, 0.0), served))
    return core


def sample(core: NativeEngine, count: int, tokens: int, temperature: float = 1.0) -> tuple[float, dict[str, list[int]]]:
    """(tokens a second while decoding, completions)."""
    rng = random.Random(0)
    for i in range(count):
        prompt = tuple(rng.randrange(3, 500) for _ in range(32))
        core.add(Request(str(i), prompt, Sampling(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=i)))
    out: dict[str, list[int]] = {str(i): [] for i in range(count)}
    core.step()  # the prompts
    started, drawn = time.perf_counter(), 0
    while core.has_work():
        step = core.step()
        drawn += len(step.tokens)
        for request_id, token in zip(step.request_ids, step.tokens, strict=True):
            out[request_id].append(token)
    return drawn / (time.perf_counter() - started), out


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


def check(directory: Path, device: str, weights: LlamaForCausalLM) -> None:
    dtype = "bfloat16" if device == "cuda" else "float32"
    there, here = engine(directory, device, dtype, 8, weights), engine(directory, "cpu", "float32", 8, weights)
    tokens = [random.Random(1).randrange(3, 500) for _ in range(100)]
    worst = max(abs(a - b) for a, b in zip(there.score(tokens), here.score(tokens), strict=True))
    same = [
        a == b for a, b in zip(*(sample(core, 1, 32, temperature=0.0)[1]["0"] for core in (there, here)), strict=True)
    ]
    print(
        f"log-probs {device} {dtype} against cpu float32: max |difference| {worst:.2g}; greedy tokens equal {sum(same)} of {len(same)}"
    )
    assert worst < (0.5 if dtype == "bfloat16" else 1e-4), "the device does not compute what the CPU does"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    small = device == "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu (tiny shapes: the figures mean nothing)"
    flops, bandwidth = next((peak for key, peak in PEAKS.items() if key in name), (float("nan"), float("nan")))
    print(f"{name}, torch {torch.__version__}")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        weights = LlamaForCausalLM(model(small))
        weights.save_pretrained(directory)
        parameters = sum(tensor.numel() for tensor in weights.parameters())
        check(directory, device, weights)
        for count in (1, 8) if small else (1, 64, 256, 1024):
            core = engine(directory, device, "bfloat16", count, weights)
            sample(core, count, 8)
            rate, _ = sample(core, count, 16 if small else 128)
            read = 2 * parameters * rate / count / bandwidth
            print(f"engine  {count:5d} sequences  {rate:10.0f} tokens/s  weights read at {read:.1%} of the bandwidth")
        trainer = TorchTrainer(directory, TrainConfig(device=device, microbatch_tokens=16384), AlgoConfig(), 0)
        shape = (2, 4, 16) if small else (16, 16, 256)
        for step in range(4):
            report = trainer.step(batch(step, *shape, vocabulary=weights.config.vocab_size))
        rate = report.forward_tokens / report.seconds
        print(
            f"trainer {report.forward_tokens:5d} tokens a step  {rate:8.0f} tokens/s  MFU {6 * parameters * rate / flops:.1%}"
        )


if __name__ == "__main__":
    main()
