"""An engine process on devices that the trainer lends while it waits (`engine/fleet/fleet.py`)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.protocols import Worker
from headrace.core.reports import LoadReport, SleepReport
from headrace.core.weights import WeightUpdate
from headrace.run.clients.process_engine import ProcessEngine


class LentProcess(ProcessEngine):
    """It begins asleep, also after a death, and has no weights when it wakes: whoever wakes it loads all of them, because those that it was asked to
    load last may be gone by then."""

    _death = ""
    """How its last process ended; empty once another has said that it is awake."""

    async def wake(self, replaced: bool) -> SleepReport:
        report = await self._keeper.ask("wake", None, SleepReport)
        if self._keeper.is_up:  # else it has died since, and its successor is asleep
            self._awake.set()
            self._death = ""
            if self._owes_requests:
                self._reissue()
        return report

    async def absence(self) -> str:
        """Returns at once, too, if its process has died since it woke: the successor answers, but sleeps, and would begin nothing."""
        return self._death or await self.ended()

    async def ended(self) -> str:
        return await super().absence()

    def died(self, how: str, deaths: int) -> None:
        self._death = how
        super().died(how, deaths)

    def went_down(self, forgive: Callable[[], None] | None) -> None:
        self._awake.clear()
        super().went_down(forgive)

    async def _load(self, worker: Worker, name: str, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """It may have died since this was asked, and another process be asleep in its place."""
        await self._awake.wait()
        return await super()._load(worker, name, update, parts)
