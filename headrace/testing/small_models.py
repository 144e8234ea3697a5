"""A small model of every architecture that transformers knows: its default config, shrunk, with its features kept on.

Sizes, counts and ranks are lowered by the names of their settings; groups of key heads, windows, biases, several kinds of layers and experts stay.
What a config calls otherwise stands in `OWN`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Values of `model_type` whose models transformers calls causal."""

VOCABULARY = 96
SIZES: dict[int, tuple[str, ...]] = {
    64: ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "emb_dim", "embedding_size", "word_embed_proj_dim", "attention_hidden_size",
         "lru_width", "hidden_dim", "n_embed"),
    80: ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff",
         "intermediate_size_mlp"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
         "expert_ffn_hidden_size", "moe_ffn_hidden_size", "index_n_heads"),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
    4: ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers", "num_attention_heads", "n_head", "n_heads", "num_heads",
        "decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads", "num_blocks", "mamba_n_heads_"),
    8: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "sliding_window", "attention_window_size", "local_attention_window",
        "qk_rope_head_dim", "index_topk", "hidden_size_per_layer_input", "mamba_d_state", "state_size", "ssm_state_size"),
    2: ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "linear_num_key_heads"),
    16: ("head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "q_lora_rank", "global_head_dim",
         "index_head_dim", "mamba_head_dim", "d_kv", "attention_head_dim", "qk_head_dim", "kv_channels", "swa_head_dim"),
    256: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"),
}  # fmt: skip
"""The size that settings of these names get, if they are larger."""
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
)
GROUPS = (
    "n_group",
    "topk_group",
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "first_k_dense_replace",
    "moe_layer_start_index",
)
LAYER_LISTS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "attention_types",
    "hybrid_layer_ids",
    "mlp_only_layers",
    "no_rope_layers",
)
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "use_double_wide_mlp": True,
}
GEMMA4_UNIFIED = {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "opt": {"word_embed_proj_dim": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "xlstm": {"num_heads": 4, "num_blocks": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "attn_layer_indices": [1],
    },
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.6,
        "attention_out_multiplier": 1.3,
        "ssm_in_multiplier": 1.2,
        "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.3],
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.7, 1.4],
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "gemma4_unified": GEMMA4_UNIFIED,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_head_dim": 24},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"num_key_value_heads": 2, "num_attention_heads": 4},
    "reformer": {"is_decoder": True},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1},
}
"""Settings of single architectures, by their own names."""


def small_config(model_type: str) -> Any:
    """Raises what transformers raises if it makes no config of these values."""
    return _rebuilt(CONFIG_MAPPING[model_type](), OWN.get(model_type, {}))


def _rebuilt(config: Any, own: dict[str, Any]) -> Any:
    """A config of the same class with smaller values; what its class derives from them is derived again."""
    inside = {name: found for name in type(config).sub_configs if (found := getattr(config, name, None)) is not None}
    before = {name: value for name, value in config.to_dict().items() if name not in inside}
    after = _shrunk(before)
    changed = {name: value for name, value in after.items() if value != before[name]}
    of_text = "text_config" in inside
    changed |= {name: _rebuilt(found, own if name == "text_config" else {}) for name, found in inside.items()}
    return type(config)(**{**changed, **({} if of_text else own)})


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """`values`: those of a config without the configs inside it."""
    found = dict(values)
    for size, names in SIZES.items():
        for name in names:
            if _is_number(found.get(name)) and found[name] > size:
                found[name] = size
    for most, names in ((2, KEY_HEADS), (1, GROUPS)):
        for name in names:
            if _is_number(found.get(name)):
                found[name] = min(found[name], most)
    heads = values.get("num_attention_heads")
    if (
        heads is not None and values.get("num_key_value_heads") == heads
    ):  # each head has its own key, and latent attention needs that
        found["num_key_value_heads"] = found["num_attention_heads"]
    if "qk_rope_head_dim" in values and values.get("head_dim") == values["qk_rope_head_dim"]:
        found["head_dim"] = found["qk_rope_head_dim"]
    for name in LAYER_LISTS:
        if isinstance(found.get(name), list) and len(found[name]) > 4:
            found[name] = _both_kinds(found[name])
    for name, value in found.items():
        if name.endswith("_token_id") and isinstance(value, list):
            found[name] = 2
        elif name.endswith("_token_id") and _is_number(value) and value >= VOCABULARY:
            found[name] = 0 if name == "pad_token_id" else 2
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _both_kinds(kinds: list[Any]) -> list[Any]:
    """Four entries with as many kinds among them as may be, in the order in which they first come."""
    seen = list(dict.fromkeys(kind for kind in kinds if not isinstance(kind, list)))
    return (seen * 4)[:4] if all(isinstance(kind, str) for kind in seen) else kinds[:4]


def small_model(model_type: str, seed: int = 0, config: Any = None) -> Any:
    """A model in float32 and eval mode, with weights wide enough that greedy choices are clear. `config`: another than the small one."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or small_config(model_type), dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(one for name, one in model.state_dict().items() if "bias" in name)):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.eval()
