"""The seeded schedule of one life of a simulated run, and worker processes that follow it.

The processes are shipped fakes (`testing/fake_worker.py`) whose messages are late, repeated or lost, and that hang or die in the
middle of their work.
"""

from __future__ import annotations

import asyncio
import random

from headrace.processes.wire import Frame, pack
from headrace.testing.fake_worker import Died, FakeProcess
from headrace.testing.faultsim.faults import Fault


class Chance:
    """The durations of everything, and the faults on the way. Protocol `Post`."""

    def __init__(self, seed: str, faults: tuple[Fault, ...], patience: float) -> None:
        """`patience`: seconds after which a wait stops the run."""
        self.random, self._patience = random.Random(seed), patience
        self._faults = {(fault.kind, fault.at): fault for fault in faults}
        self.befell: list[Fault] = []
        self.scale = self.random.choice([0.0, 0.01, 0.01, 0.3])
        """Seconds that a message takes."""
        self.slow = 1.0
        self._messages = 0

    def due(self, kind: str, at: int) -> Fault | None:
        fault = self._faults.pop((kind, at), None)  # type: ignore[arg-type]
        if fault:
            self.befell.append(fault)
        return fault

    def seconds(self, scale: float) -> float:
        """Draws a duration: often `scale`, sometimes zero, sometimes long."""
        draw = self.random.random()
        return scale * (1.0 if draw < 0.5 else 0.0 if draw < 0.6 else self.random.expovariate(1.0))

    def stall(self, who: str, turn: int) -> float:
        """Returns the seconds for which a worker hangs before its `turn`."""
        if self.due(f"{who}_hangs", turn):
            return 1e9
        return 0.3 * self._patience if self.due(f"{who}_slow", turn) else 0.0

    def copies(self) -> int:
        """Returns how often the next message arrives."""
        number, self._messages = self._messages, self._messages + 1
        if self.due("lose", number):
            return 0
        return 2 if self.due("repeat", number) else 1


class OneAtATime:
    """Devices that engine and trainer may share. Then they have room for one of them, and `wrong` says who used them beside another."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._has: list[Process] = []
        self.wrong: list[str] = []

    def take(self, process: Process) -> None:
        others = [worker.who for worker in self._has if worker.alive and worker is not process]
        if self._shared and others:
            self.wrong.append(f"the {process.who} takes devices that the {others[0]} has")
        self._has = [*(worker for worker in self._has if worker is not process), process]

    def leave(self, process: Process) -> None:
        self._has = [worker for worker in self._has if worker is not process]

    def use(self, process: Process, what: str) -> None:
        if process not in self._has:
            self.wrong.append(f"the {process.who} is asleep, and is asked to {what}")


class Process(FakeProcess):
    """A worker process with faults."""

    who = ""

    def __init__(self, chance: Chance) -> None:
        super().__init__(chance)
        self.chance = chance

    async def step_into(self, turn: int) -> None:
        """Applies the faults before a turn of the worker."""
        if stall := self.chance.stall(self.who, turn):
            await asyncio.sleep(stall)
        if fault := self.chance.due(f"{self.who}_dies", turn):
            await asyncio.sleep(self.chance.seconds(0.1))
            if fault.share > 0.7:  # in the middle of a message
                self.to_controller.put(pack(Frame(0, "output", number=self.number))[: int(fault.share * 9)])
            self.die("was killed by SIGKILL (simulated)")
            raise Died
