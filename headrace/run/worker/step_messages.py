"""A step on its way to the trainer's ranks: each is sent its own rows, in blocks, and then what begins the step.

    controller   rows (number, RowBlock) -> None, several under way        step (number, ShareHead) -> TrainReport
    rank         its thread that reads answers each block at once, so that a busy rank is sent no more than it has room for

`number` tells the rows of two steps apart: adapters are trained one after the other, but may be sent at the same time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from headrace.core.protocols import Worker
from headrace.processes.wire import pack_payload, unpack
from headrace.trainer.dealing.share import PackedShare, RowBlock, ShareHead, StepShare, received

ROWS = "rows"
"""The call that delivers a block."""

UNDER_WAY = 4
"""Blocks of a share that are sent before the first of them is answered. A block is packed when it is sent, so the controller has no more."""


IN_ALL = 64
"""Blocks of all shares that are under way, so that the memory for them does not grow with the number of ranks."""


async def send_shares(shares: Sequence[PackedShare], number: int, workers: Sequence[Sequence[Worker]]) -> None:
    """Sends each share to its workers. Raises what a call raises, `WorkerDied` included."""
    room = asyncio.Semaphore(IN_ALL)
    sending = [
        asyncio.ensure_future(_send(share, number, its, room)) for share, its in zip(shares, workers, strict=True)
    ]
    try:
        await asyncio.gather(*sending)
    finally:
        for task in sending:
            task.cancel()


async def _send(share: PackedShare, number: int, workers: Sequence[Worker], room: asyncio.Semaphore) -> None:
    blocks = share.blocks()

    def following() -> msgspec.Raw | None:
        block = next(blocks, None)
        return None if block is None else pack_payload((number, block))

    async def deliver(payload: msgspec.Raw) -> None:
        try:
            await asyncio.gather(*(worker.call(ROWS, payload, type(None)) for worker in workers))
        finally:
            room.release()

    under_way: deque[asyncio.Future[None]] = deque()
    try:
        while True:
            await room.acquire()
            # in a thread: a loop that packs would keep engines and workers waiting
            if (payload := await asyncio.to_thread(following)) is None:
                room.release()
                break
            under_way.append(asyncio.ensure_future(deliver(payload)))
            if len(under_way) >= UNDER_WAY:
                await under_way.popleft()
        while under_way:
            await under_way.popleft()
    finally:
        for sent in under_way:
            sent.cancel()


class ReceivedRows:
    """The rank's end. Rows of a step that is never begun stay here: its run has ended."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[RowBlock]] = {}

    def take(self, payload: msgspec.Raw) -> None:
        """Keeps what a call of `ROWS` delivered."""
        number, block = unpack(payload, tuple[int, RowBlock])
        self._blocks.setdefault(number, []).append(block)

    def share(self, payload: msgspec.Raw) -> StepShare:
        """Returns the share that a call of `step` begins. Raises ValueError if rows of it are missing."""
        number, head = unpack(payload, tuple[int, ShareHead])
        return received(head, self._blocks.pop(number, []))
