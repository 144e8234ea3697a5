"""A step's rows on their way to the ranks: each rank its own rows as raw columns, beside the whole batch for everyone, which it was until
2026-11-29 (`docs/decisions/0032-step-shares.md`). Both in one run, in CPU time.

    python benchmarks/step_shares.py --groups 32 --tokens 4000 --ranks 8
"""

from __future__ import annotations

import argparse
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.algo.objective import AGGREGATIONS
from headrace.algo.training_rows import trajectories_of
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt
from headrace.processes.wire import pack_payload
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import RowBlock, ShareHead, received, shares_of
from headrace.trainer.packing import DealtRows, StepRows, plan_of, split_ranks

T = TypeVar("T")

ROLLOUTS = 16
PROMPT = 200


def batch_of(groups: int, tokens: int) -> Batch:
    """Groups of 16 rollouts of different lengths, the mean of which is `tokens`."""
    chance = random.Random(0)
    template = tuple(range(50))
    made = []
    for ticket in range(groups):
        prompt = template + tuple(chance.randrange(150_000) for _ in range(PROMPT - 50))
        rows = tuple(row_of(chance, prompt, chance.randrange(tokens // 2, 3 * tokens // 2)) for _ in range(ROLLOUTS))
        made.append(Group(ticket, Prompt(f"p{ticket}", "q", prompt), (), rows))
    return Batch(0, tuple(made))


def row_of(chance: random.Random, prompt: tuple[int, ...], count: int) -> Row:
    tokens = tuple(chance.randrange(150_000) for _ in range(count))
    logprobs = tuple(-chance.random() for _ in range(count))
    advantage = chance.gauss(0, 1)
    versions = (3,) * (count // 2) + (4,) * (count - count // 2)
    return Row(prompt, tokens, logprobs, (advantage,) * count, (True,) * count, versions)


def cpu(work: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def silence(work: Callable[[], T]) -> tuple[float, float, T]:
    """CPU seconds of the work, and the longest time in which another thread could not run meanwhile."""
    longest, stop = [0.0], threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not stop.wait(0.01):
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now

    thread = threading.Thread(target=beat)
    thread.start()
    seconds, result = cpu(work)
    stop.set()
    thread.join()
    return seconds, longest[0], result


def resident() -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def rank_now(head: bytes, blocks: list[bytes], budget: int) -> Any:
    share = received(
        msgspec.msgpack.decode(head, type=ShareHead), [msgspec.msgpack.decode(block, type=RowBlock) for block in blocks]
    )
    return plan_of(DealtRows(share.dealt, AGGREGATIONS["token_mean"], constant=0, step=0))


def rank_before(raw: bytes, ranks: int, budget: int) -> Any:
    batch = msgspec.msgpack.decode(raw, type=Batch)
    given = StepRows(
        batch.rows,
        AGGREGATIONS["token_mean"],
        constant=0,
        budget=budget,
        step=0,
        trajectories=trajectories_of(batch.groups),
    )
    return split_ranks(given, ranks)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16384)
    given = parser.parse_args()
    batch = batch_of(given.groups, given.tokens)
    count = sum(len(row.tokens) for row in batch.rows)
    print(
        f"{count:,} tokens in {len(batch.rows)} rows, {given.ranks} ranks; nanoseconds are CPU time per token of the step"
    )

    start = resident()
    packing, raw = cpu(lambda: bytes(pack_payload(batch)))
    sent_before = len(raw) * given.ranks
    print(
        f"before  controller {packing / count * 1e9:6.0f} ns, {sent_before / count:7.1f} B sent, {(resident() - start) / count:5.0f} B held"
    )
    working, still, plan = silence(lambda: rank_before(raw, given.ranks, given.budget))
    before = working
    print(f"before  each rank  {working / count * 1e9:6.0f} ns, nothing else ran for {still:.2f} s")

    start = resident()
    dealing = Dealing(budget=given.budget, ranks=given.ranks)
    planning, shares = cpu(lambda: shares_of(batch, dealing))
    held = resident() - start
    encoding, encoded = cpu(lambda: [[msgspec.msgpack.encode(block) for block in share.blocks()] for share in shares])
    heads = [msgspec.msgpack.encode(share.head) for share in shares]
    sent = sum(map(len, heads)) + sum(len(block) for blocks in encoded for block in blocks)
    print(
        f"now     controller {(planning + encoding) / count * 1e9:6.0f} ns, {sent / count:7.1f} B sent, {held / count:5.0f} B held"
    )
    working, still, own = silence(lambda: rank_now(heads[0], encoded[0], given.budget))
    print(f"now     each rank  {working / count * 1e9:6.0f} ns, nothing else ran for {still:.2f} s")
    same = all(
        (a.tokens == b.tokens).all() and (a.weight == b.weight).all()
        for a, b in zip(plan.packs, own.packs, strict=True)
    )
    print(f"ratios  a rank {before / working:.1f}, sent {sent_before / sent:.1f}; same microbatches: {same}")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
