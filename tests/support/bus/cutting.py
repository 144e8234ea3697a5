"""A proxy that cuts connections: after how many bytes, and in which direction, each one is told beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Cut(NamedTuple):
    """The end of one connection."""

    from_worker: bool
    after: int
    """Bytes that still pass in that direction."""
    rude: bool = True
    """Whether both ends get a reset, rather than an orderly end."""


class CuttingProxy:
    def __init__(self, address: str, cuts: Sequence[Cut]) -> None:
        """`cuts`: those of the first connections, one each. Later ones are not cut."""
        host, _, port = address.rpartition(":")
        self._where, self._cuts = (host, int(port)), iter(cuts)
        self.address, self.made = "", 0
        """Where it listens; and how many cuts were made."""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection(*self._where)
        except OSError:  # nobody listens there (yet, or any more), and so it looks from outside
            writer.transport.abort()
            return
        cut = next(self._cuts, None)
        allowed = (cut.after if cut and cut.from_worker else None, cut.after if cut and not cut.from_worker else None)
        both = [
            asyncio.ensure_future(_copy(reader, away, allowed[0])),
            asyncio.ensure_future(_copy(there, writer, allowed[1])),
        ]
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        was_cut = any(one.result() for one in done)
        self.made += was_cut
        for one in both:
            one.cancel()
        for end in (writer, away):
            end.transport.abort() if was_cut and cut and cut.rude else end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowed: int | None) -> bool:
    """Returns whether the last byte was let through, rather than sent."""
    with contextlib.suppress(OSError):
        while allowed is None or allowed > 0:
            data = await reader.read(1 << 16 if allowed is None else allowed)
            if not data:
                return False
            writer.write(data)
            await writer.drain()
            allowed = None if allowed is None else allowed - len(data)
        return True
    return False


@contextmanager
def cutting(address: str, cuts: Sequence[Cut]) -> Iterator[CuttingProxy]:
    """A proxy in a thread of its own."""
    proxy, begun, loop = CuttingProxy(address, cuts), threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        await proxy.open()
        begun.set()
        await asyncio.Event().wait()

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(serve())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
