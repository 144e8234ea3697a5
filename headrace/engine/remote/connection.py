"""One server: its connections, its token, deadlines, answers and streams. It knows no route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.errors import ConfigError, HeadraceError, IdentityError
from headrace.web.limits import raise_open_files

if TYPE_CHECKING:
    import aiohttp


# --- Failures of a request to a server.


class Unreachable(HeadraceError):
    """No answer, or an incomplete one: the server may be gone. A later attempt may succeed."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Status of an answer that was refused by the server; 0 where none came."""


class Busy(HeadraceError):
    """The server has no room now."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """The time to wait before asking again."""


# --- connection ------------------------------------------------------------


CONNECT = 10.0
"""Seconds in which a connection must be made."""

LONGEST_LINE = 1 << 26
"""Largest size of one event in bytes: a completion's routing is sent in one."""


class Connection:
    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
            # Every request has a connection of its own: a limit would silently make some wait for others, and on a connection that is used again a
            # second answer to an earlier request (of a proxy that retries, of a server that fails late) is read as that to the next.
            raise_open_files()
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=connector, timeout=timeout, read_bufsize=LONGEST_LINE, trust_env=False
            )
        return self._session

    async def get(self, path: str, seconds: float) -> Any:
        return _decoded(await self._ask("GET", path, None, seconds))

    async def text(self, path: str, seconds: float) -> str:
        return await self._ask("GET", path, None, seconds)

    async def post(self, path: str, body: Any, seconds: float) -> Any:
        return _decoded(await self._ask("POST", path, body, seconds))

    async def tell(self, path: str, body: Any, seconds: float) -> None:
        """Posts a body. The answer has no content."""
        await self._ask("POST", path, body, seconds)

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> str:
        """Raises Unreachable if there is no answer within `seconds`, and the error of `_refusal` if the status is not a success."""
        import aiohttp

        try:
            async with asyncio.timeout(seconds), self._open().request(method, self.url + path, json=body) as answer:
                text = await answer.text()
        except TimeoutError:
            raise Unreachable(f"{self.url}{path} did not answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.url}{path}: {error or repr(error)}") from None
        if answer.status != 200:
            raise _refusal(self.url + path, answer.status, text, answer.headers)
        return text

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Yields server-sent events until `[DONE]`. A caller who leaves early closes the connection, which the server notices.
        Raises Unreachable if the stream ends earlier."""
        import aiohttp

        try:
            async with self._open().post(self.url + path, json=body) as answer:
                if answer.status != 200:
                    raise _refusal(self.url + path, answer.status, await answer.text(), answer.headers)
                async for line in answer.content:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        yield _decoded(data)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line that is too long
            if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
                raise
            raise Unreachable(f"{self.url}{path}: {error or repr(error)}") from None
        raise Unreachable(f"{self.url}{path}: the stream ended before its end")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _decoded(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise Unreachable(f"an answer that is not JSON: {text[:100]!r}") from None


def _refusal(where: str, status: int, text: str, headers: Mapping[str, str]) -> Exception:
    """400 is ours to mend; 409 are weights that are others; 404 and 5xx may pass."""
    try:
        error = msgspec.json.decode(text)["error"]
        message, code = str(error["message"]), str(error.get("code"))
    except (msgspec.DecodeError, TypeError, KeyError):
        message, code = text.strip()[:200] or f"status {status}", ""
    if status == 503 and code == "busy":
        return Busy(message, float(headers.get("Retry-After", "1")))
    if status in (401, 403):
        return ConfigError(f"{where} refuses us ({status}): {message}; name its token in engine.token_file")
    if status == 409:
        return IdentityError(message)
    if status in (400, 413, 415, 422):
        return ValueError(message)
    return Unreachable(f"{where} answered {status}: {message}", status)
