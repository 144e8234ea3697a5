"""The application of every server here: its routes behind the guard against pages of other origins, and errors as answers."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from headrace.core.errors import HeadraceError
from headrace.core.printing import say
from headrace.web.errors import Refused, answer_error
from headrace.web.guard import OriginGuard
from headrace.web.unknown_fields import IgnoredFields, Remark


def make_application(
    routes: Sequence[Route],
    permission: Sequence[Middleware],
    remark: Remark = lambda name, sentence: say(sentence),
) -> Starlette:
    """`permission`: asks in this order who may send a request, for every path; empty where the routes do so. `remark`: is told of fields of
    requests that are ignored."""
    kinds = [Refused, HeadraceError, ValueError, 404, 405, Exception]
    return Starlette(
        routes=routes,
        middleware=[Middleware(OriginGuard), *permission, Middleware(IgnoredFields, remark=remark)],
        exception_handlers=dict.fromkeys(kinds, answer_error),
    )
