"""The reports of an engine after every forward pass, and the transcript of a completion that is made from them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from itertools import chain, repeat
from typing import Literal, NamedTuple

import msgspec

from headrace.core.types import (
    Completion,
    Request,
    RoutingTrace,
    SamplingMask,
    Stop,
    Struct,
    TopLogprobs,
    VersionSpan,
)


class Finished(Struct, frozen=True):
    """The end of a request.

    >>> end = Finished("t12/0", "stop")
    """

    request_id: str
    stop: Stop
    error: str = ""
    routing: RoutingTrace | None = None


class PromptScores(Struct, frozen=True):
    """The log-probs of a request's prompt, reported once, when all are known and before a token is sampled.

    >>> scores = PromptScores("t12/0", version=4, logprobs=(-3.1, -0.9, -0.4))  # of the second to the fourth token
    """

    request_id: str
    version: int
    logprobs: tuple[float, ...]
    top: TopLogprobs | None = None
    mixed: bool = False
    """Whether some parameters were newer than `version` (`VersionSpan.mixed`)."""


class TokenDetails(Struct, frozen=True):
    """One sampled position of a request that asked for more than the token: a row of `TopLogprobs` and of `SamplingMask`.

    >>> details = TokenDetails("t12/0", mask=array("i", [9, 20]).tobytes())  # tokens 9 and 20 were left to sample from
    """

    request_id: str
    top_tokens: bytes = b""
    top_logprobs: bytes = b""
    mask: bytes = b""
    set_name: bytes = b""
    """A digest of the set of tokens that a constraint alone has left; empty if none has."""
    set: bytes = b""
    """The set itself, encoded, with the first token of the request that an engine samples from it."""


class LabelledRows(Struct, frozen=True):
    """The requests that got tokens, each with the labels of its tokens.

    >>> rows = LabelledRows(("t12/0", "t12/1"), versions=(4, 4), kv_versions=(4, 3))
    """

    request_ids: tuple[str, ...]
    versions: tuple[int, ...]
    """The version of each request's tokens."""
    kv_versions: tuple[int, ...]
    """The oldest version among the cache entries of each request."""


_read_rows = lru_cache(maxsize=2048)(msgspec.msgpack.Decoder(LabelledRows).decode)
"""An engine reports the same rows many times in succession, and a fleet has one set of rows for each member."""


class TokenRuns(Struct, frozen=True):
    """The tokens of several passes with the same requests. Within it all tokens of a request have one label.

    >>> logprobs = array("d", [-0.1, -2.0, -0.7, -0.3]).tobytes()
    >>> runs = TokenRuns(encoded(rows), 2, array("i", [20, 8, 9, 4]).tobytes(), logprobs)
    >>> runs.rows == rows, runs.only({"t12/1"}).tokens == array("i", [8, 4]).tobytes()
    (True, True)
    """

    encoded_rows: bytes
    """Its `LabelledRows` (msgpack). Whoever has had a message with the same bytes need not look at the requests again."""
    count: int
    """Tokens of each request."""
    tokens: bytes
    """[count, requests] int32"""
    logprobs: bytes
    """[count, requests] float64"""

    @property
    def rows(self) -> LabelledRows:
        return _read_rows(self.encoded_rows)

    def only(self, names: Container[str]) -> TokenRuns:
        """Returns those of the requests in `names`."""
        rows, width = self.rows, len(self.rows.request_ids)
        kept = [place for place, name in enumerate(rows.request_ids) if name in names]
        starts = [row * width + place for row in range(self.count) for place in kept]
        return TokenRuns(
            encoded(
                LabelledRows(
                    tuple(rows.request_ids[i] for i in kept),
                    tuple(rows.versions[i] for i in kept),
                    tuple(rows.kv_versions[i] for i in kept),
                )
            ),
            count=self.count,
            tokens=b"".join(self.tokens[4 * i : 4 * (i + 1)] for i in starts),
            logprobs=b"".join(self.logprobs[8 * i : 8 * (i + 1)] for i in starts),
        )


Label = tuple[str, int, int, bool]
"""A request, the version of its tokens, the oldest version among its cache entries, and whether the weights were mixed."""


def labels_of(runs: TokenRuns, mixed: bool) -> list[Label]:
    rows = runs.rows
    return list(zip(rows.request_ids, rows.versions, rows.kv_versions, repeat(mixed)))


def encoded(rows: LabelledRows) -> bytes:
    return msgspec.msgpack.encode(rows)


class StepOutput(Struct, frozen=True):
    """The result of one forward pass: columns over the requests that got a token, and the requests that ended. Or that of several, whose
    tokens are `runs` (`merged`).

    >>> first = StepOutput(4, ("t12/0", "t12/1"), tokens=(20, 8), logprobs=(-0.1, -2.0), kv_versions=(4, 4))
    >>> second = StepOutput(5, ("t12/0",), (2,), (-0.2,), kv_versions=(4,), finished=(end,))
    """

    version: int
    request_ids: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    kv_versions: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()
    versions: tuple[int, ...] = ()
    """The version of each column, for requests with an adapter the adapter's; empty if all are `version`."""
    details: tuple[TokenDetails, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    mixed: bool = False
    """Whether an update was being streamed in: some parameters are newer than `version` (see `VersionSpan.mixed`)."""
    runs: TokenRuns | None = None
    """The tokens of several passes; the columns of tokens above are empty then."""

    @property
    def token_count(self) -> int:
        return len(self.runs.tokens) // 4 if self.runs else len(self.tokens)

    @property
    def requests(self) -> tuple[str, ...]:
        """The ids of the requests that got tokens."""
        return self.runs.rows.request_ids if self.runs else self.request_ids

    def versions_of_requests(self) -> Iterator[tuple[str, int]]:
        """Yields each of `requests` with the version that sampled its tokens."""
        own = self.runs.rows.versions if self.runs else self.versions
        return zip(self.requests, own or (self.version,) * len(self.requests), strict=True)

    def only(self, names: Container[str]) -> StepOutput:
        """Returns the part that belongs to the requests in `names`."""
        kept = [place for place, name in enumerate(self.request_ids) if name in names]
        return StepOutput(
            version=self.version,
            request_ids=tuple(self.request_ids[i] for i in kept),
            tokens=tuple(self.tokens[i] for i in kept),
            logprobs=tuple(self.logprobs[i] for i in kept),
            kv_versions=tuple(self.kv_versions[i] for i in kept),
            finished=tuple(end for end in self.finished if end.request_id in names),
            versions=tuple(self.versions[i] for i in kept) if self.versions else (),
            details=tuple(detail for detail in self.details if detail.request_id in names),
            scores=tuple(scores for scores in self.scores if scores.request_id in names),
            mixed=self.mixed,
            runs=self.runs.only(names) if self.runs else None,
        )

    def sampled(self) -> Iterator[tuple[str, int, float, int]]:
        """Yields request, token, log-prob and version of every token, those of a request in the order in which they were sampled."""
        runs = self.as_runs()
        tokens, logprobs, rows = array("i", runs.tokens), array("d", runs.logprobs), runs.rows
        for place, (name, version) in enumerate(zip(rows.request_ids, rows.versions, strict=True)):
            for at in range(place, len(tokens), len(rows.request_ids)):
                yield name, tokens[at], logprobs[at], version

    def as_runs(self) -> TokenRuns:
        """Returns its tokens in columns, also those of one pass."""
        if self.runs:
            return self.runs
        return TokenRuns(
            encoded(self._rows()),
            count=1,
            tokens=array("i", self.tokens).tobytes(),
            logprobs=array("d", self.logprobs).tobytes(),
        )

    def _rows(self) -> LabelledRows:
        """Returns the rows of one pass."""
        return LabelledRows(
            self.request_ids, self.versions or (self.version,) * len(self.request_ids), self.kv_versions
        )


def are_alike(first: StepOutput, other: StepOutput) -> bool:
    """Whether two passes have the same requests under the same labels, so that `merged` may make one output of them."""
    return (
        not first.finished
        and first.request_ids == other.request_ids
        and (first.version, first.mixed) == (other.version, other.mixed)
        and (first.versions, first.kv_versions) == (other.versions, other.kv_versions)
    )


def merged(outputs: Sequence[StepOutput]) -> StepOutput:
    """Returns one output with all that is in those of passes which follow each other and `are_alike`.

    >>> passes = [StepOutput(4, ("t12/0",), (token,), (-0.1,), (4,)) for token in (20, 9)]
    >>> [(request_id, token) for request_id, token, _, _ in merged(passes).sampled()]
    [('t12/0', 20), ('t12/0', 9)]
    """
    first, last = outputs[0], outputs[-1]
    return StepOutput(
        version=first.version,
        finished=last.finished,
        details=tuple(chain.from_iterable(output.details for output in outputs)),
        scores=tuple(chain.from_iterable(output.scores for output in outputs)),
        mixed=first.mixed,
        runs=TokenRuns(
            encoded(first._rows()),
            count=len(outputs),
            tokens=array("i", chain.from_iterable(output.tokens for output in outputs)).tobytes(),
            logprobs=array("d", chain.from_iterable(output.logprobs for output in outputs)).tobytes(),
        ),
    )


class Columns:
    """The tokens of outputs with the same number of requests, one output after another. Outputs are added in a time that does not depend on that
    number; each request finds its tokens by its place (`SampledTokens.note`).

    >>> columns = Columns(width=2)
    >>> columns.add(runs)
    >>> columns.add(runs)
    >>> columns.count, array("i", columns.tokens(1, 1, 4)).tolist()
    (4, [4, 8, 4])
    """

    MANY, MOST = 64, 1 << 16
    """Outputs and tokens that are added at most: a request that goes on keeps the tokens of those that have ended in memory too."""

    __slots__ = ("_logprobs", "_outputs", "_tokens", "count", "key", "labels", "width")

    def __init__(self, width: int) -> None:
        self.width, self.count, self._outputs = width, 0, 0
        """Requests, tokens of each place, and outputs that were added."""
        self.labels: list[Label | None] = [None] * width
        """The label of the tokens that come next to each place; None: nobody has the request."""
        self.key: tuple[bytes, bool] | None = None
        """The encoded rows and `mixed` of an output that continues all places; None if none does."""
        self._tokens, self._logprobs = _Turned("i", width), _Turned("d", width)

    @property
    def is_full(self) -> bool:
        return self._outputs >= self.MANY or self.count * self.width >= self.MOST

    def add(self, runs: TokenRuns) -> None:
        self._tokens.added.append(runs.tokens)
        self._logprobs.added.append(runs.logprobs)
        self.count += runs.count
        self._outputs += 1

    def tokens(self, place: int, start: int, stop: int) -> bytes:
        """Returns tokens [start, stop) of a request (int32)."""
        return self._tokens.read(place, start, stop)

    def logprobs(self, place: int, start: int, stop: int) -> bytes:
        """Returns their log-probs (float64)."""
        return self._logprobs.read(place, start, stop)


class _Turned:
    """Numbers that come as [count, width] and are read as [width, count]. What has come is turned when somebody reads, all of it at once: to
    pick every n-th number out of as many tokens costs a miss of the processor's cache each."""

    BLOCKS = 8
    """Turned pieces that are kept apart."""

    __slots__ = ("_blocks", "_kind", "_width", "added")

    def __init__(self, kind: Literal["i", "d"], width: int) -> None:
        self._kind, self._width = kind, width
        self._blocks = list[memoryview]()
        """[width, count] each"""
        self.added = list[bytes]()
        """Messages that have come since."""

    def read(self, place: int, start: int, stop: int) -> bytes:
        """Returns numbers [start, stop) of a place."""
        if self.added:
            self._turn()
        found, at = list[memoryview](), 0
        for block in self._blocks:
            size = len(block) // self._width
            if start < at + size and at < stop:
                row = place * size - at
                found.append(block[row + max(start, at) : row + min(stop, at + size)])
            at += size
        return b"".join(found)

    def _turn(self) -> None:
        import numpy as np  # here: settings are read without it

        new = np.frombuffer(b"".join(self.added), self._kind).reshape(-1, self._width).T
        self.added.clear()
        if len(self._blocks) == self.BLOCKS:
            before = [np.frombuffer(block, self._kind).reshape(self._width, -1) for block in self._blocks]
            self._blocks, new = [], np.concatenate([*before, new], axis=1)
        self._blocks.append(np.ascontiguousarray(new).reshape(-1).data)


class _Part(NamedTuple):
    """Tokens [start, stop) of a place of columns."""

    columns: Columns
    place: int
    start: int
    stop: int | None
    """None: all that there are, and those that will be added."""
    label: Label

    @property
    def end(self) -> int:
        return self.columns.count if self.stop is None else self.stop


class SampledTokens:
    """All tokens of a request, with log-probs and labels. Where they lie is noted, and they are made arrays of its own when somebody reads
    them or there are many such places: appending a few tokens to an array costs as much as appending hundreds.

    >>> sampled = SampledTokens((20,), (-0.1,), (before,))
    >>> sampled.note(columns, 1, ("t12/1", 4, 3, False))
    >>> columns.add(runs)
    >>> len(sampled), sampled.tokens.tolist(), [(span.start, span.kv_version) for span in sampled.spans]
    (3, [20, 8, 4], [(0, 4), (1, 3)])
    """

    MANY = 16
    """Places that are noted at most: each keeps the tokens of other requests in memory too."""

    __slots__ = ("_before", "_last", "_logprobs", "_parts", "_spans", "_tokens")

    def __init__(
        self, tokens: Sequence[int] = (), logprobs: Sequence[float] = (), spans: Sequence[VersionSpan] = ()
    ) -> None:
        self._tokens, self._logprobs, self._spans = array("i", tokens), array("d", logprobs), list(spans)
        self._parts = list[_Part]()
        """The parts behind the arrays and before the last one."""
        self._last: _Part | None = None
        """The newest part, which alone may grow."""
        self._before = len(self._tokens)
        """Tokens before those of the last part."""

    def __len__(self) -> int:
        last = self._last
        return self._before + last.end - last.start if last else self._before

    def note(self, columns: Columns, place: int, label: Label, start: int | None = None) -> None:
        """Adds the tokens of a place of columns from `start` on (None: those that will be added there), until the next call, or `close`."""
        self.close()
        if last := self._last:
            self._before += last.end - last.start
            self._parts.append(last)
        self._last = _Part(columns, place, columns.count if start is None else start, None, label)
        if len(self._parts) >= self.MANY:
            self._read()

    def close(self) -> None:
        """No more tokens are added."""
        if (last := self._last) and last.stop is None:
            self._last = _Part(last.columns, last.place, last.start, last.end, last.label)

    @property
    def tokens(self) -> array[int]:
        """[T]"""
        return self._read()._tokens

    @property
    def logprobs(self) -> array[float]:
        """[T]"""
        return self._read()._logprobs

    @property
    def spans(self) -> list[VersionSpan]:
        return self._read()._spans

    def _read(self) -> SampledTokens:
        if not (last := self._last):
            return self
        at, tokens, logprobs = len(self._tokens), list[bytes](), list[bytes]()
        for part in (*self._parts, last):
            if (stop := part.end) == part.start:
                continue
            label = part.label[1:]
            if not (spans := self._spans) or (spans[-1].version, spans[-1].kv_version, spans[-1].mixed) != label:
                spans.append(VersionSpan(at, *label))
            tokens.append(part.columns.tokens(part.place, part.start, stop))
            logprobs.append(part.columns.logprobs(part.place, part.start, stop))
            at += stop - part.start
        self._parts, self._before = [], at
        self._last = None if last.stop is not None else last._replace(start=last.columns.count)
        self._tokens.frombytes(b"".join(tokens))
        self._logprobs.frombytes(b"".join(logprobs))
        return self


@dataclass(kw_only=True)
class Transcript:
    """A request and all that has been reported about it so far: what another engine needs to continue it.

    >>> transcript = Transcript(request=request)
    >>> write_down(first, {"t12/0": transcript}.get)
    >>> transcript.so_far().tokens, transcript.so_far().stop
    ((20,), 'interrupted')
    >>> write_down(second, {"t12/0": transcript}.get)
    >>> transcript.completion(end).versions()
    [4, 5]
    """

    request: Request
    _: KW_ONLY
    sampled: SampledTokens = field(default_factory=SampledTokens)
    details: list[TokenDetails] = field(default_factory=list)
    """Details of the first tokens. The tokens behind them have none."""
    scores: PromptScores | None = None
    end: Finished | None = None

    @property
    def tokens(self) -> array[int]:
        """[T]"""
        return self.sampled.tokens

    @property
    def logprobs(self) -> array[float]:
        """[T]"""
        return self.sampled.logprobs

    def at_present(self) -> SoFar:
        """Returns what has been reported until now, in a time that does not depend on the number of tokens."""
        return SoFar(self, len(self.sampled), len(self.details), self.scores, self.end)

    def so_far(self) -> Completion:
        """Returns the completion as it stands, with `stop` = `interrupted` if the request has not ended."""
        return self.at_present().completion()

    def completion(self, end: Finished) -> Completion:
        return self.at_present().completion(end)


class SoFar(msgspec.Struct, frozen=True, gc=False):
    """The reports of a request up to one moment, which later ones do not change. It belongs to no cycle, and a checkpoint takes one of
    each request in one turn of the event loop, so Python's garbage collector does not count it.

    >>> moment = transcript.at_present()
    >>> write_down(second, {"t12/0": transcript}.get)
    >>> len(transcript.tokens) - moment.count, len(moment.completion().tokens) == moment.count
    (1, True)
    """

    transcript: Transcript
    count: int
    """Tokens."""
    detailed: int
    """Tokens that have details."""
    scores: PromptScores | None
    end: Finished | None

    @property
    def tokens(self) -> array[int]:
        """[T]"""
        return self.transcript.sampled.tokens[: self.count]

    @property
    def spans(self) -> list[VersionSpan]:
        return [span for span in self.transcript.sampled.spans if span.start < self.count]

    def completion(self, end: Finished | None = None) -> Completion:
        """`end`: that of the request, if it is not `end` here, and it was not interrupted."""
        end = end or self.end or Finished(self.transcript.request.id, "interrupted")
        spans = tuple(self.spans)
        if (scores := self.scores) and not spans:
            spans = (VersionSpan(0, scores.version, scores.version, scores.mixed),)
        return Completion(
            tuple(self.tokens.tolist()),
            tuple(self.transcript.sampled.logprobs[: self.count].tolist()),
            spans,
            end.stop,
            error=end.error,
            prompt_logprobs=scores.logprobs if scores else None,
            prompt_top=scores.top if scores else None,
            top=self._top(),
            mask=self._mask(),
            routing=end.routing,
        )

    def _top(self) -> TopLogprobs | None:
        k = max([self.transcript.request.top_logprobs, *(len(detail.top_tokens) // 4 for detail in self._details)])
        if not k:
            return None
        nothing = array("i", [0] * k).tobytes(), array("f", [-math.inf] * k).tobytes()
        rows = [(detail.top_tokens, detail.top_logprobs) for detail in self._of_tokens()]
        padded = [[row + none[len(row) :] for row, none in zip(pair, nothing, strict=True)] for pair in rows]
        return TopLogprobs(k, b"".join(tokens for tokens, _ in padded), b"".join(logprobs for _, logprobs in padded))

    def _mask(self) -> SamplingMask | None:
        """Returns what was recorded, even if the request does not ask for it: a resumed run may have other settings."""
        if not self.transcript.request.return_mask and not any(
            detail.mask or detail.set_name for detail in self._details
        ):
            return None
        offsets, details = array("q", [0]), self._of_tokens()
        for detail in details:
            offsets.append(offsets[-1] + len(detail.mask) // 4)
        # an engine that continues the request sends its sets again
        sets = {detail.set_name: detail.set for detail in details if detail.set}
        place = {b"": -1} | {name: number for number, name in enumerate(sets)}
        set_of = array("i", [place[detail.set_name] for detail in details]).tobytes() if sets else b""
        return SamplingMask(
            b"".join(detail.mask for detail in details), offsets.tobytes(), tuple(sets.values()), set_of
        )

    def _of_tokens(self) -> list[TokenDetails]:
        """[T] the details of each token."""
        return self._details + [TokenDetails(self.transcript.request.id)] * (self.count - self.detailed)

    @property
    def _details(self) -> list[TokenDetails]:
        return self.transcript.details[: self.detailed]


def write_down(
    output: StepOutput, find: Callable[[str], Transcript | None], note: Callable[[StepOutput], None] | None = None
) -> None:
    """Adds the output of a pass to the transcripts. Requests that `find` does not know were cancelled, and are skipped. `note`: what adds the
    tokens, where that is done in another way."""
    for request_id in {detail.request_id for detail in output.details}:
        if transcript := find(request_id):  # tokens before, sampled under other settings, may have none
            missing = len(transcript.sampled) - len(transcript.details)
            transcript.details += [TokenDetails(request_id)] * missing
    if note:
        note(output)
    elif output.requests:
        runs = output.as_runs()
        columns = Columns(len(output.requests))
        columns.add(runs)
        for place, label in enumerate(labels_of(runs, output.mixed)):
            if transcript := find(label[0]):
                transcript.sampled.note(columns, place, label, start=0)
    for details in output.details:
        if transcript := find(details.request_id):
            transcript.details.append(details)
    for scores in output.scores:
        if transcript := find(scores.request_id):
            transcript.scores = scores


def spans_between(spans: Sequence[VersionSpan], start: int, stop: int) -> list[VersionSpan]:
    """Returns the spans of tokens [start, stop) of a completion, with positions counted from `start`.

    >>> [(span.start, span.version, span.kv_version) for span in spans_between([before, after], 1, 4)]
    [(0, 4, 4), (1, 5, 4)]
    """
    ends = [*(span.start for span in spans[1:]), stop]
    inside = [span for span, end in zip(spans, ends, strict=False) if max(start, span.start) < min(stop, end)]
    return [VersionSpan(max(0, span.start - start), span.version, span.kv_version, span.mixed) for span in inside]
