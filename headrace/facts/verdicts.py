"""The questions about a run, each with one verdict: did it learn, how stale was it, was it biased, is every prompt accounted for, did
engine and trainer agree, were tokens trained as they were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from msgspec.structs import replace

from headrace.facts import run_state
from headrace.facts.facts import Accounting, Evaluated, FirstFailure, TrialChecked, WeightWay
from headrace.facts.group_numbers import (
    NO_CONTRAST,
    POOLS,
    Choices,
    Shift,
    Tally,
    discarded,
    length_shift,
    reward_shift,
    solve_rate,
)
from headrace.facts.run_state import RunState, mean_lag, trimmed_tokens
from headrace.facts.run_totals import TravelSums
from headrace.facts.texts import counted, number, percent, plural, reward_text, size, with_error
from headrace.facts.thresholds import ERRORS, LEAST, LIMITS, OFTEN

# --- The troubles of a run in words and numbers that every view shows
# Shares, failures by kind, held-out prompts that failed.


class Failing(NamedTuple):
    """One way in which rollouts fail."""

    kind: str
    """The class of the exception such as `KeyError`, or the reason if nothing was raised."""
    rollouts: int
    """Rollouts that failed in this way, held-out ones included."""
    first: FirstFailure | None
    """None in runs that did not record it."""


def failings(state: RunState) -> list[Failing]:
    """Returns the ways in which rollouts failed, the commonest first."""
    counts = state.shares.total.kinds.copy()
    for evaluation in state.evals:
        counts.update(evaluation.kinds or evaluation.failures)
    return [Failing(kind, count, state.failures.get(kind)) for kind, count in counts.most_common() if count > 0]


def shares(tally: Tally) -> list[str]:
    """Returns those of `cut off 92 %`, `no contrast 86 %`, `dropped 2 %` and `failed 48 % (KeyError 31)` that are not zero."""
    parts = (
        ("cut off", tally.truncated_share),
        ("no contrast", tally.no_contrast_share),
        ("dropped", tally.dropped_share),
        ("failed", tally.failed_share),
    )
    found = [f"{name} {percent(share)}" for name, share in parts if share]
    if tally.failed:
        found[-1] += f" ({counted(+tally.kinds)})"
    return found


def measured_on(evaluation: Evaluated) -> str:
    """Returns the prompts behind a held-out reward: `8 prompts`, `4 of 8 prompts, 4 failed: KeyError`."""
    kinds = evaluation.kinds or evaluation.failures
    if evaluation.failed_prompts:
        return f"{evaluation.prompts} of {plural(evaluation.asked, 'prompt')}, {evaluation.failed_prompts} failed: {', '.join(kinds)}"
    failed = f", {plural(sum(kinds.values()), 'rollout')} failed: {', '.join(kinds)}" if kinds else ""
    return f"{plural(evaluation.prompts, 'prompt')}{failed}"


def judged(answer: str, extracted: Mapping[str, str]) -> str:
    """Returns `extracted 12, right answer 14`, or the parts of it that are known."""
    seen = [repr(text) if text else "nothing" for text in extracted.values()]
    names = list(extracted) if len(extracted) > 1 else [""] * len(seen)
    parts = [f"extracted {text}{f' for {name}' if name else ''}" for name, text in zip(names, seen, strict=True)]
    return ", ".join([*parts, *([f"right answer {answer}"] if answer else [])])


# --- The bytes that travel to the engines for a version of the weights, in words.


_EARLIER = {
    "shared_memory": WeightWay("shared_memory", "", "shared memory", "nothing"),
    "cuda_ipc": WeightWay("cuda_ipc", "", "CUDA IPC", "nothing"),
    "files": WeightWay("files", "", "files", "files"),
    "tcp": WeightWay("tcp", "", "TCP"),
    "http": WeightWay("http", "", "HTTP"),
    "broadcast": WeightWay("broadcast", "", "broadcast"),
}
"""The transports that there were when runs did not record their words (until 2026-11-28)."""


def travelled(state: RunState) -> tuple[str, str] | None:
    """Returns the bytes that travelled a version, and how: `4.3 MB a version`, `TCP, delta: 1.6 % of 269 MB`. None if it is not known.

    Not every engine reports what it received: servers of vLLM and SGLang and rollout hosts do not. What the trainer offered is told
    instead, and in files what it wrote."""
    way, sums = _way(state), _sums(state)
    if way is None or sums is None:
        return None
    name, delta = way.words, way.encoding == "delta"
    if way.travels == "nothing":
        return "no bytes travel", name
    form = "adapters" if "adapter" in state.swapped.travels else "delta" if delta else "full"
    known = way.travels != "files" and sums.reported and not (state.members and sums.uncounted)
    if known:
        sent, of, versions, each = sums.received, sums.wanted, sums.reported, sums.engines / sums.reported
    else:
        sent, of, versions, each = sums.offered, sums.nbytes, sums.versions, 1.0
    fleet = f" to {number(each)} engines" if each > 1 else ""
    words = []
    if delta:
        whole = f"{sums.whole} of {sums.versions} whole"
        words = [f"{_share(sent / of)} of {size(sums.nbytes / sums.versions)}{' each' if fleet else ''} ({whole})"]
    words += [] if known or way.travels == "files" else ["as offered by the trainer"]
    done = " written" if way.travels == "files" else ""
    return f"{size(sent / versions)} a version{fleet}{done}", f"{name}, {form}{': ' * bool(words)}{', '.join(words)}"


def _way(state: RunState) -> WeightWay | None:
    if state.started is None:
        return None
    if way := state.started.weights:
        return way if way.words else replace(_EARLIER[way.transport], encoding=way.encoding)
    # Runs from before 2026-11-28 have it in words: `TCP: deltas, full every 50 (the reason)`.
    name, _, form = state.started.where.get("weights", "").partition(": ")
    found = next((earlier for earlier in _EARLIER.values() if earlier.words == name), None)
    return replace(found, encoding="delta" if form.startswith("deltas") else "full") if found else None


def _sums(state: RunState) -> TravelSums | None:
    """Returns those of the adapters where adapters are published: their base travels once."""
    travels = state.swapped.travels
    sums = travels.get("adapter") or travels.get("full")
    return sums if sums and sums.nbytes else None


def _share(share: float) -> str:
    return percent(share) if share >= 0.1 else f"{100 * share:.2g} %"


# --- verdicts ------------------------------------------------------------


Mood = Literal["good", "bad", "plain", "unknown"]


class Verdict(NamedTuple):
    """One answer, as report and summary show it."""

    title: str
    value: str
    detail: str
    mood: Mood


def before_and_after(state: RunState) -> tuple[Evaluated | None, Evaluated | None]:
    """Returns the first evaluation before training, and the last one since, which may be from the middle of the run."""
    return ends_of(state.evals)


def at_the_end(state: RunState) -> Evaluated | None:
    """Returns the evaluation of the held-out prompts after the last step; None if there is none, or if the run has gone on since."""
    after = [evaluation for evaluation in state.evals if evaluation.phase == "after"]
    return after[-1] if after and after[-1].step >= state.step else None


def ends_of(evals: Sequence[Evaluated]) -> tuple[Evaluated | None, Evaluated | None]:
    """Returns the first evaluation of a set before training, and the last one since, of those that measured the same."""
    evals = comparable(evals)
    before = next((evaluation for evaluation in evals if evaluation.phase == "before"), None)
    since = [evaluation for evaluation in evals if evaluation.phase != "before"]
    return before, since[-1] if since else None


def comparable(evals: Sequence[Evaluated]) -> Sequence[Evaluated]:
    """Returns the evaluations that measured what the last one did: a resume may have changed the reward, or what is measured."""
    last = evals[-1].measure if evals else ""
    return [evaluation for evaluation in evals if not (last and evaluation.measure) or evaluation.measure == last]


def stretches(evals: Sequence[Evaluated]) -> list[list[Evaluated]]:
    """Returns the evaluations in stretches that measured the same, of which a line may be drawn: at each further one a resume has changed what the
    reward means."""
    found: list[list[Evaluated]] = []
    for evaluation in evals:
        before = found[-1][-1].measure if found else ""
        if not found or (before and evaluation.measure and before != evaluation.measure):
            found.append([])
        found[-1].append(evaluation)
    return found


def gain_of(evals: Sequence[Evaluated]) -> str:
    """Returns what a set gave before training and gives now, with the error of the last: `0.120 → 0.410 ± 0.030`."""
    before, since = ends_of(evals)
    last = since or before
    if last is None:
        return "not measured"
    was = f"{reward_text(before.reward_mean)} → " if before and since else ""
    return was + with_error(last.reward_mean, last.reward_sem)


def held_out(state: RunState) -> Verdict:
    """Compares the held-out reward before and after training."""
    before, after = before_and_after(state)
    title = "Held-out reward"
    if before is None and after is None:
        return Verdict(title, "not measured", "the run has no evaluation", "unknown")
    if before is None or after is None:
        evaluation = before or after
        assert evaluation is not None
        missing = "after training: not measured" if after is None else "before training: not measured"
        detail = f"{evaluation.phase}, {measured_on(evaluation)}; {missing}"
        return Verdict(
            title,
            with_error(evaluation.reward_mean, evaluation.reward_sem),
            detail,
            "bad" if evaluation.failed_prompts else "unknown",
        )
    change = after.reward_mean - before.reward_mean
    # This treats the two as independent; they share prompts, so the true error of the difference is smaller.
    error = math.hypot(before.reward_sem, after.reward_sem)
    value = f"{reward_text(before.reward_mean)} → {reward_text(after.reward_mean)}"
    when = "" if after is at_the_end(state) else f" at step {after.step}"
    detail = f"{with_error(change, error).replace('-', '−') if change < 0 else '+' + with_error(change, error)}{when}"
    detail += f", {measured_on(after)}"
    if before.failed_prompts != after.failed_prompts:
        detail += f" (before: {measured_on(before)})"
    if not math.isfinite(change):
        return Verdict(title, value, f"a measurement has no finite mean: {measured_on(after)}", "bad")
    if before.failed_prompts or after.failed_prompts:
        return Verdict(title, value, f"{detail}; the reward of the failed ones is unknown", "bad")
    if math.isfinite(error) and abs(change) < ERRORS * error:
        return Verdict(title, value, f"{detail}; within two standard errors", "plain")
    return Verdict(title, value, detail, "good" if change > 0 else "bad")


def lag(state: RunState) -> Verdict:
    """Compares the largest lag of a trained token with the bound (C1)."""
    mean = mean_lag(state)
    bound = state.started.max_lag if state.started else None
    if mean is None or bound is None:
        return Verdict("Lag", "not measured", "no token was trained", "unknown")
    worst = max(state.lags)
    apart = "; kept rollouts of earlier groups apart" if state.ages else ""
    if worst > bound:
        return Verdict("Lag", f"max {worst}", f"ABOVE the bound of {bound}; mean {number(mean, 2)}{apart}", "bad")
    return Verdict("Lag", f"max {worst}", f"bound {bound} holds; mean {number(mean, 2)} steps{apart}", "good")


def experience_words(state: RunState) -> str:
    """Returns the share and the ages of the tokens of good rollouts of earlier groups; empty if none was trained."""
    again = state.ages.total()
    if not again:
        return ""
    ages = sorted(state.ages)
    middle = next(
        age for age, below in zip(ages, accumulate(state.ages[age] for age in ages), strict=True) if 2 * below >= again
    )
    share = percent(again / (again + state.lags.total()))
    return f"{share} of the tokens, {middle} steps old in the median, at most {ages[-1]}"


BIASED = 3.0
"""Standard errors from which a shift counts as bias. Two numbers are tested in every run, so 2 would raise false alarms too often."""


def bias(state: RunState) -> Verdict:
    """Judges whether the trained rollouts differ from the drawn ones, because of failures or because groups were discarded for their age."""
    verdict, total = _by_age(state), state.shares.total
    share = total.failed_share
    if not share or verdict.value == "not measured":
        return verdict
    failed = f"{percent(share)} failed" if share >= 0.01 else f"{plural(total.failed, 'rollout')} failed"
    value = failed if verdict.mood == "good" else f"{failed}, {verdict.value}"
    detail = f"{counted(+total.kinds)} of {plural(total.rollouts, 'rollout')}; their rewards are unknown"
    if calls("share/failed", share):
        return Verdict(
            verdict.title,
            value,
            f"failures have SELECTED what this run learned from: {detail}; {verdict.detail}",
            "bad",
        )
    return Verdict(
        verdict.title, value, f"{detail}; {verdict.detail}", "plain" if verdict.mood == "good" else verdict.mood
    )


def _by_age(state: RunState) -> Verdict:
    """Judges whether the groups that were discarded for their age were longer or harder than the trained ones."""
    title, away = "Selection bias", discarded(state.fates)
    trained, lost = state.fates.of("trained").groups, sum(fate.groups for fate in away)
    if not trained:
        return Verdict(title, "not measured", "no group was trained", "unknown")
    if not lost:
        return _trimming(state, title)
    value = f"{percent(lost / (trained + lost))} discarded"
    unfinished = sum(fate.unfinished for fate in away)
    lengths, rewards = length_shift(state.fates), reward_shift(state.fates)
    messages = [_shifted("tokens", lengths, 1, unfinished > 0), _shifted("mean reward", rewards, 3)]
    if unfinished:
        messages.append(f"{plural(unfinished, 'group')} cancelled before completion, with unknown rewards")
    detail = "; ".join(part for part in messages if part)
    # Cancelled groups would have become longer, so a short length of theirs is no evidence.
    other = lengths and (lengths.errors <= -BIASED or (lengths.errors >= BIASED and not unfinished))
    if other or (rewards and abs(rewards.errors) >= BIASED):
        return Verdict(title, value, f"discarding has BIASED this run: {detail}", "bad")
    if unfinished:
        return Verdict(title, value, f"unknown: {detail}", "unknown")
    return Verdict(title, value, f"none beyond {BIASED:g} standard errors: {detail}", "plain")


def _trimming(state: RunState, title: str) -> Verdict:
    """Judges a run in which no group was discarded: its oldest tokens may have been trimmed."""
    tokens = trimmed_tokens(state)
    if not tokens:
        return Verdict(title, "none", "no group was discarded for its age", "good")
    share = percent(tokens / (tokens + state.lags.total()))
    detail = "no group was discarded for its age, but the oldest tokens of the slowest rollouts are not trained, so these weigh less"
    return Verdict(title, f"{share} trimmed", detail, "plain")


def _shifted(what: str, shift: Shift | None, digits: int, least: bool = False) -> str:
    """Formats a shift. `least`: the drawn mean is a lower bound."""
    if shift is None:
        return ""
    bound = "at least " if least else ""
    errors = f" ({shift.errors:+.1f} standard errors)" if math.isfinite(shift.errors) else ""
    return f"{what} {shift.trained:.{digits}f} trained, {bound}{shift.drawn:.{digits}f} drawn{errors}"


def pool_shares(chosen: Choices) -> list[str]:
    """`mixed 71 % (38 %)`: each pool's share of the draws, and of the candidates."""
    offered = chosen.offered.total()
    return [
        f"{pool} {percent(chosen.drawn[pool] / chosen.draws)} ({percent(chosen.offered[pool] / offered)})"
        for pool in POOLS
        if chosen.offered[pool]
    ]


def prompts(state: RunState) -> Verdict:
    """Says how far the draws of a run with a curriculum are from uniform ones."""
    title, chosen = "Prompts", state.choices
    assert chosen.distance is not None, "no prompt was chosen"
    messages = [f"drawn (offered): {', '.join(pool_shares(chosen))}"]
    if chosen.rewards:
        messages.append("mean reward of their last groups {} ({})".format(*map(reward_text, chosen.rewards)))
    if chosen.effective:
        messages.append(
            f"as uneven as {chosen.effective:.0f} equally likely prompts, of {chosen.known}; one at most {chosen.most} times"
        )
    if chosen.sizes:
        shares = (f"{size} ({percent(chosen.sizes[size] / chosen.sizes.total())})" for size in sorted(chosen.sizes))
        messages.append(f"groups of {', '.join(shares)} rollouts")
    messages.append("the reward of what was drawn is that of chosen prompts, not of the policy")
    return Verdict(title, f"chosen, {number(chosen.distance, 2)} from uniform", "; ".join(messages), "plain")


def accounting(state: RunState) -> Verdict:
    """Checks the identity C2."""
    counts = state.accounting
    off = counts.balance()
    source = "counted by the controller" if state.ended else "counted from the facts"
    if not counts.drawn and not off:
        return Verdict("Accounting", "no ticket drawn", source, "unknown")
    if off:
        return Verdict("Accounting", "DOES NOT HOLD", f"{plural(abs(off), 'ticket')} {lost_or_double(off)}", "bad")
    return Verdict(
        "Accounting", "holds", f"{plural(counts.drawn, 'prompt')} drawn, each accounted for once; {source}", "good"
    )


def lost_or_double(off: int) -> str:
    return "without an outcome" if off > 0 else "with more than one outcome"


def equation(counts: Accounting) -> str:
    """Formats the identity: `drawn 812 = trained 800 + dropped 10 + failed 2 + pipeline 0 + checkpoint 0`."""
    sign = "=" if counts.balance() == 0 else "≠"
    return (
        f"drawn {counts.drawn:,} {sign} trained {counts.trained:,} + dropped {sum(counts.dropped.values()):,}"
        f" + failed {sum(counts.failed.values()):,} + pipeline {counts.in_pipeline:,}"
        f" + checkpoint {counts.in_checkpoint:,}"
    )


def reasons(counts: Accounting) -> list[str]:
    """Returns the reasons of dropped and failed tickets, one line each."""
    lines = [f"dropped: {counted(counts.dropped)}"] if counts.dropped else []
    if counts.failed:
        lines.append(f"failed: {counted(counts.failed)}")
    if counts.rollout_failures:
        lines.append(f"single rollouts that failed in groups that continued: {counted(counts.rollout_failures)}")
    return lines


def identity(state: RunState) -> Verdict:
    """Summarises the probes of C3."""
    title = "Policy identity"
    swaps = f"{plural(state.swapped.count, 'version')} delivered"
    failed, worst, trial = state.probed.failed, state.probed.worst, state.probed.trial
    if trial and not trial.ok:
        return Verdict(title, "the trial FAILED", f"the engine kept old values of {trial.stale}", "bad")
    if worst is None:
        return Verdict(title, "not probed", swaps if state.swapped.count else "no version was delivered", "unknown")
    spread = f"worst mean |Δ log-prob| {number(worst.mean_abs_diff)} of {number(worst.tolerance)} allowed"
    spread += f" (single token {number(state.probed.widest)})"
    if worst.weights:
        spread += (
            f" between the sampler with {worst.weights} weights and the policy that is trained, KL {number(worst.kl)}"
        )
    if failed:
        return Verdict(
            title, f"{plural(len(failed), 'probe')} FAILED", f"first at version {failed[0].version}; {spread}", "bad"
        )
    tried = f"; {_tried(trial)}" if trial else ""
    return Verdict(title, f"{plural(state.probed.count, 'probe')} ok", f"{spread}; {swaps}{tried}", "good")


def _tried(trial: TrialChecked) -> str:
    seen = trial.kinds - len(trial.unseen)
    message = f"trial: {seen} of {trial.kinds} kinds and blocks of weights proven to arrive"
    return message + (f" (too weak to be told from rounding: {', '.join(trial.unseen[:3])})" if trial.unseen else "")


def weight_sync(state: RunState) -> Verdict:
    """Says what travels to the engines for each version. It is no judgement."""
    title, found = "Weight sync", travelled(state)
    if found is None:
        return Verdict(title, "not measured", "no version was delivered", "unknown")
    return Verdict(title, *found, "plain")


def record(state: RunState) -> Verdict:
    """Judges whether the trainer had the engine's record of every token: log-prob, sampling mask, experts."""
    title, totals = "Sampler's record", state.totals
    if not totals.steps:
        return Verdict(title, "unknown", "no step was trained", "unknown")
    gaps = {
        "no finite log-prob (not trained)": totals.dropped_tokens,
        "a token outside its sampling mask (trained with the whole vocabulary)": totals.outside_tokens,
        "no recorded experts (the trainer's router chose)": totals.missing_routes,
        "two records of experts for one shared prompt (the first was used)": totals.routing_conflicts,
    }
    if not any(gaps.values()):
        return Verdict(title, "complete", f"{plural(totals.tokens, 'token')} trained as they were sampled", "good")
    return Verdict(
        title, "has gaps", "; ".join(f"{count:,} × {what}" for what, count in gaps.items() if count), "plain"
    )


def all_verdicts(state: RunState) -> list[Verdict]:
    chosen = [prompts(state)] if state.choices.draws else []
    return [held_out(state), lag(state), bias(state), *chosen, accounting(state), identity(state), record(state)]


# --- Advice for a run that trains on few of its rollouts
# A condition on its numbers, and a sentence with the remedy.
#
# Each rule looks at the last groups. To add one, write a function of the state and name it in `RULES`; it returns None if its condition
# does not hold. The rules are in the order in which to follow them: completions that are cut off have no contrast either, so cutting off
# comes before contrast, and rewards that not even completed answers get come before both.


class Advice(NamedTuple):
    name: str
    """A key of `RULES`."""
    found: str
    """The words of its rule: the trouble, a colon, the remedy."""
    besides: str = ""
    """The share of its time that the trainer waits meanwhile, if it is large."""

    @property
    def sentence(self) -> str:
        return self.found + self.besides

    @property
    def trouble(self) -> str:
        return self.found.rpartition(": ")[0]

    @property
    def remedy(self) -> str:
        return self.found.rpartition(": ")[2]


def enough(recent: Tally) -> bool:
    """Returns whether so many groups have ended that their shares mean something."""
    return recent.rollouts >= LEAST and recent.groups >= LEAST // 8


def advices(state: RunState) -> list[Advice]:
    """Returns the advice that applies now, in the order in which to follow it."""
    if not state.started or not enough(state.shares.recent):
        return []
    return [Advice(name, found, _waiting(state)) for name, rule in RULES.items() if (found := rule(state))]


def calls(name: str, value: float | None) -> bool:
    """Returns whether a number (a key of `LIMITS`) calls for advice."""
    return LIMITS[name].mark(value) in ("warn", "bad")


def _failed(state: RunState) -> str | None:
    failing = state.shares.failing
    share = failing.failed_share
    if not calls("share/failed", share):
        return None
    message = f"{percent(share)} of the last {failing.rollouts} rollouts failed ({counted(+failing.kinds)}) and are not trained"
    return (
        f"{message}: correct the reward, or the rows that it cannot read"
        if failing.faults
        else f"{message}: look at the logs"
    )


def _cut_off(state: RunState) -> str | None:
    recent = state.shares.recent
    share = recent.truncated_share
    assert state.started is not None
    if not calls("share/truncated", share):
        return None
    limit = f"at {state.started.max_tokens} tokens" if state.started.max_tokens else "at their limit"
    barren = recent.no_contrast_share
    then = f", and {percent(barren)} of groups have no contrast" if calls("share/no_contrast", barren) else ""
    return f"{percent(share)} of completions are cut off {limit}{then}: raise rollout.max_tokens"


def _never_rewarded(state: RunState) -> str | None:
    recent = state.shares.recent
    rewards = [reward for group in recent.held for reward in group.rewards]
    ended = recent.scored - recent.truncated
    if not calls("share/no_contrast", recent.no_contrast_share) or any(rewards) or ended < ENDED:
        return None
    return (
        f"none of the last {len(rewards)} completions earned a reward, and {ended} of them were not cut off: show solved examples in the "
        "prompt (task.examples), begin with a warm start ([warm_start]), or give partial rewards"
    )


ENDED = 8
"""Completions without a reward that came to their own end, from which a higher limit is not the first remedy."""


def _no_contrast(state: RunState) -> str | None:
    recent = state.shares.recent
    share = recent.no_contrast_share
    if (
        not calls("share/no_contrast", share)
        or calls("share/truncated", recent.truncated_share)
        or _never_rewarded(state)
    ):
        return None
    means = [mean for group in recent.held if group.reason == NO_CONTRAST for mean in solve_rate(group)]
    rewards = [reward for group in recent.held for reward in group.rewards]
    known, prompts = "", "easier or harder prompts"
    if means:
        known = f" (their mean is {number(sum(means) / len(means))})"
        low, high = min(rewards), max(rewards)
        solved = sum(2 * mean > low + high for mean in means) / len(means)
        if low < high:  # solved and hopeless ones beside each other come from a policy that tries nothing else
            prompts = "harder prompts" if solved > 0.8 else "easier prompts" if solved < 0.2 else prompts
    return (
        f"{percent(share)} of groups have no contrast, their rewards are all equal{known}: choose {prompts}, give partial rewards, or raise "
        "rollout.group_size"
    )


def _never_again(state: RunState) -> str | None:
    chosen = state.choices
    if not calls("prompts/new", new_share(chosen)):
        return None
    return (
        f"{chosen.drawn['new']:,} of {chosen.draws:,} draws were of prompts that had not been drawn before, of which a curriculum knows "
        'nothing: set curriculum.kind = "uniform", or train on fewer prompts for more epochs'
    )


def new_share(chosen: Choices) -> float | None:
    """Returns the share of a curriculum's draws that were of new prompts; None while there are too few."""
    return chosen.drawn["new"] / chosen.draws if chosen.draws >= STRANGERS else None


STRANGERS = 512
"""Draws of a curriculum from which to give advice about prompts that do not come back."""


def _discarded(state: RunState) -> str | None:
    share = state.shares.recent.dropped_share
    if not calls("share/dropped", share):
        return None
    reasons = {reason: count for reason, count in state.accounting.dropped.items() if reason != NO_CONTRAST}
    remedy = (
        'raise staleness.max_lag, or use staleness.overdue = "wait"'
        if {"overdue", "interrupted"} & reasons.keys()
        else "the reasons are in the report"
    )
    return f"{percent(share)} of groups are dropped ({counted(reasons)}): {remedy}"


def _waiting(state: RunState) -> str:
    idle = run_state.recent_trainer_idle(state)
    return f" (the trainer waits {percent(idle)} of its time)" if idle is not None and idle >= OFTEN else ""


Rule = Callable[[RunState], str | None]
RULES: dict[str, Rule] = {
    "failed": _failed,
    "no reward": _never_rewarded,
    "cut off": _cut_off,
    "no contrast": _no_contrast,
    "dropped": _discarded,
    "curriculum": _never_again,
}
