"""A step of 100 million tokens on its way from the controller to fakes of 1, 8, 64 and 512 ranks (`run/worker/step_messages.py`): the controller's memory above the
batch, bytes sent, the largest message, and CPU time: of a token, and of the longest turn of its event loop.

    python benchmarks/large_step.py [--millions 100] [--ranks 1 8 64 512] [--answer 0.02]

Completions are the same objects in all groups: the batch's own Python numbers (about 100 bytes a token) are left out. A rank answers a block after
`--answer` seconds, so that what waits for it is held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
from step_shares import row_of

from headrace.core.batches import Batch, Group
from headrace.core.types import Prompt
from headrace.native.arithmetic import cpu_model
from headrace.run.worker.step_messages import send_shares
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import shares_of

LENGTH, ROLLOUTS = 5000, 20


def batch_of(millions: int) -> Batch:
    chance = random.Random(0)
    completions = [row_of(chance, (1,), LENGTH) for _ in range(ROLLOUTS)]
    groups = []
    for number in range(millions * 1_000_000 // (LENGTH * ROLLOUTS)):
        prompt = (7, 7, number // 100, number % 100)
        rows = tuple(msgspec.structs.replace(row, prompt=prompt) for row in completions)
        groups.append(Group(number, Prompt("p", "", (1,)), (), rows))
    return Batch(0, tuple(groups))


class FakeRank:
    def __init__(self, seconds: float) -> None:
        self._seconds, self.received, self.largest = seconds, 0, 0

    async def call(self, method: str, payload: Any, returns: type[Any]) -> Any:
        size = len(memoryview(payload))
        self.received, self.largest = self.received + size, max(self.largest, size)
        await asyncio.sleep(self._seconds)


def resident() -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


async def measure(batch: Batch, ranks: int, seconds: float, before: int) -> None:
    longest, stop = 0.0, False

    async def beat() -> None:
        nonlocal longest
        last = time.thread_time()
        while not stop:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    beating = asyncio.ensure_future(beat())
    count = sum(len(row.tokens) for row in batch.rows)
    started, cpu = time.monotonic(), time.process_time()
    shares = await asyncio.to_thread(shares_of, batch, Dealing(budget=16_384, ranks=ranks))
    dealt, planned = resident() - before, time.process_time() - cpu
    workers = [FakeRank(seconds) for _ in range(ranks)]
    await send_shares(shares, 0, [[worker] for worker in workers])  # type: ignore[list-item]
    stop = True
    await beating
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    sent = [worker.received for worker in workers]
    print(
        f"{ranks} ranks: {sum(sent) / count:.2f} B a token sent, the fullest rank {max(sent) * ranks / sum(sent):.2f} of its part, largest message "
        f"{max(worker.largest for worker in workers) / 1e6:.2f} MB; held {dealt / count:.1f} B a token, peak {peak / count:.1f}; "
        f"{planned / count * 1e9:.0f} ns a token to deal, {(time.process_time() - cpu) / count * 1e9:.0f} in all, {time.monotonic() - started:.0f} s; "
        f"longest turn of the loop {longest * 1e3:.0f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--answer", type=float, default=0.02)
    given = parser.parse_args()
    batch = batch_of(given.millions)
    print(f"{given.millions} million tokens in {len(batch.rows)} rows, {cpu_model()}", flush=True)
    for ranks in given.ranks:
        if not (child := os.fork()):  # the peak of memory is that of a process
            asyncio.run(measure(batch, ranks, given.answer, resident()))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
