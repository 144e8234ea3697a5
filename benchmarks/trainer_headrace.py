"""headrace's part of trainer.py: sampling the rollouts, optimizer steps on them, gradients, memory by length."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from engine import tokenised
from engine_loads import Text
from safetensors.torch import save_file
from trainer_process import Json, Stopwatch, child_main
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer

SHORTEST, LONGEST = 50, 400
NO_CLIPPING = 1e9


def main(options: Json) -> Json:
    works = {"rollouts": rollouts, "step": step, "gradients": gradients, "truth": truth, "length": length}
    return works[options["work"]](options)


# -- rollouts ---------------------------------------------------------------------------------------------------------------


def rollouts(options: Json) -> Json:
    """Makes P prompts of real text and samples G completions of each with the real model, of log-normal lengths; or, with `row_tokens`, takes
    rows of this length from the text, since what they say does not change the time of a step."""
    model_dir = Path(options["model"])
    text = Text(tokenised(model_dir), seed=0)
    if options["row_tokens"]:
        return {
            "groups": [cut_group(text, options["samples"], options["row_tokens"]) for _ in range(options["prompts"])]
        }
    weights = parameters_from_dir(model_dir, torch.bfloat16)
    return {"groups": sampled_groups(model_dir, weights, text, options["prompts"], options["samples"])}


def sampled_groups(
    model_dir: Path, weights: Mapping[str, torch.Tensor], text: Text, prompts: int, samples: int
) -> list[Json]:
    """Samples with the weights, in their dtype."""
    lengths, rewards = random.Random(0), random.Random(1)
    begins = [text.cut(lengths.randint(180, 220)) for _ in range(prompts)]
    asks = [(prompt, completion_length(lengths)) for prompt in begins for _ in range(samples)]
    sampled, groups = sample(model_dir, weights, asks), []
    for number, prompt in enumerate(begins):
        rows = sampled[number * samples : (number + 1) * samples]
        groups.append({"prompt": prompt, "rows": rows, "advantages": advantages([rewards.random() for _ in rows])})
    return groups


def cut_group(text: Text, samples: int, tokens: int) -> Json:
    """A prompt of 200 tokens and its completions, each row of `tokens` tokens."""
    completions = [text.cut(tokens - 200) for _ in range(samples)]
    rows = [{"tokens": completion, "logprobs": [-3.0] * len(completion)} for completion in completions]
    return {"prompt": text.cut(200), "rows": rows, "advantages": [(-1.0) ** number for number in range(samples)]}


def completion_length(numbers: random.Random) -> int:
    """Returns log-normal lengths with a median of 140, cut at both ends."""
    return max(SHORTEST, min(LONGEST, round(numbers.lognormvariate(4.94, 0.6))))


def advantages(rewards: list[float]) -> list[float]:
    rewards_of = torch.tensor(rewards, dtype=torch.float64)
    return ((rewards_of - rewards_of.mean()) / (rewards_of.std() + 1e-6)).tolist()


def sample(model_dir: Path, weights: Mapping[str, torch.Tensor], asks: list[tuple[list[int], int]]) -> list[Json]:
    dtype: Any = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    engine = NativeEngine(model_dir, EngineConfig(dtype=dtype, kv_gib=1.0, max_running=64, context_length=640))
    engine.swap(engine.prepare(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), weights))
    for index, (prompt, count) in enumerate(asks):
        engine.add(Request(str(index), tuple(prompt), Sampling(max_tokens=count, ignore_eos=True, seed=index)))
    rows: list[Json] = [{"tokens": [], "logprobs": []} for _ in asks]
    while engine.has_work():
        output = engine.step()
        for request_id, token, logprob in zip(output.request_ids, output.tokens, output.logprobs, strict=True):
            rows[int(request_id)]["tokens"].append(token)
            rows[int(request_id)]["logprobs"].append(logprob)
    return rows


# -- steps ------------------------------------------------------------------------------------------------------------------


def batch_of(groups: list[Json], number: int = 0) -> Batch:
    made = []
    for ticket, group in enumerate(groups):
        prompt = Prompt(str(ticket), "", tuple(group["prompt"]))
        rows = tuple(
            Row(
                prompt.tokens,
                tuple(row["tokens"]),
                tuple(row["logprobs"]),
                (advantage,) * len(row["tokens"]),
                (True,) * len(row["tokens"]),
                (number,) * len(row["tokens"]),
            )
            for row, advantage in zip(group["rows"], group["advantages"], strict=True)
        )
        made.append(Group(ticket, prompt, (), rows))
    return Batch(number, tuple(made))


def trainer_of(options: Json) -> TorchTrainer:
    config = TrainConfig(
        learning_rate=1e-6,
        dtype=options["dtype"],
        max_grad_norm=options.get("max_grad_norm", 1.0),
        microbatch_tokens=options.get("microbatch_tokens", 2048),
        gradient_checkpointing=options.get("checkpointing", False),
    )
    trainer = TorchTrainer(Path(options["model"]), config, AlgoConfig(name="grpo"), seed=0)
    if options.get("unpacked"):
        unpack(trainer)
    return trainer


def unpack(trainer: Any) -> None:
    """Trains row after row through Hugging Face's own attention, each with its own copy of the prompt: the path of
    models whose attention cannot be packed."""
    trainer._model.set_attn_implementation("sdpa")
    trainer._forward = dataclasses.replace(trainer._forward, packed=False)


def step(options: Json) -> Json:
    groups = json.loads(Path(options["rollouts"]).read_text())["groups"]
    trainer = trainer_of(options)
    trainer.step(batch_of(few(groups)))
    watches = []
    for _ in range(options["steps"]):
        batch, watch = batch_of(groups, trainer.version), Stopwatch()
        report = trainer.step(batch)
        watches.append(watch.read())
    return {
        "steps": watches,
        "loss_tokens": report.loss_tokens,
        "forward_tokens": report.forward_tokens,
        "microbatches": report.microbatches,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "path": trainer.path,
    }


def few(groups: list[Json]) -> list[Json]:
    """The warm-up: half a group."""
    group = groups[0]
    half = max(2, len(group["rows"]) // 2)
    return [{**group, "rows": group["rows"][:half], "advantages": group["advantages"][:half]}]


def gradients(options: Json) -> Json:
    groups = json.loads(Path(options["rollouts"]).read_text())["groups"]
    trainer: Any = trainer_of({**options, "max_grad_norm": NO_CLIPPING})
    batch = batch_of(groups)
    (plan,) = trainer._plans(batch)
    sums = trainer._gradient(batch.temperature).fill(plan)
    named = {name: parameter.grad for name, parameter in trainer._model.named_parameters()}
    save_file({name: grad.contiguous() for name, grad in named.items() if grad is not None}, options["gradients"])
    return {"loss": sums.loss}


def truth(options: Json) -> Json:
    """Computes the same loss in its plainest form: float64, Hugging Face's forward, row after row."""
    groups = json.loads(Path(options["rollouts"]).read_text())["groups"]
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float64, local_files_only=True).eval()
    count = sum(len(row["tokens"]) for group in groups for row in group["rows"])
    total = 0.0
    for group in groups:
        for row, advantage in zip(group["rows"], group["advantages"], strict=True):
            tokens, sampled = torch.tensor(row["tokens"]), torch.tensor(row["logprobs"], dtype=torch.float64)
            logits = model(torch.tensor([group["prompt"] + row["tokens"]])).logits[0, len(group["prompt"]) - 1 : -1]
            ratio = torch.exp(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0] - sampled)
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / count
            loss.backward()
            total += loss.item()
    save_file({name: parameter.grad for name, parameter in model.named_parameters()}, options["gradients"])
    return {"loss": total}


# -- memory by length -------------------------------------------------------------------------------------------------------


def length(options: Json) -> Json:
    """Trains one row of N tokens through a tiny model with a real vocabulary, whose logits alone would take 200 kB per
    token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        trainer = trainer_of({**options, "model": folder})
        tokens = torch.randint(0, config.vocab_size, (options["tokens"],)).tolist()
        row = {"tokens": tokens[16:], "logprobs": [-10.8] * (len(tokens) - 16)}
        group = {"prompt": tokens[:16], "rows": [row], "advantages": [1.0]}
        short = {**group, "rows": [{name: column[:64] for name, column in row.items()}]}
        trainer.step(batch_of([short]))
        watch = Stopwatch()
        trainer.step(batch_of([group], trainer.version))
        return watch.read()


if __name__ == "__main__":
    child_main(main)
