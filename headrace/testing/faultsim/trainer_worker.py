"""A simulated trainer process. Its weights are a checksum over everything it has trained, in order: if the weights of two runs are the
same, so are all their batches, token by token, log-prob by log-prob, version by version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from headrace.core.errors import HeadraceError
from headrace.core.reports import Captured, SleepReport, TrainReport
from headrace.core.weights import WeightUpdate
from headrace.processes.wire import Frame, unpack
from headrace.run.worker.step_messages import ROWS, ReceivedRows
from headrace.run.worker.worker_messages import TrainerReady, TrainerStart
from headrace.testing.faultsim.chance import Chance, OneAtATime, Process
from headrace.testing.faultsim.engine_worker import opinion
from headrace.trainer.dealing.row_paths import Path as RowPath
from headrace.trainer.dealing.share import StepShare
from headrace.trainer.dealing.trees import preorder

WEIGHTS = "weights.txt"

SKIPPED = "nonfinite_gradient"
"""The reason of skipped steps."""


def paths_of(share: StepShare) -> list[RowPath]:
    """The rows of a share, in the order of the step."""
    trees = (roots for dealt in share.minibatches for roots in dealt.microbatches)
    ends = (path for roots in trees for node in preorder(roots) for path in node.ending)
    return sorted(ends, key=lambda path: path.number)


def content_of(paths: Sequence[RowPath]) -> bytes:
    """Every number of every row that is trained."""
    columns = ("tokens", "loss", "target", "sampled", "advantage", "version", "trajectory", "unmixed")
    return b"".join(getattr(path, name).tobytes() for path in paths for name in columns)


class SimulatedTrainerProcess(Process):
    who = "trainer"

    def __init__(
        self, chance: Chance, memory: dict[int, str], turns: Callable[[], int], skips: bool, devices: OneAtATime
    ) -> None:
        super().__init__(chance)
        self._memory, self._turns, self._skips, self._devices = memory, turns, skips, devices
        self._version, self._weights = 0, "begin"
        self._copied: WeightUpdate | None = None
        self._captured, self._rows = "", ReceivedRows()
        self._saving: asyncio.Task[None] | None = None
        self._seconds = chance.random.choice([0.1, 1.0, 5.0])

    async def serve(self) -> None:
        """Serves one call after the other, even if the caller no longer waits."""
        while True:
            frame = await self.receive()
            if frame.method == ROWS:
                self._rows.take(frame.payload)
                self.reply(frame, None)
                continue
            await self.step_into(self._turns())
            if frame.method == "save":
                self._saving = asyncio.get_running_loop().create_task(self._save(frame))
                continue
            try:
                result = await self._obey(frame)
            except (HeadraceError, OSError) as error:
                self.fail(frame, error)
            else:
                await self.step_into(self._turns())
                self.reply(frame, result)

    async def _obey(self, frame: Frame) -> Any:
        match frame.method:
            case "start":
                return self._start(unpack(frame.payload, TrainerStart))
            case "step":
                return await self._step(self._rows.share(frame.payload))
            case "copy":
                await asyncio.sleep(self.chance.seconds(0.1))
                self._copied = self._publish()
                return None
            case "publish":
                update, self._copied = self._copied or self._publish(), None
                return update
            case "sleep" | "wake":
                await asyncio.sleep(self.chance.seconds(0.1))
                self._devices.take(self) if frame.method == "wake" else self._devices.leave(self)
                return SleepReport()
            case "score":
                self._devices.use(self, "score")
                tokens, _ = unpack(frame.payload, tuple[list[int], str])
                return list(opinion(self._weights, len(tokens) - 1))
            case "capture":
                await asyncio.sleep(self.chance.seconds(0.1))
                assert self._saving is None or self._saving.done(), "a checkpoint is captured while another is written"
                self._captured = f"{self._version} {self._weights}"
                return Captured()
            case method:
                raise AssertionError(f"unknown call {method}")

    async def _save(self, frame: Frame) -> None:
        """Writes what was captured, beside the next calls."""
        directory = Path(unpack(frame.payload, tuple[str, str])[0])
        await asyncio.sleep(self.chance.seconds(self._seconds))
        if not self.alive:
            return
        try:
            (directory / WEIGHTS).write_text(self._captured)
        except OSError as error:
            self.fail(frame, error)
        else:
            self.reply(frame, None)

    def _publish(self) -> WeightUpdate:
        slot = self._version % 2
        self._memory[slot] = self._weights
        return WeightUpdate(
            version=self._version, kind="full", fingerprint=self._weights, nbytes=0, seconds=0.0, where={"slot": slot}
        )

    def _start(self, start: TrainerStart) -> TrainerReady:
        self._devices.take(self)
        if checkpoint := start.restore.get(""):
            version, self._weights = (Path(checkpoint) / WEIGHTS).read_text().split()
            self._version = int(version)
        return TrainerReady({}, self._version)

    async def _step(self, share: StepShare) -> TrainReport:
        batch, paths = share.head, paths_of(share)
        self._devices.use(self, "train")
        await asyncio.sleep(self.chance.seconds(self._seconds))
        self._devices.use(self, "train")
        assert batch.step == self._version, f"step {batch.step} is asked of weights of version {self._version}"
        learned = msgspec.structs.replace(batch, skippable=True)  # the flag is not part of the batch's content
        weights = xxhash.xxh3_64_hexdigest(self._weights.encode() + msgspec.msgpack.encode(learned) + content_of(paths))
        if self._skips and int(weights, 16) % 5 == 0:
            return TrainReport(batch.step, self._version, skipped=SKIPPED)
        self._version, self._weights = self._version + 1, weights
        tokens = sum(len(path.loss) for path in paths)
        return TrainReport(batch.step, self._version, grad_norm=int(weights, 16) / 2**64, loss_tokens=tokens)
