"""A pass is asked for while the device still computes the one before: its tokens are on the device, and the host learns them later.

    host      plan n │ plan n + 1 │ results of n, who ends │ plan n + 2 │ results of n + 1 ...
    device           │ pass n            │ pass n + 1               │ pass n + 2

Pass n + 1 is planned as if nobody ended with the tokens of pass n, but those whose limit it is. Who did end is left out when its results are looked
at: nothing of it was booked. If weights are swapped, or the engine falls asleep, a pass that is under way is forgotten, and its rows are forwarded
again: what it wrote into the cache lies behind what is known, and is written over.

Only passes in which every row decodes, and none has a constraint, are asked for ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.engine.native.draws import DrawDetails, Drawn, Mask
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput, Runner
from headrace.engine.native.sampler import PendingDraw
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.sequences import EngineSequence, Plan
from headrace.native.uploads import uploaded


@dataclass(frozen=True)
class PassUnderWay:
    """A pass of decoding rows whose tokens the host has not seen."""

    batch: ForwardInput
    sequences: Sequence[EngineSequence]
    """The sequences of its rows, in their order. Rows may have moved since, or ended."""
    forward: ForwardOutput
    draw: PendingDraw

    def alive(self) -> np.ndarray:
        """Returns the places of sequences that still run."""
        return np.flatnonzero([sequence.row >= 0 for sequence in self.sequences])


def may_fly(runner: Runner, schedule: Scheduler, plan: Plan) -> bool:
    """Whether the results of this pass may be looked at later: it is of decoding rows alone, of which nothing is asked that the host decides before a
    token is drawn, and no experts are recorded."""
    running = schedule.running
    if not runner.feeds or plan.chunks or plan.batch.routing:
        return False
    return not running.column("adjusted").any() and not running.column("top").any()


def take_off(
    schedule: Scheduler, batch: ForwardInput, forward: ForwardOutput, rows: np.ndarray, ahead: int
) -> PassUnderWay:
    """Begins to draw. `rows`: those of the batch; `ahead`: tokens that their counters lack."""
    running = schedule.running
    settings, columns = running.settings(rows), running.columns[rows]
    settings = replace(settings, counter=settings.counter + ahead)
    wanted = DrawDetails(masks=columns["mask"], tops=np.zeros(len(rows), np.int64))
    sequences = [running.sequences[row] for row in rows.tolist()]
    return PassUnderWay(batch, sequences, forward, PendingDraw(forward.logits, settings, wanted))


def plan_ahead(schedule: Scheduler, flight: PassUnderWay) -> tuple[ForwardInput, np.ndarray] | None:
    """Returns the pass after one that is under way, and its rows; None if the host must see the tokens first, or others wait for a row that is
    free. Takes the blocks that it needs."""
    running = schedule.running
    if len(running) < running.slots and schedule.queue.head() is not None:
        return None
    places = {id(sequence): place for place, sequence in enumerate(flight.sequences)}
    if any(id(sequence) not in places for sequence in running.sequences):
        return None
    columns = running.columns[: len(running)]
    rows = np.flatnonzero(columns["counter"] + 1 < columns["limit"])
    full = rows[columns["blocks"][rows] * BLOCK == columns["computed"][rows] + 1]
    if not len(rows) or len(full) > schedule.blocks.free:
        return None
    for row in full.tolist():
        running.append(row, schedule.blocks.take())
    at = np.array([places[id(running.sequences[row])] for row in rows.tolist()])
    drawn = flight.draw.tokens
    whole = len(at) == len(flight.sequences) and (at == np.arange(len(at))).all()
    batch = ForwardInput(
        tokens=np.zeros(len(rows), np.int64),
        starts=np.arange(len(rows) + 1, dtype=np.int32),
        context=columns["computed"][rows] + 1,
        tables=np.ascontiguousarray(running.tables[rows, : columns["blocks"][rows].max()]),
        rows=np.arange(len(rows)),
        adapters=columns["adapter"][rows],
        fed=drawn if whole else drawn[uploaded(at, drawn.device)],
    )
    return batch, rows


def landed(schedule: Scheduler, flight: PassUnderWay, alive: np.ndarray) -> Plan:
    """Returns the plan of a pass as if it had been made of the sequences `alive` alone, by their rows now; the host knows its tokens by now."""
    running, batch = schedule.running, flight.batch
    rows = np.array([flight.sequences[place].row for place in alive.tolist()], dtype=np.int64)
    own = replace(
        batch,
        tokens=running.columns["token"][rows],
        starts=np.arange(len(rows) + 1, dtype=np.int32),
        context=batch.context[alive],
        tables=batch.tables[alive],
        rows=np.arange(len(rows)),
        adapters=batch.adapters[alive],
        fed=None,
    )
    return Plan(own, rows, [], rows, None)


def of_places(drawn: Drawn, places: np.ndarray) -> Drawn:
    """Returns some rows of a draw without most probable tokens."""
    mask = drawn.mask
    if mask is not None:
        parts = [mask.token_ids[mask.offsets[place] : mask.offsets[place + 1]] for place in places.tolist()]
        ends = np.cumsum([0, *map(len, parts)])
        mask = Mask(np.concatenate(parts) if parts else mask.token_ids[:0], ends)
    return Drawn(tokens=drawn.tokens[places], logprobs=drawn.logprobs[places], finite=drawn.finite[places], mask=mask)
