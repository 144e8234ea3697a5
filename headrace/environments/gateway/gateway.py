"""The server of the gateway: on this machine only, in the controller's event loop, and with a secret for each rollout.

The secret is the first part of the path (`http://127.0.0.1:PORT/SECRET/v1`), so that an agent needs the base URL and nothing else. It is
also given as the key. Any key but that of another rollout is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.environments.gateway import chat_routes
from headrace.environments.gateway.chat_answers import Written
from headrace.environments.gateway.chat_routes import GatewayRules
from headrace.environments.gateway.chat_tree import ChatTree
from headrace.environments.gateway.gateway_rollout import GatewayRollout
from headrace.errors import HeadraceError
from headrace.web.errors import Refused, answer_error
from headrace.web.limits import ServerLimits
from headrace.web.server import bind, make_server

HOST = "127.0.0.1"
AT_ONCE = 64
"""Requests of one rollout that may be in progress; a further one is answered with 429."""

Answer = Callable[[HttpRequest, GatewayRollout, GatewayRules], Awaitable[Response]]

ROUTES: Mapping[str, tuple[str, Answer]] = {
    "v1/models": ("GET", chat_routes.models),
    "v1/chat/completions": ("POST", chat_routes.chat),
}
"""Path behind the secret -> method and answer."""


class Gateway:
    """Protocol `GatewayRules`."""

    def __init__(
        self, written: Written, stop: Sequence[str], sampling: Mapping[str, object], limits: ServerLimits
    ) -> None:
        """`sampling`: the run's values of the fields that requests cannot choose, by their names."""
        self.written, self.stop, self.limits = written, tuple(stop), limits
        self._sampling = sampling
        self._rollouts: dict[str, GatewayRollout] = {}
        self._starting = asyncio.Lock()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0
        self._replaced: dict[str, object] = {}

    async def open(self, tree: ChatTree) -> GatewayRollout:
        """Returns a rollout that can be asked for turns until `shut`. Starts the server with the first one."""
        async with self._starting:
            if self._serving is None:
                await self._start()
        rollout = GatewayRollout(tree)
        self._rollouts[rollout.secret] = rollout
        return rollout

    def url(self, rollout: GatewayRollout) -> str:
        """The address of a rollout; OpenAI's clients add `/v1`."""
        return f"http://{HOST}:{self._port}/{rollout.secret}"

    async def shut(self, rollout: GatewayRollout) -> None:
        """Ends the rollout's requests. Its secret is worth nothing from now on."""
        self._rollouts.pop(rollout.secret, None)
        await rollout.close()

    async def _start(self) -> None:
        sock = bind(HOST, 0)
        self._port = sock.getsockname()[1]
        kinds = [Refused, HeadraceError, ValueError, 404, 405, Exception]
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        app = Starlette(
            routes=[Route("/{path:path}", self._answer, methods=methods)],
            exception_handlers=dict.fromkeys(kinds, answer_error),
        )
        self._server = make_server(app)
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))

    async def close(self) -> None:
        for rollout in list(self._rollouts.values()):
            await self.shut(rollout)
        if self._serving is not None and self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving})

    # -- requests -----------------------------------------------------------------------------------------------------------

    async def _answer(self, request: HttpRequest) -> Response:
        secret, _, path = request.url.path.lstrip("/").partition("/")
        rollout = self._rollout(secret, request)
        try:
            if path not in ROUTES:
                raise Refused(404, f"/{path} is not served here; there are: {', '.join(f'/{one}' for one in ROUTES)}")
            method, answer = ROUTES[path]
            if request.method != method:
                raise Refused(405, f"/{path} takes {method}", headers={"Allow": method})
            if rollout.asking >= AT_ONCE:
                said = f"{AT_ONCE} requests of this rollout are under way; try again"
                raise Refused(429, said, "busy", {"Retry-After": "1"})
            return await answer(request, rollout, self)
        except Refused as refused:
            rollout.error = refused.message
            raise

    def _rollout(self, secret: str, request: HttpRequest) -> GatewayRollout:
        rollout, key = self._rollouts.get(secret), _key(request)
        if rollout is not None and (key == secret or key not in self._rollouts):
            return rollout
        said = (
            "the key belongs to another rollout than the address; use the OPENAI_API_KEY that came with the OPENAI_BASE_URL"
            if rollout
            else "the address names no rollout that is in progress; use the OPENAI_BASE_URL that the process was given"
        )
        if rollout is not None:
            rollout.error = said
        raise Refused(401, said, "invalid_api_key")

    # -- fields of requests that the run decides ----------------------------------------------------------------------------

    def replaced(self, name: str, value: object) -> None:
        if name == "seed" or value == self._sampling.get(name):
            return
        self._replaced.setdefault(name, value)

    def remarks(self) -> list[str]:
        return [
            f"the agent asks for {name} = {value}; all its turns are sampled with rollout.{name} = {self._sampling[name]}"
            for name, value in self._replaced.items()
        ]


def _key(request: HttpRequest) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
