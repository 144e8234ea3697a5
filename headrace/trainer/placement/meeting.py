"""How the ranks of a trainer find each other: through a file in a directory that the controller made for them.

A file needs no port, so that no other program can take it meanwhile, and nobody else can connect. Collectives have no deadline of their
own that matters: the controller notices a rank that died or was stopped, and ends the others (`orchestration/clients/rank_group.py`).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.errors import ConfigError

DEADLINE = timedelta(days=7)
"""The deadline of a collective: later than any of the controller's, which says who waits for whom."""


def meet(rank: int, ranks: int, place: str, device: torch.device) -> None:
    """Joins this process to the others. Blocks until all of them have come. Raises ConfigError if there are fewer GPUs than ranks."""
    backend = "gloo"
    if device.type == "cuda":
        if (count := torch.cuda.device_count()) < ranks:
            raise ConfigError(
                f"train.parallel asks for {ranks} ranks, and torch sees {count} GPUs; lower train.parallel.shard or tensor, or set train.device = cpu"
            )
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    if sys.platform == "linux":  # by the machine's name gloo may find an address that leads nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(place, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=DEADLINE)
