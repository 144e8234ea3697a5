"""How the ranks of a trainer find each other: through a file in a directory that the controller made for them, or at the door of rank 0.

A file needs no port, so that no other program can take it meanwhile, and nobody else can connect: the way on one machine. Ranks on other
machines meet in a store that rank 0 serves at an address which the controller has given to all of them. The network interface is
that of the rank's own address: gloo and NCCL would choose one by the machine's name, which often stands for the loopback.

Collectives have no deadline of their own that matters: the controller notices a rank that died or was stopped, and ends the others
(`run/clients/process_trainer.py`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.core.errors import ConfigError
from headrace.native.memory import return_freed_memory
from headrace.native.resources import LOCAL_RANKS, local_rank

T = TypeVar("T")

DEADLINE = timedelta(days=7)
"""The deadline of a collective: later than any of the controller's, which says who waits for whom."""

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with the network interface of collectives. One that is set already stays."""

_SIOCGIFADDR = 0x8915
"""The request for an interface's IPv4 address (netdevice(7))."""


def meet(rank: int, ranks: int, place: str, device: torch.device, door: socket.socket | None = None) -> None:
    """Joins this process to the others. Blocks until all of them have come. Raises ConfigError if there are fewer GPUs than ranks.

    `place`: the file, or HOST:PORT of rank 0's door. `door`: the socket at which this rank listens, if ranks are elsewhere."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(_gpu(rank, ranks, alone=door is not None))
        backend = "cpu:gloo,cuda:nccl"
    if sys.platform == "linux":
        if GLOO not in os.environ:
            os.environ[GLOO] = interface_of(str(door.getsockname()[0])) if door else "lo"
        if door:
            os.environ.setdefault(NCCL, f"={os.environ[GLOO]}")
    return_freed_memory()
    store = _store_at(place, rank, ranks, door) if door else dist.FileStore(place, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=DEADLINE)


def _gpu(rank: int, ranks: int, *, alone: bool) -> int:
    """Returns the number of this rank's GPU. `alone`: whether it was started elsewhere."""
    count = torch.cuda.device_count()
    if alone:
        return gpu_of(local_rank(), count, rank)
    if count < ranks:
        raise ConfigError(
            f"train.parallel asks for {ranks} ranks, and torch sees {count} GPUs; lower train.parallel.shard or tensor, or set train.device = cpu"
        )
    return rank


def gpu_of(numbered: tuple[str, int] | None, count: int, rank: int) -> int:
    """Returns the number of the GPU of a rank that was started elsewhere, among the `count` that it sees. `numbered`: variable and number that its
    starter gave it; None: none. Raises ConfigError if there are fewer GPUs."""
    if numbered is None or count == 1:  # the only one that its starter lets it see, or is alone there: see `shared_gpu`
        return 0
    name, number = numbered
    if number >= count:
        raise ConfigError(
            f"{name} = {number} in the environment of rank {rank} on {socket.gethostname()}, and torch sees {count} GPUs there"
        )
    return number


def check_own_gpus() -> None:
    """Raises ConfigError, on all ranks, if two of them have taken one GPU. All call this at the same time."""
    mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), mine))
    if problem := shared_gpu(found):
        raise ConfigError(problem)


def shared_gpu(found: Sequence[tuple[str, str]]) -> str:
    """A sentence about two ranks with one GPU; empty if each has one of its own. `found`: machine and GPU of each rank.

    >>> shared_gpu([("a", "GPU-1"), ("a", "GPU-2")])
    ''
    """
    first: dict[str, int] = {}
    for rank, (host, gpu) in enumerate(found):
        if (other := first.setdefault(gpu, rank)) != rank:
            return (
                f"ranks {other} and {rank} have taken the same GPU of {host} ({gpu}), since nobody has numbered them there; start each with a GPU of its "
                f"own in CUDA_VISIBLE_DEVICES, or all of them by torchrun, srun or mpirun ({', '.join(LOCAL_RANKS)})"
            )
    return ""


def _store_at(place: str, rank: int, ranks: int, door: socket.socket) -> dist.Store:
    host, _, port = place.rpartition(":")
    listening = door.detach() if rank == 0 else None
    if rank:
        door.close()
    return dist.TCPStore(
        host,
        int(port),
        ranks,
        is_master=rank == 0,
        timeout=DEADLINE,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def interface_of(address: str) -> str:
    """Returns the name of this machine's network interface with that address. Raises ConfigError if there is none.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    if address.startswith("127.") or address == "::1":
        return "lo"
    names = _interfaces_of_ipv6() if ":" in address else _interfaces_of_ipv4()
    if address in names:
        return names[address]
    raise ConfigError(
        f"no network interface of {socket.gethostname()} has the address {address}; name one with --address, or the interface with {GLOO}"
    )


def _interfaces_of_ipv4() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _interfaces_of_ipv6() -> dict[str, str]:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])): line[-1] for line in lines}


def check_same(what: str, mine: str, remedy: str) -> None:
    """Compares a value of all ranks, which all call this at the same time. Raises ConfigError, on all of them, if they differ."""
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), mine))
    if other := next((rank for rank, (_, value) in enumerate(found) if value != found[0][1]), 0):
        raise ConfigError(
            f"{what} of rank {other} (on {found[other][0]}) are not those of rank 0 (on {found[0][0]}): {found[other][1]} instead of "
            f"{found[0][1]}; {remedy}"
        )


def of_leader(compute: Callable[[], T]) -> T:
    """The result of a computation that rank 0 makes for all ranks, which all call this at the same time. Raises its ConfigError, on all of them."""
    found: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            found[0] = compute()
        except ConfigError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found)
    if found[1]:
        raise ConfigError(found[1])
    return found[0]
