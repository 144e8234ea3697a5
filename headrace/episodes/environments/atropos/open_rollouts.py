"""The rollouts that environments of Atropos may play, and which of them a request belongs to.

Nothing in a request names a rollout. A request that continues the tokens of a rollout is its next turn. Any other begins a rollout: in the
ticket whose first request was the same, as long as that has rollouts left, or in the ticket that has waited longest. While there is none,
the request waits. So a ticket is drawn before its prompt is sampled (C1), and the run paces its environments.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from headrace.core.errors import RolloutFailed
from headrace.core.rewards import Unusable, number_of
from headrace.episodes.environments.gateway.history_trees import GatewayRollout, TreeReply
from headrace.web.bodies import Body, Count, Drawing, Token
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.sending import decoded_in_turns, read_bytes

# --- Bodies of the requests of atroposlib 0.4
# Of its trajectory API (`atroposlib/api/server.py`), and of its client of vLLM servers (`atroposlib/envs/server_handling/vllm_server.py`).
# Unknown fields of the trajectory API are ignored, as its own server does.


T = TypeVar("T")

MASKED = -100
"""The number in a mask at tokens that are not to be trained."""


class EnvRegistration(msgspec.Struct, kw_only=True):
    """`/register-env`"""

    max_token_length: Count
    desired_name: str | None = None
    weight: float = 1.0
    group_size: int
    min_batch_allocation: float | None = None


class EnvNumber(msgspec.Struct, kw_only=True):
    """`/status-env` and `/disconnect-env`"""

    env_id: int


class PostedGroup(msgspec.Struct, kw_only=True):
    """`/scored_data`, and an item of `/scored_data_list`: one group."""

    tokens: list[list[Token]]
    """The sequences, prompts included."""
    masks: list[list[int]]
    """`MASKED` or the token, for each token."""
    scores: list[float]
    advantages: list[Any] | None = None
    overrides: list[Any] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    distill_token_ids: list[Any] | None = None
    distill_logprobs: list[Any] | None = None

    def problem(self) -> str:
        """Returns why nothing of it can be trained; empty if it can be."""
        if not self.tokens or not len(self.tokens) == len(self.masks) == len(self.scores):
            return (
                f"{len(self.tokens)} sequences, {len(self.masks)} masks and {len(self.scores)} scores are not a group"
            )
        overrides = [name for name in self.group_overrides or () if name != "group_size"]
        given = {
            "advantages": any(map(bool, self.advantages or ())),
            "overrides": any(map(bool, self.overrides or ())),
            "group_overrides": bool(overrides),
            "images": any(map(bool, self.images or ())),
            "distill_token_ids": bool(self.distill_token_ids),
            "distill_logprobs": bool(self.distill_logprobs),
        }
        if found := [name for name, there in given.items() if there]:
            return f"{found[0]} are given, and this trainer has its own: leave them out"
        return ""


class PromptTokens(Body, kw_only=True):
    prompt_token_ids: list[Token]


class TokensWanted(Drawing, kw_only=True, forbid_unknown_fields=True):
    """`/generate`: the completions of a prompt in tokens."""

    prompt: PromptTokens
    max_tokens: Count | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    stream: bool = False


async def read_posted(request: HttpRequest, kind: type[T], limits: ServerLimits) -> T:
    """Returns a body, which may be compressed with gzip. Raises Refused."""
    body = await read_bytes(request, "application/json", limits)
    if "gzip" in request.headers.get("content-encoding", "").lower():
        unpacking = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            body = unpacking.decompress(body, limits.body_bytes + 1)
        except zlib.error:
            raise Refused(400, "the body says that it is gzip, and is not") from None
        if len(body) > limits.body_bytes:
            raise Refused(413, f"a body may have {limits.body_bytes} bytes when it is unpacked")
    return await decoded_in_turns(body, kind)


# --- open rollouts ------------------------------------------------------------


def digest_of(tokens: Sequence[int]) -> bytes:
    return blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def _unfinished() -> asyncio.Future[float]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, kw_only=True)
class OpenRollout:
    """A rollout that an environment may play."""

    served: GatewayRollout
    ticket: OpenTicket
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[float] = field(default_factory=_unfinished)
    """Its score."""
    busy: bool = False
    """Whether a later turn of it is being sampled."""
    tokens: tuple[int, ...] = ()
    """All tokens up to the end of the last turn."""
    sampled: list[range] = field(default_factory=list)
    """The places of the completions among them."""
    digest: bytes = b""

    @property
    def playing(self) -> bool:
        return self.taken.is_set() and not self.ended.done()

    def extended(self, turn: TreeReply) -> None:
        """Takes note of a turn."""
        if turn.completion is None:
            return
        assert turn.path is not None, "a completion ends a path"
        tokens = turn.path.tokens()
        if self.tokens != tokens[: len(self.tokens)]:  # the template has rewritten history: a path of its own
            self.sampled.clear()
        self.tokens, self.digest = tokens, digest_of(tokens)
        self.sampled.append(range(len(tokens) - len(turn.completion.tokens), len(tokens)))

    def score(self, score: float) -> None:
        if not self.ended.done():
            self.ended.set_result(score)

    def fail(self, reason: str, detail: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RolloutFailed(reason, detail))
            self.ended.exception()  # whoever plays it may have left already


@dataclass(eq=False)
class OpenTicket:
    """The rollouts of one ticket."""

    prompt_id: str
    first: bytes = b""
    """The digest of the request that began it; empty if none has."""
    rollouts: list[OpenRollout] = field(default_factory=list)

    def free(self) -> list[OpenRollout]:
        return [rollout for rollout in self.rollouts if not rollout.taken.is_set() and not rollout.ended.done()]


class _Wanted(NamedTuple):
    first: bytes
    rollouts: int
    found: asyncio.Future[list[OpenRollout]]


class OpenRollouts:
    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._tickets: list[OpenTicket] = []
        """Tickets with rollouts that are not over, the oldest first."""
        self._wanted: deque[_Wanted] = deque()
        self._closed = False
        self.newest = 0
        """The newest version that has sampled a turn."""

    @contextmanager
    def offered(self, served: GatewayRollout, prompt_id: str) -> Iterator[OpenRollout]:
        """A rollout that may be taken within the context."""
        ticket = next(
            (ticket for ticket in self._tickets if ticket.prompt_id == prompt_id and self._grows(ticket)), None
        )
        if ticket is None:
            self._tickets.append(ticket := OpenTicket(prompt_id))
        rollout = OpenRollout(served=served, ticket=ticket)
        ticket.rollouts.append(rollout)
        self._hand_out()
        try:
            yield rollout
        finally:
            rollout.fail("agent_failed", "its rollout is over")  # nobody may take it any more
            self._over(ticket)

    def playing(self) -> list[OpenRollout]:
        """The rollouts that were taken and have no score yet, the oldest ticket's first."""
        return [rollout for ticket in self._tickets for rollout in ticket.rollouts if rollout.playing]

    async def take(self, first: bytes, count: int) -> list[OpenRollout]:
        """Takes rollouts of one ticket. `first`: the digest of the request that begins them. Waits until there are so many. Raises
        Refused if there never will be."""
        if self._closed:
            raise _run_is_over()
        if count > self.group_size:
            message = f"n = {count} completions are more than the rollout.group_size = {self.group_size} of the run"
            raise Refused(400, f"{message}: set --env.group_size {self.group_size}")
        wanted = _Wanted(first, count, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        self._hand_out()
        try:
            return await wanted.found
        except asyncio.CancelledError:
            for rollout in wanted.found.result() if wanted.found.done() and not wanted.found.cancelled() else ():
                rollout.fail("agent_failed", "the environment closed the connection before its turn was sampled")
            raise

    async def close(self) -> None:
        """Refuses the requests that wait for a ticket, and all later ones."""
        self._closed = True
        for wanted in self._wanted:
            if not wanted.found.done():
                wanted.found.set_exception(_run_is_over())
        self._wanted.clear()
        await asyncio.sleep(0)

    def extended(self, rollout: OpenRollout, turn: TreeReply) -> None:
        """Takes note of a turn."""
        rollout.extended(turn)
        if turn.completion and turn.completion.spans:
            self.newest = max(self.newest, turn.completion.spans[-1].version)

    def _grows(self, ticket: OpenTicket) -> bool:
        return len(ticket.rollouts) < self.group_size and not ticket.first

    def _hand_out(self) -> None:
        for wanted in [request for request in self._wanted if not request.found.cancelled()]:
            if found := self._find(wanted.first, wanted.rollouts):
                for rollout in found:
                    rollout.taken.set()
                wanted.found.set_result(found)
        self._wanted = deque(request for request in self._wanted if not request.found.done())

    def _find(self, first: bytes, count: int) -> list[OpenRollout]:
        begun = (
            open_ticket
            for open_ticket in self._tickets
            if open_ticket.first == first and len(open_ticket.free()) >= count
        )
        whole = (
            open_ticket
            for open_ticket in self._tickets
            if not open_ticket.first and len(open_ticket.free()) == self.group_size
        )
        ticket = next(begun, None) or next(whole, None)
        if ticket is None:
            return []
        ticket.first = first
        return ticket.free()[:count]

    def _over(self, ticket: OpenTicket) -> None:
        """Ends the rollouts that nobody has asked for when all others of their ticket are over."""
        left = [rollout for rollout in ticket.rollouts if not rollout.ended.done()]
        if not any(rollout.taken.is_set() for rollout in left):
            begun = len(ticket.rollouts) - len(left)
            for rollout in left if ticket.first else ():
                message = f"the environment has asked for {begun} of the {len(ticket.rollouts)} rollouts of its group"
                rollout.fail(
                    "environment_turns", f"{message}: its rollouts begin with different messages, or it was ended"
                )
        if all(rollout.ended.done() for rollout in ticket.rollouts) and ticket in self._tickets:
            self._tickets.remove(ticket)


def _run_is_over() -> Refused:
    return Refused(503, "the run is over", "rollout_over")


# --- Finds the rollouts that a posted group scores: those with the tokens that it posts.
#
# A group is tokens, masks and scores. Nothing in it names a version, a rollout or a ticket, so each sequence is looked for among the rollouts
# that were sampled for tickets. What is trained are the tokens, log-probs and versions that were recorded there (C4, C5), and the post adds a
# score. A sequence that was not sampled here is of unknown age, and nothing of it is trained.
#
# Many environments turn messages into tokens again before they post them (atroposlib's `tokenize_for_trainer`). Such a sequence is found by its
# text: that of a rollout, and behind it at most the end of the turn. Texts are read one at a time, and the event loop goes on between two of them.


Written = Callable[[Sequence[int]], str]


class GroupFound(NamedTuple):
    """The rollouts of one posted group."""

    scored: int
    """Rollouts that got a score."""
    failed: int
    """Rollouts that have failed by what was posted of them, or in place of them."""
    unknown: int
    """Sequences that were not sampled here, or have a score already."""


class Sequences:
    """The sequences of one request."""

    def __init__(self, playing: Sequence[OpenRollout], written: Written, decode: Written, longest: int) -> None:
        """`written`, `decode`: tokens to text, with special tokens and without. `longest`: tokens of a rollout; those of a text that is turned
        into tokens again are at most twice as many."""
        self._playing = [rollout for rollout in playing if rollout.sampled]
        self._written, self._decode, self._most = written, decode, 2 * longest
        self._texts: dict[bytes, tuple[str, str]] = {}
        """The texts of tokens, by their digest."""

    async def score(self, group: PostedGroup) -> GroupFound:
        """Gives the rollouts of a group their scores."""
        places, scored = self._places(await self._candidates(group)), 0
        for tokens, mask, score, place in zip(group.tokens, group.masks, group.scores, places, strict=True):
            if place is None:
                continue
            problem = self._problem(place, tokens, mask, score)
            if problem:
                place.fail(*problem)
            elif place.playing:
                place.score(score)
                scored += 1
            await asyncio.sleep(0)
        known = [place for place in places if place]
        unknown = len(places) - len(known)
        return GroupFound(scored, len(known) - scored + _fail_replaced(known, unknown), unknown)

    async def refuse(self, group: PostedGroup, problem: str) -> GroupFound:
        """Ends the rollouts of a group of which nothing can be trained."""
        known = await self._candidates(group)
        for found in known:
            for rollout in found[:1]:
                rollout.fail("environment_reward", problem)
        return GroupFound(0, sum(map(bool, known)), len(known) - sum(map(bool, known)))

    async def _candidates(self, group: PostedGroup) -> list[list[OpenRollout]]:
        """Returns the rollouts that each sequence may be."""
        digests = []
        for tokens in group.tokens:
            digests.append(digest_of(tokens) if len(tokens) <= self._most else b"")  # a longer one is nobody's
            await asyncio.sleep(0)
        if set(digests) - {rollout.digest for rollout in self._playing}:
            for rollout in self._playing:
                self._text_of(rollout.digest, rollout.tokens)
                await asyncio.sleep(0)
        found = []
        for digest, tokens in zip(digests, group.tokens, strict=True):
            found.append(self._with(digest, tokens))
            await asyncio.sleep(0)
        return [
            [rollout for rollout in those if rollout.playing] for those in found
        ]  # another request may have ended some

    def _places(self, candidates: Sequence[Sequence[OpenRollout]]) -> list[OpenRollout | None]:
        """Returns the rollout of each sequence. Of several with the same tokens, it is one of the ticket that has most of the group."""
        tickets = Counter(ticket for found in candidates for ticket in {rollout.ticket for rollout in found})
        places: list[OpenRollout | None] = []
        for found in candidates:
            free = [rollout for rollout in found if rollout not in places]
            places.append(max(free, key=lambda rollout: tickets[rollout.ticket], default=None))
        return places

    def _with(self, digest: bytes, tokens: Sequence[int]) -> list[OpenRollout]:
        if same := [rollout for rollout in self._playing if rollout.digest == digest]:
            return same
        if len(tokens) > self._most:
            return []
        whole, plain = self._text_of(digest, tokens)
        return [rollout for rollout in self._playing if self._begins(whole, plain, rollout)]

    def _text_of(self, digest: bytes, tokens: Sequence[int]) -> tuple[str, str]:
        if digest not in self._texts:
            self._texts[digest] = self._written(tokens), self._decode(tokens)
        return self._texts[digest]

    def _problem(
        self, rollout: OpenRollout, tokens: Sequence[int], mask: Sequence[int], score: float
    ) -> tuple[str, str] | None:
        """Returns the reason and the detail for which a sequence that was found cannot be trained."""
        if isinstance(number := number_of(score), Unusable):
            return "environment_reward", f"its score {number.said}"
        if len(mask) != len(tokens):
            return "environment_reward", f"{len(mask)} numbers of its mask for {len(tokens)} tokens"
        trained = [place for place, number in enumerate(mask) if number != MASKED]
        if not trained:
            return "environment_reward", "its mask leaves out all of it"
        sampled = [place for places in rollout.sampled for place in places]
        same = tuple(tokens) == rollout.tokens
        if trained != sampled if same else self._said(tokens, trained) != self._said(rollout.tokens, sampled):
            message = f"its mask leaves {len(trained)} tokens to be trained, and {len(sampled)} were sampled"
            return "environment_reward", f"{message}; a turn is trained as a whole, and all of them are"
        return None

    def _said(self, tokens: Sequence[int], places: Sequence[int]) -> str:
        """The text of these places, without white space and special tokens: other tokens for one text are cut in other places."""
        return "".join(self._decode([tokens[place] for place in places]).split())

    def _begins(self, whole: str, plain: str, rollout: OpenRollout) -> bool:
        """Whether a text is that of the rollout, and behind it nothing but special tokens and white space."""
        own_whole, own_plain = self._text_of(rollout.digest, rollout.tokens)
        return whole.startswith(own_whole) and plain.startswith(own_plain) and not plain[len(own_plain) :].strip()


def _fail_replaced(known: Sequence[OpenRollout], unknown: int) -> int:
    """Ends the rollouts in whose place a group has sequences that were not sampled here. Nobody will post them any more."""
    if not known or not unknown:
        return 0
    ticket = Counter(rollout.ticket for rollout in known).most_common(1)[0][0]
    left = [
        rollout for rollout in ticket.rollouts if rollout.playing and rollout not in known and not rollout.served.asking
    ][:unknown]
    for rollout in left:
        message = (
            "the environment has posted its group with other tokens than were sampled for it, which are of unknown age"
        )
        rollout.fail("environment_reward", message)
    return len(left)
