"""The nouns of headrace: one frozen type per stage, each born complete.

Read this file, then `protocols.py`, then `orchestration/loops/pipeline.py`, and you have understood the system.

    Prompt --ticket--> Request --engine--> Completion --> Episode --scorer--> Scored --> Group --> Batch --> WeightUpdate

A stage makes a new value; it never fills a hole in an old one. Every type is a `msgspec.Struct`, so that the same value
travels between processes (msgpack), into the journal (JSON) and into a checkpoint without a second definition.

Legend for shapes: P prompts a step, G rollouts a prompt, T tokens of one sequence, N packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Stop = Literal["stop", "length", "interrupted", "error"]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all nouns: frozen, compared by value, refuses fields it does not know."""


class Prompt(Struct, frozen=True):
    """One prompt as drawn from a task, already through the chat template (which is applied once, here and nowhere else)."""

    id: str
    """Unique within the task and stable across restarts: the accounting and the resume test rest on it."""
    text: str
    """What the person asked, for reward functions, journals and reports. Never re-tokenised."""
    tokens: tuple[int, ...]
    columns: dict[str, Any] = {}
    """The row's other columns, handed to reward functions by name. JSON-able."""
    chat: str = ""
    """The column that holds the conversation of which `text` is the last question; empty where the prompt is one text."""


class Sampling(Struct, frozen=True):
    """How tokens are drawn. Log-probs returned are always of the distribution these settings make."""

    max_tokens: int = 64
    """0 samples nothing: for requests that only score their prompt (`Request.prompt_logprobs`)."""
    temperature: float = 1.0
    """0 is greedy (log-probs are then those at temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Keeps tokens of probability >= min_p * max probability. Order of filters: temperature, top_k, top_p, min_p."""
    stop: tuple[str, ...] = ()
    """Matched in the text of the completion only, never in the prompt. The tokens that matched stay in the completion."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    seed: int = 0
    """Token t of a request is drawn with a number that depends on (seed, t) alone: not on the batch, not on restarts."""


class Fork(Struct, frozen=True):
    """Go on from an earlier token of another request, over the cache entries that it has: nothing is computed again but the
    one token before the first that is sampled."""

    of: str
    """Id of a request that runs, or that ended not long ago. Refused when its cache entries live no more."""
    at_token: int
    """Tokens of its completion that are kept: the fork samples what comes behind them. 0 keeps its prompt alone."""


class RolloutKey(Struct, frozen=True):
    """Which completion of a run a request asks for. `str` spells it as the request's id, the same in every process:

    rollout 3 of ticket 12              RolloutKey(12, 3)                    t12/3
    its third turn                      RolloutKey(12, 3, turn=2)            t12/3.2
    beside others in one engine         RolloutKey(12, 3, adapter="math")    math:t12/3
    """

    ticket: int
    index: int
    """Of the rollout in its group, from 0."""
    turn: int = 0
    adapter: str = ""

    def __str__(self) -> str:
        owner, turn = f"{self.adapter}:" if self.adapter else "", f".{self.turn}" if self.turn else ""
        return f"{owner}t{self.ticket}/{self.index}{turn}"

    @classmethod
    def read(cls, request_id: str) -> RolloutKey | None:
        """None for a request that is no rollout's: a probe's, or an evaluation's."""
        adapter, _, name = request_id.rpartition(":")
        ticket, _, place = name.partition("/")
        index, _, turn = place.partition(".")
        try:
            key = cls(int(ticket[1:]), int(index), int(turn or 0), adapter)
        except ValueError:
            return None
        right = str(key) == request_id and min(key.ticket, key.index, key.turn) >= 0
        return key if right else None  # `int` takes more than we write: "01", say


class Request(Struct, frozen=True):
    """Requests with equal prompts (a group's, say) share it: an engine computes it once for each version of the weights."""

    id: str
    prompt: tuple[int, ...]
    """Empty for a fork."""
    sampling: Sampling
    prefix: tuple[int, ...] = ()
    """Tokens already sampled for this request (before an engine died, say). They are forwarded, not sampled again, count
    towards `max_tokens`, and are not part of what the engine returns."""
    priority: int = 0
    """Lower goes first; equal ones in their order of arrival."""
    adapter: str = ""
    """Name of a LoRA adapter that is loaded; empty for the base model. A fork has that of its source."""
    fork: Fork | None = None
    prompt_logprobs: bool = False
    """Return the log-probs (temperature 1) of the prompt's tokens. The prompt is then computed anew, under one version."""
    top_logprobs: int = 0
    """Return the log-probs of so many most probable tokens at every position that is sampled (or scored)."""
    return_mask: bool = False
    """Return which vocabulary top-k, top-p and min-p kept at every position."""
    return_routing: bool = False
    """Return which experts every position went to."""


def scoring(request_id: str, tokens: Sequence[int], priority: int = 0, adapter: str = "") -> Request:
    """A request for the log-probs of `tokens` and nothing else: `Completion.prompt_logprobs`."""
    return Request(
        request_id, tuple(tokens), Sampling(max_tokens=0), priority=priority, adapter=adapter, prompt_logprobs=True
    )


class VersionSpan(Struct, frozen=True):
    """Tokens from `start` on were sampled by the weights `version` (until the next span starts).

    Of a request with an adapter both versions are the adapter's.
    """

    start: int
    version: int
    kv_version: int
    """The oldest weights that computed any of the KV entries those tokens attended to (<= version)."""
    mixed: bool = False
    """Sampled while an update was streamed in, when some parameters were newer than `version`, the oldest in use."""


class TopLogprobs(Struct, frozen=True):
    """The most probable tokens of each position, most probable first. [T, k] int32 and float32, as bytes in rows."""

    k: int
    tokens: bytes = b""
    logprobs: bytes = b""


class SamplingMask(Struct, frozen=True):
    """The vocabulary that was left to be sampled from at each position, compressed by rows.

    An empty row is one from which nothing was cut. It cannot be mistaken for one that keeps nothing: one token always stays.
    """

    token_ids: bytes
    """[M] int32, ascending in each row"""
    offsets: bytes
    """[T + 1] int64: position t holds token_ids[offsets[t]:offsets[t + 1]]"""


class RoutingTrace(Struct, frozen=True):
    """[T', layers, k] experts chosen, best first, at every forwarded position: prompt and completion but its last token.

    Of a position that another request had computed it is what that pass chose, of one that was computed again (after a swap
    with `engine.swap = "recompute"`, or when room had run out) the last choice: that of the cache entries in use.
    """

    layers: int
    """Those with experts."""
    k: int
    width: int
    """Bytes of one expert's number: 1, or 2 above 256 experts."""
    experts: bytes


class Completion(Struct, frozen=True):
    """What an engine sampled. C4: versions of the spans never decrease; every token lies in exactly one span."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[T] of the distribution really sampled from."""
    spans: tuple[VersionSpan, ...]
    """One (of no token) when the request only scored its prompt: under which version."""
    stop: Stop
    text: str = ""
    """Decoded for rewards and reports; training never reads it (C5)."""
    error: str = ""
    """What went wrong, where `stop` is `error`."""
    prompt_logprobs: tuple[float, ...] | None = None
    """[prompt - 1] of its tokens but the first, given what precedes them, at temperature 1. All under one version: that of the
    first span."""
    prompt_top: TopLogprobs | None = None
    """[prompt - 1, k] beside `prompt_logprobs`."""
    top: TopLogprobs | None = None
    """[T, k] of the distributions sampled from."""
    mask: SamplingMask | None = None
    routing: RoutingTrace | None = None

    def versions(self) -> list[int]:
        """[T] the version of every token, spans unrolled."""
        return [span.version for span in self._unrolled()]

    def kv_versions(self) -> list[int]:
        """[T] the oldest version among the cache entries that each token was sampled over."""
        return [span.kv_version for span in self._unrolled()]

    def _unrolled(self) -> list[VersionSpan]:
        if not self.spans:
            return []
        ends = [*(s.start for s in self.spans[1:]), len(self.tokens)]
        return [span for span, end in zip(self.spans, ends, strict=True) for _ in range(span.start, end)]


class Turn(Struct, frozen=True):
    """One completion within an episode. `context` are the tokens before it that its parents do not already hold."""

    context: tuple[int, ...]
    completion: Completion
    parents: tuple[int, ...] = ()
    agent: str = ""


class Episode(Struct, frozen=True):
    """A directed graph of turns. A single-turn rollout is an episode of one turn."""

    turns: tuple[Turn, ...]

    @property
    def last(self) -> Completion:
        return self.turns[-1].completion


class TeacherTrace(Struct, frozen=True):
    """What another model thinks of tokens that the policy sampled: [T] over a completion, or over a row."""

    name: str
    versions: tuple[int, ...]
    """[T] of the teacher's weights; 0 of one that never changes."""
    logprobs: tuple[float, ...]
    """[T] at temperature 1. NaN where it was not asked."""
    top: TopLogprobs | None = None
    """[T, k] its most probable tokens, where whole distributions are compared."""


class Scored(Struct, frozen=True):
    """An episode with its reward, and the name of who gave each part of it."""

    episode: Episode
    reward: float
    """The weighted sum of `rewards`."""
    rewards: dict[str, float]
    teachers: tuple[TeacherTrace, ...] = ()
    """One for each turn, where a teacher was asked."""
    references: tuple[tuple[float, ...], ...] = ()
    """For each turn, [T] log-probs of the reference model, where the KL to it is part of the reward."""
    extracted: dict[str, str] = {}
    """What a reward function was given of the completion, by its name, where that is not the whole text (`reward.extract`)."""


OUTAGES = ("engine_error", "teacher_error", "reference_error", "reward_unreachable")
"""Reasons of failures that are nobody's fault who could mend data or reward."""


class Failure(Struct, frozen=True):
    """A rollout that could not be had or scored. It is data with a reason (C2), never a reward of zero."""

    reason: str
    """A short stable name: `reward_raised`, `reward_timeout`, `reward_nan`, `engine_error`, `prompt_too_long`, ..."""
    detail: str = ""
    traceback: str = ""
    """Where the user's function raised, its own frames alone; the last line is `KeyError: 'b'`. Empty where nothing raised."""

    @property
    def kind(self) -> str:
        """`KeyError`, where something raised; else the reason."""
        return self.traceback.rpartition("\n")[2].partition(":")[0] or self.reason

    @property
    def outage(self) -> bool:
        """Whether it was the engine or the network that failed, not the data or the reward: to try again later may help."""
        return self.reason in OUTAGES


class Row(Struct, frozen=True):
    """One training row: a root-to-leaf path of an episode. Everything in it is [T] over the sampled tokens but `prompt`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The sampler's. A non-finite one removes its token from numerator and denominator (and is counted)."""
    advantages: tuple[float, ...]
    mask: tuple[bool, ...]
    """False keeps a token as context and takes it out of the loss and its denominator."""
    versions: tuple[int, ...]
    sampling_mask: SamplingMask | None = None
    """[T] the vocabulary that was left at each position; an empty row where nothing was cut (and for context)."""
    routing: RoutingTrace | None = None
    """[T', layers, k] from the prompt's first token on; what lies behind it was not recorded."""
    teacher: TeacherTrace | None = None
    """[T]"""
    kv_versions: tuple[int, ...] = ()
    """[T] the oldest weights that computed any of the cache entries each token was sampled over; empty: those of `versions`."""


class Group(Struct, frozen=True):
    """G scored rollouts of one prompt with their advantages: what the buffer holds and the trainer consumes."""

    ticket: int
    """Admission number: groups were admitted in this order (C1)."""
    prompt: Prompt
    scored: tuple[Scored, ...]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...] = ()
    """Rollouts of this group that failed; the others are normalised among themselves."""


class Batch(Struct, frozen=True):
    """What one optimizer step consumes. `step` is the number of optimizer steps done before it, so lag = step - version."""

    step: int
    groups: tuple[Group, ...]
    temperature: float = 1.0
    adapter: str = ""
    """Which adapter it trains; empty where all weights are trained."""
    skippable: bool = True
    """Whether it is skipped where everything in it is rejected. Of a step that is done again the journal says whether it was: before
    2026-11-22 none was."""
    steps: int = 0
    """Optimizer steps of the run as they are planned now, which the learning rate goes by; 0: `train.steps`."""

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]


def spans_of(
    versions: Sequence[int], kv_versions: Sequence[int], mixed: Sequence[bool] | None = None
) -> tuple[VersionSpan, ...]:
    """Run-length code of per-token versions. `mixed`: none are, unless given."""
    spans: list[VersionSpan] = []
    flags = [False] * len(versions) if mixed is None else mixed
    for start, one in enumerate(zip(versions, kv_versions, flags, strict=True)):
        if not spans or (spans[-1].version, spans[-1].kv_version, spans[-1].mixed) != one:
            spans.append(VersionSpan(start, *one))
    return tuple(spans)
