"""The server of the gateway: in the controller's event loop, and with a secret for each rollout.

A door of its own may be opened beside the rollouts, under a secret too. The secret is the first part of the path (`http://127.0.0.1:PORT/SECRET/v1`), so that an agent needs the base URL and nothing else. It is
also given as the key. Any key but that of another rollout is accepted.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.episodes.environments.gateway import format_routes
from headrace.episodes.environments.gateway.history_trees import NUMBER, GatewayRollout, Talks
from headrace.episodes.environments.gateway.turn_request import AnswerEncoder, GatewayRules
from headrace.web.application import make_application
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.server import bind, make_server, spare_what_stays

HOST = "127.0.0.1"
AT_ONCE = 64
"""Requests of one rollout that may be in progress; a further one is answered with 429."""

Answer = Callable[[HttpRequest, GatewayRollout, GatewayRules], Awaitable[Response]]

MODEL_ROUTE = "v1/models/"
"""The begin of a path that ends with the name of a model."""

ROUTES: Mapping[str, tuple[str, Answer]] = {
    "v1/models": ("GET", format_routes.models),
    MODEL_ROUTE: ("GET", format_routes.model),
    "v1/chat/completions": ("POST", format_routes.chat),
    "v1/completions": ("POST", format_routes.completions),
    "inference/v1/generate": ("POST", format_routes.generate),
    "v1/responses": ("POST", format_routes.responses),
    "v1/messages": ("POST", format_routes.messages),
}
"""Path behind the secret -> method and answer."""


class Gateway:
    """Protocol `GatewayRules`."""

    def __init__(
        self,
        encoder: AnswerEncoder,
        stop: Sequence[str],
        sampling: Mapping[str, object],
        limits: ServerLimits,
        sock: socket.socket | None = None,
        *,
        session_header: str = "",
    ) -> None:
        """`sampling`: the run's values of the fields that requests cannot choose, by their names. `sock`: where it listens; by default
        only this machine reaches it, at a port that is free. `session_header`: the header that tells agents of one role apart."""
        self.encoder, self.stop, self.limits, self.session_header = encoder, tuple(stop), limits, session_header
        self._sock = sock
        self.doors: dict[str, Callable[[HttpRequest, str], Awaitable[Response]]] = {}
        """The answers to requests that concern no rollout, by their secret. Each is called with the path behind it."""
        self.sampling = sampling
        self._rollouts: dict[str, GatewayRollout] = {}
        self._starting = asyncio.Lock()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._remarks: dict[str, str] = {}

    async def open(self, talks: Talks) -> GatewayRollout:
        """Returns a rollout that can be asked for turns until `shut`. Starts the server with the first one."""
        async with self._starting:
            if self._serving is None:
                await self._start()
        rollout = GatewayRollout(talks)
        self._rollouts[rollout.secret] = rollout
        return rollout

    @property
    def address(self) -> str:
        """The address of the server, once a rollout is open."""
        assert self._sock is not None
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def url(self, rollout: GatewayRollout) -> str:
        """The address of a rollout; OpenAI's clients add `/v1`."""
        return f"{self.address}/{rollout.secret}"

    async def shut(self, rollout: GatewayRollout) -> None:
        """Ends the rollout's requests. Its secret is worth nothing from now on."""
        self._rollouts.pop(rollout.secret, None)
        await rollout.close()

    async def _start(self) -> None:
        self._sock = self._sock or bind(HOST, 0)
        self._server = make_server(self.application())
        spare_what_stays()
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))

    def application(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        routes = [Route("/{path:path}", self._answer, methods=methods)]
        return make_application(routes, [], self.remark)  # a secret is the permission

    async def close(self) -> None:
        for rollout in list(self._rollouts.values()):
            await self.shut(rollout)
        if self._serving is not None and self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving})
        if self._sock is not None:
            self._sock.close()

    # -- requests -----------------------------------------------------------------------------------------------------------

    async def _answer(self, request: HttpRequest) -> Response:
        secret, _, path = request.url.path.lstrip("/").partition("/")
        if secret in self.doors:
            return await self.doors[secret](request, path)
        rollout = self._rollout(secret, request)
        request.scope[NUMBER] = rollout.next_number()
        try:
            route = MODEL_ROUTE if path.startswith(MODEL_ROUTE) else path
            if route not in ROUTES:
                raise Refused(
                    404, f"/{path} is not served here; there are: {', '.join(f'/{served}' for served in ROUTES)}"
                )
            method, answer = ROUTES[route]
            if request.method != method:
                raise Refused(405, f"/{path} takes {method}", headers={"Allow": method})
            if rollout.asking >= AT_ONCE:
                message = f"{AT_ONCE} requests of this rollout are under way; try again"
                raise Refused(429, message, "busy", {"Retry-After": "1"})
            return await answer(request, rollout, self)
        except Refused as refused:
            raise rollout.refused(refused) from None

    def _rollout(self, secret: str, request: HttpRequest) -> GatewayRollout:
        rollout, key = self._rollouts.get(secret), _key(request)
        if rollout is not None and (key == secret or key not in self._rollouts):
            return rollout
        message = (
            "the key belongs to another rollout than the address; use the OPENAI_API_KEY that came with the OPENAI_BASE_URL"
            if rollout
            else "the address names no rollout that is in progress; use the OPENAI_BASE_URL that the process was given"
        )
        refused = Refused(401, message, "invalid_api_key")
        raise rollout.refused(refused) if rollout is not None else refused

    # -- fields of requests that the run decides ----------------------------------------------------------------------------

    def remark(self, name: str, sentence: str) -> None:
        self._remarks.setdefault(name, sentence)

    def remarks(self) -> list[str]:
        return list(self._remarks.values())


def _key(request: HttpRequest) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
