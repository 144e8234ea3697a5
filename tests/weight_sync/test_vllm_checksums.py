"""The checksums of a vLLM server against those of the files that it was given."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.dialects.vllm import VllmDialect, checksums
from headrace.testing.servers.fake_vllm import FakeVllm
from headrace.testing.servers.runtime_checksums import checksums_of
from support.labelled_engine import Kind, update

EVERY = 2
SERVER: Kind[FakeVllm] = Kind(FakeVllm, lambda ends: VllmDialect(ends, check_every=EVERY))


def written(model: Path, directory: Path, version: int) -> WeightUpdate:
    """A version whose weights are those of the model plus its number."""
    found = update(directory, version)
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: tensor + version for name, tensor in tensors.items()}, directory / f"{version}" / "model.safetensors"
    )
    return found


def test_parameters_are_those_of_the_file_alone_or_joined(tiny_llama: Path) -> None:
    path, reported = tiny_llama / "model.safetensors", checksums_of(tiny_llama)
    nothing = hashlib.sha256(b"").hexdigest()
    packed = {name for name, digest in reported.items() if digest == nothing}
    found = checksums(path, reported)
    assert packed and {name: found[name] for name in reported.keys() - packed} == {
        name: digest for name, digest in reported.items() if name not in packed
    }
    assert any(".qkv_proj." in name for name in found) and any(".gate_up_proj." in name for name in found)
    under = "tp1:model.layers.0.self_attn.qkv_proj.base_layer.weight"
    assert list(checksums(path, [under, "tp0:model.layers.0.mlp.experts.w13_weight", "tp0:lm_head.bias"])) == [under]


def test_a_tensor_that_was_not_loaded_is_found(tiny_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with asyncio.timeout(300), SERVER.served(tiny_llama, weights=tiny_llama) as (url, server):
            engine = SERVER.engine_at(url)
            try:
                await engine.open()
                for version in range(EVERY + 1):
                    await engine.load(written(tiny_llama, tmp_path, version))
                server.faults.add("norm_ignored")
                await engine.load(written(tiny_llama, tmp_path, EVERY + 1))  # is not compared
                with pytest.raises(IdentityError, match=r"version 4, and 5 of \d+ checksums .*norm\.weight.*watch\."):
                    await engine.load(written(tiny_llama, tmp_path, 2 * EVERY))
                assert server.serving.paused, "and serves nobody"
            finally:
                await engine.close()

    asyncio.run(go())


@pytest.mark.parametrize("absent", [(), ("checker",)])
def test_a_server_that_never_had_the_weights_is_found_if_it_has_checksums(
    absent: tuple[str, ...], tiny_llama: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    torch.manual_seed(1)
    tensors = load_file(tiny_llama / "model.safetensors")
    save_file({name: torch.randn_like(tensor) for name, tensor in tensors.items()}, other / "model.safetensors")

    async def go() -> None:
        how = {"weights": other, "absent": absent, "faults": ["weights_ignored"]}
        async with asyncio.timeout(300), SERVER.served(tiny_llama, **how) as (url, _):
            engine = SERVER.engine_at(url)
            try:
                await engine.open()
                if absent:
                    await engine.load(written(tiny_llama, tmp_path, 0))
                    return
                with pytest.raises(IdentityError, match=r"(\d+) of \1 checksums .* are not those of the files"):
                    await engine.load(written(tiny_llama, tmp_path, 0))
            finally:
                await engine.close()

    asyncio.run(go())
