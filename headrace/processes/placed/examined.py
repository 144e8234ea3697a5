"""A worker that offered itself, as `headrace doctor --cluster` asks it: both ends. Its answers are those of a `NodeHost`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.processes.joining.greeting import Agreed, DoctorAnswer, DoctorQuestion, Terms
from headrace.processes.placed.host import NodeHost
from headrace.processes.placed.placed import HostLost

_KINDS: dict[str, tuple[Any, Any]] = {
    "look": (tuple[()], dict[str, str]),
    "machine": (tuple[()], dict[str, float]),
    "clock": (tuple[()], float),
    "agree": (tuple[Terms], Agreed),
    "fetch": (tuple[str, str, int], tuple[str, float]),
    "give": (tuple[str, str, int], tuple[str, float]),
    "leave": (tuple[str, str], str),
    "find": (tuple[str, str, float], tuple[str, float]),
    "drop": (tuple[str], None),
}
"""The arguments and the answer of each question: only these methods can be called."""

_encode = msgspec.msgpack.encode


def answer(question: DoctorQuestion) -> DoctorAnswer:
    """Returns this machine's answer. Raises HeadraceError for a question that is none."""
    if question.method not in _KINDS:
        raise HeadraceError(f"the controller asked for {question.method}, which is not a question of this version")
    values = msgspec.msgpack.decode(question.values, type=_KINDS[question.method][0])
    return DoctorAnswer(msgspec.Raw(_encode(asyncio.run(getattr(NodeHost(), question.method)(*values)))))


class ExaminedWorker:
    """Protocol `Hosted`."""

    def __init__(self, ask: Callable[[DoctorQuestion], Awaitable[DoctorAnswer]]) -> None:
        self._ask = ask

    async def ask(self, method: str, *values: Any) -> Any:
        try:
            reply = await self._ask(DoctorQuestion(method, msgspec.Raw(_encode(values))))
        except OSError as error:
            raise HostLost(f"its connection has ended: {error}") from None
        return msgspec.msgpack.decode(reply.value, type=_KINDS[method][1])

    def kill(self) -> None:
        """Does nothing: whoever started it ends it."""
