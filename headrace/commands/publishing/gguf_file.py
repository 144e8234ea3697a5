"""`headrace export --format gguf`: an exported directory as one file for llama.cpp, tokenizer and chat template included.

Names of tensors are those of the package gguf (`get_tensor_name_map`). Llama's rotary embedding turns neighbouring values of a head there and
values half a head apart here, so rows of its query and key matrices are put in another order (`convert_hf_to_gguf.py` of llama.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.commands.publishing.gguf_tokenizer import GgufTokenizer, read_tokenizer
from headrace.core.errors import ConfigError


class GgufFamily(NamedTuple):
    architecture: str
    """A name of `gguf.MODEL_ARCH`."""
    neighbours: bool
    """Whether its rotary embedding turns neighbouring values in llama.cpp."""


FAMILIES = {
    "llama": GgufFamily("LLAMA", neighbours=True),
    "qwen2": GgufFamily("QWEN2", neighbours=False),
    "qwen3": GgufFamily("QWEN3", neighbours=False),
}
"""The families that have been read back and compared, by `model_type`."""


def write_gguf(source: Path, to: Path, *, name: str, dtype: Literal["bfloat16", "float32"]) -> None:
    """Writes the model of a directory that `transformers` loads. Matrices have `dtype`, vectors float32, as llama.cpp wants them.

    Raises ConfigError if the model's family, its settings or its tokenizer cannot be written right; nothing is written then."""
    import gguf

    if (source / "adapter_config.json").exists():
        raise ConfigError("--format gguf writes whole models, and this run trained an adapter: add --merge")
    config = json.loads((source / "config.json").read_text())
    family = check_family(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture], config["num_hidden_layers"])
    tokenizer = read_tokenizer(source, config["vocab_size"])
    part = to.with_name(f".{to.name}.part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.architecture]], use_temp_file=True)
    try:
        _add_settings(writer, config, name, dtype)
        _add_tokenizer(writer, tokenizer)
        for its_name, values in _tensors(source, config):
            theirs = names.get_name(its_name, try_suffixes=(".weight", ".bias"))
            if theirs is None:
                raise ConfigError(f"--format gguf: llama.cpp has no name for the tensor {its_name} of this model")
            _add_tensor(writer, theirs, _ordered(its_name, values, config, family), dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)


def check_family(config: Mapping[str, Any]) -> GgufFamily:
    """Raises ConfigError if a model with this `config.json` cannot be written."""
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        raise ConfigError(
            f"--format gguf writes {', '.join(FAMILIES)} models, and this one is {kind or 'of no known family'}; export it without, and "
            "convert the directory with llama.cpp's convert_hf_to_gguf.py"
        )
    rope = _rope(config).get("rope_type", "default")
    strange = {
        f"a rotary embedding of type {rope}": rope != "default",
        "biases in its attention": kind == "llama" and config.get("attention_bias"),
        "biases in its MLP": config.get("mlp_bias"),
        "sliding windows": config.get("use_sliding_window"),
        f"the activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        "quantised weights": config.get("quantization_config"),
    }
    if found := [what for what, there in strange.items() if there]:
        raise ConfigError(
            f"--format gguf: this {kind} model has {' and '.join(found)}, which has not been compared with llama.cpp; export it without, and "
            "convert the directory with llama.cpp's convert_hf_to_gguf.py"
        )
    return FAMILIES[kind]


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` of transformers 5, or the same from the fields of earlier ones."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return config.get("rope_parameters") or {"rope_type": kind, "rope_theta": config.get("rope_theta", 10000.0)}


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_settings(writer: Any, config: Mapping[str, Any], name: str, dtype: str) -> None:
    import gguf

    kinds = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "float32": gguf.LlamaFileType.ALL_F32}
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(kinds[dtype])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, tokenizer: GgufTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.splitting)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.kinds)
    writer.add_token_merges(tokenizer.merges)
    for role, number in tokenizer.special.items():
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(tokenizer.adds_bos)
    if tokenizer.template:
        writer.add_chat_template(tokenizer.template)


def _tensors(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and values in float32; a head that is tied to the embedding is left out."""
    from safetensors import safe_open

    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
                    yield name, file.get_tensor(name).float().numpy()


def _ordered(name: str, values: np.ndarray, config: Mapping[str, Any], family: GgufFamily) -> np.ndarray:
    """Puts the rows of query and key into llama.cpp's order: of each head the first of either half, the second of either half, and so on."""
    queries = config["num_attention_heads"]
    heads = {"q_proj": queries, "k_proj": config.get("num_key_value_heads") or queries}
    count = next((heads[one] for one in heads if f"self_attn.{one}." in name), None) if family.neighbours else None
    if not count:
        return values
    halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: np.ndarray, dtype: str) -> None:
    import gguf

    if values.ndim < 2 or dtype == "float32":
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
