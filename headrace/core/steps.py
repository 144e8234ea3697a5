"""The reports of an engine after every forward pass, and the transcript of a completion that is made from them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

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


class StepOutput(Struct, frozen=True):
    """The result of one forward pass: columns over the requests that got a token, and the requests that ended.

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
    """One per column, for requests with an adapter the adapter's; empty if all are `version`."""
    details: tuple[TokenDetails, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    mixed: bool = False
    """Whether an update was being streamed in: some parameters are newer than `version` (see `VersionSpan.mixed`)."""


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
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    """Those of the first tokens. The tokens behind them have none."""
    scores: PromptScores | None = None
    end: Finished | None = None

    def copy(self) -> Transcript:
        """Returns a copy, which later reports do not change."""
        return Transcript(
            request=self.request,
            tokens=self.tokens.copy(),
            logprobs=self.logprobs.copy(),
            versions=self.versions.copy(),
            kv_versions=self.kv_versions.copy(),
            mixed=self.mixed.copy(),
            details=self.details.copy(),
            scores=self.scores,
            end=self.end,
        )

    def so_far(self) -> Completion:
        """Returns the completion as it stands, with `stop` = `interrupted` if the request has not ended."""
        return self.completion(self.end or Finished(self.request.id, "interrupted"))

    def completion(self, end: Finished) -> Completion:
        spans = spans_of(self.versions, self.kv_versions, self.mixed)
        if (scores := self.scores) and not spans:
            spans = (VersionSpan(0, scores.version, scores.version, scores.mixed),)
        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            spans,
            end.stop,
            error=end.error,
            prompt_logprobs=self.scores.logprobs if self.scores else None,
            prompt_top=self.scores.top if self.scores else None,
            top=self._top(),
            mask=self._mask(),
            routing=end.routing,
        )

    def _top(self) -> TopLogprobs | None:
        k = max([self.request.top_logprobs, *(len(detail.top_tokens) // 4 for detail in self.details)])
        if not k:
            return None
        nothing = array("i", [0] * k).tobytes(), array("f", [-math.inf] * k).tobytes()
        rows = [(detail.top_tokens, detail.top_logprobs) for detail in self._of_tokens()]
        padded = [[row + none[len(row) :] for row, none in zip(pair, nothing, strict=True)] for pair in rows]
        return TopLogprobs(k, b"".join(tokens for tokens, _ in padded), b"".join(logprobs for _, logprobs in padded))

    def _mask(self) -> SamplingMask | None:
        """Returns what was recorded, even if the request does not ask for it: a resumed run may have other settings."""
        if not self.request.return_mask and not any(detail.mask or detail.set_name for detail in self.details):
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
        return self.details + [TokenDetails(self.request.id)] * (len(self.tokens) - len(self.details))


def write_down(output: StepOutput, find: Callable[[str], Transcript | None]) -> None:
    """Adds the output of a pass to the transcripts. Requests that `find` does not know were cancelled, and are skipped."""
    versions = output.versions or (output.version,) * len(output.tokens)
    for request_id in {detail.request_id for detail in output.details}:
        if transcript := find(request_id):  # tokens before, sampled under other settings, may have none
            missing = len(transcript.tokens) - len(transcript.details)
            transcript.details += [TokenDetails(request_id)] * missing
    columns = zip(output.request_ids, output.tokens, output.logprobs, versions, output.kv_versions, strict=True)
    for request_id, token, logprob, version, kv_version in columns:
        if transcript := find(request_id):
            transcript.tokens.append(token)
            transcript.logprobs.append(logprob)
            transcript.versions.append(version)
            transcript.kv_versions.append(kv_version)
            transcript.mixed.append(output.mixed)
    for details in output.details:
        if transcript := find(details.request_id):
            transcript.details.append(details)
    for scores in output.scores:
        if transcript := find(scores.request_id):
            transcript.scores = scores


def spans_of(
    versions: Sequence[int], kv_versions: Sequence[int], mixed: Sequence[bool] | None = None
) -> tuple[VersionSpan, ...]:
    """Encodes the [T] versions of tokens as runs. Without `mixed` [T] no token is mixed.

    >>> spans_of([4, 4, 5], [4, 4, 4]) == (before, after)
    True
    """
    spans: list[VersionSpan] = []
    flags = [False] * len(versions) if mixed is None else mixed
    for start, facts in enumerate(zip(versions, kv_versions, flags, strict=True)):
        if not spans or (spans[-1].version, spans[-1].kv_version, spans[-1].mixed) != facts:
            spans.append(VersionSpan(start, *facts))
    return tuple(spans)
