"""The routes of the board. All only read. Names of runs are looked up in the list, never joined to a path."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.facts.number_tables import STEP, Order, Wanted
from headrace.views.board.board_parts import PARTS
from headrace.views.board.browsing import RolloutQuery
from headrace.views.board.runs_board import RunsBoard
from headrace.views.board.swimlanes import KINDS, LaneQuery
from headrace.views.report.page import SCRIPT, STYLE
from headrace.web.application import Guard, make_application
from headrace.web.errors import Refused
from headrace.web.sending import Events, json_response

# --- A browser cannot send a header with a page
# A browser cannot send a header with a page, so the token of a board is given once, in its address, and then kept in a cookie.


COOKIE = "headrace_board"
ASK = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>headrace board</title><body><form action='/'><p><label>This board asks for its token: "
    "<input type='password' name='token' autofocus></label> <button>open</button></p></form></body></html>"
)


class CookieGate:
    """Turns the cookie into the header that `Guard` behind it expects. The cookie holds a value that is made from the token: cookies of
    one port are sent to all others of the machine."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()
        self._value = hashlib.blake2b(self._token, person=b"headrace board").hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        if answer := self._sign_in(scope):
            await answer(scope, receive, send)
            return
        if self._has_cookie(scope):
            header = (b"authorization", b"Bearer " + self._token)
            scope = {**scope, "headers": [other for other in scope["headers"] if other[0] != header[0]] + [header]}
        await self._app(scope, receive, send)

    def _sign_in(self, scope: Scope) -> Response | None:
        """Returns the answer to somebody who asks for the page with a token, or without any permission."""
        if scope["path"] != "/":
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1].encode("latin-1", "replace")
        if given and hmac.compare_digest(given, self._token):
            answer = RedirectResponse("/", 303, {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
            answer.set_cookie(COOKIE, self._value, httponly=True, samesite="strict")
            return answer
        asked = {b"authorization", b"x-api-key"} & {name for name, _ in scope["headers"]}
        return None if asked or self._has_cookie(scope) else HTMLResponse(ASK, 401)

    def _has_cookie(self, scope: Scope) -> bool:
        text = b"; ".join(value for name, value in scope["headers"] if name == b"cookie").decode("latin-1")
        cookies = [cookie.strip().partition("=") for cookie in text.split(";")]
        return any(
            name == COOKIE and hmac.compare_digest(value.encode("latin-1"), self._value.encode())
            for name, _, value in cookies
        )


# --- board routes ------------------------------------------------------------


EVERY = 1.0
"""Seconds between two looks at the files."""
MOST_RUNS, MOST_METRICS, MOST_POINTS = 32, 64, 20_000
LARGEST = 1 << 53
"""The largest whole number of a request: up to it, a float holds every one."""
PAGE = Path(__file__).parent / "page"
FILES = {
    "report.css": STYLE,
    "report.js": SCRIPT,
    "uPlot.js": PAGE / "vendor" / "uPlot.iife.min.js",
    "uPlot.css": PAGE / "vendor" / "uPlot.min.css",
    **{path.name: path for path in sorted(PAGE.glob("*.*"))},
}
"""All files that are served, by their names."""
POLICY = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Headers of the page and its files. No script runs but the board's own, whatever a model writes."""


def make_board_app(board: RunsBoard, token: str = "") -> Starlette:
    """`token`: every request needs it, as a header or as the cookie that the page's first address sets; empty: only requests that name
    this machine are answered."""
    routes = [
        Route("/", lambda request: FileResponse(PAGE / "index.html", headers=POLICY)),
        Route("/static/{name}", _static),
        Route("/api/metrics", _metrics),
        Route("/api/curves", _curves),
        Route("/api/part", _part),
        Route("/api/lanes", _lanes),
        Route("/api/differences", _differences),
        Route("/api/rollouts", _rollouts),
        Route("/api/compared", _compared),
        Route("/api/csv", _csv),
        Route("/api/events", _events),
    ]
    app = make_application(routes, [Middleware(CookieGate, token=token), Middleware(Guard, token=token)])
    app.state.board = board
    return app


# Starlette calls these in threads, because they read files and compute; only the events wait in the event loop.


def _static(request: Request) -> Response:
    path = FILES.get(request.path_params["name"])
    if path is None:
        raise Refused(404, "there is no such file")
    return FileResponse(path, headers=POLICY)


def _metrics(request: Request) -> Response:
    return json_response(_board(request).metrics(_runs(request)))


def _curves(request: Request) -> Response:
    given = request.query_params
    points = _whole(request, "points", 1000)
    window = _whole(request, "window", 1)
    if not 2 <= points <= MOST_POINTS or window < 1:
        raise Refused(400, f"points must be 2 to {MOST_POINTS}, and window at least 1")
    metrics = _several(request, "metric", MOST_METRICS)
    within = _number(request, "from", -math.inf), _number(request, "to", math.inf)
    over = given.get("over", STEP)
    return json_response(
        _board(request).curves(_runs(request), metrics, over, window=window, within=within, points=points)
    )


def _part(request: Request) -> Response:
    which = request.query_params.get("part", "")
    if which not in PARTS:
        raise Refused(404, f"part must be one of {', '.join(PARTS)}")
    return HTMLResponse(_board(request).part(_one_run(request), which, _steps(request)))


def _lanes(request: Request) -> Response:
    kind = request.query_params.get("show", "all")
    if kind not in KINDS:
        raise Refused(400, f"show must be one of {', '.join(KINDS)}")
    start = max(0, _whole(request, "start", 0))
    query = LaneQuery(steps=_steps(request), kind=kind, start=start)  # type: ignore[arg-type]
    return HTMLResponse(_board(request).lanes(_one_run(request), query))


def _differences(request: Request) -> Response:
    return HTMLResponse(_board(request).differences(_runs(request)))


def _rollouts(request: Request) -> Response:
    given = request.query_params
    order = given.get("order", "newest")
    if order not in get_args(Order):
        raise Refused(400, f"order must be one of {', '.join(get_args(Order))}")
    wanted = Wanted(
        steps=(_number(request, "from", 0), _number(request, "to", math.inf)),
        rewards=(_number(request, "least", -math.inf), _number(request, "most", math.inf)),
        cut=given.get("cut") == "1",
        failed=given.get("failed") == "1",
        gone=given.get("gone") == "1",
    )
    question = RolloutQuery(
        wanted=wanted,
        order=order,  # type: ignore[arg-type]
        lag=_whole(request, "lag", 0),
        words=given.get("words", ""),
        ticket=_whole(request, "ticket", 0) if given.get("ticket") else None,
        rollout=_whole(request, "rollout", 0) if given.get("rollout") else None,
        start=max(0, _whole(request, "start", 0)),
    )
    answer = _board(request).rollouts(_one_run(request), question)
    return json_response(
        {"html": answer.html, "shown": answer.shown, "candidates": answer.candidates, "following": answer.following}
    )


def _compared(request: Request) -> Response:
    first, second = (_place(request, name) for name in ("one", "other"))
    try:
        return HTMLResponse(_board(request).compared(_one_run(request), (first, second)))
    except KeyError as error:
        raise Refused(404, str(error.args[0])) from None


def _place(request: Request, name: str) -> tuple[int, int]:
    """Returns the ticket of a rollout and its place in the group, which are written as `12.3`."""
    given = re.fullmatch(r"(\d{1,12})\.(\d{1,6})", request.query_params.get(name, ""), re.ASCII)
    if not given:
        raise Refused(400, f"{name} must be the ticket of a rollout and its place in the group, such as 12.3")
    return int(given[1]), int(given[2])


def _csv(request: Request) -> Response:
    lines = _board(request).csv(_runs(request), _several(request, "metric", MOST_METRICS))
    return StreamingResponse(
        lines, media_type="text/csv", headers={"Content-Disposition": 'attachment; filename="headrace.csv"'}
    )


async def _events(request: Request) -> Response:
    return Events(_changes(_board(request), request.query_params.getlist("run")[:MOST_RUNS]), named=True)


async def _changes(board: RunsBoard, names: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """Yields the list of runs whenever it has changed; the named runs are read on meanwhile."""
    before: dict[str, Any] = {}
    while not board.closed:
        now, more = await asyncio.to_thread(board.look, names)
        if now != before:
            before = now
            yield {"type": "runs", "directory": str(board.directory), **now}
        await asyncio.sleep(EVERY / 20 if more else EVERY)


def _board(request: Request) -> RunsBoard:
    board: RunsBoard = request.app.state.board
    return board


def _runs(request: Request) -> list[str]:
    return _several(request, "run", MOST_RUNS)


def _one_run(request: Request) -> str:
    return _several(request, "run", 1)[0]


def _several(request: Request, name: str, most: int) -> list[str]:
    values = list(dict.fromkeys(request.query_params.getlist(name)))
    if not 1 <= len(values) <= most:
        raise Refused(400, f"give 1 to {most} of {name}, not {len(values)}")
    return values


def _steps(request: Request) -> tuple[int, int] | None:
    first, last = (_whole(request, name, 0) for name in ("from", "to"))
    return (first, last) if request.query_params.get("from") else None


def _whole(request: Request, name: str, default: int) -> int:
    value = _number(request, name, default)
    if not -LARGEST <= value <= LARGEST:
        raise Refused(400, f"{name} must be at most {LARGEST}")
    return int(value)


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if math.isnan(value) or (math.isinf(value) and text):
        raise Refused(400, f"{name} is not a number: {text[:40]}")
    return value
