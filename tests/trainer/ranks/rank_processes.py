"""Processes that have met as the ranks of a trainer. They do one piece of work after another."""

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

WORKS = 12
"""Pieces of work until others take their place. Each makes process groups, and each group has a thread of gloo that wakes a hundred times a
second: after two hundred pieces such threads took most of the machine. Groups cannot be ended one by one: DTensor keeps what it knows of an
equal mesh, by the names of its groups."""


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
        self._context, self._count, self._directory = context, count, directory
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._works = 0

    def _start(self) -> None:
        store = self._directory / f"store-{self._works}"
        for rank in range(self._count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, self._count, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *given: Any) -> list[Any]:
        """Calls a function of a module on every rank at once, and returns the results. `given`: its arguments."""
        if self._works % WORKS == 0:
            self.close()
            self._start()
        self._works += 1
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, given)))
        try:
            return [self._result(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        except (
            AssertionError
        ):  # others may wait in a collective, and their answers would be taken for those of the next work
            self.close()
            self._works += -self._works % WORKS
            raise

    def _result(self, rank: int, pipe: Connection) -> Any:
        assert pipe.poll(DEADLINE), f"rank {rank} does not answer"
        done, result = pickle.loads(pipe.recv_bytes())
        assert done, f"rank {rank}: {result}"
        return result

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    import torch

    from headrace.trainer.placement.rendezvous import meet

    gc.freeze()  # a collection would copy every page of what was loaded before the fork
    torch.set_num_threads(1)
    meet(rank, count, store, torch.device("cpu"))
    while True:
        work, given = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, work(*given))
        except BaseException:
            answer = (False, traceback.format_exc())
        # as bytes: a pipe's own `send` puts tensors into shared memory, through a process that torch gives one second to start
        pipe.send_bytes(pickle.dumps(answer))
