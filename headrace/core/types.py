"""The nouns of headrace: one frozen type per stage, each born complete.

Read this file, then `batches.py`, then `protocols.py`, then `loop/pipeline.py`, and you have understood the system.
    Prompt --ticket--> Request --engine--> Completion --> Episode --scorer--> Scored --> Group --> Batch --> WeightUpdate

A stage makes a new value; it never fills a hole in an old one. Every type is a `msgspec.Struct`, so that the same value
travels between processes, into the journal and into a checkpoint (all msgpack) without a second definition.

One small case runs through the examples of this file, of `batches.py`, `weights.py`, `steps.py`, `reports.py` and
`protocols.py`: two rollouts of a prompt of four tokens; version 5 of the weights goes live while the first of them is sampled.
`tests/test_examples.py` evaluates them in this order.

Legend for shapes: P prompts a step, G rollouts a prompt, T tokens of one sequence, N packed tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Stop = Literal["stop", "length", "interrupted", "error"]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all nouns: frozen, compared by value, refuses fields it does not know."""


class Prompt(Struct, frozen=True):
    """A prompt as a task yields it, already through the chat template (which is applied once, here and nowhere else).

    >>> prompt = Prompt(id="sums/7", text="2+3=", tokens=(1, 17, 10, 18), columns={"answer": "5"})
    """

    id: str
    """Unique within the task and stable across restarts: accounting and resuming rely on it."""
    text: str
    """The question as a person wrote it, for reward functions, journals and reports. Never re-tokenised."""
    tokens: tuple[int, ...]
    columns: dict[str, Any] = {}
    """The other columns of the data row, passed to reward functions by name. JSON-able."""
    chat: str = ""
    """The column that holds the conversation that `text`, its last question, belongs to; empty for a prompt of one text."""
    images: tuple[str, ...] = ()
    """The files of the images that the model is shown, in order; each is named by the digest of its content. Among `tokens` they have numbers beyond
    the vocabulary."""
    rollouts: int = 0
    """The number of rollouts of its group, if a curriculum has chosen it (`curriculum.largest_group`). 0: `rollout.group_size`."""


class Constraint(Struct, frozen=True):
    """A language that a completion must belong to. At every position only those tokens can be sampled with which it still can, and the
    completion ends where it does.

    >>> constraint = Constraint("regex", "[0-9]+")
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
    """The schema as JSON, the regular expression, the choices as a JSON list of texts, or a grammar in llguidance's variant of Lark's format."""
    after: str = ""
    """The text behind which it begins to hold, such as the mark at the end of a model's thinking; empty: it holds from the first token."""


class Sampling(Struct, frozen=True):
    """Sampling settings. The log-probs returned are always those of the distribution that these settings make.

    >>> sampling = Sampling(max_tokens=4, temperature=0.8, seed=7)
    """

    max_tokens: int = 64
    """0 samples nothing: for a request that only scores its prompt (`Request.prompt_logprobs`)."""
    temperature: float = 1.0
    """0 is greedy (log-probs are then those at temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Keeps tokens of probability >= min_p * max probability. Order of filters: temperature, top_k, top_p, min_p."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. They are matched in its text only, not in the prompt, and their tokens stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    seed: int = 0
    """Token t of a request is drawn with a number that depends on (seed, t) alone, not on the batch or on restarts."""
    constraint: Constraint | None = None
    """Tokens that it rules out are taken out first: temperature, top_k, top_p and min_p see what is left."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, number added to its logit), before temperature and filters. No trainer can repeat it: such a completion is not trained on."""


class Fork(Struct, frozen=True):
    """A request to continue another request from one of its tokens, over that request's KV entries: only the token before the
    first one sampled is computed again.

    >>> fork = Fork(of="t12/0", at_token=2)  # keeps the prompt and the first two sampled tokens of t12/0
    """

    of: str
    """Id of a request that runs, or that ended recently. The fork is refused when its KV entries have been freed."""
    at_token: int
    """Number of tokens of its completion that are kept; 0 keeps its prompt alone."""


class Request(Struct, frozen=True):
    """One completion asked of an engine. Requests with equal prompts (those of a group) share the prompt's KV entries: an engine
    computes them once per version of the weights.

    >>> request = Request("t12/0", prompt.tokens, sampling)
    >>> continued = Request("b", (), sampling, fork=fork)  # a fork has no prompt of its own
    """

    id: str
    prompt: tuple[int, ...]
    """Empty for a fork."""
    sampling: Sampling
    prefix: tuple[int, ...] = ()
    """Tokens already sampled for this request, for example before an engine died. They are forwarded, not sampled again, they
    count towards `max_tokens`, and the engine does not return them."""
    priority: int = 0
    """Requests with a lower number are admitted first, those with equal numbers in their order of arrival."""
    adapter: str = ""
    """Name of a loaded LoRA adapter; empty for the base model. A fork has the adapter of its source."""
    fork: Fork | None = None
    prompt_logprobs: bool = False
    """Return the log-probs (temperature 1) of the prompt's tokens. The whole prompt is then computed again, under one version."""
    top_logprobs: int = 0
    """Return the log-probs of this many most probable tokens at every position that is sampled or scored."""
    return_mask: bool = False
    """Return the vocabulary that the constraint, top-k, top-p and min-p left at every position (`SamplingMask`)."""
    return_routing: bool = False
    """Return the experts that every position was routed to (`RoutingTrace`)."""


class RolloutKey(Struct, frozen=True):
    """The place of one completion in a run. `str` gives the request id, which is the same in every process.

    >>> str(RolloutKey(12, 0)), str(RolloutKey(12, 0, turn=2)), str(RolloutKey(12, 0, adapter="math"))
    ('t12/0', 't12/0.2', 'math:t12/0')
    >>> RolloutKey.read("math:t12/0.2")
    RolloutKey(ticket=12, index=0, turn=2, adapter='math', context='')
    >>> str(RolloutKey(12, 0, turn=2, context="5e01"))
    't12/0.2~5e01'
    """

    ticket: int
    """Number of the group's prompt in the order of drawing, from 0. A ticket is drawn before its prompt is sampled, and given
    back when the weights that its group trained are live, or when the group ends untrained (C1)."""
    index: int
    """Number of the rollout in its group, from 0."""
    turn: int = 0
    """Number of the turn in its rollout, from 0; 0 is not spelled out in the id."""
    adapter: str = ""
    """The adapter that is trained; empty where all weights are."""
    context: str = ""
    """A digest of the tokens before the turn, and of a constraint of its own (`episodes/episodes.py`); empty where they are the prompt of the group. A recorded turn is
    found again by the tokens that it was sampled after, and never used after others (C5)."""

    def __str__(self) -> str:
        owner, turn = f"{self.adapter}:" if self.adapter else "", f".{self.turn}" if self.turn else ""
        context = f"~{self.context}" if self.context else ""
        return f"{owner}t{self.ticket}/{self.index}{turn}{context}"

    @classmethod
    def read(cls, request_id: str) -> RolloutKey | None:
        """Parses a request id; None for an id that belongs to no rollout (a probe, an evaluation)."""
        adapter, _, name = request_id.rpartition(":")
        ticket, _, rest = name.partition("/")
        place, _, context = rest.partition("~")
        index, _, turn = place.partition(".")
        try:
            key = cls(int(ticket[1:]), int(index), int(turn or 0), adapter, context)
        except ValueError:
            return None
        right = str(key) == request_id and min(key.ticket, key.index, key.turn) >= 0
        return key if right else None  # `int` accepts spellings that `str` never writes, such as "01"


class VersionSpan(Struct, frozen=True):
    """A run of tokens sampled by the same weights, from token `start` of the completion to the start of the next span.

    A request that uses an adapter has the adapter's versions.

    >>> before = VersionSpan(start=0, version=4, kv_version=4)
    >>> after = VersionSpan(start=2, version=5, kv_version=4)  # new weights went live; the KV entries of before were kept
    """

    start: int
    version: int
    kv_version: int
    """The oldest version among the KV entries that these tokens attended to (<= version)."""
    mixed: bool = False
    """Whether the tokens were sampled while an update was streamed in: `version` is then the oldest in use, and some
    parameters were newer."""


class TopLogprobs(Struct, frozen=True):
    """The most probable tokens of each position, most probable first.

    >>> from array import array
    >>> top = TopLogprobs(k=2, tokens=array("i", [20, 9]).tobytes(), logprobs=array("f", [-0.1, -2.5]).tobytes())  # T = 1
    """

    k: int
    tokens: bytes = b""
    """[T, k] int32, row by row"""
    logprobs: bytes = b""
    """[T, k] float32, row by row"""


class SamplingMask(Struct, frozen=True):
    """The vocabulary that was left at each position: by top-k, top-p and min-p as compressed sparse rows, by a constraint alone as sets.

    An empty row without a set means that nothing was cut at its position. This is unambiguous, since at least one token is always kept.
    A constraint leaves one token here and nearly all of them there, but few different sets, so each of these is written once.

    >>> mask = SamplingMask(array("i", [9, 20]).tobytes(), array("q", [0, 2, 2]).tobytes())  # T = 2; nothing cut at the second
    """

    token_ids: bytes
    """[M] int32, ascending in each row"""
    offsets: bytes
    """[T + 1] int64: position t holds token_ids[offsets[t]:offsets[t + 1]]"""
    sets: tuple[bytes, ...] = ()
    """The different sets of tokens, encoded (`sampling_masks.encode_set`)."""
    set_of: bytes = b""
    """[T] int32: which of the sets was left at each position, -1 for none; empty if there are no sets. The row of a position that has one
    is empty."""


class RoutingTrace(Struct, frozen=True):
    """The experts chosen at every forwarded position: the prompt and the completion without its last token.

    The choices are those that made the KV entries in use. For a position whose entries another request computed, they are that
    request's; for a position computed again (after a swap with `engine.swap = "recompute"`, or after its entries had been
    freed to make room), they are the last ones.

    >>> routing = RoutingTrace(layers=2, k=1, width=1, experts=bytes([3, 0, 1, 7]))  # two positions, two layers
    """

    layers: int
    """Number of layers that have experts."""
    k: int
    width: int
    """Bytes per expert number: 1, or 2 if there are more than 256 experts."""
    experts: bytes
    """[T', layers, k], the best expert first, from position `start` on: a turn has those that the turns before it lack"""
    start: int = 0


class Completion(Struct, frozen=True):
    """The sampled tokens of one request. C4: the versions of the spans never decrease; every token lies in exactly one span.

    >>> completion = Completion((20, 9, 2), (-0.1, -0.7, -0.2), (before, after), "stop", text="5.")
    >>> completion.versions()
    [4, 4, 5]
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[T] log-probs of the distribution that the tokens were sampled from."""
    spans: tuple[VersionSpan, ...]
    """The versions of the tokens. A request that only scored its prompt has one span without tokens, with the version that scored it."""
    stop: Stop
    text: str = ""
    """Decoded for rewards and reports; training never reads it (C5)."""
    error: str = ""
    """The cause, if `stop` is `error`."""
    prompt_logprobs: tuple[float, ...] | None = None
    """[prompt - 1] log-probs at temperature 1 of the prompt's tokens from the second on, each given those before it, all
    under the version of the first span."""
    prompt_top: TopLogprobs | None = None
    """[prompt - 1, k] the most probable tokens at the same positions."""
    top: TopLogprobs | None = None
    """[T, k] the most probable tokens of the distributions sampled from."""
    mask: SamplingMask | None = None
    routing: RoutingTrace | None = None

    def versions(self) -> list[int]:
        """[T] the version of every token."""
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
    """One completion within an episode, and the tokens before it.

    >>> turn = Turn(prompt.tokens, completion)
    >>> reply = Turn((30, 31), completion, parents=(0,))  # 30, 31: the result of a tool, after the tokens of turn 0
    """

    context: tuple[int, ...]
    """The tokens before the completion that its parents do not hold."""
    completion: Completion
    parents: tuple[int, ...] = ()
    """Indices of turns in the episode. One without parents begins a path: the first, or one before which a template rewrote history."""
    agent: str = ""
    """The role that the policy plays in it, if the episode has several; empty for the only one, or the first."""
    trained: bool = True
    """Whether its completion is trained. That of an agent which is a part of the world of the others is context."""
    messages: tuple[dict[str, Any], ...] = ()
    reply: dict[str, Any] = {}
    """The messages that are new before the completion, and the completion as one, in a chat. Training never makes tokens of them (C5)."""
    rewrites: tuple[int, ...] = ()
    """The index of the turn whose conversation it continues, if a template has rewritten the messages up to that turn."""
    state: str = ""
    """The name that its environment gave the state in which it began; empty if it gave none."""


class Episode(Struct, frozen=True):
    """A rollout: a directed graph of turns. A single-turn rollout is an episode of one turn.

    >>> episode = Episode((turn,))
    >>> episode.last.text
    '5.'
    """

    turns: tuple[Turn, ...]
    cut: str = ""
    """The limit at which the episode was cut off: `turns`, `tokens` or `seconds`. Empty if its environment ended it."""

    @property
    def last(self) -> Completion:
        return self.turns[-1].completion

    @property
    def sampled(self) -> int:
        """Tokens that were sampled, in all turns."""
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        return bool(self.cut) or self.last.stop == "length"


class TeacherTrace(Struct, frozen=True):
    """The log-probs that another model gives the tokens of a completion, or of a row.

    >>> trace = TeacherTrace("math", versions=(0, 0, 0), logprobs=(-0.2, -1.1, -0.1))
    """

    name: str
    versions: tuple[int, ...]
    """[T] versions of the teacher's weights; 0 for a teacher that never changes."""
    logprobs: tuple[float, ...]
    """[T] at temperature 1. NaN for tokens that the teacher did not score."""
    top: TopLogprobs | None = None
    """[T, k] the teacher's most probable tokens, if whole distributions are compared."""


class Branch(Struct, frozen=True):
    """One end of an episode that branches: the turns from `first` on and before `end`, and what they earned. `cut`: as of an episode.

    >>> branch = Branch(first=1, end=3, reward=1.0, rewards={"exact": 1.0})  # turns 1 and 2 follow turn 0, as others do
    """

    first: int
    end: int
    reward: float
    rewards: dict[str, float]
    cut: str = ""


class Scored(Struct, frozen=True):
    """An episode with its rewards, each by the name of the function or service that gave it.

    >>> right = Scored(episode, reward=1.0, rewards={"exact": 1.0})
    """

    episode: Episode
    reward: float
    """The weighted sum of `rewards`."""
    rewards: dict[str, float]
    teachers: tuple[TeacherTrace, ...] = ()
    """One per turn, if a teacher scored the episode."""
    references: tuple[tuple[float, ...], ...] = ()
    """The [T] log-probs of the reference model per turn, if the KL to it is part of the reward."""
    extracted: dict[str, str] = {}
    """The part of the completion that each reward function was given, by its name, if not all of it (`reward.extract`)."""
    turn_rewards: tuple[dict[str, float], ...] = ()
    """The rewards that the environment gave to single turns, by name, one dict per turn. `rewards` has their sums."""
    segments: tuple[tuple[tuple[int, float, float], ...], ...] = ()
    """The steps of each turn under a process reward: tokens up to a step's end, its score, its weighted return (`scoring/extract.py`)."""
    branches: tuple[Branch, ...] = ()
    """The ends of an episode that branches (`rollout.forks`); `reward` and `rewards` are then their means."""
