"""The sample browser: rollouts that fulfil conditions on their numbers and words, a page at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from headrace.core.batches import Group
from headrace.core.reports import TrainReport
from headrace.core.types import Prompt, Scored
from headrace.durable.journal import JournalReader, JournalStep
from headrace.facts.kept_settings import settings_by_step
from headrace.facts.number_tables import OUTCOMES, GroupTable, Order, Wanted
from headrace.facts.rollout_view import Pieces, RolloutView, trimmed_below, view_rollout
from headrace.facts.texts import clip, number, plural
from headrace.views.report.rollouts import MAX_TEXT, from_first_difference, hits, marked, rollout_table, shortened
from headrace.views.report.svg import table

PAGE = 12
"""Rollouts of one answer."""
SECONDS = 1.0
"""Time for one answer; a search that needs longer says where to go on."""
MAX_PROMPT = 300


@dataclass(frozen=True, kw_only=True)
class RolloutQuery:
    """Conditions on a rollout. Those that no fact has numbers of are found by reading the journal."""

    wanted: Wanted = Wanted()
    order: Order = "newest"
    lag: int = 0
    """The oldest token has at least this lag."""
    words: str = ""
    """Part of the prompt or of the completion, in upper or lower case."""
    ticket: int | None = None
    """One group by its ticket; the other conditions hold too."""
    rollout: int | None = None
    """One rollout of each group, by its place in it from 0."""
    start: int = 0
    """Groups of the order that an earlier answer has been through."""


@dataclass(frozen=True)
class RolloutPage:
    html: str
    shown: int
    candidates: int
    """Groups that the numbers leave."""
    following: int | None
    """`start` of the next question; None at the end."""


class Browser:
    """The rollouts of one run."""

    def __init__(self, run_dir: Path, make_pieces: Callable[[Path], Pieces | None]) -> None:
        self._run_dir, self._make_pieces = run_dir, make_pieces
        self._settings: Callable[[int], Mapping[str, object]] = lambda step: {}
        self._journal, self._lock = JournalReader(run_dir, patient=False), threading.Lock()
        self._pieces: Pieces | None = None
        self._tried = False

    def ask(self, question: RolloutQuery, groups: GroupTable, step: int) -> RolloutPage:
        """`step`: optimizer steps done, for the lag of groups that wait for the trainer."""
        with self._lock:
            more = self._journal.refresh(SECONDS / 2)
            self._settings = settings_by_step(self._run_dir)  # a run may be resumed with others
            if not self._tried:  # reading a tokenizer takes a second, so it is not read before it is needed
                self._pieces, self._tried = self._make_pieces(self._run_dir), True
        end = time.monotonic() + SECONDS
        tickets = groups.find(question.wanted, question.order).tolist()
        if question.ticket is not None:
            tickets = [ticket for ticket in tickets if ticket == question.ticket]
        if question.wanted.gone:
            return self._gone(question, groups, tickets)
        views: list[RolloutView] = []
        lost: list[Group] = []
        missing, place = 0, question.start
        while place < len(tickets) and len(views) < PAGE and time.monotonic() < end:
            group = self._journal.group(tickets[place])
            place += 1
            if group is None:
                missing += 1
                continue
            lost.append(group)
            trained = int(groups.rows.view["step"][group.ticket])
            views += self._of(group, (trained or step + 1) - 1, question, self._report(trained - 1))
        note = self._note(missing, more, bool(views), place < len(tickets))
        html = (rollout_table(views) if views else "") + (_failures(lost) if question.wanted.failed else "") + note
        return RolloutPage(html, len(views), len(tickets), place if place < len(tickets) else None)

    def groups(self, tickets: Iterable[int], most: int) -> dict[int, Group]:
        """Returns groups as the journal has them, as many as fit into `most` bytes."""
        with self._lock:
            self._journal.refresh(SECONDS / 2)
        found: dict[int, Group] = {}
        for ticket in tickets:
            most -= self._journal.size_of(ticket)
            if most < 0:
                break
            if group := self._journal.group(ticket):
                found[ticket] = group
        return found

    def compare(self, places: tuple[tuple[int, int], tuple[int, int]]) -> str:
        """Returns two rollouts beside each other as HTML, with what differs marked. `places`: the ticket of each, and its place in the group.

        Raises KeyError for one that the journal does not have."""
        with self._lock:
            self._journal.refresh(SECONDS / 2)
        found = [self._rollout(*place) for place in places]
        first, second = ("\n\n".join(turn.completion.text for turn in one.episode.turns) for _, one in found)
        texts = marked(*from_first_difference(first, second, MAX_TEXT))
        prompts = list(dict.fromkeys(_shown(group.prompt) for group, _ in found))
        halves = "".join(
            f'<div class="look"><p class="note">ticket {group.ticket}, rollout {place} · {hits([one.reward])}</p>'
            + (f'<pre class="asked">{escape(_shown(group.prompt))}</pre>' if len(prompts) > 1 else "")
            + f"<pre>{text or '(empty)'}</pre></div>"
            for (group, one), (_, place), text in zip(found, places, texts, strict=True)
        )
        asked = f'<pre class="asked">{escape(prompts[0])}</pre>' if len(prompts) == 1 else ""
        if first == second:
            note = "They say the same."
        elif any(f"<{mark}>" in text for mark, text in zip(("del", "ins"), texts, strict=True)):
            note = "Marked: words that only one of them has."
        else:
            note = "Nothing is marked: they have little in common, or differ in white space alone."
        return f'<section class="looks"><p class="note">{note}</p><div class="then">{asked}<div class="pair">{halves}</div></div></section>'

    def _rollout(self, ticket: int, place: int) -> tuple[Group, Scored]:
        group = self._journal.group(ticket)
        if group is None or not 0 <= place < len(group.scored):
            raise KeyError(f"the journal has no rollout {place} of ticket {ticket} (yet)")
        return group, group.scored[place]

    def _report(self, step: int) -> TrainReport:
        """Returns the report of a step, counted from 0; an empty one if it is not in the journal (yet)."""
        return self._journal.report(step) or TrainReport(step, step + 1)

    def _of(self, group: Group, step: int, question: RolloutQuery, report: TrainReport) -> Iterator[RolloutView]:
        """Yields the rollouts of a group that fulfil the conditions. `step`: counted from 0."""
        words = question.words.lower()
        in_prompt = words in group.prompt.text.lower()
        least, most = question.wanted.rewards
        journaled = JournalStep(step, 0.0, step + 1, (group,), report)
        oldest = trimmed_below(self._settings(step), step)
        for rollout, scored_rollout in enumerate(group.scored):
            done = scored_rollout.episode.last
            fits = least <= scored_rollout.reward <= most and (not question.wanted.cut or done.stop == "length")
            fits = fits and question.rollout in (None, rollout)
            if (
                fits
                and (in_prompt or words in _words(scored_rollout))
                and _oldest_lag(scored_rollout, step) >= question.lag
            ):
                yield view_rollout(journaled, group, rollout, pieces=self._pieces, oldest=oldest)

    def _note(self, missing: int, more: bool, found: bool, unfinished: bool) -> str:
        sentences = []
        if missing:
            sentences.append(f"{plural(missing, 'group')} cannot be found in the journal (yet).")
        if more:
            sentences.append("The journal is still being read; ask again for more.")
        if not found:
            sentences.append("Nothing found so far." if unfinished else "No rollout fulfils these conditions.")
        return f'<p class="note">{escape(" ".join(sentences))}</p>' if sentences else ""

    def _gone(self, question: RolloutQuery, groups: GroupTable, tickets: list[int]) -> RolloutPage:
        """Lists groups that will not be trained. The journal keeps their prompts and rewards, and no text of their rollouts."""
        shown = tickets[question.start : question.start + 5 * PAGE]
        rows = []
        for ticket in shown:
            row = groups.rows.view[ticket]
            prompt = self._journal.prompt(ticket)
            rows.append(
                (
                    str(ticket),
                    escape(clip(prompt.text, MAX_PROMPT)) if prompt else "",
                    OUTCOMES[row["outcome"]],
                    escape(groups.reasons[row["reason"]].replace("_", " ")),
                    number(float(row["mean"])) if row["mean"] == row["mean"] else "",
                    str(row["cut"]),
                    str(row["failed"]),
                    str(row["longest"]),
                )
            )
        head = ("#ticket", "prompt", "outcome", "reason", "#mean reward", "#cut off", "#failed", "#longest")
        note = '<p class="note">The journal keeps no text of the rollouts of groups that are not trained.</p>'
        html = table(head, rows) + note if rows else '<p class="empty">No group fulfils these conditions.</p>'
        after = question.start + len(shown)
        return RolloutPage(html, len(shown), len(tickets), after if after < len(tickets) else None)


def _shown(prompt: Prompt) -> str:
    return shortened(prompt.text, MAX_TEXT)


def _failures(groups: list[Group]) -> str:
    """Returns the table of the rollouts that failed: they have a reason and no text."""
    rows = [
        (str(group.ticket), escape(failure.reason.replace("_", " ")), escape(clip(failure.detail, MAX_PROMPT)))
        for group in groups
        for failure in group.failures
    ]
    return "<h3>Failed rollouts of these groups</h3>" + table(("#ticket", "reason", "detail"), rows) if rows else ""


def _words(rollout: Scored) -> str:
    return " ".join(turn.completion.text for turn in rollout.episode.turns).lower()


def _oldest_lag(rollout: Scored, step: int) -> int:
    versions = [span.version for turn in rollout.episode.turns for span in turn.completion.spans]
    return max(0, step - min(versions)) if versions else 0
