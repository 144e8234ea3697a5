"""What a publish over TCP costs each rank of a trainer, and what leaves the trainer when several engines fetch.

    python benchmarks/publish_ranks.py [--values 64e6] [--ranks 1 2 4] [--engines 1 2 4 8] [--rounds 3]

Ranks and engines are processes of their own on this machine. The ranks hold rows of a few large parameters, as FSDP2 splits them. Bytes are counted where
they leave or enter a socket; seconds are CPU time of the process that needs most, the least of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.weight_sync import slots, sockets

ROWS, TENSORS = 1024, 16
READ = Counter[str]()
"""Bytes that this process has received, and sent."""


_receive, _send = sockets.receive_into, slots.send_all


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    _receive(connection, buffer)
    READ["in"] += len(buffer)


def send_all(connection: socket.socket, data: memoryview) -> None:
    _send(connection, data)
    READ["out"] += len(data)


sockets.receive_into, slots.send_all = (
    receive_into,
    send_all,
)  # before the transports are imported, which take them by name


def rank_process(rank: int, ranks: int, transport: Any, values: int, rounds: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from headrace.weight_sync.packed import lay_out
    from headrace.weight_sync.ranges import ValueRange, parts_of
    from headrace.weight_sync.tcp import TcpPartSender

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    width = values // TENSORS // ROWS
    names = [f"layers.{number}.weight" for number in range(TENSORS)]
    with torch.device("meta"):
        manifests = {"": lay_out([(name, torch.empty(ROWS, width)) for name in names], torch.bfloat16)}
    first, last = rank * ROWS // ranks, (rank + 1) * ROWS // ranks
    own = torch.randn(TENSORS, last - first, width)

    def of(name: str) -> Iterator[ValueRange]:
        for key, rows in zip(names, own, strict=True):
            yield ValueRange(key, first * width, rows.reshape(-1))

    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, value)
        return found

    parts = parts_of(manifests, rank, of, exchange)
    assert parts
    sender = TcpPartSender(transport, manifests, [], parts)
    for version in range(rounds):
        finish = sender.copy(version, [])
        dist.barrier()
        READ.clear()
        cpu, clock = time.process_time(), time.perf_counter()
        update = finish()
        dist.barrier()
        pipe.send((time.process_time() - cpu, time.perf_counter() - clock, dict(READ), update, manifests))
        pipe.recv()  # the engines have it
        pipe.send(READ["out"])
        READ.clear()
    pipe.recv()


def engine_process(transport: Any, manifests: Any, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    receiver = transport.receiver(manifests)
    pipe.send(None)
    while (update := pipe.recv()) is not None:
        READ.clear()
        cpu, clock = time.process_time(), time.perf_counter()
        receiver.receive(update)
        pipe.send((time.process_time() - cpu, time.perf_counter() - clock))
        pipe.recv()  # all of them have it
        pipe.send(READ["out"])


def measured(ranks: int, engines: int, values: int, rounds: int) -> dict[str, float]:
    from headrace.weight_sync.tcp import Tcp

    spawn, transport = multiprocessing.get_context("spawn"), Tcp.open()
    ends: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            here, there = spawn.Pipe()
            given = (rank, ranks, transport, values, rounds, str(Path(folder) / "store"), there)
            spawn.Process(target=rank_process, args=given, daemon=True).start()
            ends.append(here)
        others: list[Any] = []
        found: dict[str, list[float]] = {}
        for version in range(rounds):
            told = [end.recv() for end in ends]
            update, manifests = told[0][3], told[0][4]
            while len(others) < engines:
                here, there = spawn.Pipe()
                spawn.Process(target=engine_process, args=(transport, manifests, there), daemon=True).start()
                others.append(here)
                here.recv()
            for end in others:
                end.send(update)
            took = [end.recv() for end in others]
            for end in (*ends, *others):
                end.send(None)
            left = [end.recv() for end in ends]
            passed = [end.recv() for end in others]
            one = {
                "cpu": max(cpu for cpu, *_ in told),
                "clock": told[0][1],
                "in": max(read.get("in", 0) for _, _, read, *_ in told),
                "cpu 0": told[0][0],
                "in 0": told[0][2].get("in", 0),
                "left": sum(left) - sum(read.get("out", 0) for _, _, read, *_ in told),
                "passed": sum(passed),
                "most": max(passed, default=0),
                "last": max((clock for _, clock in took), default=0.0),
                "whole": float(update.nbytes),
                "version": version,
            }
            for key, value in one.items():
                found.setdefault(key, []).append(value)
        for end in (*ends, *others):
            end.send(None)
    return {
        key: min(series) if key in ("cpu", "clock", "cpu 0", "last") else max(series) for key, series in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=64e6)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    mega = 1e6
    print(
        "| ranks | MB of a version | the fingerprint: rank 0 receives | the busiest rank | CPU s of rank 0 | of the busiest rank |"
    )
    print("|---|---|---|---|---|---|")
    for ranks in given.ranks:
        one = measured(ranks, 0, int(given.values), given.rounds)
        print(
            f"| {ranks} | {one['whole'] / mega:.0f} | {one['in 0'] / mega:.3f} MB | {one['in'] / mega:.3f} MB | {one['cpu 0']:.3f} | {one['cpu']:.3f} |",
            flush=True,
        )
    print(
        "\n| ranks | engines | copies that leave the trainer | that engines pass on | by the busiest engine | seconds until the last has it |"
    )
    print("|---|---|---|---|---|---|")
    for ranks in given.ranks[-2:-1] or given.ranks:
        for engines in given.engines:
            one = measured(ranks, engines, int(given.values), given.rounds)
            whole = one["whole"]
            print(
                f"| {ranks} | {engines} | {one['left'] / whole:.2f} | {one['passed'] / whole:.2f} | {one['most'] / whole:.2f} | {one['last']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
