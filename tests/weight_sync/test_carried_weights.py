"""Weights for a server that only reads files, and whose machine does not see the trainer's: fetched, proven and written there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from headrace.core.errors import IdentityError
from headrace.core.weights import AdapterSpec
from headrace.weight_sync.files import CarriedWeights, FilesReceiver
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.tcp import Tcp

SHAPES = {"embed": (300, 16), "q": (64, 64), "norm": (7,)}


def parameters(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, torch.randn(shape, generator=generator) + (version % 3 == 0)) for name, shape in SHAPES.items()]


ADAPTER = AdapterSpec(name="a", rank=2, alpha=4.0, base="x")
LORA = [("m.q.lora_A.weight", torch.ones(2, 64)), ("m.q.lora_B.weight", torch.zeros(64, 2))]
TIED = {"head": "embed"}


@pytest.fixture(params=[False, True], ids=["full", "delta"])
def transport(request: pytest.FixtureRequest) -> Tcp:
    return Tcp.open(Opening(form=Encoding(request.param, 50)))


@pytest.fixture
def carried(transport: Tcp) -> Iterator[CarriedWeights]:
    carried = CarriedWeights(transport, repeat_tied=True)
    yield carried
    carried.close()


def test_what_a_server_reads_is_what_was_published(transport: Tcp, carried: CarriedWeights) -> None:
    """The newest two versions stay: a server that is started anew loads the last one again, which travels once."""
    manifests = {"": lay_out(parameters(0), torch.bfloat16, TIED), "a": lay_out(LORA, torch.float32)}
    sender = transport.sender(manifests)
    carried.open(manifests)
    places = list[Path]()
    for version in range(4):
        update = sender.copy(version, parameters(version))()
        here = asyncio.run(carried.bring(update))
        assert msgspec.structs.replace(here, where={}) == msgspec.structs.replace(update, where={})
        assert asyncio.run(carried.bring(update)) is here
        places.append(Path(str(here.where["path"])))
        read = load_file(places[-1] / "model.safetensors")
        expected = {name: value.to(torch.bfloat16) for name, value in parameters(version)}
        assert read.keys() == {*expected, "head"} and torch.equal(read["head"], expected["embed"])
        assert all(torch.equal(read[name], value) for name, value in expected.items())
        FilesReceiver().receive(here)
    assert [place.is_dir() for place in places] == [False, False, True, True]
    adapter = asyncio.run(carried.bring(sender.copy(4, LORA, ADAPTER)()))
    place = Path(str(adapter.where["path"]))
    assert (place / "adapter_config.json").is_file() and places[-1].is_dir()
    assert torch.equal(load_file(place / "adapter_model.safetensors")[LORA[0][0]], LORA[0][1])
    carried.close()
    assert not place.exists() and not places[-1].parent.parent.exists()


def test_bytes_that_were_not_published_are_not_written(transport: Tcp, carried: CarriedWeights) -> None:
    manifests = {"": lay_out(parameters(0), torch.bfloat16)}
    sender = transport.sender(manifests)
    carried.open(manifests)
    good = sender.copy(0, parameters(0))()
    with pytest.raises(IdentityError):
        asyncio.run(carried.bring(msgspec.structs.replace(good, version=1, fingerprint=f"{good.fingerprint[:-1]}x")))
    here = Path(str(asyncio.run(carried.bring(good)).where["path"]))
    assert [place.name for place in here.parent.iterdir()] == ["000000"]
