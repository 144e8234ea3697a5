"""Processes that have met as the ranks of a trainer. They stay, and do one piece of work after another."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEADLINE = 120.0
"""Seconds for one piece of work, on a machine that is ten times slower than usual."""


class RankProcesses:
    def __init__(self, count: int, directory: Path) -> None:
        # not forked from this process: its threads (of torch, of other tests) would not live in a fork
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "headrace.trainer.step.trainer",
                "headrace.trainer.placement.sharded",
                "torch.distributed.checkpoint",
                *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3", "gemma3")),
            ]
        )
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, str(directory / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *given: Any) -> list[Any]:
        """Calls a function of a module on every rank at once, and returns the results. `given`: its arguments."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, given)))
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(DEADLINE), f"rank {rank} does not answer"
            done, result = pickle.loads(pipe.recv_bytes())
            assert done, f"rank {rank}: {result}"
            found.append(result)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    import torch

    from headrace.trainer.placement.meeting import meet

    gc.freeze()  # a collection would copy every page of what was loaded before the fork
    torch.set_num_threads(1)
    meet(rank, count, store, torch.device("cpu"))
    while True:
        work, given = pickle.loads(pipe.recv_bytes())
        _end_groups()
        try:
            answer = (True, work(*given))
        except BaseException:
            answer = (False, traceback.format_exc())
        # as bytes: a pipe's own `send` puts tensors into shared memory, through a process that torch gives one second to start
        pipe.send_bytes(pickle.dumps(answer))


def _end_groups() -> None:
    """Ends the groups that the piece of work before has made, now that all ranks are done with it. Each has a thread of gloo that wakes a
    hundred times a second; those of two hundred tests took most of the machine."""
    import torch.distributed as dist

    gc.collect()  # trainers hold groups, and are held by cycles
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
