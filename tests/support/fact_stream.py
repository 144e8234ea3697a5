"""A synthetic but consistent run for the tests of `facts/`: an asynchronous run that learns, with troubles on request."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.core.batches import Failure, Group, Row
from headrace.core.reports import EngineStats, LagStats, LoadReport, TokenNumbers, TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.durable.journal import AnyRecord, Journal, LiveRecord, ReadyRecord, SteppedRecord
from headrace.durable.segments import SEGMENT
from headrace.facts.facts import (
    Accounting,
    CheckpointSaved,
    EngineSample,
    Evaluated,
    Fact,
    GroupEnded,
    HeldOutLook,
    IdentityChecked,
    RunEnded,
    RunStarted,
    StepTrained,
    TicketDrawn,
    Waited,
    Warned,
    WeightsLive,
    WorkerLost,
)
from headrace.facts.group_numbers import Tickets
from headrace.facts.index_file import NumbersIndex
from headrace.facts.recorder import Recorder
from headrace.facts.records import Resume


class FactStream:
    """`facts()` yields the whole run in order; every number can be recomputed from what it yields."""

    def __init__(
        self,
        steps: int = 40,
        groups: int = 4,
        size: int = 4,
        tokens: int = 12,
        seed: int = 0,
        evaluate: bool = True,
        troubles: bool = True,
        prices: dict[str, float] | None = None,
    ) -> None:
        self.prices = prices or {}
        self.steps, self.groups, self.size, self.tokens = steps, groups, size, tokens
        self.evaluate, self.troubles = evaluate, troubles
        self.rng = random.Random(seed)
        self.t = 0.0
        self.ticket = 0
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rollout_failures: Counter[str] = Counter()
        self.ahead: list[Group] = []
        self.busy = self.next_sample = 0.0
        self.sampled = self.engine_steps = 0

    def facts(self) -> Iterator[Fact]:
        yield self.start()
        self.t = 2.0
        if self.evaluate:
            yield from self.samples(self.t + 9.0, 0.95)
            yield self.evaluation("before", 0)
        yield self.live(0)
        for step in range(self.steps):
            yield from self.one_step(step)
        if self.evaluate:
            yield from self.samples(self.t + 8.0, 0.95)
            yield self.evaluation("after", self.steps)
        yield self.end()

    def start(self, resumed_at: int = 0) -> RunStarted:
        where = {
            "engine": "cpu core 0, fused llama, bfloat16",
            "trainer": "cpu core 1, float32",
            "scorer": "2 processes",
        }
        return RunStarted(
            self.t,
            "demo",
            "SmolLM2-135M-Instruct, chain_sum, grpo",
            seed=1,
            steps=self.steps,
            groups_per_step=self.groups,
            group_size=self.size,
            slots=2 * self.groups,
            window=1,
            max_lag=1,
            where=where,
            resumed_at=resumed_at,
            prices=self.prices,
        )

    def skill(self, step: int) -> float:
        return 0.18 + 0.42 / (1 + math.exp(-(step - self.steps / 2) / max(1.0, self.steps / 9)))

    def evaluation(self, phase: str, step: int) -> Evaluated:
        mean = self.skill(step) + self.rng.gauss(0, 0.01)
        looks = tuple(
            HeldOutLook(f"held/{i}", f"{i} + 4 = ?", str(i + 4), (float(i % 2 or step > 0), 0.0)) for i in (0, 1)
        )
        return Evaluated(self.t, phase, step, 64, mean, 0.027, 11.5, {}, 8.0, looks=looks)  # type: ignore[arg-type]

    def live(self, version: int) -> WeightsLive:
        update = WeightUpdate(
            version=version, kind="full", fingerprint=f"{version:032x}", nbytes=269_000_000, seconds=0.21
        )
        return WeightsLive(self.t, update, LoadReport(version, 0.18, 0.0008 + 0.0004 * self.rng.random()))

    def samples(self, until: float, busy: float) -> Iterator[Fact]:
        while self.next_sample < until:
            self.t = max(self.t, self.next_sample)
            share = min(1.0, max(0.0, busy + self.rng.gauss(0, 0.03)))
            self.busy += share
            self.sampled += int(170 * share)
            self.engine_steps += int(20 * share)
            running = int(24 * share)
            stats = EngineStats(running, 3, 0.41, self.sampled, self.sampled // 3, self.engine_steps, self.busy, 0)
            yield EngineSample(self.next_sample, stats)
            self.next_sample += 1.0
        self.t = max(self.t, until)

    def one_step(self, step: int) -> Iterator[Fact]:
        began = self.t
        while len(self.ahead) < 2 * self.groups and self.drawn_enough(step) > len(self.ahead):
            yield from self.one_group(step)
        wait, seconds = 0.3 + abs(self.rng.gauss(0, 0.4)), 2.6 + self.rng.gauss(0, 0.2)
        stalled = self.troubles and step and step % 13 == 0
        wait += 5.0 if stalled else 0.0
        yield from self.samples(began + wait + seconds, 0.55 if stalled else 0.94)
        batch, self.ahead = tuple(self.ahead[: self.groups]), self.ahead[self.groups :]
        yield Waited(began + wait, "trainer", f"{self.groups} scored groups", wait)
        yield self.trained(step, batch, wait, seconds)
        self.t += 0.4
        yield self.live(step + 1)
        if step % 5 == 0:
            mean = 0.002 + 0.002 * self.rng.random()
            yield IdentityChecked(self.t, step + 1, mean, 6 * mean, 0.15, True)
        if (step + 1) % 10 == 0:
            yield CheckpointSaved(self.t, step + 1, f"checkpoints/step-{step + 1:06d}", 0.2)
        if self.troubles and step == self.steps // 2:
            yield WorkerLost(self.t, "engine", "was killed by signal 9", 1, 17)
            yield Warned(self.t, "the engine process was killed by signal 9; a new one goes on with its 17 requests")
            self.busy = self.engine_steps = self.sampled = 0
            yield EngineSample(self.t, EngineStats())

    def drawn_enough(self, step: int) -> int:
        return min(2, self.steps - step) * self.groups

    def one_group(self, step: int) -> Iterator[Fact]:
        ticket, self.ticket = self.ticket, self.ticket + 1
        group = self.group(ticket, step)
        yield TicketDrawn(self.t, ticket, group.prompt.id)
        rewards = tuple(rollout.reward for rollout in group.scored)
        lengths = tuple(len(rollout.episode.last.tokens) for rollout in group.scored)
        failures = Counter(failure.reason for failure in group.failures)
        outcome, reason = "ready", ""
        if self.troubles and self.rng.random() < 0.02:
            outcome, reason = "failed", "reward_timeout"
            self.failed[reason] += 1
        elif len(set(rewards)) == 1:
            outcome, reason = "dropped", "no_contrast"
            self.dropped[reason] += 1
        if outcome != "failed":
            self.rollout_failures += failures
        truncated = sum(rollout.episode.last.stop == "length" for rollout in group.scored)
        yield GroupEnded(
            self.t,
            ticket,
            group.prompt.id,
            outcome,
            reason,
            rewards=rewards,
            lengths=lengths,
            truncated=truncated,
            failures=dict(failures),
            seconds=3.1,
            times=tuple((3.0, round(max(0.1, 2.9 - 0.2 * length), 3)) for length in lengths),
        )
        if outcome == "ready":
            self.ahead.append(group)

    def group(self, ticket: int, step: int) -> Group:
        a, b, c = (self.rng.randint(2, 99) for _ in range(3))
        prompt = Prompt(f"chain_sum/{ticket}", f"State the result and nothing else: {a} + {b} - {c} = ?", (1, 2, 3, 4))
        scored = tuple(self.rollout(prompt, a + b - c, step, ticket) for _ in range(self.size))
        rewards = [rollout.reward for rollout in scored]
        mean = sum(rewards) / len(rewards)
        rows = tuple(_row(prompt, rollout, rollout.reward - mean) for rollout in scored)
        failed = self.troubles and self.rng.random() < 0.05
        failures = (Failure("reward_raised", "ZeroDivisionError: division by zero"),) if failed else ()
        return Group(ticket, prompt, scored, rows, failures)

    def rollout(self, prompt: Prompt, answer: int, step: int, ticket: int) -> Scored:
        right = self.rng.random() < self.skill(step)
        shown = answer if right else answer + self.rng.choice([-10, -1, 1, 10])
        length = max(1, min(2 * self.tokens, int(self.rng.gauss(self.tokens * (1.2 - self.skill(step)), 3))))
        cut = self.rng.randint(-length, length)
        spans = [VersionSpan(0, step, step)]
        if 0 < cut < length and ticket >= self.groups:  # those are trained one step later: a swap may meet them
            spans.append(VersionSpan(cut, step + 1, step))
        stop = "length" if length == 2 * self.tokens else "stop"
        text = f"The answer is <b>{shown}</b>." if self.rng.random() < 0.2 else str(shown)
        done = Completion(
            tuple(range(100, 100 + length)), tuple(-self.rng.random() for _ in range(length)), tuple(spans), stop, text
        )
        rewards = {"correct": float(right), "format": 0.1}
        return Scored(Episode((Turn(prompt.tokens, done),)), float(right), rewards)

    def trained(self, step: int, batch: tuple[Group, ...], wait: float, seconds: float) -> StepTrained:
        rows = [row for group in batch for row in group.rows]
        lags = Counter(max(0, step - version) for row in rows for version in row.versions)
        rewards = [rollout.reward for group in batch for rollout in group.scored]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        tokens = sum(len(row.tokens) for row in rows)
        wobble = self.rng.gauss
        report = TrainReport(
            step,
            step + 1,
            loss=-0.01 * self.rng.random(),
            grad_norm=abs(wobble(0.6, 0.15)),
            lr=1e-5 * min(1.0, (step + 1) / 5),
            entropy=max(0.1, 0.9 - 0.5 * step / self.steps + wobble(0, 0.03)),
            ratio_mean=1 + wobble(0, 0.003),
            ratio_max=1.2 + abs(wobble(0, 0.3)),
            clip_fraction=abs(wobble(0.01, 0.006)),
            kl=abs(wobble(0.002, 0.001)),
            loss_tokens=tokens,
            forward_tokens=int(tokens * 1.4),
            microbatches=2,
            seconds=seconds,
            lags=tuple(self.by_lag(lag, count) for lag, count in sorted(lags.items())),
            token_numbers=tuple(_numbers(batch[0].ticket, place, row) for place, row in enumerate(batch[0].rows)),
        )
        return StepTrained(self.t, report, batch, dict(lags), mean, std, mean, wait)

    def by_lag(self, lag: int, count: int) -> LagStats:
        kl = 0.001 * (lag + 1) * self.rng.uniform(0.8, 1.2)
        gaps = {"p50": 0.01, "p90": 0.05, "p99": 0.2, "max": self.rng.uniform(0.5, 1.5)}
        return LagStats(str(lag), count, 1.0, kl, 0.99 - 0.01 * lag, 2 * kl, 0.01, {"veto": 0.001 * lag}, gaps)

    def accounting(self) -> Accounting:
        return Accounting(
            drawn=self.ticket,
            trained=self.steps * self.groups,
            dropped=dict(self.dropped),
            failed=dict(self.failed),
            in_pipeline=len(self.ahead),
            rollout_failures=dict(self.rollout_failures),
        )

    def end(self) -> RunEnded:
        return RunEnded(self.t, "finished", self.steps, self.accounting(), 0.07, 0.18, self.sampled // 3, self.sampled)


def records_of(facts: Iterable[Fact]) -> Iterator[AnyRecord]:
    """What a journal beside these facts would hold of the steps that were trained."""
    for fact in facts:
        if isinstance(fact, StepTrained):
            yield from (ReadyRecord(fact.t, group) for group in fact.groups)
            yield SteppedRecord(fact.t, fact.report, tuple(group.ticket for group in fact.groups))
        elif isinstance(fact, WeightsLive):
            yield LiveRecord(fact.t, fact.update.version, fact.update.fingerprint)


def standing(facts: Iterable[Fact], step: int) -> Resume:
    """Where a run stands whose journal ends with these facts, and whose checkpoint is that of `step`."""
    tickets = Tickets()
    for fact in facts:
        if isinstance(fact, TicketDrawn):
            tickets.draw(fact)
        elif isinstance(fact, GroupEnded):
            tickets.end(fact)
        elif isinstance(fact, StepTrained):
            tickets.train(group.ticket for group in fact.groups)
    return Resume(
        step=step,
        saved=step,
        next_ticket=tickets.drawn,
        flying=frozenset(tickets.flying),
        ready=frozenset(tickets.ready),
    )


def write_journal(run_dir: Path, records: Iterable[AnyRecord], segment: int = SEGMENT) -> None:
    journal = Journal(run_dir, segment=segment)
    for record in records:
        journal.write(record)
    journal.close()


def _row(prompt: Prompt, scored: Scored, advantage: float) -> Row:
    done = scored.episode.last
    length = len(done.tokens)
    return Row(
        prompt.tokens, done.tokens, done.logprobs, (advantage,) * length, (True,) * length, tuple(done.versions())
    )


def _numbers(ticket: int, place: int, row: Row) -> TokenNumbers:
    """The trainer's log-prob of token i is lower than the sampler's by i / 100; its entropy is i / 10."""
    logprobs = array("f", (value - i / 100 for i, value in enumerate(row.logprobs)))
    entropies = array("f", (i / 10 for i in range(len(row.tokens))))
    return TokenNumbers(ticket, place, logprobs.tobytes(), entropies.tobytes())


def write_run(directory: Path, seed: int = 0, end: bool = True, config: str = "") -> Path:
    """A run of 30 steps with its journal. `end`: whether it recorded its end."""
    directory.mkdir(parents=True)
    facts = list(FactStream(steps=30, groups=4, tokens=5, seed=seed).facts())
    recorder = Recorder(directory, index=NumbersIndex(directory))
    for fact in facts if end else facts[:-1]:
        recorder.record(fact)
    recorder.close()
    write_journal(directory, records_of(facts))
    (directory / "config.toml").write_text(f"seed = {seed}\n{config}")
    return directory
