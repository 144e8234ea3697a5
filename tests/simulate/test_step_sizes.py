"""The planner's bytes of a step, against those of a small trainer and of what it is sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.commands.plan.rates.rates import sends_parts, step_sizes
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt
from headrace.run.worker.step_messages import send_shares
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import shares_of
from headrace.trainer.parallel import ParallelConfig
from headrace.weight_sync.config import WeightSyncConfig
from headrace.weight_sync.packed import lay_out
from support.trainer_calls import batch, model_dir, trainer  # noqa: F401

WAY = WeightSyncConfig()


class Counting:
    """A rank that counts what it is sent."""

    received = 0

    async def call(self, method: str, payload: Any, returns: type[Any]) -> None:
        self.received += len(memoryview(payload))


def some_group(chance: random.Random, ticket: int) -> Group:
    """Two versions sampled each completion."""
    prompt = tuple(chance.randrange(150_000) for _ in range(200))
    rows = []
    for _ in range(8):
        count = chance.randrange(300, 900)
        tokens, logprobs = (
            tuple(chance.randrange(150_000) for _ in range(count)),
            tuple(-chance.random() for _ in range(count)),
        )
        versions = (3,) * (count // 3) + (4,) * (count - count // 3)
        rows.append(Row(prompt, tokens, logprobs, (chance.gauss(0, 1),) * count, (True,) * count, versions))
    return Group(ticket, Prompt(f"p{ticket}", "q", prompt), (), tuple(rows))


@pytest.mark.parametrize("mesh", [ParallelConfig(shard=2), ParallelConfig(shard=4, tensor=2)])
def test_the_rows_of_a_step_are_as_many_bytes_as_the_plan_says(mesh: ParallelConfig) -> None:
    groups = tuple(some_group(random.Random(ticket), ticket) for ticket in range(16))
    shares = shares_of(Batch(0, groups), Dealing(budget=16_384, ranks=mesh.batches))
    ranks = [Counting() for _ in range(mesh.ranks)]
    together = [[rank for number, rank in enumerate(ranks) if mesh.share_of(number) == at] for at in range(len(shares))]
    asyncio.run(send_shares(shares, 0, together))  # type: ignore[arg-type]
    heads = sum(len(msgspec.msgpack.encode(share.head)) for share in shares) * mesh.ranks / mesh.batches
    rows = [row for group in groups for row in group.rows]
    said = step_sizes(
        sampled=sum(len(row.tokens) for row in rows),
        prompts=200 * len(rows),
        parameters=1,
        mesh=mesh,
        weights="float32",
        way=WAY,
    )
    assert sum(rank.received for rank in ranks) + heads == pytest.approx(said.rows, rel=0.1)
    assert max(rank.received for rank in ranks) == pytest.approx(said.rank_rows, rel=0.1)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_checkpoint_and_new_weights_are_as_many_bytes_as_the_plan_says(
    weights: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    one = trainer(model_dir("llama"), weights=weights, dtype=weights)
    one.step(batch(1))
    one.save(tmp_path / "saved")
    held = [(name, tensor.detach().clone()) for name, tensor in one.parameters()]
    parameters = sum(tensor.numel() for _, tensor in held)
    said = step_sizes(sampled=1, prompts=1, parameters=parameters, mesh=ParallelConfig(), weights=weights, way=WAY)
    saved = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
    assert saved == pytest.approx(said.checkpoint, rel=0.1)
    assert lay_out(held, torch.bfloat16).nbytes == pytest.approx(said.weights, rel=0.1)


def test_a_rank_sends_its_part_only_where_the_transport_takes_parts() -> None:
    assert sends_parts(WAY) and sends_parts(WeightSyncConfig(kind="tcp"))
    assert not sends_parts(WeightSyncConfig(kind="http")) and not sends_parts(
        WeightSyncConfig(kind="tcp", encoding="delta")
    )
