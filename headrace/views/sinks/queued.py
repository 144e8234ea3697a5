"""Dashboards are written to by a thread of their own, so that one that is slow, full or not there never slows or stops a run: its numbers are
then dropped, counted, and warned of."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headrace.durable.atomic_files import kept_id
from headrace.facts.facts import RunStarted, WarmStarted
from headrace.facts.number_tables import scalars, warm_scalars
from headrace.facts.records import MetricsFact
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, plural

ROOM = 4096
"""Calls that wait for a dashboard at most."""
PATIENCE = 60.0
"""Seconds for which the end of a run waits until a dashboard has everything."""
LONGEST = 200
"""Characters of a dashboard's error."""


class Dashboard(Protocol):
    """A place for numbers. One thread calls it. What it raises is counted, and the call is not repeated."""

    def start(self, fact: RunStarted) -> None:
        """A process of the run begins; called before `log`. If it fails, it is tried again with the next numbers."""

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """`at`: seconds since 1970."""

    def close(self) -> None: ...


def id_on_dashboards(run_dir: Path) -> str:
    """Returns the run's id on dashboards that others write to. Its place would name another run too: the one that was there before and was deleted, or
    that of another machine with the same folders."""
    return kept_id(run_dir / "dashboard_id")


def described(fact: RunStarted) -> dict[str, Any]:
    """Returns what a dashboard shows of a run beside its numbers."""
    return {"headline": fact.headline, "seed": fact.seed, "max_lag": fact.max_lag, "steps": fact.steps}


class OwnThread:
    """Makes calls one after the other in a thread of its own, which begins with the first. What they raise is counted."""

    def __init__(self, name: str, *, last: Callable[[], None], room: int = ROOM) -> None:
        """`last`: the call that ends the thread. `room`: calls that wait at most."""
        self._last = last
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(room)
        self._thread = threading.Thread(target=self._work, name=f"observe.{name}", daemon=True)
        self.dropped = self.failed = 0
        """Calls that found the queue full; calls that raised."""
        self.error = ""
        """The first of these errors."""
        self._given = self._done = 0

    @property
    def began(self) -> bool:
        return self._thread.ident is not None

    def call(self, make: Callable[[], None]) -> None:
        if not self.began:
            self._thread.start()
        try:
            self._waiting.put_nowait(make)
            self._given += 1
        except queue.Full:
            self.dropped += 1

    def close(self, patience: float) -> bool:
        """Waits for all calls, `patience` seconds at most. Returns whether the thread has ended."""
        end = time.monotonic() + patience
        with suppress(queue.Full):
            self._waiting.put(None, timeout=patience)
            self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    @property
    def lost(self) -> int:
        """Calls that raised, that found no room or that were not made yet."""
        return self.failed + self.dropped + self._given - self._done

    def _work(self) -> None:
        while (make := self._waiting.get()) is not None:
            self._make(make)
            self._done += 1
        self._make(self._last)

    def _make(self, make: Callable[[], None]) -> None:
        try:
            make()
        except Exception as error:  # whatever a library raises
            self.error = self.error or clip(f"{type(error).__name__}: {error}", LONGEST)
            self.failed += 1


class QueuedSink:
    """A sink that hands numbers to a dashboard by a queue."""

    def __init__(
        self,
        name: str,
        dashboard: Dashboard,
        say: Callable[[str], None],
        *,
        forgets_from: int | None = None,
        room: int = ROOM,
        patience: float | None = None,
    ) -> None:
        """`name`: its setting below `observe`. `say`: records a warning; called by the thread that calls `record` and `close` only.
        `forgets_from`: the first step whose numbers the dashboard drops when this process begins. Those of a warm start, whose steps are numbered
        like the run's own, are then given again."""
        self._name, self._dashboard, self._say = name, dashboard, say
        self._forgets_from = forgets_from
        self._patience = PATIENCE if patience is None else patience
        self.thread = OwnThread(name, last=dashboard.close, room=room)
        self._starts: list[RunStarted] = []
        """Starts that the dashboard has not taken yet."""
        self._warned = False
        self._warm: WarmStarted | None = None
        """The training before the run, until a process of it begins: a dashboard knows no run before that."""

    def record(self, fact: MetricsFact, state: RunState) -> None:
        if isinstance(fact, RunStarted):
            self.thread.call(partial(self._start, fact))
        if isinstance(fact, WarmStarted):
            self._warm = fact
        elif isinstance(fact, RunStarted) and self._forgets_from is not None:
            self._warm = state.warm
        if self._warm and state.started:
            first = self._forgets_from or 0
            points = [(step, values) for step, values in warm_scalars(self._warm) if step >= first]
            self.thread.call(partial(self._log_all, points, time.time()))
            self._warm = None
        step, values = scalars(fact, state)
        if values:
            self.thread.call(partial(self._log, step, values, time.time()))
        if (self.thread.failed or self.thread.dropped) and not self._warned:
            self._warned = True
            self._say(f"observe.{self._name} does not get all numbers, and the run goes on without: {self._why}")

    @property
    def _why(self) -> str:
        return self.thread.error or "it is slower than the run"

    def _start(self, fact: RunStarted) -> None:
        self._starts.append(fact)
        self._begin()

    def _begin(self) -> None:
        while self._starts:
            self._dashboard.start(self._starts[0])
            self._starts.pop(0)

    def _log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._begin()
        self._dashboard.log(step, values, at)

    def _log_all(self, points: Sequence[tuple[int, Mapping[str, float]]], at: float) -> None:
        for step, values in points:
            self._log(step, values, at)

    def close(self) -> None:
        if not self.thread.began:
            return
        ended = self.thread.close(self._patience)
        if self.thread.lost or not ended:
            slow = "" if ended else f", and had not ended after {self._patience:.0f} s"
            lost = plural(self.thread.lost, "fact")
            self._say(f"observe.{self._name} lacks the numbers of {lost}{slow}: {self._why}")


class _Hushed:
    """A stream that drops what some threads write, and passes on what all others write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in _silent else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_silent: set[int] = set()
_changing, _streams = threading.Lock(), ExitStack()
"""The streams are replaced by the first thread that is silent and put back by the last one: each for itself, the threads of two dashboards would
leave one of the replacements behind."""


@contextmanager
def hushed() -> Iterator[None]:
    """Drops what this thread prints meanwhile, such as the greetings of a library on the screen of a run."""
    here = threading.get_ident()
    with _changing:
        if not _silent:
            _streams.enter_context(redirect_stdout(_Hushed(sys.stdout)))
            _streams.enter_context(redirect_stderr(_Hushed(sys.stderr)))
        _silent.add(here)
    try:
        yield
    finally:
        with _changing:
            _silent.discard(here)
            if not _silent:
                _streams.close()
