"""The transitions of every ticket, in one place. Each is written to the journal first, then counted, then reported.

    transition   journal     buffer                             fact
    ----------   -------     ------                             ----
    drawn        `Drawn`     in flight                          `TicketDrawn`; `PromptChosen` if it was chosen
    ready        `Ready`     ready                              `GroupEnded` (ready)
    ended        `Gone`      the slot is free                   `GroupEnded` (dropped, failed)
    trained      `Stepped`   trained; dropped if skipped        `StepTrained`; `GroupEnded` (dropped) for each
    live         `Live`      the slots are free                 `WeightsLive`

A run that is killed between two of these columns loses nothing: recovery reads the journal and applies its records to the buffer with the
same `Buffer.count`, and to the curriculum with the same `Curriculum.count`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.algo.advantages import met_again
from headrace.core.batches import Batch, Failure, Group, Row
from headrace.core.reports import PromptChoice, TrainReport
from headrace.core.types import Episode, Prompt, Scored
from headrace.core.weights import WeightUpdate
from headrace.durable.journal import AnyRecord, DrawnRecord, GoneRecord, Journal, LiveRecord, ReadyRecord, SteppedRecord
from headrace.episodes.environments.workers.episode_frames import PROBLEM, SPECIALS
from headrace.facts.facts import (
    Fact,
    FirstFailure,
    FirstText,
    GroupEnded,
    PromptChosen,
    StepTrained,
    TicketDrawn,
    Warned,
    WeightsLive,
)
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer
from headrace.loop.curriculum import Curriculum
from headrace.loop.partial import Delivery


class Ledger:
    def __init__(self, journal: Journal, buffer: Buffer, curriculum: Curriculum, telemetry: Telemetry) -> None:
        self._journal, self._buffer, self._curriculum = journal, buffer, curriculum
        self._record, self._clock = telemetry.record, telemetry.clock

    def drawn(self, ticket: int, prompt: Prompt, choice: PromptChoice | None = None) -> None:
        """`choice`: how the prompt was chosen, if it was."""
        self._enter(DrawnRecord(self._clock(), ticket, prompt))
        self._record(TicketDrawn(self._clock(), ticket, prompt.id))
        if choice:
            self._record(PromptChosen(self._clock(), ticket, choice))

    def ready(self, group: Group, rolled: Rolled) -> GroupEnded:
        self._enter(ReadyRecord(self._clock(), group))
        return self._ended(rolled, "ready")

    def ended(self, rolled: Rolled, outcome: Outcome, reason: str) -> GroupEnded:
        """Records a group that will not be trained, whether it is in flight, ready or taken."""
        assert outcome != "ready"
        failures = rolled.failures if outcome == "dropped" else ()
        reasons = tuple(failure.reason for failure in failures)
        rewards = tuple(rollout.reward for rollout in rolled.scored)
        self._enter(GoneRecord(self._clock(), rolled.ticket, outcome, reason, failures=reasons, rewards=rewards))
        return self._ended(rolled, outcome, reason)

    def trained(self, report: TrainReport, batch: Batch, drawn: float, waited: float) -> None:
        """Records an optimizer step, also a skipped one. `drawn` and `waited`: see `step_fact`. The journal is flushed on return."""
        groups = batch.groups
        tickets = tuple(group.ticket for group in groups)
        record = SteppedRecord(self._clock(), report, tickets, batch.steps, batch.demonstrations)
        self._enter(record, flush=True)
        if not report.skipped:
            self._record(step_fact(self._clock(), report, groups, drawn, waited))
            return
        for group in groups:
            self._ended(rolled_of(group), "dropped", report.skipped)

    def live(self, update: WeightUpdate, delivery: Delivery, cancelled: int) -> None:
        """`cancelled`: number of rollouts of groups that are dropped because of the new weights."""
        self._enter(LiveRecord(self._clock(), update.version, update.fingerprint))
        interrupted = delivery.interrupted + cancelled
        self._record(WeightsLive(self._clock(), update, delivery.load, interrupted, delivery.pause))

    def _enter(self, record: AnyRecord, flush: bool = False) -> None:
        self._journal.write(record)
        if flush:
            self._journal.flush()
        self._buffer.count(record)
        self._curriculum.count(record)

    def _ended(self, rolled: Rolled, outcome: Outcome, reason: str = "") -> GroupEnded:
        self._record(fact := rolled.ended(self._clock(), outcome, reason))
        return fact


# --- The facts of a group's rollouts, and of an optimizer step


Outcome = Literal["ready", "dropped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """The result of a ticket: its scored rollouts and its failures."""

    ticket: int
    prompt: Prompt
    scored: tuple[Scored, ...]
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    """Seconds since the ticket was drawn."""
    lost_tokens: int = 0
    """Number of tokens sampled for rollouts that were cancelled or started again."""
    between: tuple[float, ...] = ()
    """Seconds that each scored rollout spent between its turns."""
    times: tuple[tuple[float, ...], ...] = ()
    """The moments of the turns of each scored rollout, see `PlayedGroup`."""

    @property
    def commonest_failure(self) -> str:
        return Counter(failure.reason for failure in self.failures).most_common(1)[0][0]

    @property
    def detail(self) -> str:
        return self.failures[0].detail if self.failures else ""

    def ended(self, t: float, outcome: Outcome, reason: str = "") -> GroupEnded:
        return GroupEnded(
            t=t,
            ticket=self.ticket,
            prompt_id=self.prompt.id,
            outcome=outcome,
            reason=reason,
            detail=self.detail,
            rewards=tuple(rollout.reward for rollout in self.scored),
            lengths=tuple(rollout.episode.sampled for rollout in self.scored),
            truncated=sum(rollout.episode.truncated for rollout in self.scored),
            failures=dict(Counter(failure.reason for failure in self.failures)),
            seconds=self.seconds,
            lost_tokens=self.lost_tokens,
            kinds=dict(Counter(failure.kind for failure in self.failures)),
            talk=talk_of([rollout.episode for rollout in self.scored]),
            rollouts=self.prompt.rollouts,
            times=self._moments(),
            **self._paces(),
        )

    def _paces(self) -> dict[str, Any]:
        """The fields of `GroupEnded` about several turns; none if every rollout has one."""
        episodes = [rollout.episode for rollout in self.scored]
        if all(len(episode.turns) == 1 for episode in episodes):
            return {}
        read = (sum(len(turn.context) for turn in episode.turns if turn.parents) for episode in episodes)
        return {
            "turns": tuple(len(episode.turns) for episode in episodes),
            "read": tuple(read),
            "between": tuple(round(seconds, 3) for seconds in self.between),
        }

    def _moments(self) -> tuple[tuple[float, ...], ...]:
        """`GroupEnded.times`. A rollout with forks has none: its turns are those of several rollouts."""
        kept = tuple(
            tuple(round(moment, 3) for moment in moments) if len(moments) == 2 * len(rollout.episode.turns) else ()
            for rollout, moments in zip(self.scored, self.times, strict=False)
        )
        return kept if any(kept) else ()


def talk_of(episodes: Sequence[Episode]) -> dict[str, int]:
    """The counts of `GroupEnded.talk`; empty if no episode is a chat."""
    turns = [turn for episode in episodes for turn in episode.turns]
    results = [message for turn in turns for message in turn.messages if "tool_call_id" in message]
    if not any(turn.messages for turn in turns):
        return {}
    problems = Counter(f"calls: {message[PROBLEM]}" for message in results if PROBLEM in message)
    specials = sum(SPECIALS in message for turn in turns for message in turn.messages)
    begun = sum(len({turn.agent for turn in episode.turns}) for episode in episodes)
    forked = sum(not turn.parents for turn in turns) - begun
    later, met = met_again(episodes)
    return {
        "turns": len(turns),
        "forked": forked,
        "calls": len(results),
        **({"later": later, "met": met} if later else {}),
        **({"specials": specials} if specials else {}),
        **problems,
    }


class Firsts:
    """Reports the first failure of each kind, once per process."""

    def __init__(self, record: Callable[[Fact], None], clock: Callable[[], float], held_out: bool = False) -> None:
        self._record, self._clock, self._held_out = record, clock, held_out
        self._kinds: set[str] = set()

    def report(self, failures: Iterable[Failure], prompt_id: str) -> None:
        for failure in failures:
            if failure.kind not in self._kinds:
                self._kinds.add(failure.kind)
                values = (failure.reason, failure.kind, failure.detail, failure.traceback, prompt_id, self._held_out)
                self._record(FirstFailure(self._clock(), *values))


class FirstTexts:
    """Reports the first completion of a process, so that the user sees early what the model writes, and the first message of an
    environment or agent that holds the text of control tokens."""

    def __init__(self, record: Callable[[Fact], None], clock: Callable[[], float]) -> None:
        self._record, self._clock, self._shown, self._warned = record, clock, False, False

    def report(self, prompt: Prompt, episodes: Sequence[Episode]) -> None:
        self._of_specials(episodes)
        for episode in episodes if not self._shown else ():
            last, self._shown = episode.last, True
            version = last.spans[0].version if last.spans else 0
            self._record(
                FirstText(
                    t=self._clock(),
                    prompt=prompt.text,
                    text=last.text,
                    tokens=len(last.tokens),
                    stop=last.stop,
                    version=version,
                )
            )
            return

    def _of_specials(self, episodes: Sequence[Episode]) -> None:
        messages = (message for episode in episodes for turn in episode.turns for message in turn.messages)
        if not self._warned and (held := next((message for message in messages if SPECIALS in message), None)):
            self._warned = True
            sentence = (
                f"a message of the role {held.get('role')} holds the text of special tokens ({', '.join(held[SPECIALS][:5])}), which the "
                'model reads as text; set task.specials_in_text = "allow" if they are meant as tokens'
            )
            self._record(Warned(self._clock(), sentence))


def rolled_of(group: Group) -> Rolled:
    """The result of a group that was ready before."""
    return Rolled(ticket=group.ticket, prompt=group.prompt, scored=group.scored, failures=group.failures)


def step_fact(t: float, report: TrainReport, groups: tuple[Group, ...], drawn: float, waited: float) -> StepTrained:
    """`drawn`: mean reward of all groups that ended since the previous step. `waited`: seconds until the batch was complete."""
    lags, ages = (
        _lags(report.step, [row for rows in of_groups for row in rows])
        for of_groups in ([group.rows for group in groups], [group.again for group in groups])
    )
    rewards = [rollout.reward for group in groups for rollout in group.scored]
    mean = sum(rewards) / len(rewards)
    std = math.dist(rewards, [mean] * len(rewards)) / math.sqrt(
        len(rewards)
    )  # `dist` overflows to infinity, `**` raises
    return StepTrained(
        t=t,
        report=report,
        groups=groups,
        lags=lags,
        reward_mean=mean,
        reward_std=std,
        reward_drawn=drawn,
        wait_seconds=waited,
        ages=ages,
    )


def _lags(step: int, rows: Sequence[Row]) -> dict[int, int]:
    """Returns lag -> number of tokens in the loss."""
    return dict(
        Counter(step - version for row in rows for version, kept in zip(row.versions, row.mask, strict=True) if kept)
    )
