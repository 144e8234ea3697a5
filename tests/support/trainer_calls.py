""""""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt
from headrace.trainer.config import TrainConfig
from headrace.trainer.packing import StepPlan, StepRows, pack_rows, split_ranks
from headrace.trainer.placement.port import Placement
from headrace.trainer.step.trainer import TorchTrainer


def near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 3e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, one in expected.items():
        largest = float(one.double().abs().max()) or 1.0  # that of A is 0 while B is
        distance = float((actual[name].double() - one.double()).abs().max()) / largest
        assert distance <= tolerance, (name, distance)


V = 61


SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {**GQA, "tie_word_embeddings": True}, "packed trees, chunked head"),
    "qwen3": ("Qwen3", GQA, "packed trees, chunked head"),
    "gemma3": (
        "Gemma3Text",
        {
            **GQA,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
        "packed trees, chunked head",
    ),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4}, "packed trees, chunked head"),
    "gpt_neox": ("GPTNeoX", {**SIZES, "initializer_range": 0.2}, "packed trees, chunked head"),
    "gpt2": ("GPT2", {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4}, "packed trees, chunked head"),
    "phi": ("Phi", {**SIZES, "initializer_range": 0.2}, "packed trees, chunked head"),  # its head has a bias
    "gemma2": (
        "Gemma2",
        {**GQA, "query_pre_attn_scalar": 8},
        "carried states, chunked head",
    ),  # caps attention and logits
    "granite": ("Granite", {**GQA, "logits_scaling": 4.0}, "row by row, own head"),  # scales logits
    "gpt_oss": (
        "GptOss",
        {**GQA, "num_local_experts": 4, "sliding_window": 4},
        "carried states, chunked head",
    ),  # sinks
    "bloom": ("Bloom", {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "carried states, chunked head"),
    "qwen3_next": (  # a delta rule, whose norm takes a gate too, and experts
        "Qwen3Next",
        {
            **GQA,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "carried states, chunked head",
    ),
    "llama4": (
        "Llama4Text",
        {**GQA, "num_local_experts": 4, "intermediate_size_mlp": 48},
        "carried states, chunked head",
    ),
    "mamba": ("Mamba", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}, "row by row, chunked head"),
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """name -> directory of a tiny random model."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        kind, sizes, _ = MODELS[name]
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**sizes))
        for parameter in model.parameters():
            if parameter.ndim < 2:  # biases and norms are born 0 and 1, where mistakes do not show
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
        (root / name / "chat_template.jinja").write_text("{{ messages }}")
        return root / name

    return make


def trainer(directory: Path, algo: AlgoConfig | None = None, **config: Any) -> TorchTrainer:
    config = {"dtype": "float32", "learning_rate": 1e-3, "device": "cpu", **config}
    return TorchTrainer(directory, TrainConfig(**config), algo or AlgoConfig(), seed=0)


def group(rng: random.Random, rows: int, prompt: int, longest: int) -> Group:
    """Ragged completions, some tokens masked, some sampler's log-probs missing."""
    tokens = tuple(rng.randrange(V) for _ in range(prompt))
    made = []
    for _ in range(rows):
        count = rng.randint(1, longest)
        made.append(
            Row(
                tokens,
                tuple(rng.randrange(V) for _ in range(count)),
                tuple(math.nan if rng.random() < 0.1 else rng.gauss(-4, 0.5) for _ in range(count)),
                (rng.gauss(0, 1),) * count,
                tuple(rng.random() < 0.85 for _ in range(count)),
                (0,) * count,
            )
        )
    return Group(0, Prompt("p", "", tokens), (), tuple(made))


def batch(seed: int = 0, step: int = 0, temperature: float = 1.0) -> Batch:
    rng = random.Random(seed)
    return Batch(step, (group(rng, 4, 5, 7), group(rng, 1, 3, 4), group(rng, 3, 9, 2)), temperature)


def own_plan(rows: StepRows, placement: Placement) -> StepPlan:
    """The plan of one rank, from the rows of the whole step."""
    if placement.plain:
        return pack_rows(rows)
    parallel = placement.parallel
    return split_ranks(replace(rows, budget=rows.budget * parallel.context), parallel.batches)[placement.share]


def gradients(of: TorchTrainer, given_batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    sums = of._gradient(given_batch.temperature).fill(of._plans(given_batch)[0])
    found = {name: p.grad.clone() for name, p in of._model.named_parameters() if p.grad is not None}
    of._learners[""].optimizer.zero_grad()
    return sums.loss, found


def reference(
    directory: Path, given_batch: Batch, weigh: str, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient as one would write them down: padded rows, full logits, PPO by its formula."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    rows = given_batch.rows
    ids = [row.prompt + row.tokens for row in rows]
    longest = max(map(len, ids))
    padded = torch.tensor([row + (0,) * (longest - len(row)) for row in ids])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    heat = torch.tensor([row.temperature or given_batch.temperature for row in rows])[:, None, None]
    logits = model(input_ids=padded, attention_mask=attention, use_cache=False).logits / heat
    logp = torch.log_softmax(logits, -1)
    losses = []
    for i, row in enumerate(rows):
        mine = []
        for t, token in enumerate(row.tokens):
            if row.mask[t] and math.isfinite(row.logprobs[t]):
                ratio = torch.exp(logp[i, len(row.prompt) + t - 1, token] - row.logprobs[t])
                adv = row.advantages[t]
                mine.append(-min(ratio * adv, ratio.clamp(0.8, 1.2) * adv))
        losses.append(mine)
    flat = [loss for mine in losses for loss in mine]
    filled = [mine for mine in losses if mine]
    if weigh == "token_mean":
        total = sum(flat) / len(flat)
    elif weigh == "seq_mean_token_mean":
        total = sum(sum(mine) / len(mine) for mine in filled) / len(filled)
    elif weigh == "token_sum":
        total = sum(flat) / (7 * len(filled))
    else:
        total = sum(flat) / len(filled)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
