"""One attempt to reach a server: a JSON body is posted, an answer comes back, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.web.limits import raise_open_files

if TYPE_CHECKING:
    import aiohttp

LARGEST = 16 << 20
"""Bytes of an answer. More can be no list of scores, and would fill the controller's memory."""
CONNECT = 10.0
"""Seconds in which a connection must be made."""


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Names without regard to case."""
    body: bytes


class NoAnswer(Exception):
    """Nothing came back, or not all of it. `late`: there was a connection, and the time was over."""

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Poster(Protocol):
    """The client of all services of a run. Its fake is `fake_service.ScriptedPost`."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> HttpAnswer:
        """Raises NoAnswer if no whole answer has come within `seconds`."""

    async def close(self) -> None: ...


class HttpPoster:
    """Protocol `Poster`, with aiohttp. Its connections belong to the event loop that the first attempt is made in."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> HttpAnswer:
        import aiohttp

        try:
            async with (
                asyncio.timeout(seconds),
                # A redirect is not followed: the token would go to a place that nobody named.
                self._open().post(url, data=body, headers=dict(headers), allow_redirects=False) as answer,
            ):
                found = bytearray()
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > LARGEST:
                        raise NoAnswer(f"{url} answers with more than {LARGEST >> 20} MiB")
                return HttpAnswer(answer.status, answer.headers, bytes(found))
        except TimeoutError:
            raise NoAnswer(f"{url} did not answer within {seconds:g} s", late=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{url}: {error or repr(error)}") from None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # Each endpoint limits its own requests; a limit here would silently make one scorer wait for another.
            raise_open_files()  # each request has a connection of its own
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=True)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
