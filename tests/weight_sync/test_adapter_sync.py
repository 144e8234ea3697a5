"""An adapter from the trainer to the engine: the same bits, and the same log-probs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algo.config import AlgoConfig
from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.request_book import scoring
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender
from support.few import few
from support.tiny_models import prompts, saved

Loras = dict[str, LoraConfig]


@dataclass
class BothEnds:
    """A trainer and an engine, with no process between them."""

    trainer: TorchTrainer
    engine: NativeEngine
    sender: SharedMemorySender
    receiver: SharedMemoryReceiver
    memory: SharedMemory
    base: str = ""

    def publish(self, name: str = "", version: int = 0) -> WeightUpdate:
        spec = next((adapter for adapter in self.trainer.adapters() if adapter.name == name), None)
        if spec:
            spec = LORAS[name].spec(name, self.base)
        update = self.sender.send(version, self.trainer.parameters(name), spec)
        self.base = self.base if name else update.fingerprint
        return update

    def load(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        received = dict(self.receiver.receive(update))
        self.engine.swap(self.engine.prepare(update, received))
        return received

    def engine_says(self, tokens: list[int], name: str = "") -> list[float]:
        self.engine.add(scoring("score", tokens, adapter=name))
        found: list[float] = []
        while self.engine.has_work():
            for scores in self.engine.step().scores:
                found = list(scores.logprobs)
        return found


LORAS: Loras = {
    "north": LoraConfig(rank=4, alpha=8, rank_pattern={"q_proj": 2}),
    "south": LoraConfig(rank=2, rslora=True, targets=("v_proj", "down_proj"), init_seed=1),
}


def both_ends(name: str, dtype: str, loras: Loras, path: str = "auto") -> BothEnds:
    directory = Path(saved(name))
    train, algo = TrainConfig(dtype=dtype, device="cpu"), AlgoConfig()
    assignments = {name: Assignment(train, algo, lora) for name, lora in loras.items()}
    trainer = TorchTrainer(directory, train, algo, 0, adapters=assignments)
    generator = torch.Generator().manual_seed(3)
    for adapter in loras:
        for parameter in dict(trainer.parameters(adapter)).values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    serving = getattr(torch, dtype)
    manifests = {name: lay_out(trainer.parameters(name), serving) for name in ("", *loras)}
    memory = SharedMemory.open()
    engine = NativeEngine(
        directory,
        EngineConfig(device="cpu", dtype=dtype, kv_gib=0.01, context_length=64, max_adapters=len(loras), path=path),
    )
    return BothEnds(trainer, engine, memory.sender(manifests, once=[""]), memory.receiver(manifests), memory)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[BothEnds] = []

    def build(*given: Any, **options: Any) -> BothEnds:
        made.append(both_ends(*given, **options))
        return made[-1]

    yield build
    for one in made:
        one.memory.close()


@pytest.mark.parametrize("path", few(["auto", "fused"], keep=1))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_the_engine_holds_the_trainers_bits_and_says_what_it_says(make, path, dtype, tolerance):
    one, text = make("qwen2", dtype, LORAS, path=path), prompts(30)[0]
    base = one.load(one.publish())
    assert all(torch.equal(base[name], tensor.to(base[name].dtype)) for name, tensor in one.trainer.parameters())
    for name in LORAS:
        received = one.load(one.publish(name))
        sent = dict(one.trainer.parameters(name))
        assert list(received) == list(sent)
        assert all(torch.equal(received[key], sent[key].to(getattr(torch, dtype))) for key in sent)
    said = {name: torch.tensor(one.engine_says(text, name)) for name in LORAS}
    for name in LORAS:
        assert (said[name] - torch.tensor(one.trainer.score(text, name))).abs().mean() < tolerance
    assert (said["north"] - said["south"]).abs().mean() > 2 * tolerance, "they are different policies"


def test_adapters_have_buffers_of_their_own_and_the_last_version_stays_valid(make):
    one = make("qwen2", "float32", LORAS)
    one.load(one.publish())
    north, south = one.load(one.publish("north", 1)), one.load(one.publish("south", 1))
    kept = {key: tensor.clone() for key, tensor in {**north}.items()}, {k: t.clone() for k, t in south.items()}
    for parameter in dict(one.trainer.parameters("north")).values():
        parameter += 1
    one.load(one.publish("north", 2))
    assert all(torch.equal(north[key], kept[0][key]) for key in north), "version 1 lies in the other slot"
    assert all(torch.equal(south[key], kept[1][key]) for key in south), "and south was not touched"


def test_one_flipped_bit_of_an_adapter_is_refused_and_the_old_one_goes_on(make):
    one, text = make("qwen2", "float32", LORAS), prompts(12)[0]
    one.load(one.publish())
    one.load(one.publish("north", 1))
    before = one.engine_says(text, "north")
    update = one.publish("north", 2)
    position = update.where["offset"] + 5
    assert position == lay_out(one.trainer.parameters(), torch.float32).nbytes + 5, "in the first slot behind the base"
    (value,) = os.pread(one.memory.fd, 1, position)
    os.pwrite(one.memory.fd, bytes([value ^ 1]), position)
    with pytest.raises(IdentityError, match="the adapter north of version 2"):
        one.load(update)
    assert one.engine_says(list(text), "north") == before


def test_an_adapter_of_another_base_is_refused(make):
    one = make("qwen2", "float32", LORAS)
    one.load(one.publish())
    one.base = "of another model"
    with pytest.raises(ValueError, match="made for base weights with fingerprint of another model"):
        one.load(one.publish("north", 1))


def test_an_adapter_that_was_not_announced_is_refused(make):
    one = make("qwen2", "float32", {"north": LORAS["north"]})
    one.load(one.publish())
    foreign = WeightUpdate(
        version=1, kind="adapter", fingerprint="f00", nbytes=0, seconds=0.0, adapter=LORAS["south"].spec("south")
    )
    with pytest.raises(IdentityError, match="started with no adapter south"):
        one.receiver.receive(foreign)
