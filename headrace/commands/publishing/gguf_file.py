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

from headrace.core.errors import ConfigError
from headrace.models.tokenizer import end_of_turn, load_tokenizer

# --- The tokenizer of a GGUF file, from `tokenizer.json`
# Byte-level BPE, whose splitting of text llama.cpp knows under a name.


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {QWEN2: "qwen2", LLAMA3: "llama-bpe"}
"""Regular expressions by which models split text, and their names in llama.cpp (`llama-vocab.cpp`)."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens, as `gguf.TokenType` numbers them."""


class GgufTokenizer(NamedTuple):
    tokens: list[str]
    """[V]"""
    kinds: list[int]
    """[V]"""
    merges: list[str]
    splitting: str
    """The name of its pre-tokenizer."""
    special: dict[str, int]
    """Ids by role: bos, eos, pad, and eot, the end of a turn in the template, as far as the model has them."""
    adds_bos: bool
    template: str
    """The chat template; empty if there is none."""


def read_tokenizer(directory: Path, rows: int) -> GgufTokenizer:
    """Reads the tokenizer of a model's directory. `rows`: of the embedding; ids without a token are unused. Raises ConfigError if llama.cpp
    would read text otherwise."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"a GGUF file holds the tokenizer, and {directory} has no tokenizer.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    model, added = found["model"], found.get("added_tokens") or []
    splitting = _splitting(found)
    by_id = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for token_ in added:
        by_id[token_["id"]] = token_["content"]
        kinds[token_["id"]] = CONTROL if token_["special"] else USER_DEFINED
    if max(by_id) >= rows:
        raise ConfigError(f"the tokenizer has a token {max(by_id)}, and the model's embedding only {rows} rows")
    settings = _read(directory / "tokenizer_config.json")
    ids = {token: number for number, token in by_id.items()}
    special = {
        role: ids[text] for role in ("bos", "eos", "pad") if (text := _text(settings.get(f"{role}_token"))) in ids
    }
    if (turn := end_of_turn(load_tokenizer(directory))) is not None:
        special["eot"] = turn  # llama.cpp ends there too
    return GgufTokenizer(
        tokens=[by_id.get(number, f"[PAD{number}]") for number in range(rows)],
        kinds=[kinds.get(number, UNUSED) for number in range(rows)],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        splitting=splitting,
        special=special,
        adds_bos=_adds_bos(path, special.get("bos")),
        template=_template(directory, settings),
    )


def _splitting(tokenizer: dict[str, Any]) -> str:
    """Returns llama.cpp's name of the way in which text is split before merges."""
    model, before = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    parts = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    last = parts[-1]
    whole = model["type"] == "BPE" and not model.get("byte_fallback") and last.get("type") == "ByteLevel"
    plain = (tokenizer.get("normalizer") or {"type": "NFC"})["type"] == "NFC" and not last.get("add_prefix_space")
    name = _name(parts[:-1], bool(last.get("use_regex", True))) if whole and plain else ""
    if not name or bool(model.get("ignore_merges")) != (name == "llama-bpe"):
        raise ConfigError(
            "--format gguf writes tokenizers of byte-level BPE that split text as GPT-2, SmolLM, Llama 3 or Qwen2 do, and this model's is another: "
            "llama.cpp would read text as other tokens; export it without --format gguf"
        )
    return name


def _name(parts: list[dict[str, Any]], by_gpt2: bool) -> str:
    """`parts`: before the last one, which turns bytes into letters, and splits as GPT-2 does if `by_gpt2`."""
    match parts:
        case []:
            return "gpt-2" if by_gpt2 else ""
        case [{"type": "Digits", "individual_digits": True}]:
            return "smollm" if by_gpt2 else ""
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]:
            return "" if by_gpt2 else PATTERNS.get(pattern, "")
    return ""


def _adds_bos(path: Path, bos: int | None) -> bool:
    """Whether the tokenizer puts its first token before a text. Raises ConfigError if it adds anything else."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    bare, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    if whole not in (bare, [bos, *bare]):
        raise ConfigError("the tokenizer adds other tokens to a text than its first one, which a GGUF file cannot say")
    return whole != bare


def _template(directory: Path, settings: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    found = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template") or ""
    return found if isinstance(found, str) else ""


def _text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


# --- gguf file ------------------------------------------------------------


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
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
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
    count = next((heads[head] for head in heads if f"self_attn.{head}." in name), None) if family.neighbours else None
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
