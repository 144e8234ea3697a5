"""`state.digest`: the sums of a run up to a place of its metrics, so that they are known without reading all facts before it. A run writes one
beside its metrics, for the board, and one into each checkpoint, from which a resume goes on.

Curves are drawn from `numbers.index`; everything else that the board shows comes from a `RunState`. Its sums are kept whole. Of its lists a
digest has a part: one step in `stride_of` for curves, the last few for rates, and what is rare. Like the index, a digest counts only while
the metrics before its place are those that it saw.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.reports import EngineStats
from headrace.core.types import Struct
from headrace.durable.atomic_files import replace_file
from headrace.facts.costs import Costs
from headrace.facts.facts import MemberSample
from headrace.facts.index.index_file import framed_bytes, mark_of, unframed
from headrace.facts.index.numbers import Numbers
from headrace.facts.numbers.choices import Choices
from headrace.facts.numbers.engine_use import EngineSpan, EngineUse, Nap, Naps
from headrace.facts.numbers.fates import Fate, Fates, Histogram, Sieve
from headrace.facts.numbers.scorers import ScorerUse
from headrace.facts.numbers.shares import Recent, Shares, Tally
from headrace.facts.numbers.state import RunState, WaitTotal, stride_of
from headrace.facts.numbers.step_totals import LagSum, LagSums, ProbeTotals, StepTotals, SwapTotals, TravelSums
from headrace.facts.numbers.tickets import Tickets
from headrace.facts.records import METRICS, MetricsFact
from headrace.version import __version__

DIGEST = "state.digest"
MAGIC = b"hrdigst1"
LAST = 32
"""Steps, swaps and probes at the end that are kept."""
SPANS = 128
"""Samples of the engine at the end that are kept."""
OBJECTS: tuple[type, ...] = (
    *(RunState, WaitTotal, Sieve, Histogram, Fates, Fate, Shares, Tally, Recent, Choices, Costs, ScorerUse, Tickets),
    *(EngineUse, Naps, StepTotals, SwapTotals, TravelSums, ProbeTotals, LagSums, LagSum),
)
"""Classes that are their attributes."""
STRUCTS: tuple[type, ...] = (*get_args(MetricsFact), EngineStats, MemberSample)
TUPLES: tuple[Any, ...] = (EngineSpan, Nap)
KINDS: dict[str, Any] = {one.__name__: one for one in (*OBJECTS, *STRUCTS, *TUPLES)}
PLAIN = {type(None), bool, int, float, str}
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque}


class Digest(msgspec.Struct):
    size: int
    """Bytes of the metrics that it counts."""
    mark: str
    """The checksum of the last of them, as in the index."""
    version: str
    """The version of headrace that wrote it; another one may count otherwise."""
    lines: int
    """Lines of these bytes."""
    block: tuple[int, int]
    """Start and end, in the index of the run, of the block that counts up to the same place; zeros if there is none."""
    groups: int
    """Rows of the groups' numbers."""
    reasons: list[str]
    """The reasons in these rows (`GroupTable.reasons`)."""
    state: Any
    """A `RunState`, as `frozen` makes it."""


def digest_of(
    run_dir: Path, state: RunState, numbers: Numbers, *, lines: int, block: tuple[int, int] = (0, 0)
) -> bytes:
    """Returns the bytes of a digest. `state` and `numbers` count the metrics up to `numbers.size`, which are so many `lines`. `block`: see
    `Digest`."""
    groups, size = numbers.groups, numbers.size
    mark, sums = mark_of(run_dir / METRICS, size), frozen(thinned(state))
    digest = Digest(
        size=size,
        mark=mark,
        version=__version__,
        lines=lines,
        block=block,
        groups=len(groups.rows),
        reasons=list(groups.reasons),
        state=sums,
    )
    return MAGIC + framed_bytes(msgspec.msgpack.encode(digest))


def write_digest(path: Path, data: bytes) -> None:
    """Replaces the file. A disk that is full costs only the board's speed."""
    with suppress(OSError, HeadraceError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, flush=False)


def read_digest(path: Path, run_dir: Path) -> tuple[Digest, RunState] | None:
    """Returns None for a file that is absent, torn, of another version, or of other metrics."""
    try:
        data = path.read_bytes()
        body = unframed(data, len(MAGIC)) if data.startswith(MAGIC) else None
        digest = msgspec.msgpack.decode(body, type=Digest) if body is not None else None
        if digest is None or digest.version != __version__:
            return None
        if not digest.mark or digest.mark != mark_of(run_dir / METRICS, digest.size):
            return None
        state = thawed(digest.state)
    except (OSError, msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return None
    return (digest, state) if isinstance(state, RunState) else None


def thinned(state: RunState) -> RunState:
    """Returns a state with the same sums and shorter lists. The given one is not changed."""
    made, stride = copy.copy(state), stride_of(state.totals.steps)
    made.whole, made.samples = False, ()
    made.rows = [row for row in state.rows[:-LAST] if row.report.step % stride == 0] + state.rows[-LAST:]
    made.swaps = [one for one in state.swaps[:-LAST] if one.update.version % stride == 0] + state.swaps[-LAST:]
    made.checks = state.checks[-LAST:]
    made.checkpoints = [one for one in state.checkpoints[:-LAST] if one.error] + state.checkpoints[-LAST:]
    made.engine, made.naps = copy.copy(state.engine), copy.copy(state.naps)
    made.engine.spans, made.naps.over = state.engine.spans[-SPANS:], state.naps.over[-LAST:]
    return made


def frozen(value: Any) -> Any:
    """Returns a value of lists, numbers and texts: `[kind, content, ...]` for everything that is not plain."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (dict, Counter, defaultdict):
        keys, values = list(value), list(value.values())
        factory = value.default_factory.__name__ if kind is defaultdict else ""
        return [kind.__name__, _all(keys), _all(values), factory]
    if kind.__name__ in SEQUENCES:
        return [kind.__name__, _all(sorted(value) if kind is set else list(value))]  # equal sets, equal bytes
    if isinstance(value, Struct):
        return [kind.__name__, value]
    if isinstance(value, tuple):
        return [kind.__name__, _all(list(value))]
    assert kind in OBJECTS, f"{kind.__name__} is not in OBJECTS"
    return [kind.__name__, {name: frozen(own) for name, own in vars(value).items()}]


def _all(values: list[Any]) -> list[Any]:
    return values if set(map(type, values)) <= PLAIN else [frozen(one) for one in values]


def thawed(data: Any) -> Any:
    """The inverse of `frozen`. Raises LookupError, TypeError, ValueError or a `MsgspecError` for what is not of this version."""
    if not isinstance(data, list):
        return data
    name, content = data[0], data[1]
    if name in SEQUENCES:
        return SEQUENCES[name](_each(content))
    if name in ("dict", "Counter", "defaultdict"):
        made: Any = defaultdict(KINDS[data[3]]) if name == "defaultdict" else Counter() if name == "Counter" else {}
        dict.update(made, zip(_each(content), _each(data[2]), strict=True))
        return made
    kind = KINDS[name]
    if kind in STRUCTS:
        return msgspec.convert(content, kind)
    if kind in TUPLES:
        return kind(*_each(content))
    return _object(kind, content)


def _each(content: Sequence[Any]) -> list[Any]:
    return [thawed(one) for one in content]


def _object(kind: type, content: dict[str, Any]) -> Any:
    made = kind("") if kind is ScorerUse else kind()
    if vars(made).keys() != content.keys():
        raise ValueError(f"other attributes of {kind.__name__}")
    for name, value in content.items():
        setattr(made, name, thawed(value))
    return made
