"""What an engine tells after every forward pass, and how a completion is put together from it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.types import (
    Completion,
    Request,
    RoutingTrace,
    SamplingMask,
    Stop,
    Struct,
    TopLogprobs,
    VersionSpan,
    spans_of,
)


class Finished(Struct, frozen=True):
    request_id: str
    stop: Stop
    error: str = ""
    routing: RoutingTrace | None = None


class PromptScores(Struct, frozen=True):
    """What a request wanted to know of its prompt: told once, when all of it is known, before anything is sampled."""

    request_id: str
    version: int
    logprobs: tuple[float, ...]
    top: TopLogprobs | None = None
    mixed: bool = False
    """As in `VersionSpan`."""


class TokenDetails(Struct, frozen=True):
    """What some requests want beside the token that was sampled: one row of `TopLogprobs` and of `SamplingMask`."""

    request_id: str
    top_tokens: bytes = b""
    top_logprobs: bytes = b""
    mask: bytes = b""


class StepOutput(Struct, frozen=True):
    """What one forward pass sampled: columns over the rows that got a token, and the requests that ended."""

    version: int
    request_ids: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    kv_versions: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()
    versions: tuple[int, ...] = ()
    """Empty where all are `version`; else one per row, for rows with an adapter the adapter's."""
    details: tuple[TokenDetails, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    mixed: bool = False
    """An update was being streamed in: some parameters are newer than `version` (see `VersionSpan.mixed`)."""


@dataclass
class Transcript:
    """A request and what has been told of it so far: all that another engine needs to go on with it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    scores: PromptScores | None = None
    end: Finished | None = None

    def copy(self) -> Transcript:
        """As it is now: nothing that is told later shows in it."""
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
        """`interrupted` where it has not ended."""
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
        if not self.request.top_logprobs:
            return None
        tokens = b"".join(one.top_tokens for one in self.details)
        return TopLogprobs(self.request.top_logprobs, tokens, b"".join(one.top_logprobs for one in self.details))

    def _mask(self) -> SamplingMask | None:
        if not self.request.return_mask:
            return None
        offsets = array("q", [0])
        for one in self.details:
            offsets.append(offsets[-1] + len(one.mask) // 4)
        return SamplingMask(b"".join(one.mask for one in self.details), offsets.tobytes())


def write_down(output: StepOutput, find: Callable[[str], Transcript | None]) -> None:
    """Puts what a pass sampled into the transcripts; unknown requests (cancelled meanwhile) are skipped."""
    versions = output.versions or (output.version,) * len(output.tokens)
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
