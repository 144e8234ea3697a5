"""Measurements of the served policy: its held-out reward, and whether it is the one that was trained (C3)."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from msgspec import structs

from headrace.core.batches import Failure, Row
from headrace.core.errors import IdentityError
from headrace.core.protocols import Engine, Trainer
from headrace.core.reports import TrialScores
from headrace.core.types import Prompt, Scored
from headrace.engine.fleet.fleet import Fleet
from headrace.facts.facts import Evaluated, HeldOutLook, IdentityChecked, TrialChecked
from headrace.facts.telemetry import Telemetry
from headrace.loop.ledger import Firsts, FirstTexts
from headrace.loop.own_groups import GroupSource

Phase = Literal["before", "during", "after"]

# --- The held-out reward
# The same prompts before, during and after training, with the same engine and scorer.


class HeldOutSet(NamedTuple):
    """Prompts that are measured, and where their rollouts come from."""

    name: str
    groups: GroupSource
    prompts: Sequence[Prompt]
    measure: str = ""
    """The mark of what it measures (`measure_of`)."""
    every: int = 0
    """Optimizer steps between two measurements during training; 0: with each of the held-out prompts."""

    def is_due(self, step: int, done: int) -> bool:
        """Whether the set's turn is at `step`, or was after step `done`."""
        return not self.every or step // self.every * self.every > done


class Evaluator:
    """Measures the mean reward of held-out prompts, and of the further evaluation sets."""

    def __init__(self, held_out: HeldOutSet, telemetry: Telemetry, sets: Sequence[HeldOutSet] = ()) -> None:
        """`sets`: the further ones."""
        self._first, self._sets, self._telemetry = held_out, sets, telemetry
        self._firsts = Firsts(telemetry.record, telemetry.clock, held_out=True)
        self._texts = FirstTexts(telemetry.record, telemetry.clock)
        self._numbers = itertools.count()
        """Numbers for the measurements, because two may run at the same time."""
        self._late = set[str]()
        """The sets of which it is said that later weights answer."""
        self._told: asyncio.Future[bool] | None = None
        """Done when the measurement that was begun last is over: whether it was recorded."""

    async def measure(self, phase: Phase, step: int, done: int = -1) -> Evaluated | None:
        """Measures the held-out prompts and the sets whose turn it is, and returns what the held-out prompts gave; None if the run has none, or if it is
        ending during training and an earlier measurement was not recorded. A failed rollout is counted by reason, not scored as zero. During training it
        is a task beside the loops, and does not hold them up. `done`: the last step whose sets were measured, or are being measured; before and after
        training all sets are.

        All facts are recorded when all were measured, that of the held-out prompts last, and behind those of measurements that were begun before:
        where a run has it, it has all of them, and the last one is that of the newest weights.

        Consumes: the held-out prompts; no ticket and no slot.
        Waits for: their rollouts and rewards (`GroupSource.held_out`), and for the measurements before.
        Unblocked by: completions, results of environments, rewards. An interrupt of the run cancels the task.
        """
        if not self._first.prompts:
            return None
        started, before, recorded = self._telemetry.clock(), self._told, False
        told = self._told = asyncio.get_running_loop().create_future()
        sets = [one for one in self._sets if phase != "during" or one.is_due(step, done)]
        try:
            fact, *further = await asyncio.gather(*(self._measured(one, phase, step) for one in (self._first, *sets)))
            if before and not await asyncio.shield(before) and phase == "during":
                return None  # the run ends, and measures both when it goes on
            now = self._telemetry.clock()
            for other in further:
                self._telemetry.record(structs.replace(other, t=now, beside=True))
            for one in (fact, *further):
                self._say_late(one)
            fact = structs.replace(fact, t=now, seconds=now - started)
            self._telemetry.record(fact)
            recorded = True
            return fact
        finally:
            told.set_result(recorded)

    async def _measured(self, one: HeldOutSet, phase: Phase, step: int) -> Evaluated:
        clock = self._telemetry.clock
        started, number = clock(), next(self._numbers)
        results = await asyncio.gather(*(self._one(one, number, i, prompt) for i, prompt in enumerate(one.prompts)))
        scored = [rollout for group in results for rollout in group if isinstance(rollout, Scored)]
        failures = [rollout for group in results for rollout in group if isinstance(rollout, Failure)]
        # The standard error is over prompts, because samples of one prompt are not independent.
        means = [_mean([rollout.reward for rollout in group if isinstance(rollout, Scored)]) for group in results]
        kept = [mean for mean in means if not math.isnan(mean)]
        return Evaluated(
            t=clock(),
            phase=phase,
            step=step,
            prompts=len(kept),
            reward_mean=_mean(kept),
            reward_sem=_standard_error(kept),
            length_mean=_mean([rollout.episode.sampled for rollout in scored]),
            failures=dict(Counter(failure.reason for failure in failures)),
            seconds=clock() - started,
            asked=len(one.prompts),
            kinds=dict(Counter(failure.kind for failure in failures)),
            truncated=sum(rollout.episode.truncated for rollout in scored),
            looks=tuple(_look(prompt, group) for prompt, group in zip(one.prompts, results[:LOOKS], strict=False)),
            name=one.name,
            measure=one.measure,
            later=_share_of_later(scored, step),
        )

    def _say_late(self, fact: Evaluated) -> None:
        """Says once for each set that a measurement takes longer than the steps beside it."""
        if fact.later < LATE or fact.name in self._late:
            return
        self._late.add(fact.name)
        self._telemetry.warn(
            f"{fact.later:.0%} of the tokens of {f'the set {fact.name}' if fact.name else 'the held-out prompts'} at step {fact.step} were sampled by later "
            f"weights: the measurement took {fact.seconds:.0f} s beside training. Raise eval.every, or lower eval.prompts or eval.samples"
        )

    async def _one(self, of: HeldOutSet, number: int, index: int, prompt: Prompt) -> list[Scored | Failure]:
        group = await of.groups.held_out(number, index, prompt, partial(self._texts.report, prompt))
        self._firsts.report(group.failures, prompt.id)
        return [*group.scored, *group.failures]


MEASURED_BY = re.compile(
    r"(the contents of )?(task|environment|sandbox|reward\.(function|services|judges|special)|rollout\.(max_tokens|top|min|stop|constraint))"
)
"""The begins of the names of settings that decide what a held-out reward means."""


def measure_of(made_by: Mapping[str, Any], temperature: float) -> str:
    """Returns a mark of what is measured and how; empty if nothing is known of it. `made_by`: what the settings mean (`resume_rules.meaning`)."""
    those = {name: value for name, value in made_by.items() if MEASURED_BY.match(name)}
    if not those:
        return ""
    return hashlib.sha256(json.dumps([temperature, those], sort_keys=True).encode()).hexdigest()[:16]


LATE = 0.5
"""The share of tokens of later weights from which on a measurement is not one of its step."""


def _share_of_later(scored: Sequence[Scored], step: int) -> float:
    """Returns the share of the sampled tokens that are of later weights than those of the step."""
    later = sampled = 0
    for rollout in scored:
        for turn in rollout.episode.turns:
            done = turn.completion
            ends = [*(span.start for span in done.spans[1:]), len(done.tokens)]
            later += sum(end - span.start for span, end in zip(done.spans, ends, strict=False) if span.version > step)
            sampled += len(done.tokens)
    return later / sampled if sampled else 0.0


LOOKS, LOOKED = 3, 600
"""Prompts of an evaluation that are kept to be read, and characters of each text."""


def _look(prompt: Prompt, group: Sequence[Scored | Failure]) -> HeldOutLook:
    scored = [rollout for rollout in group if isinstance(rollout, Scored)]
    text = scored[0].episode.last.text if scored else ""
    rewards = tuple(rollout.reward for rollout in scored)
    return HeldOutLook(prompt.id, prompt.text[:LOOKED], text[:LOOKED], rewards)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.dist(values, [mean] * len(values)) / math.sqrt((len(values) - 1) * len(values))


# --- The proof that the served policy is the trained one (C3)
# The engine's log-probs of fixed tokens against the trainer's.
#
# The fingerprint proves that the engine holds the published bytes; log-probs prove that it computes with them what the trainer does.
#
# trial   before the first version  every trained value is changed by some percent and published. Whatever the engine multiplies by that it has
#                                   not made anew shows, at any precision, as the share of its effect that is missing.
# floor   at the first version      the mean difference of this pair of engine and trainer, which rounding causes.
# probe   every so many versions    the mean difference may be a few times the floor.


PROBE = "The quick brown fox jumps over the lazy dog, and 7 times 6 is 42."
"""The probe's text, the same in all runs."""

TEXT = """A river falls 12 metres between the mill and the bridge. In 1847 three brothers, Ada, Tom and Joseph, dug a channel beside it: "We will \
never wait for rain again!" Water ran along 350 yards of oak boards to a wheel of iron, which turned day and night. def flow(depth, width): return \
0.6 * depth * width ** 1.5  # cubic feet a second. Why did the wheel stop on Sunday? Because somebody had shut the gate; nobody knew who. The next \
morning they put up a sign in English, French and German: open, ouvert, offen. If x + 7 = 19, then x is 12, and 2x is 24. {"gate": "open", "level": \
[3, 1, 4]} Mist rose over the meadow while the miller's daughter counted sacks of flour, wrote the sum into a small blue book, and sent the boy home."""
"""The text of the trial: words, numbers, code and marks, so that many tokens, and of a mixture many experts, take part."""
TRIAL_TOKENS = 256
PIECE = 128
"""The most tokens that are scored in one request."""
FEW = 32
"""Tokens on which the effect of each kind is computed first, where engine and trainer compute alike: a tenth of the time."""


class Rounding(NamedTuple):
    """The mean |difference| per token, in nats, that rounding may cause."""

    most: float
    """The largest in any model (0.01 to 0.06 is usual in bf16)."""
    least: float
    """Always allowed: an engine that computes as the trainer does begins with a floor of zero."""
    above: float
    """How many times the floor is allowed: the rounding of later weights is drawn anew."""


ROUNDING = {"float32": Rounding(1e-3, 5e-6, 10.0), "bfloat16": Rounding(0.15, 0.02, 3.0)}

CERTAIN = 9.0
"""Standard errors beyond which a finding is no chance. They are those of independent tokens; where a token stands several times, its rounding is
alike, and 7.3 were seen in a sound run (a trainer in bfloat16, an engine in float32, a vocabulary of 51 letters)."""
SEEN = CERTAIN + 4
"""Standard errors that a share of 1 has to be away from 0, so that it would be found: three lower by chance, and a tenth by rounding."""
STALE = 0.15
"""The share of an effect that may be missing: what kept its old values has a share of 1, and one layer of a block about 0.25."""
ADVICE = 'Run with engine.path = "hf"; if that agrees, the fused decoder is wrong for this model: please report it.'
ADVICE_SERVER = (
    "Its server has not applied the weights or the adapter that it reported as loaded (its log may have the reason), or it computes "
    'this model in another way: run with engine.kind = "native"; if that agrees, the trainer is right and the server is not.'
)


class Missing(NamedTuple):
    """The share of an expected change that is missing, by least squares, with its standard error."""

    value: float
    error: float
    effect: float
    """The share of the expected change that is more than the trainer's own rounding, 0 to 1."""

    @classmethod
    def of(cls, found: Sequence[float], expected: Sequence[float], rounding: float = 0.0) -> Missing | None:
        """None where no change is expected. Both are differences from the same log-probs of the trainer, so that these log-probs' own `rounding`
        (its mean square) is in both, and would be taken for a share of a half where there is no other change."""
        square = sum(x * x for x in expected)
        if square == 0 or len(expected) < 2:
            return None
        shared = rounding * len(expected)
        value = (sum(a * b for a, b in zip(found, expected, strict=True)) - shared) / square
        rest = sum((a - value * b) ** 2 for a, b in zip(found, expected, strict=True))
        return cls(value, math.sqrt(rest / (len(expected) - 1) / square), 1 - 2 * shared / square)

    @property
    def is_stale(self) -> bool:
        return not self.value <= max(STALE, CERTAIN * self.error)  # NaN is one, too

    @property
    def is_seen(self) -> bool:
        """Whether the slope would have been found if all of the change were missing."""
        return SEEN * self.error < self.effect


class ComparedTokens(NamedTuple):
    """A sequence that engine and trainer score."""

    tokens: Sequence[int]
    counted: Sequence[bool]
    """[T-1] which of the tokens behind the first one are compared."""

    def of(self, logprobs: Sequence[float]) -> list[float]:
        """Returns those that are compared, of the log-probs of tokens[1:]."""
        return [one for one, counted in zip(logprobs, self.counted, strict=True) if counted]


class Quantised(NamedTuple):
    """A policy that the engine samples from with coarser weights than are trained."""

    weights: str
    """`engine.weights`"""
    most: float
    """The largest mean |difference| per token that is allowed, in nats."""
    text: Sequence[Sequence[int]]
    """Texts that are compared before the policy has sampled anything."""


MEASURED, MOST_ROWS, LONGEST = 256, 16, 2048
"""Sampled tokens on which a quantised policy is measured, at least if there are so many; the rows that they are taken from; tokens of each
behind its prompt."""


def sampled_pieces(rows: Sequence[Row]) -> list[ComparedTokens]:
    """Some rows of a step, taken evenly, with the tokens that the policy has sampled."""
    pieces, count = [], 0
    for row in rows[:: -(-len(rows) // MOST_ROWS) or 1]:
        counted = [False] * (len(row.prompt) - 1) + [*row.mask[:LONGEST]]
        pieces.append(ComparedTokens(row.prompt + row.tokens[:LONGEST], counted))
        count += sum(pieces[-1].counted)
        if count >= MEASURED:
            break
    return pieces if count else []


class IdentityProbe:
    def __init__(
        self,
        tokens: Sequence[int],
        every: int,
        dtype: str,
        telemetry: Telemetry,
        adapter: str = "",
        *,
        trial: Sequence[Sequence[int]] = (),
        served: bool = False,
        exact: bool = False,
        quantised: Quantised | None = None,
    ) -> None:
        """`every`: versions between two probes; 0 switches all of them off. `dtype`: the less precise of those of engine and trainer. `adapter`:
        the policy that is probed. `trial`: the tokens of the trial, in pieces; without any there is none. `served`: whether the engine is
        a server. `exact`: whether engine and trainer compute one forward pass, bit for bit. `quantised`: set where the engine samples with
        coarser weights: then every version is compared, on tokens that the policy has sampled."""
        self._every, self._rounding, self._quantised = every, ROUNDING[dtype], quantised
        texts = quantised.text if quantised else [tuple(tokens)]
        self._pieces = [ComparedTokens(text, [True] * (len(text) - 1)) for text in texts]
        self._asked: dict[int, list[ComparedTokens]] = {}
        """Sequences that the trainer has scored, by the version."""
        self._telemetry, self._adapter = telemetry, adapter
        self._advice = ADVICE_SERVER if served else ADVICE
        self.trial = [list(piece) for piece in trial] if every else []
        self.trial_tokens = (FEW, 0) if exact else (0,)
        """The tokens of each attempt at the trial on which the effect of each kind is computed, until one decides; 0: all."""
        self._floors: dict[int, float] = {}
        """The mean difference of each engine at its first version, by its identity (`id`)."""

    async def trainer_side(self, trainer: Trainer, version: int, always: bool = False) -> list[float] | None:
        """The log-probs that the engine must compute; None if this version is not probed. `always`: probe regardless of its number."""
        due = bool(self._every) and (always or self._quantised is not None or version % self._every == 0)
        if not due:
            return None
        pieces = self._asked[version] = self._pieces
        return [logprob for piece in pieces for logprob in piece.of(await trainer.score(piece.tokens, self._adapter))]

    def saw(self, rows: Sequence[Row]) -> None:
        """Takes what the policy has sampled lately, on which a quantised one is compared from now on."""
        if self._quantised:
            self._pieces = sampled_pieces(rows) or self._pieces

    async def engine_side(
        self, engine: Engine, version: int, expected: list[float] | None, first: bool = False
    ) -> float | None:
        """Returns the root mean square of the differences, in nats; None if this version is not probed. `first`: the engine has just
        loaded this version as its first one, and what it computes now is its floor.

        Raises `IdentityError` when the served policy is not the trained one. Every member of a fleet is probed; it goes on without those that
        fail, as long as one is left.
        """
        if expected is None:
            return None
        pieces = self._asked.pop(version, self._pieces)

        async def check(part: Engine) -> float:
            scores = await asyncio.gather(*(self._scored(part, piece.tokens, version) for piece in pieces))
            found = [logprob for piece, own in zip(pieces, scores, strict=True) for logprob in piece.of(own)]
            return self._difference(part, version, found, expected, first=first)

        return await (engine.examine(version, check, self._adapter) if isinstance(engine, Fleet) else check(engine))

    async def try_weights(self, engine: Engine, version: int, scores: TrialScores) -> bool:
        """Returns whether the trial is decided: if the effects of kinds are those of a few tokens, all others have to leave no doubt. Raises
        IdentityError if some engine computes as though a kind of parameter, or a block of layers, had kept its old values."""

        async def check(part: Engine) -> float:
            """Returns 1 if this engine's trial is decided, else 0."""
            found: list[float] = []
            for piece in self.trial:
                found += await self._scored(part, piece, version)
            if not beyond_doubt(found, scores, self._rounding):
                return 0
            self._judge_trial(found, scores)
            return 1

        if not isinstance(engine, Fleet):
            return bool(await check(engine))
        decided, errors = await engine.ask_serving(check)
        if errors:  # no member may be left out and come back: another version shows nothing of what it has not loaded
            raise next(iter(errors.values()))
        return all(decided.values())

    def _judge_trial(self, found: Sequence[float], scores: TrialScores) -> None:
        """Raises IdentityError if something has kept its old values."""
        shares = shares_of(found, scores, self._rounding)
        stale = {label: share for label, share in shares.items() if share and share.is_stale}
        unseen = [label for label, share in shares.items() if not (share and share.is_seen)]
        mean = _mean_of_probe(found, scores.changed)
        worst = max(stale, key=lambda label: _certainty(stale[label]), default="")
        self._telemetry.record(
            TrialChecked(
                t=self._telemetry.clock(),
                mean_abs_diff=mean,
                kinds=len(shares),
                unseen=tuple(unseen),
                stale=worst,
                ok=not stale,
            )
        )
        if stale:
            share, others = stale[worst], len(stale) - 1
            more = f" (and of {others} other kinds or blocks)" if others else ""
            raise IdentityError(
                f"a trial update changed every trained value, and the engine computes as if {share.value:.0%} (± {share.error:.0%}) of the change in "
                f"{worst}{more} were not there: it would train one policy and sample from another. {self._advice} watch.trial = false skips the trial"
            )

    async def _scored(self, engine: Engine, tokens: Sequence[int], version: int) -> Sequence[float]:
        completion = await engine.score(tokens, self._adapter)
        found = completion.prompt_logprobs
        if found is None or completion.spans[0].version != version:
            under = f"under version {completion.spans[0].version}" if completion.spans else "not at all"
            raise IdentityError(
                f"the engine was to score the probe under version {version}, and did it {under} {completion.error}".rstrip()
            )
        return found

    def _difference(
        self, engine: Engine, version: int, found: Sequence[float], expected: Sequence[float], *, first: bool
    ) -> float:
        mean, limit = _mean_of_probe(found, expected), self._limit(engine, first)
        kl = sum(math.expm1(min(b - a, 50.0)) - (b - a) for a, b in zip(found, expected, strict=True)) / len(expected)
        ok = mean <= limit  # False for NaN too
        self._telemetry.record(
            IdentityChecked(
                t=self._telemetry.clock(),
                version=version,
                mean_abs_diff=mean,
                max_abs_diff=max(abs(a - b) for a, b in zip(found, expected, strict=True)),
                tolerance=limit,
                ok=ok,
                weights=self._quantised.weights if self._quantised else "",
                tokens=len(expected),
                kl=kl,
            )
        )
        if not ok and self._quantised:
            raise IdentityError(
                f"at version {version} the engine, which has {self._quantised.weights} weights (engine.weights), samples from another policy than the "
                f"one that is trained: their log-probs of {len(expected)} tokens differ by {mean:.3g} on average (watch.mismatch = {limit:g} is allowed; "
                f'KL {kl:.3g}). Resume with engine.weights = "published", or with a watch.mismatch that your algorithm bears (docs/quantised.md)'
            )
        if not ok:
            floor = max(self._floors.values(), default=0.0)
            more = f", {mean / floor:.3g} times as much as at the first version" if floor else ""
            raise IdentityError(
                f"at version {version} the engine's log-probs of the probe differ from the trainer's by {mean:.3g} on average{more} "
                f"(allowed {limit:.3g}): it does not compute the policy that is trained. {self._advice}"
            )
        if first:
            self._floors[id(engine)] = mean
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(found, expected, strict=True)) / len(expected))

    def _limit(self, engine: Engine, first: bool) -> float:
        """The largest mean |difference|: before there is a floor, what rounding can cause in any model."""
        if self._quantised:
            return self._quantised.most
        most, least, above = self._rounding
        if first or not self._floors:
            return most
        floor = self._floors.get(id(engine), max(self._floors.values()))  # a member that came later has none
        return min(most, max(least, above * floor))


def beyond_doubt(found: Sequence[float], scores: TrialScores, rounding: Rounding) -> bool:
    """Whether scores of all tokens, or of a few, decide the trial. A few do if each kind shows in them, and if no token's log-prob is so far
    off that half of a share of STALE could be missing of any kind: the share is at most the ratio of the two lengths (Cauchy and Schwarz)."""
    few = len(next(iter(scores.kept.values()), scores.changed))
    if few == len(scores.changed):
        return True
    gap = math.sqrt(_square([a - b for a, b in zip(found, scores.changed, strict=True)]))
    shares = shares_of(found, scores, rounding)
    effects = (_square([a - b for a, b in zip(kept, scores.changed, strict=False)]) for kept in scores.kept.values())
    return all(share and share.is_seen and not share.is_stale for share in shares.values()) and all(
        gap <= STALE / 2 * math.sqrt(effect) for effect in effects
    )


def shares_of(found: Sequence[float], scores: TrialScores, rounding: Rounding) -> dict[str, Missing | None]:
    """Returns the share of each kind's and block's change that is missing in what an engine computed, by the tokens that `kept` has."""
    few = len(next(iter(scores.kept.values()), scores.changed))
    gaps = [a - b for a, b in zip(found[:few], scores.changed[:few], strict=True)]
    changes = {
        label: [a - b for a, b in zip(kept, scores.changed[:few], strict=True)] for label, kept in scores.kept.items()
    }
    # The rounding of the trainer's log-probs is no larger than any of these, and than what it can be in any model.
    seen = [_square(gaps), *(_square(change) / 2 for change in changes.values() if any(change))]
    own = min(*seen, rounding.most**2)
    return {label: Missing.of(gaps, change, own) for label, change in changes.items()}


def pieces_of(tokens: Sequence[int], context_length: int) -> list[Sequence[int]]:
    """Cuts the tokens of the trial into pieces that an engine with this context can score."""
    tokens, length = tokens[:TRIAL_TOKENS], min(PIECE, context_length)
    cut = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [piece for piece in cut if len(piece) > 1]


def _certainty(share: Missing) -> float:
    return abs(share.value) / share.error if share.error else math.inf


def _square(values: Sequence[float]) -> float:
    """The mean square."""
    return sum(x * x for x in values) / len(values)


def _mean_of_probe(found: Sequence[float], expected: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)
