"""Tiny random models of every family, and a driver that steps a runner by hand: what the tests of the runners stand on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput
from headrace.engine.native.runners.paged import require_exact
from headrace.engine.native.runners.skeleton import Skeleton, read
from headrace.models.saved_buffers import saved_buffers


def skip_where_inexact(dtype: torch.dtype) -> None:
    """Skips a test of exactness in PyTorch where an exact engine is refused: torch 2.11 on 16 cores with AMX is such a machine."""
    try:
        require_exact(dtype, torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BIASED = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16}
GEMMA = {
    "head_dim": 8,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 12,
}
QWEN3_MOE = {
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

SCALED = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    **PARTIAL,
    "rope_type": "longrope",
    "short_factor": [1.1, 1.3],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 256,
}

GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", BIASED),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 37}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma3_text": ("gemma3_text", GEMMA),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "ministral3": ("ministral3", {"head_dim": 8, "rope_parameters": GROWING, "sliding_window": 21}),
    "cohere": ("cohere", {"attention_bias": True, "logit_scale": 0.4}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.4},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 1.5},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe-mixed": ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "olmo3": ("olmo3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "granite": ("granite", SCALED),
    "granitemoe": ("granitemoe", {**SCALED, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite4": (
        "granitemoehybrid",
        {
            **SCALED,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
        },
    ),
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "glm4": ("glm4", {"head_dim": 8, "rope_parameters": PARTIAL, "attention_bias": True}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "gpt2": ("gpt2", {}),
}
OWN_CACHE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "mamba": ("mamba", {"state_size": 8}),
    "deepseek_v32": (
        "deepseek_v32",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "index_head_dim": 8,
            "index_n_heads": 32,
            "index_topk": 8,
        },
    ),
    "trocr": ("trocr", {"decoder_ffn_dim": 48}),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
"""ALiBi; state spaces, sparse attention with heads enough that no two keys score alike, positions that count padding, and a delta
rule beside attention."""
DEEP = {
    "llama-deep": ("llama", {"num_hidden_layers": 5}),
    "qwen3-deep": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "num_hidden_layers": 5}),
    "gemma3-deep": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen3_moe-deep": ("qwen3_moe", {**QWEN3_MOE, "num_hidden_layers": 4}),
    "granite-scaled": ("granite", {"logits_scaling": 8.0}),
}
"""Layers enough for the stages of a pipeline, and logits that are more than a product."""
FALCON_H1 = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_rms_norm": True,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "attention_in_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.3],
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.4],
}
CONVOLUTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "sliding_window": 9,
        },
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granite4-hybrid": (
        "granitemoehybrid",
        {
            **SCALED,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "bamba": (
        "bamba",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "attn_layer_indices": [1],
        },
    ),
    "nemotron_h-dense": (
        "nemotron_h",
        {"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16},
    ),
    "arcee": ("arcee", BIASED),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1-gate-first": ("falcon_h1", {**FALCON_H1, "mamba_norm_before_gate": False}),
    "falcon_h1-plain": ("falcon_h1", {**FALCON_H1, "mamba_rms_norm": False}),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 9,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**QWEN3_MOE, "head_dim": 16, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
}
"""Layers that only the kernels have beside transformers."""
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "nine-heads": ("llama", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}),
    "one-key-head": ("gemma3_text", {**GEMMA, "num_key_value_heads": 1}),
}
"""Numbers of heads that two ranks cannot have equal parts of."""
MIXTURES = [name for name in MODELS if "moe" in name or name in ("mixtral", "gpt_oss")]


_saved = TemporaryDirectory(prefix="headrace-models-")


@cache
def saved(name: str, seed: int = 0) -> Path:
    """A directory with the model, made once."""
    directory = Path(_saved.name) / f"{name}-{seed}"
    make(name, seed).save_pretrained(directory)
    return directory


@cache
def saved_with_tokenizer(name: str) -> Path:
    """A directory with the model and the file of a tokenizer, which is not one: for settings that name a model whose tokenizer nothing reads."""
    directory = shutil.copytree(saved(name), Path(_saved.name) / f"{name}-with-tokenizer")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def make(name: str, seed: int = 0, **changes: Any) -> Any:
    model_type, extra = (MODELS | OTHERS | OWN_CACHE | DEEP | CONVOLUTIONS | HEADS).get(name, (name, {}))
    torch.manual_seed(seed)
    values = {**SMALL, **extra, **changes}
    if model_type == "gemma4_text":
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # wide enough that greedy choices are clear, neighbours differ and experts are not tied
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
        for key, parameter in model.named_parameters():
            if model_type == "gemma4_text" and key.endswith("q_norm.weight"):
                parameter.mul_(0.2)  # its scores have no factor, and would see one token alone
        for buffer in saved_buffers(model).values():
            buffer.add_(torch.randn_like(buffer) * 0.15)
    return model.eval()


_made = cache(make)


def reference(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Hugging Face's own model, to be changed at will."""
    if dtype == torch.float32:
        return deepcopy(_made(name))
    return AutoModelForCausalLM.from_pretrained(saved(name), dtype=dtype, attn_implementation="eager").eval()


def skeleton(name: str, dtype: torch.dtype = torch.float32) -> Skeleton:
    return read(saved(name), dtype, torch.device("cpu"))


def parameters(name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """As a trainer would publish them."""
    tensors = (*_made(name).named_parameters(), *saved_buffers(_made(name)).items())
    return {key: value.detach().to(dtype) for key, value in tensors}


@dataclass
class Stretch:
    tokens: list[int]
    adapter: int = -1
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    state: int = -1
    """The slot of its state."""


class RunnerDriver:
    """Steps a runner over sequences whose blocks lie anywhere in its cache."""

    def __init__(self, runner: Any, weights: Mapping[str, torch.Tensor] | None = None, blocks: int = 64) -> None:
        self.runner = runner
        runner.allocate(blocks, blocks if runner.state_nbytes else 0)
        self.states = list(range(blocks))
        """Slots of states that no sequence has."""
        self.free = np.random.default_rng(0).permutation(blocks).tolist()
        if weights is not None:
            runner.use(runner.prepare(weights))

    def sequence(self, tokens: Sequence[int], adapter: int = -1) -> Stretch:
        return Stretch(list(tokens), adapter)

    def batch(
        self, segments: Sequence[tuple[Stretch, int]], rows: Sequence[int] | None = None, routing=False
    ) -> ForwardInput:
        """The next tokens of each sequence. `rows`: the last of every segment unless said otherwise."""
        for sequence, count in segments:
            if sequence.state < 0:
                sequence.state = self.states.pop()
            while len(sequence.blocks) * BLOCK < sequence.cached + count:
                sequence.blocks.append(self.free.pop())
        width = max(len(sequence.blocks) for sequence, _ in segments)
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in segments]
        tokens = [token for s, count in segments for token in s.tokens[s.cached : s.cached + count]]
        starts = np.cumsum([0, *(count for _, count in segments)])
        return ForwardInput(
            tokens=np.array(tokens, dtype=np.int64),
            starts=starts.astype(np.int32),
            context=np.array([sequence.cached for sequence, _ in segments], dtype=np.int32),
            tables=np.array(tables, dtype=np.int32),
            rows=np.array(starts[1:] - 1 if rows is None else rows, dtype=np.int64),
            adapters=np.array([sequence.adapter for sequence, _ in segments], dtype=np.int32),
            routing=routing,
            states=np.array([sequence.state for sequence, _ in segments], dtype=np.int32),
        )

    def step(self, segments: Sequence[tuple[Stretch, int]], **options: Any) -> ForwardOutput:
        out = self.runner.forward(self.batch(segments, **options))
        for sequence, count in segments:
            sequence.cached += count
        return out

    def logprobs(self, tokens: Sequence[int], chunk: int = 1000, adapter: int = -1) -> torch.Tensor:
        """[T, V] of a sequence alone, prefilled in chunks."""
        sequence, parts = self.sequence(tokens, adapter), []
        while sequence.cached < len(tokens):
            count = min(chunk, len(tokens) - sequence.cached)
            parts.append(self.step([(sequence, count)], rows=range(count)).logits.float().log_softmax(-1))
        return torch.cat(parts)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        chunk: int = 16,
        adapters: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Greedy decoding of all together: one chunk of a prompt a step beside those that decode."""
        adapters = adapters or [-1] * len(prompts)
        waiting = [self.sequence(prompt, adapter) for prompt, adapter in zip(prompts, adapters, strict=True)]
        everyone, running = list(waiting), []
        ends = {id(s): len(s.tokens) + count for s, count in zip(everyone, counts, strict=True)}
        while waiting or running:
            segments = [(sequence, 1) for sequence in running]
            if waiting:
                first = waiting[0]
                segments.insert(len(running) // 2, (first, min(chunk, len(first.tokens) - first.cached)))
            best = self.step(segments).logits.argmax(-1).tolist()
            for (sequence, _), token in zip(segments, best, strict=True):
                if sequence.cached == len(sequence.tokens):
                    sequence.tokens.append(token)
            if waiting and len(waiting[0].tokens) > waiting[0].cached:
                running += [waiting.pop(0)] if len(waiting[0].tokens) == waiting[0].cached + 1 else []
            running = [sequence for sequence in running if len(sequence.tokens) < ends[id(sequence)]]
        return [s.tokens[len(p) :] for s, p in zip(everyone, prompts, strict=True)]


def prompts(*lengths: int, vocabulary: int = 96) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
