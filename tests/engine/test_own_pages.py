"""A model whose files are written again while it is served or trained: what is loaded stays what it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.native.model_loading import read_model
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.native.memory import own_pages
from headrace.trainer.model.causal_lm import load_model


def overwrite(file: Path) -> None:
    """Zeros in the place of all numbers, as somebody would write who saves another model there."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    with file.open("r+b") as written:
        written.seek(start)
        written.write(bytes(len(data) - start))


@pytest.mark.parametrize("path", ["fused", "hf", "cache"])
def test_an_engine_keeps_the_weights_that_it_has_loaded(path: str, tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    config = EngineConfig(dtype="float32", device="cpu", kv_gib=0.01, context_length=64, path=path)
    parameters = parameters_from_dir(model, torch.float32)
    read_model(model, config).prepare(parameters)
    before = {
        name: float(tensor.abs().sum()) for name, tensor in parameters_from_dir(tiny_llama, torch.float32).items()
    }
    overwrite(model / "model.safetensors")
    assert {name: float(tensor.abs().sum()) for name, tensor in parameters.items()} == before


def test_a_trainer_keeps_the_weights_that_it_does_not_train(tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    loaded = load_model(model, torch.device("cpu"))
    overwrite(model / "model.safetensors")
    assert all(parameter.any() for parameter in loaded.parameters())


def test_memory_that_processes_share_is_not_copied(tmp_path: Path) -> None:
    names = ("weights.safetensors", "of another process")
    tensors = [torch.from_file(str(tmp_path / name), shared=True, size=4) for name in names]
    places = [tensor.data_ptr() for tensor in tensors]
    own_pages(tensors)
    assert [tensor.data_ptr() == place for tensor, place in zip(tensors, places, strict=True)] == [False, True]
