"""A process group that broadcasts buckets, one after another, in a thread of its own.

No other thread waits for it: it reports what has happened, and whoever has waited too long leaves it. A broadcast that never ends (torch
2.13, gloo: one receiver was killed, and another waits on) then keeps its thread and its two buckets, never the memory that an engine serves
from: bytes are copied out of a bucket by whoever receives them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.weight_sync.push.round_messages import Backend

BUCKET = 1 << 23
"""Bytes. Larger ones are no faster, and two of them stay in the cache."""

READY = -1
"""The number that a group reports when all members have met."""

Tell = Callable[[int | Exception], None]
"""Called with `READY`, with the number of each bucket that was carried, or with the error after which nothing follows."""


class BucketGroup:
    def __init__(
        self, store: dist.Store, rank: int, size: int, *, backend: Backend, address: str, patience: float, tell: Tell
    ) -> None:
        """`address`: of this machine, at which the others reach it. `patience`: seconds for the members to meet."""
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self.buckets = [torch.empty(BUCKET, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._group: Any = None
        self._work: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()

        def make() -> Any:
            make_one = _nccl if backend == "nccl" else _gloo
            return make_one(store, rank, size, address, timedelta(seconds=patience))

        threading.Thread(target=self._run, args=(make, tell), name="broadcast", daemon=True).start()

    def carry(self, number: int, nbytes: int) -> None:
        """Broadcasts the first bytes of bucket `number % 2` from rank 0, after all that was asked for before."""
        self._work.put((number, self.buckets[number % 2][:nbytes]))

    def leave(self) -> None:
        """Gives the group up. Returns at once; its thread ends when the broadcast that it waits for has ended, if ever."""
        self._work.put(None)
        if self._device.type == "cuda" and self._group is not None:
            threading.Thread(target=self._group.abort, daemon=True).start()

    def _run(self, make: Callable[[], Any], tell: Tell) -> None:
        try:
            group = self._group = make()
            tell(READY)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            while work := self._work.get():
                number, bucket = work
                group.broadcast([bucket], options).wait()
                if self._device.type == "cuda":  # not the device: an engine may be capturing a graph
                    torch.cuda.current_stream().synchronize()
                tell(number)
        except Exception as error:
            tell(error)
        self._group = None


def _gloo(store: dist.Store, rank: int, size: int, address: str, patience: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=address)]
    options._timeout = patience
    return kind(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, address: str, patience: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


def own_gpu() -> str:
    """Returns the identity of the GPU that this process uses; empty for none."""
    if not torch.cuda.is_initialized() or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
