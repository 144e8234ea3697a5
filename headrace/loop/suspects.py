"""Tickets that may be what ends the processes that work on them, and when they are given up.

A process that dies says of nothing in its hands that it was the cause. So:

1. Each death is charged to every ticket that the process had in hand.
2. A ticket that is charged with all but one of the deaths that it may cost is a *suspect*. Suspects are worked on one at a time, beside any
   number of other tickets. So no further death is charged to two of them, and an innocent one ends in peace when its turn comes.
3. A ticket that is charged with `most` deaths is *given up*: nobody works on it again. Its deaths are forgiven, because a run can do nothing
   about such a prompt, but has `engine.max_deaths` for an engine that is broken. They are forgiven only if some request was finished since the
   last time: an engine that dies of everything is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.core.types import RolloutKey

Forgive = Callable[[], None]
"""Takes one death off the count of its process. Repeated calls do nothing."""


def _unforgiving() -> None:
    pass


class Suspects:
    """The deaths that tickets are charged with. The engines of a fleet share one."""

    def __init__(self, most: int) -> None:
        """`most`: deaths with which a ticket is given up."""
        self.most = most
        self.given_up: set[str] = set()
        self._charged: dict[str, list[Forgive]] = {}
        self._turn = ""
        """The suspect that is being worked on, with what of it is in hand."""
        self._in_hand: set[str] = set()
        self._waiting: list[Callable[[], None]] = []
        self._finished = False
        """Whether something was finished since deaths were last forgiven."""

    def charge(self, tickets: Iterable[str], forgive: Forgive = _unforgiving) -> list[str]:
        """Charges a death to these tickets. Returns those that are given up now."""
        found = []
        for ticket in dict.fromkeys(tickets):
            charged = self._charged.setdefault(ticket, [])
            charged.append(forgive)
            if len(charged) >= self.most and ticket not in self.given_up:
                self.given_up.add(ticket)
                found.append(ticket)
                if self._finished:
                    self._finished = False
                    for one in charged:
                        one()
        return found

    @property
    def suspects(self) -> list[str]:
        """The tickets that may be worked on one at a time only."""
        return [ticket for ticket in self._charged if self._is_suspect(ticket)]

    def may_begin(self, ticket: str, name: str) -> bool:
        """Takes `name`, which belongs to the ticket, into hand. False if another suspect is being worked on: try again when `listen` calls."""
        if not self._is_suspect(ticket):
            return True
        if self._turn not in ("", ticket):
            return False
        self._turn = ticket
        self._in_hand.add(name)
        return True

    def ended(self, name: str, finished: bool = False) -> None:
        """`name` is in hand no more. `finished`: whether it was done, rather than taken away."""
        self._finished |= finished
        if name in self._in_hand:
            self._in_hand.discard(name)
            if not self._in_hand:
                self._turn = ""
                for one in self._waiting:
                    one()

    def listen(self, turn_is_free: Callable[[], None]) -> None:
        """`turn_is_free`: called when another suspect may begin."""
        self._waiting.append(turn_is_free)

    def _is_suspect(self, ticket: str) -> bool:
        return len(self._charged.get(ticket, ())) >= max(1, self.most - 1) and ticket not in self.given_up


def ticket_of(request_id: str) -> str:
    """Returns the ticket of a request, as words; the id itself if it belongs to no rollout."""
    key = RolloutKey.read(request_id)
    return request_id if key is None else f"{key.adapter}:t{key.ticket}".removeprefix(":")


def said_of(tickets: Sequence[str], most: int, what: str) -> str:
    """`what`: the processes that died."""
    return (
        f"{', '.join(tickets)} {'is' if len(tickets) == 1 else 'are'} given up: {most} {what} died while they worked on it "
        "(engine.ticket_deaths). Its rollouts are counted as failed"
    )
