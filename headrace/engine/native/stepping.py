"""One step: a forward pass under one version of the weights (C4), a token drawn for every row that is up to date, and caches
and counters updated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch

from headrace.core.steps import Finished, PromptScores, StepOutput, TokenDetails
from headrace.core.types import RoutingTrace, Stop, TopLogprobs
from headrace.engine.native.ahead import PassUnderWay, landed, may_fly, of_places, plan_ahead, take_off
from headrace.engine.native.draws import DrawDetails, Drawn, RowScores
from headrace.engine.native.forward_pass import ForwardOutput, Runner
from headrace.engine.native.guides import Guides, reported
from headrace.engine.native.kv_cache import RecordedRouting
from headrace.engine.native.live_weights import Served
from headrace.engine.native.sampler import draw, score
from headrace.engine.native.scheduler import LOST, Forks, Scheduler
from headrace.engine.native.sequences import Chunk, EngineSequence, Plan, Planner, Running

# --- Details that requests can ask for
# Top log-probs, sampling masks, log-probs of the prompt. They are returned as bytes.


def token_details(running: Running, rows: np.ndarray, drawn: Drawn) -> tuple[TokenDetails, ...]:
    """`rows`: those that `drawn` is about, in its order."""
    top, mask = running.columns["top"][rows], running.columns["mask"][rows]
    wanted = np.flatnonzero(((top > 0) | mask) & drawn.finite)
    return tuple(
        TokenDetails(
            running.sequences[rows[place]].id,
            *(_row_of_top(drawn, place, int(top[place])) if top[place] else (b"", b"")),
            **(_mask_of(running.sequences[rows[place]], drawn, place) if mask[place] else {}),
        )
        for place in wanted.tolist()
    )


def _row_of_top(drawn: Drawn, place: int, k: int) -> tuple[bytes, bytes]:
    assert drawn.top_ids is not None and drawn.top_logprobs is not None
    return (
        drawn.top_ids[place, :k].astype(np.int32).tobytes(),
        drawn.top_logprobs[place, :k].astype(np.float32).tobytes(),
    )


def _mask_of(sequence: EngineSequence, drawn: Drawn, place: int) -> dict[str, bytes]:
    """The tokens that filters kept, or name and encoding of the set that they were drawn from if filters cut nothing more: fields of
    `TokenDetails`."""
    assert drawn.mask is not None
    offsets = drawn.mask.offsets
    kept = drawn.mask.token_ids[offsets[place] : offsets[place + 1]]
    guide = sequence.guide
    if guide is not None and guide.allowed is not None and not len(kept):
        name, encoded = reported(guide)
        return {"set_name": name, "set": encoded}
    return {"mask": kept.tobytes()}


def score_chunk(forward: ForwardOutput, place: int, running: Running, chunk: Chunk) -> bool:
    """Appends the log-probs of the tokens after a chunk's positions to those of its sequence. `place`: the row of the logits after the
    first of them. False if one of them is not finite."""
    sequence = running.sequences[chunk.row]
    following = running.history[chunk.row, chunk.start + 1 : chunk.start + 1 + chunk.scores]
    rows = np.arange(place, place + chunk.scores)
    scores = score(forward, rows, following.astype(np.int64), sequence.request.top_logprobs)
    sequence.scores.append(scores)
    return bool(np.isfinite(scores.logprobs).all())


def prompt_scores(sequence: EngineSequence, version: int, mixed: bool) -> PromptScores:
    """Returns the scores of the whole prompt, once they are complete."""
    parts: list[RowScores] = sequence.scores
    k = sequence.request.top_logprobs
    logprobs = tuple(float(value) for part in parts for value in part.logprobs)
    ids = b"".join(part.top_ids.astype(np.int32).tobytes() for part in parts if part.top_ids is not None)
    values = b"".join(part.top_logprobs.astype(np.float32).tobytes() for part in parts if part.top_logprobs is not None)
    return PromptScores(sequence.id, version, logprobs, TopLogprobs(k, ids, values) if k else None, mixed)


# --- stepping ------------------------------------------------------------


@dataclass(kw_only=True)
class Counters:
    """Totals since the start."""

    sampled: int = 0
    prompt: int = 0
    recomputed: int = 0


@dataclass
class Ends:
    """The sequences that end with this step, collected before any row is removed, because removing one moves others."""

    stops: dict[EngineSequence, Stop] = field(default_factory=dict)
    poisoned: list[EngineSequence] = field(default_factory=list)
    """Sequences whose logits are not finite."""
    stuck: dict[EngineSequence, str] = field(default_factory=dict)
    """Sequences whose constraint cannot be followed further, and why."""


class Stepper:
    def __init__(
        self,
        runner: Runner,
        schedule: Scheduler,
        *,
        planner: Planner,
        served: Served,
        forks: Forks,
        routing: RecordedRouting | None,
        guides: Guides,
        ends: np.ndarray,
    ) -> None:
        """`ends` [V] bool: end-of-sequence tokens."""
        self._guides = guides
        self._runner, self._schedule, self._planner = runner, schedule, planner
        self._served, self._forks, self._routing = served, forks, routing
        self._running, self._ends = schedule.running, ends
        self.counters = Counters()
        self._flight: PassUnderWay | None = None
        """A pass that the device may still be computing, asked for by the step before."""

    def forget(self) -> None:
        """Forgets a pass that is under way: its rows are forwarded again by the next step."""
        self._flight = None

    def __call__(self) -> StepOutput:
        flight, self._flight = self._flight, None
        if flight is not None and len(flight.alive()):
            return self._land(flight)
        plan = self._prepare()
        lost = tuple(Finished(sequence.id, "error", LOST) for sequence in self._schedule.lost)
        self._schedule.lost.clear()
        if plan is None:
            return StepOutput(self._served.base, finished=lost)
        forward = self._runner.forward(plan.batch)
        if self._routing is not None and forward.routing is not None:
            places = plan.batch.places() if forward.routed is None else forward.routed
            self._routing.record(places, forward.routing)
        if may_fly(self._runner, self._schedule, plan):
            return self._land(take_off(self._schedule, plan.batch, forward, plan.rows, 0), lost)
        ends = Ends()
        return self._collect(plan, forward, lost, self._draw(plan, forward, ends), ends)

    def _land(self, flight: PassUnderWay, lost: tuple[Finished, ...] = ()) -> StepOutput:
        """Asks for the pass after this one, and looks at the results of this one meanwhile."""
        if (following := plan_ahead(self._schedule, flight)) is not None:
            batch, rows = following
            self._clear()
            self._flight = take_off(self._schedule, batch, self._runner.forward(batch), rows, 1)
        alive = flight.alive()
        plan = landed(self._schedule, flight, alive)
        drawn, fed = flight.draw.result()
        if not fed:
            self.forget()
        return self._collect(plan, flight.forward, lost, of_places(drawn, alive), Ends())

    def _prepare(self) -> Plan | None:
        """Gives rows and blocks to the next sequences, and copies and clears blocks as needed."""
        self._clear()
        if copies := self._schedule.admit():
            source, target = np.array(copies, dtype=np.int64).T.copy()
            self._runner.copy_blocks(source, target)
            if self._routing is not None:
                self._routing.copy(source, target)
        self._schedule.grow()
        self._clear()
        plan = self._planner.plan(self._running)
        if plan is not None and (kept := self._schedule.kept(plan)) is not None:
            plan = replace(plan, batch=replace(plan.batch, kept=kept))
        for slot, other in self._schedule.states.copies():
            self._runner.copy_state(slot, other)
        return plan

    def _clear(self) -> None:
        if dirty := self._schedule.blocks.dirty():
            self._runner.clear_blocks(np.array(dirty, dtype=np.int64))

    # -- results of the pass ----------------------------------------------------------------------------------------------------

    def _collect(
        self, plan: Plan, forward: ForwardOutput, lost: tuple[Finished, ...], drawn: Drawn, ends: Ends
    ) -> StepOutput:
        """`ends`: of rows whose constraint cannot be followed."""
        running = self._running
        self._advance(plan, forward)
        scores = self._score(plan, forward, ends)
        kept = plan.rows[drawn.finite]
        self._append(kept, drawn)
        self._find_ends(plan.rows, drawn, ends)
        output = StepOutput(
            self._served.base,
            tuple([running.sequences[row].request.id for row in kept.tolist()]),
            tuple(drawn.tokens[drawn.finite].tolist()),
            tuple(drawn.logprobs[drawn.finite].tolist()),
            tuple(running.columns["kv_version"][kept].tolist()),
            versions=self._versions(kept),
            details=self._details(plan.rows, drawn),
            scores=scores,
            mixed=self._served.mixed,
        )
        self._guide(kept, drawn, ends)
        self.counters.sampled += len(kept)
        finished = self._take_out(plan, ends)
        return msgspec.structs.replace(output, finished=lost + finished) if lost or finished else output

    def _adjust(self, plan: Plan, forward: ForwardOutput, ends: Ends) -> np.ndarray | None:
        """Changes the logits that are drawn from as constraints and biases say. Returns the number of tokens that constraints left of each
        row; None if there are no such rows."""
        self._guides.wait()
        adjusted = np.flatnonzero(self._running.columns["adjusted"][plan.rows])
        if not len(adjusted):
            return None
        places, sets = [], []
        left = np.full(len(plan.rows), forward.logits.shape[1])
        for row in adjusted.tolist():
            sequence = self._running.sequences[plan.rows[row]]
            place, guide = row if plan.drawn is None else int(plan.drawn[row]), sequence.guide
            if guide is not None and guide.problem:
                ends.stuck[sequence] = guide.problem
            elif guide is not None:
                assert guide.allowed is not None, "a guide knows what may follow, or why nothing can"
                places.append(place)
                sets.append(guide.allowed)
                left[row] = guide.allowed.count
            if biases := sequence.request.sampling.logit_bias:
                tokens, numbers = zip(*biases, strict=True)
                forward.logits[place, list(tokens)] += torch.tensor(numbers).to(forward.logits)
        if places:
            self._guides.rule_out(forward.logits, places, sets)
        return left

    def _guide(self, kept: np.ndarray, drawn: Drawn, ends: Ends) -> None:
        """Begins to compute what may follow the tokens that were drawn, for rows `kept`."""
        sequences = [self._running.sequences[row] for row in kept.tolist()]
        tokens = drawn.tokens[drawn.finite].tolist()
        self._guides.advance(
            [
                (sequence.guide, token)
                for sequence, token in zip(sequences, tokens, strict=True)
                if sequence.guide is not None and sequence not in ends.stops
            ]
        )

    def _draw(self, plan: Plan, forward: ForwardOutput, ends: Ends) -> Drawn:
        running, rows = self._running, plan.rows
        if not len(rows):
            nothing = np.zeros(0)
            return Drawn(tokens=nothing.astype(np.int64), logprobs=nothing, finite=nothing.astype(bool))
        settings = running.settings(rows if plan.chunks else None)
        left = self._adjust(plan, forward, ends)
        columns = running.columns[rows]
        drawn = draw(forward, settings, plan.drawn, DrawDetails(masks=columns["mask"], tops=columns["top"], left=left))
        if ends.stuck:
            drawn.finite[:] &= [running.sequences[row] not in ends.stuck for row in rows.tolist()]
        return drawn

    def _advance(self, plan: Plan, forward: ForwardOutput) -> None:
        """Records the tokens that the pass has put into the cache."""
        columns = self._running.columns
        if forward.again is not None:
            self.counters.recomputed += int(forward.again.clip(min=0).sum())
            rows = np.array([*plan.decoding.tolist(), *(chunk.row for chunk in plan.chunks)])[forward.again >= 0]
            columns["kv_version"][rows] = self._served.versions(columns["adapter"][rows])
        self.counters.prompt += int(np.count_nonzero(columns["fresh"][plan.decoding]))
        columns["computed"][plan.decoding] += 1
        for chunk in plan.chunks:
            columns["computed"][chunk.row] = chunk.stop
            sequence = self._running.sequences[chunk.row]
            again = chunk.stop if sequence.begun else min(max(sequence.again, chunk.start), chunk.stop)
            self.counters.recomputed += again - chunk.start
            self.counters.prompt += chunk.stop - again
        columns = columns[: len(self._running)]
        unset = np.flatnonzero((columns["kv_version"] < 0) & (columns["computed"] > 0))
        if len(unset):
            columns["kv_version"][unset] = self._served.versions(columns["adapter"][unset])

    def _append(self, kept: np.ndarray, drawn: Drawn) -> None:
        """The tokens that were drawn, for rows `kept`."""
        columns, tokens = self._running.columns, drawn.tokens[drawn.finite]
        self._running.history[kept, columns["known"][kept]] = tokens
        columns["token"][kept] = tokens
        columns["known"][kept] += 1
        columns["counter"][kept] += 1
        for row in kept[columns["fresh"][kept]].tolist():
            self._schedule.verify(self._running.sequences[row])
        self._schedule.sharing.full(kept)

    def _score(self, plan: Plan, forward: ForwardOutput, ends: Ends) -> tuple[PromptScores, ...]:
        """Reports the log-probs of a prompt when all of it has been computed."""
        scored, place = [], len(plan.decoding)
        for chunk in plan.chunks:
            sequence = self._running.sequences[chunk.row]
            if sequence.scored and self._score_chunk(chunk, forward, place, ends):
                version, mixed = self._served.version(sequence.adapter), self._served.mixed
                scored.append(prompt_scores(sequence, version, mixed))
                sequence.scored, sequence.scores = False, []
                self._running.columns["scored"][chunk.row] = False
            place += chunk.scores + chunk.samples
        return tuple(scored)

    def _score_chunk(self, chunk: Chunk, forward: ForwardOutput, place: int, ends: Ends) -> bool:
        """Whether the prompt is through. One that was only to be scored ends with its last token."""
        sequence = self._running.sequences[chunk.row]
        if chunk.scores and not score_chunk(forward, place, self._running, chunk):
            ends.poisoned.append(sequence)
            return False
        if chunk.stop < sequence.prompt:
            return False
        if not sequence.request.sampling.max_tokens:
            ends.stops[sequence] = "length"
        return True

    def _find_ends(self, rows: np.ndarray, drawn: Drawn, ends: Ends) -> None:
        columns = self._running.columns
        stopped = columns["ends_at_eos"][rows] & self._ends[drawn.tokens] & drawn.finite
        for place in np.flatnonzero(columns["watched"][rows] & drawn.finite).tolist():
            stopper = self._running.sequences[rows[place]].stopper
            assert stopper is not None
            stopped[place] |= stopper.push(int(drawn.tokens[place]))
        full = columns["counter"][rows] >= columns["limit"][rows]
        for place in np.flatnonzero(stopped | full | ~drawn.finite).tolist():
            sequence = self._running.sequences[rows[place]]
            if drawn.finite[place]:
                ends.stops[sequence] = "stop" if stopped[place] else "length"
            elif sequence not in ends.poisoned and sequence not in ends.stuck:
                ends.poisoned.append(sequence)

    def _versions(self, rows: np.ndarray) -> tuple[int, ...]:
        """Empty while no adapter is loaded."""
        if not self._served.adapters:
            return ()
        return tuple(self._served.versions(self._running.columns["adapter"][rows]).tolist())

    def _details(self, rows: np.ndarray, drawn: Drawn) -> tuple[TokenDetails, ...]:
        if drawn.mask is None and drawn.top_ids is None:
            return ()
        return token_details(self._running, rows, drawn)

    # -- the end of sequences -----------------------------------------------------------------------------------------------

    def _take_out(self, plan: Plan, ends: Ends) -> tuple[Finished, ...]:
        finished = []
        if ends.poisoned:
            errors = self._blame(plan, ends.poisoned)
            for sequence, error in zip(ends.poisoned, errors, strict=True):
                finished.append(Finished(sequence.id, "error", error))
                self._schedule.end(sequence, poisoned=True)
        for sequence, problem in ends.stuck.items():
            finished.append(Finished(sequence.id, "error", problem))
            self._schedule.end(sequence)
        for sequence, stop in ends.stops.items():
            if not sequence.gone:
                finished.append(self.finished(sequence, stop))
                self._forks.remember(sequence)
                self._schedule.finish(sequence)
        return tuple(finished)

    def finished(self, sequence: EngineSequence, stop: Stop) -> Finished:
        """The last word on a sequence, said while its row is still there (if it has one)."""
        return Finished(sequence.id, stop, routing=self._trace(sequence))

    def _trace(self, sequence: EngineSequence) -> RoutingTrace | None:
        if not sequence.request.return_routing or self._routing is None:
            return None
        if sequence.row < 0:
            return self._routing.trace([], 0)
        computed = int(self._running.columns["computed"][sequence.row])
        return self._routing.trace(self._running.table(sequence.row), computed)

    def _blame(self, plan: Plan, poisoned: list[EngineSequence]) -> list[str]:
        """Returns a sentence for each poisoned sequence: its version, and the first layer with non-finite numbers, if computing the
        pass again shows one."""
        layers = self._runner.blame(plan.batch)
        rows = [*plan.decoding.tolist(), *(chunk.row for chunk in plan.chunks)]
        sentences = []
        for sequence in poisoned:
            segment = rows.index(sequence.row)
            found = layers[plan.batch.starts[segment] : plan.batch.starts[segment + 1]]
            where = f"first after layer {found[found >= 0].min()}" if (found >= 0).any() else "gone when computed again"
            sentences.append(f"non-finite logits at version {self._served.version(sequence.adapter)}, {where}")
        return sentences
