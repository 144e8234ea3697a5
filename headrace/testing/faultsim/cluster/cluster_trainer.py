"""The simulated ranks of a cluster's trainer. Rank 0 does the step; it waits for ever when another one hangs, as in a collective.

The weights are a checksum over everything that was trained, in order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from headrace.core.errors import HeadraceError
from headrace.core.reports import Captured, TrainReport
from headrace.core.weights import WeightUpdate
from headrace.processes.wire import Frame, unpack
from headrace.run.worker.step_messages import ROWS, ReceivedRows
from headrace.run.worker.worker_messages import TrainerReady, TrainerStart
from headrace.testing.fake_worker import FakeProcess
from headrace.testing.faultsim.cluster.machines import NodeLink
from headrace.testing.faultsim.cluster.sizing import ClusterSize
from headrace.testing.faultsim.engine_worker import opinion
from headrace.testing.faultsim.trainer_worker import WEIGHTS, content_of, paths_of
from headrace.trainer.dealing.share import StepShare


@dataclass
class MeshState:
    """The state that the ranks of one trainer share."""

    version: int = 0
    weights: str = "begin"
    published: dict[int, str] = field(default_factory=dict)
    """The fingerprints of the two versions that engines can fetch."""
    slow_until: float = 0.0
    hangs: bool = False
    """Whether a rank hangs."""


class ClusterRankProcess(FakeProcess):
    def __init__(self, link: NodeLink, size: ClusterSize, mesh: MeshState, rank: int) -> None:
        super().__init__(link)
        self._size, self._mesh, self._rank = size, mesh, rank
        self._copied: WeightUpdate | None = None
        self._captured, self._rows = "", ReceivedRows()
        self._saving: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        while True:
            frame = await self.receive()
            if frame.method == ROWS:
                if not self._rank:
                    self._rows.take(frame.payload)
                self.reply(frame, None)
                continue
            if frame.method == "save" and not self._rank:
                self._saving = asyncio.get_running_loop().create_task(self._save(frame))
                continue
            try:
                result = None if self._rank else await self._obey(frame)
            except (HeadraceError, OSError) as error:
                self.fail(frame, error)
            else:
                self.reply(frame, result)

    def vanish(self) -> None:
        """The node has lost its power. The others hear of it from their collectives, and end."""
        self.die("was lost with its node")

    async def _obey(self, frame: Frame) -> Any:
        size, mesh = self._size, self._mesh
        match frame.method:
            case "start":
                return self._start(unpack(frame.payload, TrainerStart))
            case "step":
                return await self._step(self._rows.share(frame.payload))
            case "copy":
                await self._together(size.publish)
                self._copied = self._publish()
                return None
            case "publish":
                update, self._copied = self._copied or self._publish(), None
                return update
            case "score":
                tokens, _ = unpack(frame.payload, tuple[list[int], str])
                return list(opinion(mesh.weights, len(tokens) - 1))
            case "capture":
                await self._together(size.gather)
                self._captured = f"{mesh.version} {mesh.weights}"
                return Captured()
            case method:
                raise AssertionError(f"unknown call {method}")

    async def _save(self, frame: Frame) -> None:
        """Writes what was captured, beside the next steps."""
        directory = Path(unpack(frame.payload, tuple[str, str])[0])
        await asyncio.sleep(self._size.save)
        if not self.alive:
            return
        try:
            (directory / WEIGHTS).write_text(self._captured)
        except OSError as error:
            self.fail(frame, error)
        else:
            self.reply(frame, None)

    async def _together(self, seconds: float) -> None:
        slow = 1.5 if asyncio.get_running_loop().time() < self._mesh.slow_until else 1.0
        await asyncio.sleep(seconds * slow)
        if self._mesh.hangs:
            await asyncio.Event().wait()

    def _start(self, start: TrainerStart) -> TrainerReady:
        if where := start.restore.get(""):
            version, self._mesh.weights = (Path(where) / WEIGHTS).read_text().split()
            self._mesh.version = int(version)
        return TrainerReady({}, self._mesh.version)

    def _publish(self) -> WeightUpdate:
        mesh = self._mesh
        mesh.published[mesh.version] = mesh.weights
        mesh.published.pop(mesh.version - 2, None)
        return WeightUpdate(
            version=mesh.version, kind="full", fingerprint=mesh.weights, nbytes=0, seconds=self._size.publish
        )

    async def _step(self, share: StepShare) -> TrainReport:
        size, mesh, loop = self._size, self._mesh, asyncio.get_running_loop()
        batch, paths = share.head, paths_of(share)
        assert batch.step == mesh.version, f"step {batch.step} is asked of weights of version {mesh.version}"
        began, tokens = loop.time(), sum(int(path.target[0]) for path in paths)
        prompts = sum(length for _, length, _ in {tuple(path.tokens[: path.prompt].tolist()) for path in paths})
        await self._together(size.step_fixed + size.step_token * (tokens + prompts))
        mesh.weights = xxhash.xxh3_64_hexdigest(mesh.weights.encode() + content_of(paths))
        mesh.version += 1
        return TrainReport(
            batch.step,
            mesh.version,
            grad_norm=int(mesh.weights, 16) / 2**64,
            loss_tokens=tokens,
            forward_tokens=tokens + prompts,
            seconds=loop.time() - began,
        )
