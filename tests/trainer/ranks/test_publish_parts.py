"""Ranks publish the parts that they hold: the bits of `full_tensor()` in canonical order, and the whole model in no process."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rank_processes import RankProcesses
from sharded_case import Case, trainer_of_rank
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.core.errors import IdentityError
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.run.worker.build import FollowingSender, rank_sender
from headrace.run.worker.worker_messages import TrainerStart
from headrace.trainer.step.trainer import TorchTrainer
from headrace.weight_sync import tcp_server
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.packed import PackedBuffer, lay_out
from headrace.weight_sync.ranges import ByteRange, ValueRange, make_up, parts_of
from headrace.weight_sync.tcp import Tcp, TcpPartSender
from support import tiny_models
from support.meeting import Meeting

KEPT: list[Any] = []
"""The senders of a rank's process, which serve from threads."""


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not any(one.alias_info for one in func._schema.returns):
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


def sender_of(
    directory: Path, case: Case, transport: Tcp
) -> tuple[TorchTrainer, Any, dict[str, Manifest], torch.distributed.ProcessGroup]:
    import torch.distributed as dist

    one, rank, ranks = trainer_of_rank(directory, case), dist.get_rank(), dist.get_world_size()
    names = ["", *(spec.name for spec in one.adapters())]
    manifests = {name: lay_out(one.parameters(name), torch.bfloat16) for name in names}
    start = TrainerStart(
        model_dir="", train={}, algo={}, seed=0, serving_dtype="bfloat16", keep_routing=False, transport=transport
    )
    start = msgspec.structs.replace(start, rank=rank, ranks=ranks)

    def values_of(name: str) -> Iterator[ValueRange]:
        return itertools.starmap(ValueRange, one.own_values(name, rank, ranks))

    sender = rank_sender(start, values_of, manifests, [""] if names[1:] else [])
    return one, sender, manifests, dist.group.WORLD


def published(directory: Path, case: Case, transport: Tcp) -> dict[str, Any]:
    """Publishes three versions of a model whose values are its own. Returns what the last update and this rank held."""
    one, sender, manifests, _ = sender_of(directory, case, transport)
    KEPT.append(sender)
    for version in range(3):
        one.step(case.batch(version))
        with Largest() as largest:
            finish = sender.copy(version, one.parameters())
        update = finish()
    whole = {name: tensor.bfloat16() for name, tensor in one.parameters()}
    (manifest,) = manifests.values()
    buffer = PackedBuffer(manifest, memoryview(bytearray(manifest.nbytes)))
    buffer.fill(whole.items())
    return {
        "update": update,
        "manifest": manifest,
        "whole": whole,
        "fingerprint": buffer.fingerprint(),
        "kind": type(sender).__name__,
        "held": sender.held_bytes if isinstance(sender, TcpPartSender) else 0,
        "largest": largest.nbytes,
    }


CASES = {
    "llama": Case(model="llama"),
    "tied": Case(model="llama-tied-biased"),
    "bfloat16": Case(model="llama", train={"weights": "bfloat16", "dtype": "bfloat16"}),
    "merged": Case(model="llama", lora={"rank": 2, "publish": "merged"}),
    "experts": Case(model="qwen3_moe", parallel={"expert": 2}),
}


def check(ranks: RankProcesses, directory: Path, case: Case) -> list[dict[str, Any]]:
    transport = Tcp.open()
    found = ranks.run(published, directory, case, transport)
    first = found[0]
    update, manifest = first["update"], first["manifest"]
    assert {one["kind"] for one in found} == {"TcpPartSender"}
    assert isinstance(update, WeightUpdate) and update.fingerprint == first["fingerprint"], "bit for bit"
    receiver = transport.receiver({"": manifest})
    views = receiver.receive(update)
    assert receiver.received == manifest.payload
    assert all(torch.equal(views[name], tensor) for name, tensor in first["whole"].items())
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_publish_the_bits_of_one(two: RankProcesses, name: str) -> None:
    case = CASES[name]
    check(two, tiny_models.saved(case["model"]), case)


def test_copies_of_a_split_are_published_once(four: RankProcesses) -> None:
    case = Case(model="llama", parallel={"shard": 2, "replicate": 2})
    check(four, tiny_models.saved("llama"), case)


@pytest.mark.parametrize("count", [2, 4])
def test_no_rank_holds_more_than_its_share_and_one_tensor(two: RankProcesses, four: RankProcesses, count: int) -> None:
    case = Case(model="llama", parallel={"shard": count})
    for one in check(two if count == 2 else four, tiny_models.saved("llama"), case):
        manifest = one["manifest"]
        tensor = max(spec.nbytes for spec in manifest.tensors)
        assert one["largest"] <= 2 * tensor, "a parameter in float32"
        slots, page = 2, 4096
        assert one["held"] <= slots * (manifest.payload / count + tensor + page), one["held"]


def through(directory: Path, case: Case, transport: Tcp) -> str:
    _, sender, _, _ = sender_of(directory, case, transport)
    return type(sender).__name__


def test_differences_come_from_rank_0(two: RankProcesses) -> None:
    """Engines put no differences of parts together."""
    case = Case(model="llama")
    found = two.run(through, tiny_models.saved("llama"), case, Tcp.open(Opening(form=Encoding(delta=True))))
    assert found == ["OfferingSender", FollowingSender.__name__]


def test_parts_that_are_torn_stale_or_do_not_make_up_the_whole_are_refused(two: RankProcesses) -> None:
    case, transport = Case(model="llama"), Tcp.open()
    first, _ = two.run(published, tiny_models.saved("llama"), case, transport)
    update, manifest = first["update"], first["manifest"]
    receiver = transport.receiver({"": manifest})
    replaced = msgspec.structs.replace
    stale = replaced(update, where={**update.where, "label": "copy 1"}, fingerprint="00")
    with pytest.raises(IdentityError, match="no longer has them"):
        receiver.receive(stale)
    half = replaced(update, where={**update.where, "parts": update.where["parts"][:1]})
    with pytest.raises(IdentityError, match="do not make up this engine's weights"):
        receiver.receive(half)
    older = replaced(update, where={**update.where, "label": "copy 2"})
    with pytest.raises(IdentityError, match="the engine loaded"):
        receiver.receive(older)
    assert torch.equal(receiver.receive(update)["lm_head.weight"], first["whole"]["lm_head.weight"])


def test_adapters_that_are_published_in_turn_keep_two_versions_each() -> None:
    manifests = {name: lay_out([("a", torch.empty(8))], torch.bfloat16) for name in ("", "north", "south")}
    values = dict.fromkeys(manifests, 0.0)

    def values_of(name: str) -> Iterator[ValueRange]:
        yield ValueRange("a", 0, torch.full((8,), values[name]))

    parts = parts_of(manifests, 0, values_of, lambda value: [value])
    assert parts
    transport = Tcp.open()
    sender = TcpPartSender(transport, manifests, [""], parts)
    updates = {}
    for version in range(3):
        for name in ("north", "south"):
            values[name] = version + 1.0
            updates[name, version] = sender.send(version, [], AdapterSpec(name, 8, 16.0))
    for (name, version), update in updates.items():
        receiver = transport.receiver(manifests)
        if version == 0:
            with pytest.raises(IdentityError, match="no longer has them"):
                receiver.receive(update)
        else:
            assert receiver.receive(update)["a"].tolist() == [version + 1.0] * 8, (name, version)


def test_ranges_make_up_a_buffer_when_every_byte_lies_in_one() -> None:
    manifest = lay_out([("a", torch.empty(64)), ("b", torch.empty(3, 10))], torch.bfloat16)
    whole = [ByteRange(0, 128), ByteRange(128, 60)]
    assert make_up(manifest, [whole]) and make_up(manifest, [whole[1:], whole[:1]])
    assert make_up(manifest, [[ByteRange(0, 40), ByteRange(128, 60)], [ByteRange(40, 88)]])
    for wrong in (
        [whole[:1]],
        [whole, whole[1:]],
        [[ByteRange(0, 130), ByteRange(130, 58)]],
        [[ByteRange(0, 100), *whole[1:]]],
    ):
        assert not make_up(manifest, wrong), wrong


@pytest.mark.parametrize("ranks", [2, 16])
def test_each_rank_sends_its_part_to_the_first_engine_which_sends_it_to_the_next(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes to engines through the busiest rank are those of its part, once."""
    rows, engines = 64, 5
    manifests = {"": lay_out([("a", torch.empty(rows, 256))], torch.bfloat16)}
    whole = torch.randn(rows, 256)
    part, sent, meeting, transport = manifests[""].payload // ranks, Counter[int](), Meeting(ranks), Tcp.open()

    def counted(connection: socket.socket, data: memoryview) -> None:
        """Layouts of parts are smaller."""
        sent[connection.getsockname()[1]] += len(data) if len(data) == part else 0
        send_all(connection, data)

    send_all = tcp_server.send_all
    monkeypatch.setattr(tcp_server, "send_all", counted)

    def begin(rank: int) -> WeightUpdate:
        first = rank * rows // ranks
        own = whole[first : (rank + 1) * rows // ranks]

        def values(name: str) -> Iterator[ValueRange]:
            yield ValueRange("a", first * 256, own.reshape(-1))

        parts = parts_of(manifests, rank, values, lambda value: meeting.exchange(rank, value))
        assert parts
        return TcpPartSender(transport, manifests, [], parts).send(0, [])

    with ThreadPoolExecutor(ranks) as pool:
        update = next(iter(pool.map(begin, range(ranks))))
    receivers = [transport.receiver(manifests) for _ in range(engines)]  # an engine that is gone passes nothing on
    for receiver in receivers:
        assert torch.equal(receiver.receive(update)["a"], whole.bfloat16())
    assert [sent[port] for _, port in update.where["parts"]] == [part] * ranks
    assert sum(sent.values()) == engines * ranks * part, "others have it of each other"
