"""The routes of the board. All only read. Names of runs are looked up in the list, never joined to a path."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.facts.number_tables import STEP, Order, Wanted
from headrace.views.board.board_parts import PARTS
from headrace.views.board.browsing import RolloutQuery
from headrace.views.board.cookie import CookieGate
from headrace.views.board.runs_board import RunsBoard
from headrace.views.board.swimlanes import KINDS, LaneQuery
from headrace.views.report.page import SCRIPT, STYLE
from headrace.web.application import Guard, make_application
from headrace.web.errors import Refused
from headrace.web.sending import Events, json_response

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
