"""A model is written file by file, as transformers writes it at once, and from a checkpoint without a trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.algo.config import AlgoConfig
from headrace.core.errors import CheckpointError
from headrace.testing.small_models import small_model
from headrace.trainer.config import TrainConfig
from headrace.trainer.model.causal_lm import export_model, load_model
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer, export_weights
from support import tiny_models

CPU = torch.device("cpu")


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gemma3_text", "olmoe"])
def test_the_files_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    directory = tiny_models.saved(name)
    model = load_model(directory, CPU)
    model.save_pretrained(tmp_path / "theirs")
    export_model(model, directory, tmp_path / "ours", dtype="float32", whole=model.state_dict().__getitem__)
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    written, expected = (json.loads((tmp_path / where / "config.json").read_text()) for where in ("ours", "theirs"))
    assert written == expected
    assert [path.name for path in (tmp_path / "ours").glob("*.safetensors*")] == ["model.safetensors"]


def test_weights_beyond_a_file_are_listed_and_loaded(tmp_path: Path) -> None:
    directory = tiny_models.saved("qwen3_moe")
    model = load_model(directory, CPU)
    whole = model.state_dict().__getitem__
    export_model(model, directory, tmp_path / "out", dtype="bfloat16", whole=whole, most=40_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    again = load_model(tmp_path / "out", CPU)
    for key, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(key), parameter.bfloat16().float()), key
    export_model(model, directory, tmp_path / "out", dtype="float32", whole=whole)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(("model_type", "head"), [("deepseek_v3", "model.layers.4."), ("qwen3_next", "mtp.")])
def test_heads_that_predict_further_tokens_are_exported_as_they_were(
    model_type: str, head: str, tmp_path: Path
) -> None:
    model = small_model(model_type)
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path / "from")
    whole, more = tensors(tmp_path / "from"), {f"{head}{name}": torch.rand(3, 2) for name in ("eh_proj.weight", "norm")}
    save_file({**whole, **more, "model.layers.9.norm": torch.rand(2)}, tmp_path / "from" / "model.safetensors")
    loaded = load_model(tmp_path / "from", CPU)
    export_model(loaded, tmp_path / "from", tmp_path / "to", dtype="bfloat16", whole=loaded.state_dict().__getitem__)
    found = tensors(tmp_path / "to")
    assert found.keys() == whole.keys() | more.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in more.items())
    load_model(tmp_path / "to", CPU)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_checkpoint_is_exported_without_a_trainer(weights: str, tmp_path: Path) -> None:
    directory = tiny_models.saved("mixtral")
    train = TrainConfig(device="cpu", path="torch", dtype="bfloat16", weights=weights)
    trainer = TorchTrainer(directory, train, AlgoConfig(), seed=0)
    trainer.save(tmp_path / "checkpoint")
    assignment = Assignment(train, AlgoConfig())
    where = {"checkpoint": tmp_path / "checkpoint", "to": tmp_path / "streamed"}
    export_weights(directory, assignment, seed=0, dtype="float32", merge=False, **where)
    trainer.export(tmp_path / "own", "float32")
    ours, theirs = tensors(tmp_path / "streamed"), tensors(tmp_path / "own")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    with pytest.raises(CheckpointError, match="another model"):
        export_weights(tiny_models.saved("llama"), assignment, seed=0, dtype="float32", merge=False, **where)
