"""Weights for a server that only reads files, and whose machine does not see the trainer's: fetched, proven and written there."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from headrace.core.errors import HeadraceError, IdentityError
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.sglang import SglangDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.testing.makers import request
from headrace.weight_sync.fetching import RelayingReceiver
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


def test_a_version_that_is_published_anew_replaces_its_files(transport: Tcp, carried: CarriedWeights) -> None:
    """Files of the version before it under its number were removed in its place: they lie in one directory."""
    manifests = {"": lay_out(parameters(0), torch.bfloat16)}
    sender = transport.sender(manifests)
    carried.open(manifests)
    for version in (1, 2):
        asyncio.run(carried.bring(sender.copy(version, parameters(version))()))
    again = sender.copy(1, parameters(3))()
    here = asyncio.run(carried.bring(again))
    FilesReceiver().receive(here)
    assert asyncio.run(carried.bring(again)) is here


def test_what_it_serves_to_other_engines_ends_with_it() -> None:
    closed = list[bool]()

    class Noted(RelayingReceiver):
        def close(self) -> None:
            closed.append(True)

    class Relaying:
        def receiver(self, manifests: Mapping[str, Manifest]) -> Noted:
            return Noted(manifests, None)  # type: ignore[arg-type]

    one = CarriedWeights(Relaying())  # type: ignore[arg-type]
    one.open({"": lay_out(parameters(0), torch.bfloat16)})
    one.close()
    one.close()
    assert closed == [True]


def test_a_place_that_cannot_be_written_is_named_with_a_remedy(transport: Tcp, carried: CarriedWeights) -> None:
    manifests = {"": lay_out(parameters(0), torch.bfloat16)}
    sender = transport.sender(manifests)
    carried.open(manifests)
    place = Path(str(asyncio.run(carried.bring(sender.copy(0, parameters(0))())).where["path"])).parent
    shutil.rmtree(place)
    place.write_text("somebody's")
    update = sender.copy(1, parameters(1))()
    with pytest.raises(HeadraceError, match=r"version 1 could not be written .*/model/000001: .*TMPDIR"):
        asyncio.run(carried.bring(update))
    place.unlink()
    FilesReceiver().receive(asyncio.run(carried.bring(update)))


def test_an_update_that_could_not_be_written_is_not_asked_for() -> None:
    """A server that comes back would be given it, and what is reported would name its version."""

    class Full:
        async def bring(self, update: WeightUpdate) -> WeightUpdate:
            raise PermissionError("nobody may write there")

    async def case() -> None:
        clock = asyncio.get_running_loop().time
        telemetry = Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e5, 1e6))
        connection, dialect = Connection("http://127.0.0.1:1", ""), SglangDialect(frozenset())
        engine = RemoteEngine(connection, dialect, patience=1.0, max_deaths=1, telemetry=telemetry, carrier=Full())  # type: ignore[arg-type]
        update = WeightUpdate(
            version=1, kind="adapter", fingerprint="1", nbytes=1, seconds=0.0, where={}, adapter=ADAPTER
        )
        with pytest.raises(PermissionError):
            await engine.load(update)
        with pytest.raises(ValueError, match="no adapter a is loaded"):
            await engine.generate(request("r", adapter="a"))

    asyncio.run(case())
