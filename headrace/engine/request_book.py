"""The requests of an engine. The book knows enough of a request for another process to continue it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.core.steps import Columns, Finished, SoFar, StepOutput, TokenRuns, Transcript, labels_of, write_down
from headrace.core.types import Request, Sampling

# --- A request that samples nothing: it asks for the log-probs of tokens that are there.


def scoring(request_id: str, tokens: Sequence[int], priority: int = 0, adapter: str = "") -> Request:
    """Makes a request for the log-probs of `tokens` (`Completion.prompt_logprobs`) that samples nothing."""
    return Request(
        request_id, tuple(tokens), Sampling(max_tokens=0), priority=priority, adapter=adapter, prompt_logprobs=True
    )


# --- request book ------------------------------------------------------------


@dataclass
class Pending(Transcript):
    """A request that is being generated."""

    done: asyncio.Future[Finished] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    aborted: bool = False
    """Whether it must end: no other process may continue it."""

    def rest(self) -> Request:
        """The request for the part that is still missing, to be sent to another process."""
        return msgspec.structs.replace(
            self.request,
            prefix=(*self.request.prefix, *self.tokens),
            prompt_logprobs=self.request.prompt_logprobs and self.scores is None,
        )

    def finish(self, end: Finished) -> None:
        if not self.done.done():
            self.end = end
            self.sampled.close()
            self.done.set_result(end)

    def interrupt(self) -> None:
        self.finish(Finished(self.request.id, "interrupted"))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # marks it as retrieved: the task that awaits it may be cancelled first


class RequestBook:
    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}
        self._left: dict[str, Pending] = {}
        """The requests that were pending when the engine was given up."""
        self._listeners: list[Callable[[StepOutput], None]] = []
        self._open: dict[tuple[bytes, bool], Columns] = {}
        """The columns that outputs of the same rows continue (`Columns.key`)."""
        self._places: dict[str, tuple[Columns, int]] = {}
        """The place of each request, if it has one."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def ids(self) -> list[str]:
        return list(self._pending)

    def is_done(self, request_id: str) -> bool:
        """Whether a request that has not left yet has ended."""
        return self._pending[request_id].done.done()

    def enter(self, request: Request) -> Pending:
        if request.id in self._pending:
            raise ValueError(f"the engine has a request {request.id} already; give every request an id of its own")
        pending = self._pending[request.id] = Pending(request=request)
        return pending

    def leave(self, request_id: str) -> None:
        self._vacate(request_id)
        del self._pending[request_id]

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._listeners.append(listener)

    def unfinished(self, among: Iterable[str] | None) -> Mapping[str, SoFar]:
        here = self._left or self._pending
        return {name: here[name].at_present() for name in (list(here) if among is None else among) if name in here}

    # -- from the engine --------------------------------------------------------------------------------------------------

    def publish(self, output: StepOutput) -> None:
        """Passes the output of a pass to the listeners, before it is entered here. Raises what they raise."""
        for listener in self._listeners:
            listener(output)

    def enter_output(self, output: StepOutput) -> None:
        write_down(output, self._running, self._note)
        for end in output.finished:
            if pending := self._pending.get(end.request_id):
                pending.finish(end)

    def _running(self, request_id: str) -> Pending | None:
        """Returns a request that has not ended: what is reported of one later is no part of it."""
        pending = self._pending.get(request_id)
        return pending if pending and not pending.done.done() else None

    def _note(self, output: StepOutput) -> None:
        """Adds the tokens. An output with the rows of the one before costs the same for any number of requests, and most are such where they come
        often; of others the requests count whose place or label is new."""
        if not output.token_count:
            return
        runs = output.as_runs()
        key = runs.encoded_rows, output.mixed
        if (columns := self._open.get(key)) and not columns.is_full:
            columns.add(runs)
            return
        if len(set(runs.rows.request_ids)) < len(
            runs.rows.request_ids
        ):  # of simulated engines: several tokens of a request
            self._note_once(output)
            return
        columns = self._continued(runs)
        labels, had = labels_of(runs, output.mixed), columns.labels
        new = [(place, label) for place, label in enumerate(labels) if label != had[place]]
        for place, _ in new:
            if before := had[place]:
                self._vacate(before[0])
        for place, label in new:
            self._vacate(label[0])
            if pending := self._running(label[0]):
                pending.sampled.note(columns, place, label)
                self._places[label[0]] = columns, place
                had[place] = label
        if None not in had:  # else one of them may come later, under a name that it has here already
            self._forget(columns)
            columns.key, self._open[key] = key, columns
        columns.add(runs)

    def _note_once(self, output: StepOutput) -> None:
        for name in output.requests:
            self._vacate(name)
        write_down(StepOutput(output.version, mixed=output.mixed, runs=output.as_runs()), self._running)

    def _continued(self, runs: TokenRuns) -> Columns:
        """Returns the columns in which the requests were before, or new ones."""
        names = runs.rows.request_ids
        for name in names[:4]:
            columns, _ = self._places.get(name, (None, 0))
            if columns and columns.width == len(names) and not columns.is_full:
                return columns
        return Columns(len(names))

    def _vacate(self, request_id: str) -> None:
        """A request comes, goes, or gets its tokens elsewhere."""
        if there := self._places.pop(request_id, None):
            columns, place = there
            self._pending[request_id].sampled.close()
            columns.labels[place] = None
            self._forget(columns)

    def _forget(self, columns: Columns) -> None:
        if columns.key:
            del self._open[columns.key]
            columns.key = None

    def refuse(self, request_id: str, message: str) -> None:
        self.fail(request_id, ValueError(message))

    def fail(self, request_id: str, error: Exception) -> None:
        if pending := self._pending.get(request_id):
            pending.fail(error)

    # -- over a death -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Marks all pending requests: they end, even if the process that they run in dies first."""
        for pending in self._pending.values():
            pending.aborted = True

    def interrupt(self, request_ids: Iterable[str]) -> None:
        """Ends requests that no process has."""
        for request_id in request_ids:
            self._pending[request_id].interrupt()

    def interrupt_aborted(self) -> None:
        """Ends the marked requests itself, for when no process is running that could."""
        for pending in self._pending.values():
            if pending.aborted:
                pending.interrupt()

    def reissued(self) -> list[Request]:
        """The requests for a new process. Forks end: the cache entries that they continued from died with the old one."""
        self.interrupt_aborted()
        for pending in self._pending.values():
            if pending.request.fork:
                pending.interrupt()
        return [pending.rest() for pending in self._pending.values() if not pending.done.done()]

    def give_up(self, error: Exception) -> None:
        self._left = dict(self._pending)
        for pending in self._pending.values():
            pending.fail(error)
