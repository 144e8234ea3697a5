"""Transports of weights: both ends in one test (C3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from headrace.core.errors import IdentityError
from headrace.core.protocols import Transport, WeightReceiver, WeightSender
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.run.config import load_config
from headrace.run.starting import transport_of
from headrace.trainer.model.causal_lm import tied_names
from headrace.weight_sync.cuda_ipc import CudaIpc
from headrace.weight_sync.files import Files
from headrace.weight_sync.packed import fingerprint, lay_out
from headrace.weight_sync.shared_memory import SharedMemory
from headrace.weight_sync.transport import TRANSPORTS, AnyTransport
from support import tiny_models
from support.tiny_run import tiny_config


def _parameters(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (100, 16), "q": (16, 16), "k": (8, 16), "v": (8, 16), "norm": (7,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def _manifests() -> dict[str, Manifest]:
    return {"": lay_out(_parameters(0), torch.bfloat16)}


# --- tied parameters -------------------------------------------------------------------------------------------------------


def test_a_tied_parameter_travels_once_and_its_other_names_are_in_the_layout() -> None:
    model = tiny_models.make("llama-tied-biased")
    names = tied_names(model)
    assert names == {"lm_head.weight": "model.embed_tokens.weight"}
    manifest = lay_out(model.named_parameters(), torch.bfloat16, names)
    assert manifest.tied == names and "lm_head.weight" not in [spec.name for spec in manifest.tensors]
    assert not lay_out([("a", torch.zeros(3))], torch.bfloat16, names).tied, "an adapter has none of them"
    assert not tied_names(tiny_models.make("llama"))


@pytest.mark.parametrize("repeat", [False, True])
def test_files_hold_a_tied_parameter_under_each_name_where_the_reader_copies_it(tmp_path: Path, repeat: bool) -> None:
    """vLLM on a CPU goes on with the old head otherwise (vLLM 0.32)."""
    sent = [("embed", torch.randn(5, 4)), ("norm", torch.randn(4))]
    manifest = lay_out(sent, torch.bfloat16, {"head": "embed"})
    files = Files(str(tmp_path / "files"), repeat_tied=repeat)
    update = files.sender({"": manifest}).send(0, sent)
    found = load_file(Path(update.where["path"]) / "model.safetensors")
    assert sorted(found) == (["embed", "head", "norm"] if repeat else ["embed", "norm"])
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in sent)
    assert torch.equal(found["head"], found["embed"]) if repeat else "head" not in found
    received = files.receiver({"": manifest}).receive(update)
    assert list(received) == ["embed", "norm"], "an engine that is told the layout reads each once"


@pytest.mark.parametrize(("kind", "repeats"), [("vllm", True), ("sglang", False), ("headrace", False)])
def test_which_servers_are_sent_a_tied_parameter_under_each_name(tmp_path: Path, kind: str, repeats: bool) -> None:
    given = tiny_config(tmp_path, tmp_path)
    given["engine"] = {"kind": kind, "urls": ["http://127.0.0.1:1"]}
    way = transport_of(load_config(given), tmp_path)
    assert isinstance(way, Files) and way.repeat_tied is repeats


def test_runs_of_one_name_have_weights_of_their_own_in_a_shared_directory(tmp_path: Path) -> None:
    given = tiny_config(tmp_path, tmp_path)
    given["engine"] = {"kind": "vllm", "urls": ["http://127.0.0.1:1"], "shared_dir": str(tmp_path)}
    places = []
    for logs in (tmp_path / "one", tmp_path / "two", tmp_path / "one"):
        logs.mkdir(exist_ok=True)
        way = transport_of(load_config(given), logs)
        assert isinstance(way, Files) and Path(way.directory).parent == tmp_path
        places.append(way.directory)
    assert places[0] == places[2] != places[1], "a resumed run finds its own, and clears them"


# --- every transport -------------------------------------------------------------------------------------------------------

Ends = tuple[WeightSender, WeightReceiver]


@pytest.fixture(params=TRANSPORTS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Each is made of the transport as it arrives in a start message."""
    transport: Transport = CudaIpc("cpu") if request.param == "cuda_ipc" else TRANSPORTS[request.param].open()
    arrived = [msgspec.msgpack.decode(msgspec.msgpack.encode(transport), type=AnyTransport) for _ in range(2)]
    yield arrived[0].sender(_manifests()), arrived[1].receiver(_manifests())
    transport.close()


def test_the_tag_of_a_transport_is_its_name_in_the_table() -> None:
    for name, kind in TRANSPORTS.items():
        transport = kind.open()
        assert msgspec.json.decode(msgspec.json.encode(transport))["type"] == name
        transport.close()


def test_what_is_received_is_what_was_sent_in_the_serving_dtype(ends: Ends) -> None:
    sender, receiver = ends
    for version in range(4):
        sent = _parameters(version)
        received = receiver.receive(sender.send(version, sent))
        assert list(received) == [name for name, _ in sent]
        for name, tensor in sent:
            assert received[name].dtype == torch.bfloat16
            assert torch.equal(received[name], tensor.bfloat16())


def test_an_update_tells_as_much_to_an_engine_as_to_a_record(ends: Ends) -> None:
    """`where` survives the wire and the metrics."""
    sender, receiver = ends
    update = sender.send(3, _parameters(3))
    assert update.nbytes == sum(2 * tensor.numel() for _, tensor in _parameters(3))
    for encoded in (msgspec.json, msgspec.msgpack):
        again = encoded.decode(encoded.encode(update), type=WeightUpdate)
        assert again == update
        assert torch.equal(receiver.receive(again)["q"], dict(_parameters(3))["q"].bfloat16())


def test_the_version_before_stays_valid_until_the_next_but_one(ends: Ends) -> None:
    sender, receiver = ends
    old = receiver.receive(sender.send(0, _parameters(0)))
    sender.send(1, _parameters(1))
    assert torch.equal(old["q"], dict(_parameters(0))["q"].bfloat16())


def test_neighbours_in_canonical_order_are_neighbours_in_memory(ends: Ends) -> None:
    sender, receiver = ends
    views = receiver.receive(sender.send(0, _parameters(0)))
    q, k = views["q"], views["k"]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert q.data_ptr() + q.numel() * 2 == k.data_ptr()


def test_what_is_stale_or_foreign_is_refused(ends: Ends) -> None:
    sender, receiver = ends
    stale = sender.send(0, _parameters(0))
    sender.send(1, _parameters(1))
    sender.send(2, _parameters(2))
    with pytest.raises(IdentityError, match="version 0"):
        receiver.receive(stale)
    update = sender.send(3, _parameters(3))
    foreign = msgspec.structs.replace(update, kind="adapter", adapter=AdapterSpec("south", 8, 16.0))
    with pytest.raises(IdentityError, match="no adapter south"):
        receiver.receive(foreign)
    with pytest.raises(IdentityError, match="published with fingerprint 00"):
        receiver.receive(msgspec.structs.replace(update, fingerprint="00"))
    receiver.receive(update)


def test_a_record_of_an_update_from_before_is_readable() -> None:
    """Runs recorded `slot` in every update before transports had words of their own for where the bytes are."""
    line = b'{"version":4,"kind":"full","fingerprint":"f0","slot":0,"nbytes":8,"seconds":0.5,"adapter":null}'
    assert msgspec.json.decode(line, type=WeightUpdate) == WeightUpdate(
        version=4, kind="full", fingerprint="f0", nbytes=8, seconds=0.5
    )


# --- shared memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    transport = SharedMemory.open()
    yield transport
    transport.close()


@pytest.mark.parametrize("byte", [0, 17, 3000, -1])
def test_one_flipped_bit_is_refused(memory: SharedMemory, byte: int) -> None:
    (manifest,) = _manifests().values()
    update = memory.sender(_manifests()).send(1, _parameters(1))
    last = manifest.tensors[-1]
    position = manifest.nbytes + (byte if byte >= 0 else last.offset + last.nbytes - 1)
    (value,) = os.pread(memory.fd, 1, position)
    os.pwrite(memory.fd, bytes([value ^ 1]), position)
    with pytest.raises(IdentityError, match="version 1"):
        memory.receiver(_manifests()).receive(update)


def test_an_update_that_never_arrived_is_refused(memory: SharedMemory) -> None:
    """The fault that went unnoticed elsewhere for months: the engine goes on with the weights it had."""
    (manifest,) = _manifests().values()
    update = memory.sender(_manifests()).send(2, _parameters(2))
    assert fingerprint(manifest, memoryview(bytes(manifest.nbytes))) != update.fingerprint
    os.pwrite(memory.fd, bytes(manifest.nbytes), 0)
    with pytest.raises(IdentityError):
        memory.receiver(_manifests()).receive(update)


def test_another_memory_than_the_trainer_s_is_refused(memory: SharedMemory) -> None:
    update, other = memory.sender(_manifests()).send(1, _parameters(1)), SharedMemory.open()
    with pytest.raises(IdentityError, match="do not share the same memory"):
        other.receiver(_manifests()).receive(update)
    other.close()


def test_what_is_published_once_has_one_slot(memory: SharedMemory) -> None:
    manifests = {**_manifests(), "north": lay_out(_parameters(1), torch.bfloat16)}
    sender, nbytes = memory.sender(manifests, once=[""]), manifests[""].nbytes
    north = AdapterSpec("north", 8, 16.0)
    assert [sender.send(version, _parameters(0)).where for version in (0, 1)] == [{"offset": 0}] * 2
    places = [sender.send(version, _parameters(1), north).where["offset"] for version in range(3)]
    assert places == [nbytes, 2 * nbytes, nbytes] and os.fstat(memory.fd).st_size == 3 * nbytes


def test_the_fingerprint_names_order_shape_and_dtype() -> None:
    parameters = _parameters(0)
    raw = memoryview(bytes(1 << 14))
    base = fingerprint(lay_out(parameters, torch.bfloat16), raw)
    assert fingerprint(lay_out(parameters[::-1], torch.bfloat16), raw) != base
    assert fingerprint(lay_out(parameters, torch.float16), raw) != base
    assert fingerprint(lay_out([("other", parameters[0][1]), *parameters[1:]], torch.bfloat16), raw) != base


def test_the_memory_has_no_name() -> None:
    """A killed run leaves nothing in /dev/shm or the temporary directory that a later run could trip over."""
    transport = SharedMemory.open()
    transport.sender({"": lay_out(_parameters(0), torch.bfloat16)})
    link = os.readlink(f"/proc/self/fd/{transport.fd}")
    assert link.startswith("/memfd:") and os.fstat(transport.fd).st_nlink == 0
    transport.close()
