"""Workers that offer themselves without a network, for tests in virtual time. Protocol `Arrivals`."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.processes.joining.greeting import USER_CODE, Arrival, Arrived, Hello, Kind
from headrace.testing.fake_worker import FakeProcess, Pipe
from headrace.version import __version__


class FakeArrivals:
    def __init__(self) -> None:
        self.address, self.token = "127.0.0.1:0", "a token of nobody"
        self._expected: deque[tuple[str, str, Arrival]] = deque()
        """Kind, seat and future of each."""
        self._spares: deque[Arrived] = deque()

    def expect(self, kind: str, seat: str = "") -> Arrival:
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._expected.append((kind, seat, arrival))
        self._match()
        return arrival

    def offer(
        self,
        process: FakeProcess,
        host: str = "here",
        seat: str = "",
        door: str = "",
        *,
        kind: Kind = "engine",
        local_rank: int = 0,
    ) -> None:
        """The process offers itself: it takes its seat, or else the first that is free, now or later. `door`: that of a trainer's rank, and `local_rank` its number
        on its machine; `kind`: what a process without one offers."""
        reader = asyncio.StreamReader()
        process.to_controller = Pipe(
            process.network, lambda data: reader.feed_data(data) if data else reader.feed_eof()
        )
        offered: Kind = "trainer" if door else kind
        hello = Hello(__version__, "", offered, seat, host=host, pid=1, door=door, local_rank=local_rank)
        writer: asyncio.StreamWriter = Pipe(process.network, process.arrive)  # type: ignore[assignment]
        model_dir = "" if kind in USER_CODE else "/the/model"
        self._spares.append(Arrived(reader, writer, hello, "127.0.0.1", model_dir))
        self._match()

    def _match(self) -> None:
        self._expected = deque(seat for seat in self._expected if not seat[-1].done())
        for kind, seat, arrival in self._expected:
            if found := next(
                (spare for spare in self._spares if (spare.hello.kind, spare.hello.seat) == (kind, seat)), None
            ):
                self._spares.remove(found)
                arrival.set_result(found)
