"""How far are the trainer's log-probs from the sampler's at equal weights, with and without replaying masks and
routing?

    python benchmarks/replay.py [--model smollm2-135m-instruct] [--tokens 96] [--threads 2]

There are two tables. For the first, sampling cuts the vocabulary, and the trainer's log-probs are renormalised over the
recorded mask, or not. For the second, the model is upcycled to a mixture of experts (4 experts of which 2 are chosen,
the router random), so that rounding routes some positions to other experts in the trainer than in the engine: recorded
experts are forced, or not. Each expert is the dense one with noise of 5 % and of 30 % of its weights' deviation,
because the cost of another choice depends on how much experts differ. Engine and trainer compute in bfloat16, the
trainer from float32 masters under autocast; with --dtype float32 both compute in float32.

|difference| is of log-probs in nats; the mismatch KL is the mean of exp(d) - d - 1, d = trainer - sampler, over sampled
tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from capabilities import upcycle
from swap_accuracy import ASKED
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from headrace.algo.objective import token_mean
from headrace.core.batches import Row
from headrace.core.steps import Transcript, write_down
from headrace.core.types import Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.routing import RoutingReplay
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.packing import Pack, StepRows, pack_rows

CUTS = {"nothing": {}, "top-p 0.95": {"top_p": 0.95}, "top-k 20": {"top_k": 20}, "both": {"top_p": 0.95, "top_k": 20}}
HEAD = (
    "",
    "replayed",
    "tokens",
    "mean |difference|",
    "99th percentile",
    "max",
    "mean difference",
    "mismatch KL",
    "missing",
)
BUDGET = 2048
NOISES = (0.05, 0.3)


@dataclass(frozen=True)
class Trainer:
    forward: Forward
    dtype: torch.dtype
    replay: RoutingReplay | None

    @torch.no_grad()
    def compare(self, pack: Pack) -> tuple[Tensor, str]:
        """Returns (trainer - sampler [M], share of routes that were not recorded)."""
        autocast = torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32)
        with autocast, self.replay(pack) if self.replay else nullcontext() as replayed:
            logprob = self.forward.logprobs(pack, 1.0, self.dtype).logprob
        missing = f"{replayed.missing / replayed.routed:.0%}" if replayed else ""
        return logprob - pack.sampled, missing


def sample(
    model_dir: Path, encoder: ChatEncoder, dtype: str, tokens: int, sampling: dict[str, float], routing: bool
) -> list[Row]:
    """Samples one completion of each question, with its mask and its routing."""
    engine = NativeEngine(
        model_dir,
        EngineConfig(dtype=dtype, device="cpu", kv_gib=0.5, max_running=16, context_length=1024, routing=routing),
    )
    update = WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0)
    engine.swap(engine.prepare(update, parameters_from_dir(model_dir, getattr(torch, dtype))))
    transcripts, rows = {}, []
    for number, question in enumerate(ASKED):
        _, prompt = encoder.encode_messages([{"role": "user", "content": question}])
        drawn = Sampling(max_tokens=tokens, seed=number, **sampling)
        request = Request(str(number), prompt, drawn, return_mask=bool(sampling), return_routing=routing)
        transcripts[request.id] = Transcript(request=request)
        engine.add(request)
    while engine.has_work():
        output = engine.step()
        write_down(output, transcripts.get)
        for end in output.finished:
            transcript = transcripts[end.request_id]
            done, count = transcript.completion(end), len(transcript.tokens)
            columns = (0.0,) * count, (True,) * count, (0,) * count
            rows.append(Row(transcript.request.prompt, done.tokens, done.logprobs, *columns, done.mask, done.routing))
    return rows


def trainer_of(model_dir: Path, dtype: torch.dtype, routing: bool) -> Trainer:
    forward = choose_forward(load_model(model_dir, torch.device("cpu")))
    return Trainer(forward, dtype, RoutingReplay(forward, dtype) if routing else None)


def line(name: str, trainer: Trainer, rows: Sequence[Row], replayed: bool) -> tuple[str, ...]:
    packs = pack_rows(StepRows(rows, token_mean, constant=0, budget=BUDGET, step=0)).packs
    if not replayed:
        packs = tuple(replace(pack, kept=None, routing=None) for pack in packs)
    compared = [trainer.compare(pack) for pack in packs]
    gap = torch.cat([one for one, _ in compared])
    size = gap.abs()
    kl = (gap.exp() - gap - 1).mean()
    figures = (size.mean(), size.quantile(0.99), size.max(), gap.mean(), kl)
    return name, "yes" if replayed else "no", str(len(gap)), *(f"{float(x):.2g}" for x in figures), compared[0][1]


def print_table(title: str, lines: Iterator[Sequence[str]]) -> None:
    print(f"\n{title}:\n\n| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD), flush=True)
    for cells in lines:
        print("| " + " | ".join(cells) + " |", flush=True)


def masks(model_dir: Path, dtype: str, tokens: int) -> Iterator[Sequence[str]]:
    trainer, encoder = trainer_of(model_dir, getattr(torch, dtype), False), ChatEncoder(model_dir)
    for name, sampling in CUTS.items():
        rows = sample(model_dir, encoder, dtype, tokens, sampling, routing=False)
        for replayed in (False, True) if sampling else (False,):
            yield line(name, trainer, rows, replayed)


def routes(model_dir: Path, dtype: str, tokens: int) -> Iterator[Sequence[str]]:
    for noise in NOISES:
        yield from routes_of(model_dir, dtype, tokens, noise)


def routes_of(model_dir: Path, dtype: str, tokens: int, noise: float) -> Iterator[Sequence[str]]:
    with tempfile.TemporaryDirectory() as directory:
        upcycle(model_dir, Path(directory), noise)
        rows = sample(Path(directory), ChatEncoder(model_dir), dtype, tokens, {}, routing=True)
        trainer = trainer_of(Path(directory), getattr(torch, dtype), True)
        for replayed in (False, True):
            yield line(f"experts {noise:.0%} apart", trainer, rows, replayed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--only", choices=["masks", "routes"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    model_dir = resolve_model(options.model)
    if options.only != "routes":
        print_table("Vocabulary cut while sampling", masks(model_dir, options.dtype, options.tokens))
    if options.only != "masks":
        print_table("Mixture of experts", routes(model_dir, options.dtype, options.tokens))


if __name__ == "__main__":
    main()
