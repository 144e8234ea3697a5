"""Text environments behind servers of `openenv`: one WebSocket session for each rollout.

The protocol is that of openenv 0.10 (https://github.com/meta-pytorch/OpenEnv, `openenv/core/env_server/types.py`): the client sends
`{"type": "reset" | "step" | "close", "data": ...}` to `URL/ws`, and the server answers with `{"type": "observation", "data": {"observation",
"reward", "done"}}` or with `{"type": "error", "data": {"message", "code"}}`. It is written here, because the package of the client
brings its server and a user interface (sixty packages).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.episodes.environments.libraries.options import Replies, known_options, not_installed
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.environments.workers.step_driver import LibraryRollout
from headrace.episodes.environments.workers.talk import AgentReply, AsyncAgent

KIND = "openenv"
OPTIONS: dict[str, Any] = {"action": "message", "observation": ""}
FULL = "CAPACITY_REACHED"
"""The code of the error with which a server refuses a session while it has as many as it allows."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
"""Seconds until a full server is asked again; they double."""
CHECK_SECONDS = 30.0
"""Time in which a server must answer at the start."""
LARGEST = 16 << 20
"""Bytes of one message of a server."""


class ServerAnswer(NamedTuple):
    """The answer of a server to a reset or a step."""

    text: str
    reward: float | None
    done: bool


class ServerFull(Exception):
    """The server has no session free."""


class ServerSession:
    """One session of a server."""

    def __init__(self, socket: Any, field: str) -> None:
        """`field`: the field of the observation that the model reads; empty for all of it."""
        self._socket, self._field = socket, field

    async def reset(self, data: Mapping[str, Any]) -> ServerAnswer:
        return await self._asked("reset", data)

    async def step(self, action: Mapping[str, Any]) -> ServerAnswer:
        return await self._asked("step", action)

    async def _asked(self, type: str, data: Mapping[str, Any]) -> ServerAnswer:
        """Raises ServerFull, RuntimeError with what the server says, or ValueError for an answer that makes no sense."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a full server answers before it is asked, and closes
            await self._socket.send(json.dumps({"type": type, "data": data}))
        answer = json.loads(await self._socket.recv())
        body = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(body, dict):
            raise ValueError(f"the server answered {answer!r:.120} to a {type}")
        if answer.get("type") == "error":
            if body.get("code") == FULL:
                raise ServerFull(str(body.get("message", "")))
            raise RuntimeError(f"the server refused a {type}: {body.get('message')} ({body.get('code')})")
        reward = body.get("reward")
        return ServerAnswer(
            text_of(body.get("observation"), self._field),
            None if reward is None else float(reward),
            bool(body.get("done")),
        )


def text_of(observation: Any, field: str) -> str:
    """Returns the text that the model reads. Raises ValueError if the observation has no such field."""
    if not isinstance(observation, dict):
        raise ValueError(f"the server's observation is {observation!r:.80}, not an object")
    if field and field not in observation:
        raise ValueError(
            f"the server's observation has no field {field}; there are: {', '.join(observation)} (environment.options.observation)"
        )
    text = observation[field] if field else observation
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


class ServedRollout(LibraryRollout):
    """A rollout: one session. It is subclassed with the settings. Its state are the actions, which a new session is given again."""

    address: str
    observation: str
    """See `ServerSession`."""
    action: str
    """The field of the action that takes the text of the model's turn."""
    exports_if_set = True

    def __init__(self, seed: int, prompt: Any = None, **columns: Any) -> None:
        self._columns, self._replies = {"seed": seed, **columns}, Replies()
        self._opened = contextlib.AsyncExitStack()
        self._session: ServerSession | None = None
        self._restored: dict[str, Any] | None = None

    async def step(self, agent: AsyncAgent, reply: AgentReply | None) -> Any:
        """Each step's reward is the reward of the turn that caused it."""
        if self._session is None:
            first = await self._open()
            if reply is None:
                return {} if first.done else first.text
        assert reply is not None
        if reply.stop == "limit":
            return {}
        answer = await self._act(reply.text)
        if answer.reward is not None:
            agent.reward(KIND, answer.reward)
        return {} if answer.done else answer.text

    async def _open(self) -> ServerAnswer:
        entered = session_with(self.address, self.observation, self._columns)
        self._session, first = await self._opened.enter_async_context(entered)
        self._replies.said(first)
        for action in self._replies.again(self._restored) if self._restored else ():
            await self._act(action)
        return first

    async def _act(self, action: str) -> ServerAnswer:
        assert self._session is not None
        self._replies.given(action)
        answer = await self._session.step({self.action: action})
        self._replies.said(answer)
        return answer

    def export_state(self) -> dict[str, Any]:
        return self._replies.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._restored = state

    async def close(self) -> None:
        await self._opened.aclose()


def open_openenv(settings: LibrarySettings) -> type[ServedRollout]:
    """Returns the class that plays a rollout with the server whose URL is `settings.name`.

    Raises ConfigError if websockets is not installed, the settings do not fit, or the server cannot be used."""
    options = known_options(settings, KIND, OPTIONS)
    address, field = socket_address(settings.name), options["observation"]
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise not_installed(KIND, "openenv", "websockets") from None
    try:
        asyncio.run(asyncio.wait_for(_try(address, field), CHECK_SECONDS))
    except Exception as error:  # of the network, of the server, or of its answer
        raise ConfigError(
            f"environment.name = {settings.name}: no session could be opened there: {str(error) or type(error).__name__}; start the server, or "
            "correct the URL and environment.options"
        ) from None
    return ServedRollout.opened(KIND, address=address, observation=field, action=options["action"])


@contextlib.asynccontextmanager
async def session_with(
    address: str, field: str, reset: Mapping[str, Any]
) -> AsyncIterator[tuple[ServerSession, ServerAnswer]]:
    """Opens a session that begins with a reset. Waits while the server is full; the limit of the rollout's seconds ends the wait."""
    from websockets.asyncio.client import connect

    proxy: Any = None if urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1") else True
    pause = FIRST_PAUSE
    while True:
        async with connect(address, max_size=LARGEST, proxy=proxy) as socket:
            session = ServerSession(socket, field)
            try:
                first = await session.reset(reset)
            except ServerFull:
                first = None
            if first is not None:
                yield session, first
                return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _try(address: str, field: str) -> None:
    async with session_with(address, field, {"seed": 0}):
        pass


def socket_address(url: str) -> str:
    """Returns the address of the sessions, such as ws://127.0.0.1:8000/ws. Raises ConfigError for what is not a URL of a server."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        what = f"environment.name = {url} is not a URL" if url else "environment.name is missing"
        raise ConfigError(
            f'{what}; environment.kind = "{KIND}" needs the one of a server, such as http://127.0.0.1:8000'
        )
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws"
