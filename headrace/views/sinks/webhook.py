"""Messages about a run for people who are elsewhere: POST to the address in `HEADRACE_WEBHOOK`, in the form that Slack, Mattermost and Discord
take, with the facts beside it for programs."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError, HeadraceError
from headrace.facts.facts import RunEnded, RunStarted, Warned
from headrace.facts.health import Health, Kind, health
from headrace.facts.recorder import Sink
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, duration
from headrace.settings.secrets import WEBHOOK as ADDRESS
from headrace.views.sinks.queued import PATIENCE, OwnThread

EVERY, HELD = 60.0, 3
"""Seconds of the run between two looks at its verdict, each of some milliseconds; and looks at which a verdict is the same before it is sent."""
MOST = 20
"""Warnings that a process of a run sends."""
LONGEST = 1500
"""Characters of a message; Discord takes 2,000."""
_MENTION = re.compile(r"(?<=<)(?=[!@#])|(?<=@)(?=\w)")
"""The places within `<!channel>`, `<@U123>` and `@everyone` at which a character that is not seen makes them plain text."""
TIMEOUT = 10.0
PAUSES = (2.0, 8.0)
"""Seconds before the second and the third try."""


def open_sink(run_dir: Path, resume_at_step: int | None, say: Callable[[str], None]) -> Sink:
    return Webhook(address_of(os.environ), say)


def address_of(env: Mapping[str, str]) -> str:
    """Returns the address that `HEADRACE_WEBHOOK` holds. Raises `ConfigError` without one. It is a secret, so no message has it."""
    address = env.get(ADDRESS, "").strip()
    if not _is_address(address):
        found = "is not set" if not address else "is no http(s) address"
        raise ConfigError(
            f"observe.webhook = true posts to the address in {ADDRESS}, which {found}: "
            f"export {ADDRESS}=https://..., or set observe.webhook = false"
        )
    return address


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and len(text.split()) == 1
    except ValueError:  # of a port that is no number, or a bracket that is not closed
        return False


class Alert(NamedTuple):
    event: Literal["started", "verdict", "warning", "ended"]
    text: str


class AlertChoice:
    """Chooses what is sent of the facts of one process: its start and its end, a verdict that has turned and stayed, warnings."""

    def __init__(self, judge: Callable[[RunState], Health] = health) -> None:
        self._judge = judge
        self._told: Kind | None = None
        self._turned: tuple[Kind, int] | None = None
        """The newest verdict, and at how many looks it has been that."""
        self._looked = -EVERY
        self._warned: set[str] = set()

    def of(self, fact: MetricsFact, state: RunState) -> Iterator[Alert]:
        """Yields the messages of a fact. `state` already includes it."""
        match fact:
            case RunStarted():
                how = f"resumed after step {fact.resumed_at:,}" if fact.resumed_at else "started"
                yield Alert("started", f"{how}: {fact.headline}, {fact.steps:,} steps")
            case StepRow() if fact.t - self._looked >= EVERY:
                self._looked = fact.t
                yield from self._verdict(state)
            case Warned():
                yield from self._warning(fact)
            case RunEnded():
                how = fact.reason if fact.reason == "finished" else f"ended: {fact.reason}"
                yield Alert(
                    "ended", f"{how} after step {fact.step:,}, {duration(state.now)}. {_sentences(self._judge(state))}"
                )

    def _verdict(self, state: RunState) -> Iterator[Alert]:
        found = self._judge(state)
        kind = found.kind
        looks = self._turned[1] + 1 if self._turned and self._turned[0] == kind else 1
        self._turned = kind, looks
        news = kind in ("broken", "not learning", "learned") or (kind == "learning" and self._told is not None)
        if looks == HELD and news and kind != self._told:
            self._told = kind
            yield Alert("verdict", f"step {state.step:,}: {_sentences(found)}")

    def _warning(self, fact: Warned) -> Iterator[Alert]:
        what = fact.key or fact.message
        if what in self._warned or len(self._warned) > MOST:
            return
        self._warned.add(what)
        more = len(self._warned) > MOST
        yield Alert("warning", "more warnings are not sent: headrace status has all" if more else fact.message)


def _sentences(found: Health) -> str:
    return f"{found.sentence} {found.remedy[:1].upper()}{found.remedy[1:]}".rstrip()


class Webhook:
    """Posts alerts in a thread of its own. Implements `Sink`."""

    def __init__(
        self,
        address: str,
        say: Callable[[str], None],
        *,
        pauses: tuple[float, ...] = PAUSES,
        patience: float = PATIENCE,
    ) -> None:
        """`say`: records a warning; called by the thread that calls `record` and `close` only."""
        self._address, self._say, self._pauses, self._patience = address, say, pauses, patience
        self._choice, self._thread = AlertChoice(), OwnThread("webhook", last=lambda: None)
        self._warned = False

    def record(self, fact: MetricsFact, state: RunState) -> None:
        for alert in self._choice.of(fact, state):
            name = state.started.name if state.started else ""
            self._thread.call(partial(self._post, body_of(name, state.step, alert)))
        if self._thread.failed and not self._warned:
            self._warned = True
            self._say(f"observe.webhook did not take a message, and the run goes on: {self._thread.error}")

    def _post(self, body: bytes) -> None:
        for pause in (*self._pauses, None):
            try:
                post(self._address, body)
                return
            except HeadraceError:
                if pause is None:
                    raise
                time.sleep(pause)

    def close(self) -> None:
        if self._thread.began and (not self._thread.close(self._patience) or self._thread.lost):
            error = self._thread.error or f"no answer within {self._patience:.0f} s"
            self._say(f"observe.webhook lacks {self._thread.lost} messages: {error}")


def body_of(name: str, step: int, alert: Alert) -> bytes:
    """Returns the body of a request. `text` is what Slack and Mattermost show, `content` what Discord does. Warnings may hold words of a model: they
    call nobody."""
    text = _MENTION.sub("\u200b", clip(f"{name}: {alert.text}", LONGEST))
    said = {"text": text, "content": text, "allowed_mentions": {"parse": []}}
    return json.dumps({**said, "run": name, "step": step, "event": alert.event}).encode()


class _Unmoved(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would become a GET, whose success says nothing."""

    def redirect_request(self, *given: object) -> None:
        return None


def post(address: str, body: bytes) -> None:
    """Sends one message. Raises `HeadraceError` without the address, which is a secret."""
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json", "User-Agent": "headrace"})
        with urllib.request.build_opener(_Unmoved).open(request, timeout=TIMEOUT) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        raise HeadraceError(f"its server answered {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # whose own words may have the address
        reason = getattr(error, "reason", error)
        raise HeadraceError(f"its server was not reached ({type(reason).__name__})") from None
