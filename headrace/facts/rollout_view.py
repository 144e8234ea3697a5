"""One rollout as `headrace inspect` and the report show it: its tokens with everything that is known about each."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.algo.training_rows import paths_of
from headrace.core.batches import Group, Row
from headrace.core.chat.message_images import IMAGES
from headrace.core.reports import TokenNumbers, TrainReport
from headrace.core.types import Completion, Episode, Scored, Struct, Turn, VersionSpan
from headrace.durable.journal import JournalStep
from headrace.facts.records import answer_of
from headrace.facts.texts import clip

# --- The turns of an episode as people see them
# What was heard and said, tools with their outcome, versions, rewards; and their lanes in a graph.


LONG = 200
"""Characters of a message or of a call's arguments in a line of text."""


class HeardMessage(Struct, frozen=True):
    """A message that is new before a turn."""

    who: str
    """The name of the tool whose result it is, or the role of its author."""
    text: str
    tool: bool = False
    problem: str = ""
    """The reason why there is no result (`malformed`, `unknown_tool`, `raised`, ...); empty if there is one."""
    images: tuple[str, ...] = ()
    """The files of the images that it shows."""

    def words(self, most: int) -> str:
        """Returns so many characters of its text, and the names of its images."""
        named = (f"image {Path(image).name[:12]}" for image in self.images)
        return " · ".join(filter(None, [clip(self.text, most), *named]))


class AgedTokens(Struct, frozen=True):
    """Consecutive tokens that the same weights sampled."""

    count: int
    version: int
    lag: int
    """The lag of these tokens at the step that trained them."""
    mixed: bool = False


class TurnView(Struct, frozen=True, kw_only=True):
    """One turn."""

    agent: str
    """Its role; empty for the only agent, or the first."""
    parents: tuple[int, ...]
    """Places of turns in the episode."""
    lane: int
    """Its column in the graph. A turn has its parent's, unless another turn has continued there."""
    rewritten: bool
    """Whether it begins another path of its agent, because the messages before it were changed."""
    heard: tuple[HeardMessage, ...]
    said: str
    """The text, without its tool calls."""
    calls: tuple[str, ...]
    tokens: tuple[AgedTokens, ...]
    stop: str
    rewards: dict[str, float]
    advantage: float
    """The mean over the tokens in the loss; NaN if none is, or if a critic made them."""
    judged: bool
    """Whether it is in the loss with advantages of a critic, which are not recorded."""

    @property
    def sampled(self) -> int:
        return sum(part.count for part in self.tokens)


def view_turns(step: JournalStep, group: Group, rollout: int) -> tuple[TurnView, ...]:
    """Returns the turns of one rollout."""
    scored_rollout = group.scored[rollout]
    turns = scored_rollout.episode.turns
    placed, advantages = lanes(scored_rollout.episode), _advantages(group, rollout)
    given = [dict(rewards) for rewards in scored_rollout.turn_rewards or ({},) * len(turns)]
    for branch in scored_rollout.branches:
        given[branch.end - 1] |= {
            name: value for name, value in branch.rewards.items() if name not in given[branch.end - 1]
        }
    return tuple(
        TurnView(
            agent=turn.agent,
            parents=turn.parents,
            lane=placed[number],
            rewritten=_is_rewritten(turns, number),
            heard=tuple(map(_heard, turn.messages)),
            said=said_of(turn),
            calls=calls_of(turn),
            tokens=tuple(_aged(turn.completion, step.step)),
            stop=turn.completion.stop,
            rewards=given[number],
            advantage=advantages.get(number, math.nan),
            judged=number in advantages and math.isnan(advantages[number]),
        )
        for number, turn in enumerate(turns)
    )


def lanes(episode: Episode) -> list[int]:
    """Returns the lane of each turn: that of its parent for the first turn that continues there, a new one for each other."""
    placed: list[int] = []
    continued: set[int] = set()
    count = 0
    for turn in episode.turns:
        parent = turn.parents[0] if turn.parents else None
        if parent is not None and parent not in continued:
            continued.add(parent)
            placed.append(placed[parent])
        else:
            placed.append(count)
            count += 1
    return placed


def said_of(turn: Turn) -> str:
    return str(turn.reply.get("content", turn.completion.text)).strip()


def calls_of(turn: Turn) -> tuple[str, ...]:
    called = [call["function"] for call in turn.reply.get("tool_calls", ())]
    return tuple(f"{call['name']}({clip(json.dumps(call['arguments']), LONG)})" for call in called)


def story(rollout: Scored) -> Iterator[str]:
    """Yields lines about the turns of a chat. Single completions have none."""
    turns = rollout.episode.turns
    for number, turn in enumerate(turns if len(turns) > 1 or rollout.turn_rewards else ()):
        begins = (f" of {turn.agent}" if turn.agent else "") + ("" if turn.trained else ", which is not trained")
        if _is_rewritten(turns, number):
            begins += ", on a path of its own: the chat template rewrites earlier messages"
        for message in map(_heard, turn.messages if number else ()):
            yield f"{message.who}{' returned' if message.tool else ''}: {message.words(LONG)}"
        called, text = [f"calls {call}" for call in calls_of(turn)], said_of(turn)
        given = rollout.turn_rewards[number] if rollout.turn_rewards else {}
        rewards = ", ".join(f"{name} {value:g}" for name, value in given.items())
        words = (
            [clip(text, LONG)] * bool(text) + ["; ".join(called)] * bool(called) + [f"reward {rewards}"] * bool(rewards)
        )
        yield f"turn {number + 1}{begins}: {' · '.join(words) or '(nothing)'}"
    if rollout.episode.cut:
        yield f"cut off at its limit of {rollout.episode.cut}"


def _is_rewritten(turns: Sequence[Turn], number: int) -> bool:
    turn = turns[number]
    return not turn.parents and turn.agent in {earlier.agent for earlier in turns[:number]}


def _heard(message: Mapping[str, Any]) -> HeardMessage:
    tool = message.get("role") == "tool"
    who = str(message.get("name" if tool else "role") or "")
    images = tuple(message.get(IMAGES, ()))
    return HeardMessage(who, str(message.get("content")), tool, str(message.get("problem", "")), images)


def _images_of(group: Group, episode: Episode) -> tuple[str, ...]:
    """The files of the images that the model was shown, in order: those of the prompt, or of the messages of a conversation."""
    heard = [message for turn in episode.turns for message in turn.messages]
    return tuple(file for message in heard for file in message.get(IMAGES, ())) if heard else group.prompt.images


def _aged(done: Completion, step: int) -> Iterator[AgedTokens]:
    ends = [*(span.start for span in done.spans[1:]), len(done.tokens)]
    for span, end in zip(done.spans, ends, strict=False):
        if end > span.start:
            yield AgedTokens(end - span.start, span.version, step - span.version, span.mixed)


def _advantages(group: Group, rollout: int) -> dict[int, float]:
    """Returns the mean advantage of each turn that is trained. The rows of a group are in the order of its rollouts and their paths."""
    paths = [list(paths_of(scored_rollout.episode)) for scored_rollout in group.scored]
    if sum(map(len, paths)) != len(group.rows):
        return {}
    first = sum(map(len, paths[:rollout]))
    found: dict[int, float] = {}
    for path, row in zip(paths[rollout], group.rows[first:], strict=False):
        start = 0
        for place, number in enumerate(path):
            turn = group.scored[rollout].episode.turns[number]
            start += len(turn.context) if place else 0
            end = start + len(turn.completion.tokens)
            if any(row.mask[start:end]):
                found[number] = _mean(row, start, end)
            start = end
    return found


def _mean(row: Row, start: int, end: int) -> float:
    if row.turns:  # a critic's, of which only the rewards are recorded
        return math.nan
    kept = [value for value, kept in zip(row.advantages[start:end], row.mask[start:end], strict=True) if kept]
    return sum(kept) / len(kept)


# --- rollout view ------------------------------------------------------------


Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token; joined, they are the whole text."""

CONTEXT = "context"

Place = tuple[int, int]
"""Ticket and number of a rollout."""


class RolloutView(Struct, frozen=True, kw_only=True):
    """One rollout: its completion, or the last path of an episode of several turns. Tuples are [T] over the tokens behind the prompt; those
    that were not sampled (questions, results of tools) have the reason `CONTEXT` in `left_out`."""

    step: int
    """The step that trained it, counted from 1."""
    ticket: int
    rollout: int
    prompt_id: str
    prompt: str
    images: tuple[str, ...] = ()
    """The files of the images that the model was shown."""
    reward: float
    rewards: dict[str, float]
    """Rewards by the name of the reward function."""
    stop: str
    turns: int
    spans: tuple[VersionSpan, ...]
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text of each token, or its id if the tokenizer is not available."""
    decoded: bool
    """Whether `pieces` are text."""
    text: str
    logprobs: tuple[float, ...]
    """Log-probs of the sampler."""
    lags: tuple[int, ...]
    mixed: tuple[bool, ...]
    """Sampled while an update was streamed in."""
    advantages: tuple[float, ...]
    """Empty if the rollout was not trained, or if a critic made them."""
    judged: bool
    """Whether it was trained with advantages of a critic, which are not recorded."""
    left_out: tuple[str, ...]
    """The reason why each token is not in the loss; an empty string if it is."""
    trainer: tuple[float, ...] = ()
    """Log-probs of the trainer before the step, as it recorded them or as they were computed again; NaN for tokens that are not in the loss."""
    entropies: tuple[float, ...] = ()
    """Entropies of the trainer's distributions before the step, in nats, as it recorded them; NaN as above."""
    unrecorded: str = ""
    """The reason why `entropies` are not known; empty if they are."""
    answer: str = ""
    """The right answer, if the row has one."""
    extracted: dict[str, str] = {}
    """The part of the text that each reward function was given, unless that is the whole text."""

    story: tuple[str, ...] = ()
    """The turns of an episode in words: calls of tools, their results, rewards of single turns."""
    graph: tuple[TurnView, ...] = ()
    """The turns of all paths."""
    cut: str = ""
    """The limit at which the episode was cut off; empty if none."""
    of_group: tuple[float, ...] = ()
    """The rewards of all rollouts of its group, in their order."""

    @property
    def sampled(self) -> list[int]:
        """Places of the tokens that were sampled."""
        return [place for place, why in enumerate(self.left_out) if why != CONTEXT]

    @property
    def advantage(self) -> float:
        """Mean over the sampled tokens; NaN if the rollout was not trained."""
        known = [self.advantages[place] for place in self.sampled] if self.advantages else []
        return sum(known) / len(known) if known else math.nan

    @property
    def advantage_words(self) -> str:
        if self.judged:
            return "by the trainer"
        return "not trained" if math.isnan(self.advantage) else f"{self.advantage:+.3f}"

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(reason for reason in self.left_out if reason))

    @property
    def gap(self) -> float:
        """Mean |trainer - sampler| log-prob; NaN if the trainer's are not known."""
        known = [place for place in self.sampled if place < len(self.trainer)]
        gaps = [abs(self.trainer[place] - self.logprobs[place]) for place in known]
        gaps = [gap for gap in gaps if math.isfinite(gap)]
        return sum(gaps) / len(gaps) if gaps else math.nan


def view_rollout(
    step: JournalStep,
    group: Group,
    rollout: int,
    *,
    pieces: Pieces | None = None,
    oldest: int | None = None,
    trainer: Sequence[float] = (),
) -> RolloutView:
    """Returns the view of one rollout. `oldest`: the oldest version that stays in the loss (`staleness.overdue = "trim"`)."""
    scored_rollout = group.scored[rollout]
    done, row = scored_rollout.episode.last, row_of(group, rollout)
    numbers = _numbers_of(step.report, group, row)
    path = _path(scored_rollout.episode) if row else (_Piece(done.tokens, done),)
    tokens = tuple(token for piece in path for token in piece.tokens)
    texts = pieces(tokens) if pieces else [f"{token} " for token in tokens]
    return RolloutView(
        step=step.step + 1,
        ticket=group.ticket,
        rollout=rollout,
        prompt_id=group.prompt.id,
        prompt=group.prompt.text,
        images=_images_of(group, scored_rollout.episode),
        reward=scored_rollout.reward,
        rewards=scored_rollout.rewards,
        stop=done.stop,
        turns=len(scored_rollout.episode.turns),
        spans=_spans(path),
        tokens=tokens,
        pieces=tuple(texts),
        decoded=pieces is not None,
        text=done.text,
        logprobs=row.logprobs if row else done.logprobs,
        lags=tuple(step.step - version for version in (row.versions if row else done.versions())),
        mixed=tuple(mixed for piece in path for mixed in _mixed(piece)),
        advantages=row.advantages if row and not row.turns else (),
        judged=bool(row and row.turns),
        left_out=_left_out(path, row, oldest),
        trainer=tuple(trainer) or (_floats(numbers.logprobs) if numbers else ()),
        entropies=_floats(numbers.entropies) if numbers else (),
        unrecorded="" if numbers else _unrecorded(step.report, row),
        answer=answer_of(group.prompt),
        extracted=scored_rollout.extracted,
        story=tuple(story(scored_rollout)),
        graph=view_turns(step, group, rollout),
        cut=scored_rollout.episode.cut,
        of_group=tuple(scored.reward for scored in group.scored),
    )


def _numbers_of(report: TrainReport, group: Group, row: Row | None) -> TokenNumbers | None:
    """Finds what the trainer recorded of a row."""
    place = next((number for number, other in enumerate(group.rows) if other is row), None)
    recorded = report.token_numbers or ()
    return next((numbers for numbers in recorded if (numbers.ticket, numbers.row) == (group.ticket, place)), None)


def _floats(data: bytes) -> tuple[float, ...]:
    found = array("f")
    found.frombytes(data)
    return tuple(found)


def _unrecorded(report: TrainReport, row: Row | None) -> str:
    if row is None:
        return "not trained"
    if report.token_numbers is None:
        return "the step was not trained yet, or by an earlier release"
    return "a step records those of some of its rollouts"


class _Piece(NamedTuple):
    """Consecutive tokens of a path."""

    tokens: tuple[int, ...]
    sampled: Completion | None
    """None for context."""


def _path(episode: Episode) -> tuple[_Piece, ...]:
    """The last path of an episode, behind the context of its first turn."""
    pieces: list[_Piece] = []
    number = len(episode.turns) - 1
    while True:
        turn = episode.turns[number]
        pieces.insert(0, _Piece(turn.completion.tokens, turn.completion))
        if not turn.parents:
            return tuple(pieces)
        pieces.insert(0, _Piece(turn.context, None))
        number = turn.parents[0]


def _spans(path: Sequence[_Piece]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    start = 0
    for piece in path:
        spans += [replace(span, start=span.start + start) for span in (piece.sampled.spans if piece.sampled else ())]
        start += len(piece.tokens)
    return tuple(spans)


def view_step(
    step: JournalStep,
    pieces: Pieces | None = None,
    oldest: int | None = None,
    trainer: Mapping[Place, Sequence[float]] | None = None,
) -> list[RolloutView]:
    """Returns the views of all rollouts of a step, in the order in which they were trained."""
    known = trainer or {}
    return [
        view_rollout(step, group, rollout=i, pieces=pieces, oldest=oldest, trainer=known.get((group.ticket, i), ()))
        for group in step.groups
        for i in range(len(group.scored))
    ]


def trimmed_below(settings: Mapping[str, object], step: int) -> int | None:
    """Returns the oldest version in the loss of a step (counted from 0), by the run's settings; None if tokens are not trimmed."""
    staleness = settings.get("staleness")
    if not isinstance(staleness, Mapping) or staleness.get("overdue") != "trim":
        return None
    return step - int(staleness.get("max_lag", 1))


def row_of(group: Group, rollout: int) -> Row | None:
    """Returns the training row that ends with the rollout's last completion. Rows of single-turn rollouts are in the order of the
    rollouts."""
    done = group.scored[rollout].episode.last
    count = len(done.tokens)
    candidates = [group.rows[rollout]] if len(group.rows) == len(group.scored) else list(group.rows)
    for row in candidates:
        if (row.tokens[-count:], row.logprobs[-count:]) == (done.tokens, done.logprobs):
            return row
    return None


def _mixed(piece: _Piece) -> tuple[bool, ...]:
    if piece.sampled is None:
        return (False,) * len(piece.tokens)
    spans = piece.sampled.spans
    ends = [*(span.start for span in spans[1:]), len(piece.tokens)]
    return tuple(span.mixed for span, end in zip(spans, ends, strict=False) for _ in range(span.start, end))


def _left_out(path: Sequence[_Piece], row: Row | None, oldest: int | None) -> tuple[str, ...]:
    found: list[str] = []
    for piece in path:
        mask = row.mask[len(found) : len(found) + len(piece.tokens)] if row else ()
        found += _left_out_of(piece, mask if row else None, oldest)
    return tuple(found)


def _left_out_of(piece: _Piece, mask: Sequence[bool] | None, oldest: int | None) -> list[str]:
    done, count = piece.sampled, len(piece.tokens)
    if done is None or mask is None:
        return [CONTEXT if done is None else "not trained"] * count
    why = "overlong" if done.stop == "length" and not any(mask) else "masked"
    return [
        why if not kept
        else "no finite log-prob" if not math.isfinite(logprob)
        else "overdue" if oldest is not None and version < oldest
        else ""
        for kept, logprob, version in zip(mask, done.logprobs, done.versions(), strict=True)
    ]  # fmt: skip


def token_details(view: RolloutView, place: int) -> str:
    """Returns everything that is known about one token, for a tooltip."""
    parts = [f"token {place}, id {view.tokens[place]}", f"log-prob {view.logprobs[place]:.4f}"]
    if view.trainer and math.isfinite(view.trainer[place]):
        difference = view.trainer[place] - view.logprobs[place]
        parts.append(
            f"trainer {view.trainer[place]:.4f} (difference {difference:+.4f}, ratio {ratio_words(difference)})"
        )
    if view.entropies and math.isfinite(view.entropies[place]):
        parts.append(f"entropy {view.entropies[place]:.4f}")
    parts.append(f"lag {view.lags[place]}" + (", mixed weights" if view.mixed[place] else ""))
    parts += [f"advantage {view.advantages[place]:+.3f}"] if view.advantages else []
    parts += [f"not in the loss: {view.left_out[place]}"] if view.left_out[place] else []
    return "\n".join(parts)


def ratio_words(difference: float) -> str:
    """Formats exp(difference of log-probs); a difference that `exp` cannot take is shown as its power."""
    return f"{math.exp(difference):.4f}" if abs(difference) < 20 else f"exp({difference:.0f})"


def span_list(view: RolloutView) -> str:
    """Formats the versions of the tokens, and of the oldest KV entries they attended to."""
    ends = [*(span.start for span in view.spans[1:]), len(view.tokens)]
    return ", ".join(
        f"{span.start}-{end - 1} version {span.version}"
        + (f" over KV of {span.kv_version}" if span.kv_version != span.version else "")
        + (" (mixed)" if span.mixed else "")
        for span, end in zip(view.spans, ends, strict=False)
        if end > span.start
    )
