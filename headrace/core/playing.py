"""The ports of environments: what plays a rollout (`Environment`), and the handle that it asks for turns (`Agent`).

The shipped fake is `testing/fake_environments.py`. The example goes on with the values of those in `types.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol

from headrace.core.types import Completion, Constraint, Prompt

TokenListener = Callable[[int, float], None]
"""A function that is called with each token of a turn and its log-prob as soon as it is sampled. It must not raise."""


class Agent(Protocol):
    """The engine as the environment of one rollout sees it: a handle that samples turns, one after the other."""

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
    ) -> Completion:
        """Samples the next turn, and returns it decoded. `context`: the tokens before it that no turn holds yet (the prompt, or
        a tool's result before a later turn). They are never in the loss.

        `fresh`: the context is all that precedes the turn, and the turn begins a path of its own. `after`: the turn extends the turn with
        this completion, which `turn` has returned, so that several turns may extend one and be sampled at the same time; None: it
        extends the last turn. `most`: the most tokens of the completion, if fewer than rollout.max_tokens; 0: as many. `role`: the agent whose
        turn it is, if the rollout has several. `messages` and `read` (which returns the completion as a message) are kept with the turn for
        reward functions and people. `heard` is called with the tokens as they are sampled, in their order; it may miss some at the end.
        `constraint`: the language that the completion is held to, in place of rollout.constraint; what it leaves is recorded and trained over.

        Raises `RolloutOver` if the rollout has failed: it took more turns than its limit, or the engine refused a request."""

    @property
    def longest(self) -> int:
        """The most tokens that may come before a turn."""

    def cut_off(self, context: int, *, fresh: bool = False, after: Completion | None = None) -> str:
        """Returns the limit (`turns`, `tokens` or `seconds`) that a turn after a context of so many tokens would exceed; empty if it may be asked for. Once it has
        returned a limit the episode counts as cut off, and no more turns can be had."""

    def reward(self, name: str, value: float, of: Completion | None = None) -> None:
        """Gives a turn a reward, which is added to those that `play` returns. `of`: its completion, which `turn` has returned; None: that
        of the turn that was sampled last."""

    def leave_out(self, role: str) -> None:
        """Leaves the turns of a role out of the loss, also those that it has had: it is a part of the world of the others."""

    @property
    def kept(self) -> Sequence[bytes]:
        """The notes of this rollout, in order, those of earlier processes of the run included."""

    def keep(self, note: bytes) -> None:
        """Keeps a note, which a later process finds in `kept` if this one is killed. It is written before the call returns, behind all
        tokens that the environment has been given."""

    def again(self) -> None:
        """Forgets the turns, but not the notes: the environment was lost and begins again. A turn with the context of a recorded one is
        not sampled again."""


class Environment(Protocol):
    """The environment of one rollout: it is made for that rollout, and never reset or used for another one.

    >>> from headrace.episodes.environments.single_turn import SINGLE_TURN
    >>> environment = SINGLE_TURN.make(prompt, 7)
    """

    async def play(self, agent: Agent) -> Mapping[str, float]:
        """Asks the agent for turns until the episode is over. Returns the environment's own rewards by name, which are added to
        the scorer's. An exception makes the rollout a `Failure`, never a reward of zero; `RolloutFailed` names its reason."""


@dataclass(frozen=True)
class Limits:
    """Limits of a rollout. An environment that asks `Agent.cut_off` first is cut off at the limits of turns and tokens, and keeps what it
    has; one that does not, or that takes too long, has failed.

    >>> limits = Limits(turns=4, seconds=30.0)
    """

    turns: int
    seconds: float = 0.0
    """Total time that the environment itself may take between its turns. 0 sets no limit."""
    tokens: int = 0
    """The most tokens of a path of the episode: prompt, completions and what lies between them. 0: the engine's context."""
    whole: float = 0.0
    """Seconds since its begin, sampling included, after which the episode is cut off at its next turn. 0 sets no limit."""


async def _nothing_to_close() -> None:
    pass


Resumes = Literal["replayed", "restarted", "exported", "stateless"]
"""The ways to resume a rollout that was in progress when the run was killed. In all of them its environment is made again, and a turn
with the same context as the recorded one is not sampled again.

replayed: given the same turns, the environment asks for the same ones, and the episode continues where it was. What it does between its
turns, it does again.
restarted: it may ask for others. Then the tokens of its recorded turns are lost, and counted (`GroupEnded.lost_tokens`).
exported: it keeps its state with each turn (`Agent.keep`), and goes on from the last one. Nothing before that turn is done again.
stateless: it has no state but the conversation, and goes on from the last turn too. A tool call that was finished is not made again,
even if others of the same turn were not."""

KEPT: tuple[Resumes, ...] = ("exported", "stateless")
"""Those that go on from the last turn."""


@dataclass(frozen=True)
class EnvironmentKind:
    """The environments of a run: how they are made, and their common properties.

    >>> SINGLE_TURN.limits.turns, SINGLE_TURN.resumes
    (1, 'replayed')
    """

    make: Callable[[Prompt, int], Environment]
    """Makes one from the prompt and a seed, which are the same when the run is resumed."""
    limits: Limits
    resumes: Resumes
    _: KW_ONLY
    close: Callable[[], Awaitable[None]] = _nothing_to_close
    """Ends what they share, such as processes."""
    players: str = ""
    """Those who have to come for a rollout to be played, in words for the report of waits; empty if nobody has to."""
    remarks: Callable[[], Sequence[str]] = tuple
    """Sentences on requests of its agents that were answered in another way than they were asked for. The rehearsal prints them."""
