"""The listeners of a simulated engine: they get the output of its passes, and nothing is encoded while there are none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.commands.plan.parts.flight import Flight
from headrace.core.steps import Finished, StepOutput, Transcript
from headrace.core.types import Completion, Request, Stop
from headrace.loop.world.surroundings import RESULT

Listener = Callable[[bytes], None]


class Listeners:
    """Functions that are called with every encoded `StepOutput`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def report(self, flight: Flight, so_far: Completion, version: int, stop: Stop | None) -> None:
        """Sends the tokens that are new since the last report of this request, as one pass. `stop`: set if it has ended."""
        if not self._listeners:
            return
        new, name = slice(flight.reported, None), flight.request.id
        tokens, versions = so_far.tokens[new], tuple(so_far.versions()[new])
        flight.reported = len(so_far.tokens)
        ends = (Finished(name, stop),) if stop else ()
        output = StepOutput(
            version=version,
            request_ids=(name,) * len(tokens),
            tokens=tokens,
            logprobs=so_far.logprobs[new],
            kv_versions=versions,
            finished=ends,
            versions=versions,
        )
        encoded = msgspec.msgpack.encode(output)
        for listener in list(self._listeners):
            listener(encoded)


def transcript(request: Request, so_far: Completion) -> Transcript:
    versions = so_far.versions()
    return Transcript(
        request=request,
        tokens=list(so_far.tokens),
        logprobs=list(so_far.logprobs),
        versions=versions,
        kv_versions=list(versions),
        mixed=[False] * len(versions),
    )


class TurnCaches:
    """The sequences that ended under the live weights, whose caches a next turn finds."""

    MOST = 1 << 14
    """Those that ended first go first."""

    def __init__(self) -> None:
        self._ended: dict[tuple[int, ...], tuple[int, int]] = {}
        """The version and the real tokens of each."""

    def ended(self, flight: Flight, done: Completion, version: int) -> None:
        whole = flight.request.prompt + flight.request.prefix + done.tokens
        self._ended[whole] = version, flight.prompt + flight.length
        while len(self._ended) > self.MOST:
            del self._ended[next(iter(self._ended))]

    def known(self, prompt: tuple[int, ...], version: int) -> int:
        """Returns the real tokens of a prompt that need not be computed."""
        under, tokens = self._ended.get(prompt[:-RESULT], (version, 0))
        return tokens if under == version else 0


class Prompts:
    """The prompts of the running requests: a group's prompt is computed once under each version of the weights."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, ...], tuple[int, int]] = {}
        """The version under which each prompt was computed last, and the number of requests that use it."""

    def enter(self, prompt: tuple[int, ...], version: int) -> bool:
        """Counts one more request with this prompt and returns whether the prompt has to be computed."""
        computed, users = self._used.get(prompt, (-1, 0))
        self._used[prompt] = version, users + 1
        return computed != version

    def leave(self, prompt: tuple[int, ...]) -> None:
        version, users = self._used.pop(prompt)
        if users > 1:
            self._used[prompt] = version, users - 1
