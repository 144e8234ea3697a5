"""Workers that offer themselves without a network, for tests in virtual time. Protocol `Arrivals`."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.orchestration.workers.fake import FakeProcess, Pipe
from headrace.orchestration.workers.joining.greeting import Arrival, Arrived, Hello
from headrace.version import __version__


class FakeArrivals:
    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self._expected: deque[Arrival] = deque()
        self._spares: deque[Arrived] = deque()

    def expect(self, kind: str, seat: str = "") -> Arrival:
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._expected.append(arrival)
        self._match()
        return arrival

    def offer(self, process: FakeProcess, host: str = "here") -> None:
        """The process offers itself: it takes the first seat that is free, now or later."""
        reader = asyncio.StreamReader()
        process.to_controller = Pipe(
            process.network, lambda data: reader.feed_data(data) if data else reader.feed_eof()
        )
        hello = Hello(__version__, "", "engine", host=host, pid=1)
        writer: asyncio.StreamWriter = Pipe(process.network, process.arrive)  # type: ignore[assignment]
        self._spares.append(Arrived(reader, writer, hello, "127.0.0.1", "/the/model"))
        self._match()

    def _match(self) -> None:
        while self._expected and self._spares:
            if not (arrival := self._expected.popleft()).done():
                arrival.set_result(self._spares.popleft())
