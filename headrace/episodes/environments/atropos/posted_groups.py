"""Finds the rollouts that a posted group scores: those with the tokens that it posts.

A group is tokens, masks and scores. Nothing in it names a version, a rollout or a ticket, so each sequence is looked for among the rollouts
that were sampled for tickets. What is trained are the tokens, log-probs and versions that were recorded there (C4, C5), and the post adds a
score. A sequence that was not sampled here is of unknown age, and nothing of it is trained.

Many environments turn messages into tokens again before they post them (atroposlib's `tokenize_for_trainer`). Such a sequence is found by its
text: that of a rollout, and behind it at most the end of the turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.rewards import Unusable, number_of
from headrace.episodes.environments.atropos.open_rollouts import OpenRollout, digest_of
from headrace.episodes.environments.atropos.trajectory_bodies import MASKED, PostedGroup

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
    def __init__(self, playing: Sequence[OpenRollout], written: Written, decode: Written) -> None:
        """`written`, `decode`: tokens to text, with special tokens and without."""
        self._playing = [one for one in playing if one.sampled]
        self._written, self._decode = written, decode
        self._texts: dict[OpenRollout, tuple[str, str]] = {}

    def score(self, group: PostedGroup) -> GroupFound:
        """Gives the rollouts of a group their scores."""
        places, scored = self._places(group), 0
        for tokens, mask, score, place in zip(group.tokens, group.masks, group.scores, places, strict=True):
            if place is None:
                continue
            if problem := _problem(place, tokens, mask, score):
                place.fail(*problem)
            else:
                place.score(score)
                scored += 1
        known = [one for one in places if one]
        unknown = len(places) - len(known)
        return GroupFound(scored, len(known) - scored + _fail_replaced(known, unknown), unknown)

    def refuse(self, group: PostedGroup, problem: str) -> GroupFound:
        """Ends the rollouts of a group of which nothing can be trained."""
        known = [self._with(tokens) for tokens in group.tokens]
        for found in known:
            for one in found[:1]:
                one.fail("environment_reward", problem)
        return GroupFound(0, sum(map(bool, known)), len(known) - sum(map(bool, known)))

    def _places(self, group: PostedGroup) -> list[OpenRollout | None]:
        """Returns the rollout of each sequence. Of several with the same tokens, it is one of the ticket that has most of the group."""
        candidates = [self._with(tokens) for tokens in group.tokens]
        tickets = Counter(ticket for found in candidates for ticket in {one.ticket for one in found})
        places: list[OpenRollout | None] = []
        for found in candidates:
            free = [one for one in found if one not in places]
            places.append(max(free, key=lambda one: tickets[one.ticket], default=None))
        return places

    def _with(self, tokens: Sequence[int]) -> list[OpenRollout]:
        digest = digest_of(tokens)
        if same := [one for one in self._playing if one.digest == digest]:
            return same
        whole, plain = self._written(tokens), self._decode(tokens)
        return [one for one in self._playing if self._begins(whole, plain, one)]

    def _begins(self, whole: str, plain: str, rollout: OpenRollout) -> bool:
        """Whether a text is that of the rollout, and behind it nothing but special tokens and white space."""
        if rollout not in self._texts:
            self._texts[rollout] = (self._written(rollout.tokens), self._decode(rollout.tokens))
        own_whole, own_plain = self._texts[rollout]
        return whole.startswith(own_whole) and plain.startswith(own_plain) and not plain[len(own_plain) :].strip()


def _problem(rollout: OpenRollout, tokens: Sequence[int], mask: Sequence[int], score: float) -> tuple[str, str] | None:
    """Returns the reason and the detail for which a sequence that was found cannot be trained."""
    if isinstance(number := number_of(score), Unusable):
        return "environment_reward", f"its score {number.said}"
    if len(mask) != len(tokens):
        return "environment_reward", f"{len(mask)} numbers of its mask for {len(tokens)} tokens"
    trained = [place for place, number in enumerate(mask) if number != MASKED]
    if not trained:
        return "environment_reward", "its mask leaves out all of it"
    sampled = [place for places in rollout.sampled for place in places]
    if tuple(tokens) == rollout.tokens and trained != sampled:
        said = f"its mask leaves {len(trained)} tokens to be trained, and {len(sampled)} were sampled"
        return "environment_reward", f"{said}; a turn is trained as a whole, and all of them are"
    return None


def _fail_replaced(known: Sequence[OpenRollout], unknown: int) -> int:
    """Ends the rollouts in whose place a group has sequences that were not sampled here. Nobody will post them any more."""
    if not known or not unknown:
        return 0
    ticket = Counter(one.ticket for one in known).most_common(1)[0][0]
    left = [one for one in ticket.rollouts if one.playing and one not in known and not one.served.asking][:unknown]
    for one in left:
        said = (
            "the environment has posted its group with other tokens than were sampled for it, which are of unknown age"
        )
        one.fail("environment_reward", said)
    return len(left)
