"""Ranks read from a model's files what they hold, and nothing more: the values are those of one device, and memory is a part of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import transformers
import xxhash
from rank_processes import RankProcesses
from sharded_case import CPU, Case, Piped, trainer_of_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.native.memory import held, trim
from headrace.trainer.forward.forward import choose_forward
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.outline import is_outline, outline, sample
from support import tiny_models
from support.few import few

CASES = {
    "FSDP2": Case(model="llama-deep"),
    "FSDP2, tied": Case(model="qwen3"),
    "FSDP2, norms apart": Case(model="llama", train={"weights": "bfloat16", "dtype": "bfloat16"}),
    "experts by rows": Case(model="qwen3_moe"),
    "TP": Case(model="qwen3", parallel={"shard": 1, "tensor": 2}),
    "TP of experts": Case(model="qwen3_moe", parallel={"shard": 1, "tensor": 2}),
    "EP": Case(model="qwen3_moe", routing=True, parallel={"expert": 2}),
    "EP of mixtral, a reference": Case(model="mixtral", algo={"kl": {"coef": 0.1}}, parallel={"expert": 2}),
    "stages, tied": Piped(model="qwen3-deep"),
    "stages of experts": Piped(
        model="qwen3_moe-deep", algo={"kl": {"coef": 0.1}}, parallel={"schedule": "interleaved"}
    ),
    "adapters in stages": Piped(model="llama", lora={"rank": 4}, train={"dtype": "bfloat16"}),
    "adapters": Case(model="qwen3", lora={"rank": 4}, train={"dtype": "bfloat16"}),
    "adapters, recorded experts": Case(model="qwen3_moe", routing=True, lora={"rank": 4}),
}


def mark(tensors: dict[str, Tensor]) -> str:
    found = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def marks(directory: Path, case: Case) -> tuple[bool, str, list[str]]:
    """Whether the model was read in parts, the mark of all that it publishes, and those of its reference and its adapters' base."""
    trainer = trainer_of_rank(directory, case)
    return is_outline(trainer._model), mark(dict(trainer.parameters())), others(trainer)


def others(trainer: object) -> list[str]:
    placement, reference, adapters = trainer._placement, trainer._reference, trainer._adapters  # type: ignore[attr-defined]
    model = reference.forward.model if reference else None
    whole = {name: placement.whole(p) for name, p in model.named_parameters()} if model else {}
    return [mark(whole), *([adapters.base_mark, adapters._frozen_mark] if adapters else [])]


@pytest.mark.parametrize("name", few(CASES, keep=4))
def test_the_values_that_ranks_read_are_those_of_one_device(name: str, two: RankProcesses) -> None:
    case = CASES[name]
    directory = tiny_models.saved(case["model"])
    one = case.trainer(directory)
    expected = mark(dict(one.parameters()))
    for in_parts, found, rest in two.run(marks, directory, case):
        assert in_parts
        assert (found, rest) == (expected, others(one))


FAMILIES = [*tiny_models.MODELS, *tiny_models.OTHERS, "granite-scaled", "gemma3-deep"]


@pytest.mark.parametrize("name", few(FAMILIES, keep=6))
def test_an_outline_is_the_model_without_its_values(name: str) -> None:
    directory = tiny_models.saved(name)
    found, whole = outline(directory), load_model(directory, CPU)
    assert [(n, p.shape, p.dtype) for n, p in found.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in whole.named_parameters()
    ]
    for (key, buffer), (other, expected) in zip(found.named_buffers(), whole.named_buffers(), strict=True):
        assert key == other and (buffer.is_meta or torch.equal(buffer, expected)), key
    for key, parameter in found.named_parameters():
        assert torch.equal(found.files.whole(found, parameter), whole.get_parameter(key).float()), key
    way = choose_forward(whole)
    with sample(found):
        tried = choose_forward(found)
    assert (tried.packed, tried.chunked_head) == (way.packed, way.chunked_head)
    assert all(p.is_meta for p in found.parameters())


def test_a_trial_takes_one_layer_of_each_kind() -> None:
    for name, count in (("llama-deep", 1), ("gemma3-deep", 2), ("qwen3_moe-mixed", 2)):
        found = outline(tiny_models.saved(name))
        with sample(found):
            assert len(found.model.layers) == found.config.num_hidden_layers == count, name
        assert len(found.model.layers) == found.config.num_hidden_layers > 1


def test_what_is_tied_and_saved_twice_is_loaded_as_a_whole(tmp_path: Path) -> None:
    model = tiny_models.make("qwen3")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert outline(tmp_path) is None


# -- memory ------------------------------------------------------------------------------------------------------------------


BIG = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}


def peak(directory: Path, parallel: dict[str, int]) -> tuple[int, int, int]:
    """Bytes that this rank took to read the model, of its own memory, at most; those of its part; and those of the largest tensor."""
    outline(directory)  # what is imported for the first time is not the model's
    trim()
    before, seen, over = held(CPU), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.append(held(CPU))

    watching = threading.Thread(target=watch)
    watching.start()
    trainer = trainer_of_rank(directory, Case(model="", parallel=parallel))
    over.set()
    watching.join()
    parameters = list(trainer._model.parameters())
    held_here = [p.to_local() if isinstance(p, DTensor) else p for p in parameters if not p.is_meta]
    share = sum(p.nbytes for p in held_here)
    return max(*seen, held(CPU)) - before, share, max(p.nbytes for p in parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"shard": 2}, {"shard": 1, "tensor": 2}, {"shard": 1, "pipeline": 2}],
    ids=["FSDP2", "TP", "stages"],
)
def test_a_rank_takes_its_part_of_memory_and_little_more(
    parallel: dict[str, int], two: RankProcesses, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**BIG))
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="40MB")
    for taken, share, largest in two.run(peak, tmp_path, parallel):
        print(f"{taken / 1e6:.0f} MB taken, share {share / 1e6:.0f}, largest {largest / 1e6:.0f}")
        assert taken <= 1.3 * share + largest
