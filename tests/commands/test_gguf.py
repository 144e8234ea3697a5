"""GGUF files: read back by the package gguf and by transformers, which undoes the order of llama.cpp by code of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from headrace.commands.publishing.gguf_file import LLAMA3, QWEN2, read_tokenizer, write_gguf
from headrace.core.errors import ConfigError
from support import tiny_models
from support.few import few

TEXTS = (
    "State the result: 12 + 345.",
    "  Don't you'll\n\n see 1234567!  ",
    "Grüße, 世界 🙂",
    "<|im_start|>user\nx<|im_end|>",
)
TEMPLATE = "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex

    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


SPLITTING: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": split(QWEN2),
    "llama-bpe": split(LLAMA3),
}


def write_tokenizer(directory: Path, splitting: str = "gpt-2", **model: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(ignore_merges=splitting == "llama-bpe", **model))
    made.pre_tokenizer, made.decoder = SPLITTING[splitting], decoders.ByteLevel()
    if splitting == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return fast


def model_at(directory: Path, kind: str, **more: Any) -> Path:
    """A random model with a tokenizer, and biases and norms that are not what they are born as."""
    from transformers import AutoConfig

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**tiny_models.SMALL, "vocab_size": 320, **more})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    write_tokenizer(directory, "gpt-2" if kind == "llama" else "qwen2")
    return directory


MODELS = {
    "llama": ("llama", {}),
    "llama tied, own head size": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama without groups of queries": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),  # the only size that transformers reads
}


@pytest.mark.parametrize("name", few(MODELS, keep=2))
def test_transformers_reads_the_same_model_from_the_file(name: str, tmp_path: Path) -> None:
    kind, more = MODELS[name]
    source = model_at(tmp_path / "model", kind, **more)
    write_gguf(source, tmp_path / "m.gguf", name="mine", dtype="float32")
    tokens = torch.tensor([[5, 9, 250, 3, 17, 200, 201]])
    logits = [
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **given).eval()(tokens).logits
        for place, given in ((source, {}), (tmp_path, {"gguf_file": "m.gguf"}))
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def test_matrices_are_bfloat16_and_queries_are_in_the_order_of_llama_cpp(tmp_path: Path) -> None:
    source = model_at(tmp_path / "model", "llama")
    write_gguf(source, tmp_path / "m.gguf", name="mine", dtype="bfloat16")
    reader = GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert len(found) == 2 * 9 + 3 and {tensor.tensor_type.name for tensor in reader.tensors} == {"BF16", "F32"}
    query, key = (getattr(model.model.layers[1].self_attn, one).weight.detach() for one in ("q_proj", "k_proj"))
    for name, weight, heads in (("attn_q", query, 4), ("attn_k", key, 2)):
        stored = found[f"blk.1.{name}.weight"]
        values = dequantize(stored.data, stored.tensor_type).reshape(weight.shape)
        size = len(weight) // heads
        for row in range(len(weight)):  # value i of a head and value i + size / 2 become neighbours
            head, place = divmod(row, size)
            its = head * size + place // 2 + (place % 2) * size // 2
            np.testing.assert_array_equal(values[row], weight[its].bfloat16().float().numpy())
    value = found["blk.1.attn_v.weight"]
    expected = model.model.layers[1].self_attn.v_proj.weight.detach().bfloat16().float().numpy()
    np.testing.assert_array_equal(dequantize(value.data, value.tensor_type).reshape(expected.shape), expected)


def test_settings_and_tokenizer_are_in_the_file(tmp_path: Path) -> None:
    source = model_at(tmp_path / "model", "qwen3", head_dim=8, rms_norm_eps=3e-6, rope_theta=5e5)
    write_gguf(source, tmp_path / "m.gguf", name="mine", dtype="float32")
    reader = GGUFReader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["general.architecture"], fields["general.name"]) == ("qwen3", "mine")
    assert [fields[f"qwen3.{name}"] for name in ("block_count", "attention.head_count", "attention.head_count_kv")] == [
        2,
        4,
        2,
    ]
    assert [fields[f"qwen3.attention.{name}_length"] for name in ("key", "value")] == [8, 8]
    assert fields["qwen3.rope.freq_base"] == 5e5 and fields["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(
        3e-6
    )
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 320 and tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert kinds[:4] == [3, 3, 3, 1] and (tokens[319], kinds[319]) == ("[PAD319]", 5)
    assert [fields[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "eot", "padding")] == [1, 2, 2, 2]
    assert fields["tokenizer.ggml.add_bos_token"] is False and fields["tokenizer.chat_template"] == TEMPLATE


def test_transformers_reads_the_same_tokens_from_the_file(tmp_path: Path) -> None:
    source = model_at(tmp_path / "model", "llama")
    write_gguf(source, tmp_path / "m.gguf", name="mine", dtype="float32")
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert after(text, add_special_tokens=False).input_ids == before(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("splitting", SPLITTING)
def test_the_way_of_splitting_text_is_recognised(splitting: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, splitting)
    assert read_tokenizer(tmp_path, 320).splitting == splitting


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(source: Path, to: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        write_gguf(source, to, name="m", dtype="float32")
    assert not to.exists() and not list(to.parent.glob(".*"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3_text"}, "writes llama, qwen2, qwen3 models, and this one is gemma3_text"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "a rotary embedding of type llama3"),
        ({"attention_bias": True, "mlp_bias": True}, "biases in its attention and biases in its MLP"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"vocab_size": 200}, "the model's embedding only 200 rows"),
    ],
)
def test_models_that_were_not_compared_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = model_at(tmp_path / "model", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    assert words in refused(source, tmp_path / "m.gguf")


def test_tokenizers_that_llama_cpp_would_read_otherwise_are_refused(tmp_path: Path) -> None:
    source = model_at(tmp_path / "model", "llama")
    file = source / "tokenizer.json"
    whole = json.loads(file.read_text())
    for changed in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**whole["pre_tokenizer"], "add_prefix_space": True}},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {**whole["model"], "byte_fallback": True}},
        {"model": {**whole["model"], "ignore_merges": True}},
    ):
        file.write_text(json.dumps({**whole, **changed}))
        assert "llama.cpp would read text as other tokens" in refused(source, tmp_path / "m.gguf"), changed
    file.unlink()
    assert "has no tokenizer.json" in refused(source, tmp_path / "m.gguf")
    (source / "adapter_config.json").write_text("{}")
    assert "add --merge" in refused(source, tmp_path / "m.gguf")
