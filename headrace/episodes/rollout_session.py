"""One rollout while its environment plays it: the session records what was sampled, and keeps it within its limits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import msgspec

from headrace.core.batches import Failure
from headrace.core.errors import PoisonedRequest, RolloutFailed, RolloutOver, encodable
from headrace.core.protocols import Environment, Limits, TokenListener
from headrace.core.rewards import Unusable, number_of
from headrace.core.types import Completion, Constraint, Episode, Prompt, Request, RolloutKey, Struct, Turn
from headrace.durable.spelling import jsonable
from headrace.episodes.rollout import moved
from headrace.settings.user_code import one_line, traceback_of

# --- The notes of environments about rollouts in flight
# A later process of the run gets them back, and goes on from them.
#
# The session of a rollout writes what its environment keeps (`Agent.keep`) on the rollout's page. Checkpoints hold the notes, and the log of
# passes those since. There they lie in one order with the sampled tokens, so that a note that is found follows every token that it builds
# on.


class Note(Struct, frozen=True, array_like=True):
    turns: int
    """The number of turns that were asked for before it."""
    content: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


class NotebookPage:
    """The notes of one rollout."""

    def __init__(
        self,
        stored: list[bytes] | None = None,
        write: Callable[[bytes], None] | None = None,
        before: Sequence[Note] = (),
    ) -> None:
        """`stored`: the notes so far; `write` makes a new one outlast this process; `before`: the notes of another rollout, behind which
        this one branches."""
        self._stored = [] if stored is None else stored
        self._write, self._before = write, tuple(before)

    @property
    def notes(self) -> tuple[Note, ...]:
        return (*self._before, *map(_decode, self._stored))

    def keep(self, note: Note) -> None:
        data = _encode(note)
        if self._write:
            self._write(data)
        self._stored.append(data)

    def until(self, turn: int) -> tuple[Note, ...]:
        """Returns the notes that were there when turn number `turn` was asked for."""
        return tuple(note for note in self.notes if note.turns <= turn)


class Notebook:
    def __init__(self, adapter: str = "") -> None:
        """`adapter`: the one that the rollouts train; empty if all weights are trained."""
        self._adapter = adapter
        self._notes: defaultdict[int, dict[str, list[bytes]]] = defaultdict(dict)
        """The notes of each rollout, in order, by ticket and by the key of its first turn: thousands of rollouts are in flight in a large
        run, and a group that ends must not cost a look at all of them."""
        self._write: Callable[[str, bytes], None] | None = None

    def listen(self, write: Callable[[str, bytes], None]) -> None:
        """`write` gets the name of the rollout and each new note, before the environment goes on."""
        self._write = write

    def page(self, ticket: int, rollout: int, before: Sequence[Note] = ()) -> NotebookPage:
        name = str(RolloutKey(ticket, rollout, adapter=self._adapter))

        def write(note: bytes) -> None:
            if self._write:
                self._write(name, note)

        return NotebookPage(self._notes[ticket].setdefault(name, []), write, before)

    def forget_group(self, ticket: int) -> None:
        """Forgets the notes of a group, when it has ended."""
        self._notes.pop(ticket, None)

    def state(self, tickets: Collection[int]) -> dict[str, tuple[bytes, ...]]:
        """Returns the notes of the groups with these tickets."""
        groups = [self._notes[ticket] for ticket in tickets if ticket in self._notes]
        return {name: tuple(notes) for group in groups for name, notes in group.items() if notes}

    def restore(self, notes: Mapping[str, Collection[bytes]]) -> None:
        self._notes.clear()
        for name, those in notes.items():
            self._notes[_ticket(name)][name] = list(those)


def _ticket(name: str) -> int:
    key = RolloutKey.read(name)
    assert key is not None, f"{name} names no rollout"
    return key.ticket


# --- rollout session ------------------------------------------------------------


Decode = Callable[[Sequence[int]], str]
Generate = Callable[[Request, TokenListener | None], Awaitable[Completion]]


@dataclass(frozen=True)
class TurnAsked:
    """A turn that an environment asks for."""

    rollout: int
    """The place of the rollout in its group, from 0."""
    turn: int
    """The place of the turn in its rollout, from 0."""
    context: tuple[int, ...]
    """All tokens before it."""
    most: int = 0
    """The most tokens of its completion, if fewer than rollout.max_tokens; 0: as many."""
    heard: TokenListener | None = None
    """Called with the tokens as they are sampled, by an engine that can do so."""
    _: KW_ONLY
    constraint: Constraint | None = None
    """Its language, in place of the run's own."""

    def limited(self, request: Request) -> Request:
        """Returns the request with at most `most` tokens."""
        if not 0 < self.most < request.sampling.max_tokens:
            return request
        sampling = msgspec.structs.replace(request.sampling, max_tokens=self.most)
        return msgspec.structs.replace(request, sampling=sampling)


Ask = Callable[[TurnAsked], Awaitable[Completion]]
"""Samples a turn. Raises `ValueError` where the engine refuses the request."""


class Room(NamedTuple):
    """The engine's room for a path of an episode."""

    context: int
    """The most tokens of a request with its completion."""
    turn: int
    """The most tokens of a completion."""


def storable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as the journal and other processes can hold it. JSON has integers of any size, which a model may write into a tool call
    and which msgpack does not have: they are kept as their digits, like those of rows.

    >>> call = {"function": {"name": "add", "arguments": {"a": 2**70}}}
    >>> storable({"role": "assistant", "content": "", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"]
    {'a': '1180591620717411303424'}
    """
    try:
        msgspec.msgpack.encode(message)
    except OverflowError:
        plain: dict[str, Any] = jsonable(message)
        return plain
    return dict(message)


ENDLESS = Room(1 << 62, 0)


@dataclass(frozen=True)
class Played:
    """An episode that is over, with the rewards that its environment gave."""

    episode: Episode
    rewards: Mapping[str, float]
    turn_rewards: tuple[dict[str, float], ...] = ()
    """Rewards of single turns by name, one dict per turn; empty if no turn got one."""
    between: float = field(default=0.0, compare=False, kw_only=True)
    """Seconds in which no turn was sampled: those of tools, and of the environment itself."""
    times: tuple[tuple[float, float], ...] = field(default=(), compare=False, kw_only=True)
    """The moments on the loop's clock at which each turn was asked for and had ended."""
    rollout: int = field(default=0, compare=False, kw_only=True)
    """The rollout whose turns before `pivot` it shares; its own number if it is no alternative."""
    pivot: int = field(default=0, compare=False, kw_only=True)
    """The turn at which that rollout branches."""


class RolloutSession:
    """Protocol `Agent`."""

    def __init__(
        self,
        rollout: int,
        ask: Ask,
        decode: Decode,
        *,
        limits: Limits,
        room: Room = ENDLESS,
        page: NotebookPage | None = None,
    ) -> None:
        """`page`: the notes of its environment."""
        self._page = page or NotebookPage()
        self._rollout, self._ask, self._decode, self._limits = rollout, ask, decode, limits
        self._longest = min(limits.tokens or room.context, room.context) - room.turn
        self._clock: asyncio.Timeout | None = None
        self._left: float | None = None
        """Seconds that the environment had left when the engine began to sample."""
        self._sampling = 0
        """Turns that are being sampled."""
        self._failure: Failure | None = None
        self._broken: BaseException | None = None
        """The error of the engine or of the disk. It ends the run, even if the environment catches it."""
        self._began = self._sampled_since = self._sampling_seconds = 0.0
        """Seconds on the loop's clock: when it began, when it was last asked for a turn, and how long turns were sampled."""
        self._begin()

    def _begin(self) -> None:
        self._asked = 0
        """Turns that were asked for, those that were cancelled included."""
        self._turns: dict[int, Turn] = {}
        """The turns that were sampled, by their number in the order of asking. A turn has a larger number than its parent."""
        self._times: dict[int, tuple[float, float]] = {}
        self._rewards: dict[int, dict[str, float]] = {}
        self._left_out: set[str] = set()
        """Roles whose turns are not trained."""
        self._cut = ""

    async def play(self, make: Callable[[Prompt, int], Environment], prompt: Prompt, seed: int) -> Played | Failure:
        """The one place where a failed rollout becomes data. What is not the rollout's own fault propagates."""
        self._began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._limits.seconds or None) as self._clock:
                try:
                    rewards = await make(prompt, seed).play(self)
                except (Exception, SystemExit) as error:
                    return self._raised(error)
        except TimeoutError:
            return Failure("environment_timeout", f"took more than {self._limits.seconds:g} s between its turns")
        return self._ended(rewards)

    async def turn(
        self,
        context: Sequence[int],
        *,
        fresh: bool = False,
        after: Completion | None = None,
        most: int = 0,
        role: str = "",
        messages: Sequence[Mapping[str, Any]] = (),
        read: Callable[[Completion], dict[str, Any]] | None = None,
        heard: TokenListener | None = None,
        constraint: Constraint | None = None,
        state: str = "",
    ) -> Completion:
        if self._sampling and after is None and not fresh:
            raise RuntimeError("an environment asks for one turn at a time: await the one before")
        number = self._asked
        if self._cut:
            raise self._over("environment_turns", f"asked for a turn after it was cut off at its limit of {self._cut}")
        if number >= self._limits.turns:
            raise self._over("environment_turns", f"asked for more turns than its limit of {self._limits.turns}")
        self._asked += 1
        parent = self._parent(fresh, after)
        clock = asyncio.get_running_loop().time
        asked = clock()
        path = self._path_to(context, parent)
        done = await self._sampled(TurnAsked(self._rollout, number, path, most, heard, constraint=constraint))
        done = self._own_routing(done, parent)
        reply = read(done) if read else {}
        self._turns[number] = Turn(
            tuple(context),
            done,
            parents=() if parent is None else (parent,),
            rewrites=(self._number(after),) if fresh and after else (),
            agent=role,
            messages=tuple(map(storable, messages)),
            reply=storable(reply),
            state=state,
        )
        self._rewards[number] = {}
        self._times[number] = asked, clock()
        return done

    @property
    def longest(self) -> int:
        return self._longest

    def cut_off(self, context: int, *, fresh: bool = False, after: Completion | None = None) -> str:
        if self._asked >= self._limits.turns:
            self._cut = "turns"
        elif context + self._length_of_path(self._parent(fresh, after)) > self._longest:
            self._cut = "tokens"
        elif self._limits.whole and asyncio.get_running_loop().time() - self._began > self._limits.whole:
            self._cut = "seconds"
        return self._cut

    def reward(self, name: str, value: float, of: Completion | None = None) -> None:
        if not self._turns:
            self._fail("environment_reward", f"gave the reward {name} to a turn before there was one")
        elif isinstance(number := number_of(value), Unusable):
            self._fail("environment_reward", f"the reward {name} of a turn {number.said}")
        else:
            given = self._rewards[max(self._turns) if of is None else self._number(of)]
            given[name] = given.get(name, 0.0) + number

    def leave_out(self, role: str) -> None:
        self._left_out.add(role)

    @property
    def kept(self) -> tuple[bytes, ...]:
        return tuple(note.content for note in self._page.notes)

    def keep(self, note: bytes) -> None:
        try:
            self._page.keep(Note(self._asked, note))
        except Exception as error:  # of the disk, which the environment did not cause
            self._broken = error
            raise

    def again(self) -> None:
        self._begin()
        if self._clock and self._clock.when() is not None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._limits.seconds)

    def _parent(self, fresh: bool, after: Completion | None) -> int | None:
        """The number of the turn that the next one extends; None if it begins a path."""
        if fresh or not self._turns:
            return None
        return max(self._turns) if after is None else self._number(after)

    def _number(self, completion: Completion) -> int:
        return next(number for number, turn in self._turns.items() if turn.completion is completion)

    def _path_to(self, context: Sequence[int], parent: int | None) -> tuple[int, ...]:
        """Returns all tokens up to a turn after `parent`."""
        pieces = [tuple(context)]
        while parent is not None:
            turn = self._turns[parent]
            pieces += [turn.completion.tokens, turn.context]
            parent = turn.parents[0] if turn.parents else None
        tokens: list[int] = []
        for piece in reversed(pieces):
            tokens += piece  # whole tuples: to go through tens of thousands of tokens one by one takes ten times longer
        return tuple(tokens)

    def _length_of_path(self, last: int | None) -> int:
        """Returns the number of tokens up to the end of a turn; 0 for none."""
        length = 0
        while last is not None:
            turn = self._turns[last]
            length += len(turn.context) + len(turn.completion.tokens)
            last = turn.parents[0] if turn.parents else None
        return length

    def _own_routing(self, done: Completion, parent: int | None) -> Completion:
        """Returns the completion with the experts of those positions that no turn before it has: a request reports those of all
        positions, which over many turns would be kept again and again."""
        while parent is not None and not self._turns[parent].completion.routing:
            parent = self._turns[parent].parents[0] if self._turns[parent].parents else None
        before = self._turns[parent].completion.routing if parent is not None else None
        if not before or not done.routing:
            return done
        size = before.layers * before.k * before.width
        end = before.start + len(before.experts) // size
        own = done.routing.experts[max(0, end - done.routing.start) * size :]
        routing = msgspec.structs.replace(done.routing, experts=own, start=max(end, done.routing.start))
        return msgspec.structs.replace(done, routing=routing)

    async def _sampled(self, asked: TurnAsked) -> Completion:
        self._stop_clock()
        try:
            done = await self._ask(asked)
        except ValueError as error:
            raise self._over("request_refused", str(error)) from error
        except PoisonedRequest as error:
            raise self._over("engine_died", str(error)) from error
        except Exception as error:
            self._broken = error
            raise
        finally:
            self._start_clock()
        if done.stop == "error":
            raise self._over("engine_error", done.error)
        return msgspec.structs.replace(done, text=self._decode(done.tokens))

    def _stop_clock(self) -> None:
        """The engine's time is not the environment's."""
        assert self._clock is not None
        self._sampling += 1
        if self._sampling == 1:
            until, now = self._clock.when(), asyncio.get_running_loop().time()
            self._left, self._sampled_since = None if until is None else until - now, now
            self._clock.reschedule(None)

    def _start_clock(self) -> None:
        assert self._clock is not None
        self._sampling -= 1
        now = asyncio.get_running_loop().time()
        if not self._sampling:
            self._sampling_seconds += now - self._sampled_since
            if self._left is not None:
                self._clock.reschedule(now + self._left)

    def _over(self, reason: str, detail: str) -> RolloutOver:
        self._fail(reason, detail)
        return RolloutOver(detail)

    def _fail(self, reason: str, detail: str) -> None:
        self._failure = self._failure or Failure(reason, detail)

    def _raised(self, error: BaseException) -> Failure:
        if self._broken:
            raise self._broken
        if isinstance(error, RolloutFailed):
            return self._failure or Failure(error.reason, error.detail, error.traceback)
        return self._failure or Failure("environment_raised", one_line(error), traceback_of(error))

    def _ended(self, rewards: object) -> Played | Failure:
        if self._broken:
            raise self._broken
        if self._failure:
            return self._failure
        if not self._turns:
            return Failure("environment_turns", "ended without asking for a turn")
        if all(turn.agent in self._left_out for turn in self._turns.values()):
            return Failure("environment_turns", "none of the agents that had a turn is trained")
        if not isinstance(rewards, Mapping):
            return Failure("environment_reward", f"returned {type(rewards).__name__}, not rewards by name")
        named: dict[str, float] = {}
        for name, value in rewards.items():
            if isinstance(number := number_of(value), Unusable):
                return Failure("environment_reward", f"the reward {name} {number.said}")
            named[encodable(str(name))] = number
        given = tuple(self._rewards[number] for number in sorted(self._turns)) if any(self._rewards.values()) else ()
        between = asyncio.get_running_loop().time() - self._began - self._sampling_seconds
        times = tuple(self._times[number] for number in sorted(self._turns))
        return Played(Episode(self._in_order(), self._cut), named, given, between=between, times=times)

    def _in_order(self) -> tuple[Turn, ...]:
        """The turns by number, without gaps: one that was cancelled has a number and no turn."""
        place = {number: index for index, number in enumerate(sorted(self._turns))}
        turns = (moved(turn, place.__getitem__) for _, turn in sorted(self._turns.items()))
        return tuple(msgspec.structs.replace(turn, trained=turn.agent not in self._left_out) for turn in turns)
