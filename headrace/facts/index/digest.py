"""`state.digest`: the sums of a run up to a place of its metrics, so that they are known without reading all facts before it. A run writes one
beside its metrics, for the board, and one into each checkpoint, from which a resume goes on.

Curves are drawn from `numbers.index`; everything else that the board shows comes from a `RunState`. Its sums are kept whole. Of its lists a
digest has a part: one step in `stride_of` for curves, the last few for rates, and what is rare. Like the index, a digest counts only while
the metrics before its place are those that it saw.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.durable.atomic_files import replace_file
from headrace.facts.index.index_file import framed_bytes, mark_of, unframed
from headrace.facts.index.numbers import Numbers
from headrace.facts.numbers.state import RunState, stride_of
from headrace.facts.records import METRICS
from headrace.facts.run_sums import RunSums, as_counter
from headrace.version import __version__

DIGEST = "state.digest"
MAGIC = b"hrdigst2"
LAST = 32
"""Steps, swaps and probes at the end that are kept."""
SPANS = 128
"""Samples of the engine at the end that are kept."""


class Digest(msgspec.Struct, forbid_unknown_fields=True):
    size: int
    """Bytes of the metrics that it counts."""
    mark: str
    """The checksum of the last of them, as in the index."""
    version: str
    """The version of headrace that wrote it; another one may count otherwise."""
    fields: int
    """The checksum of the names of all numbers (`fields_of`): one that a digest lacks would begin at its default."""
    lines: int
    """Lines of these bytes."""
    block: tuple[int, int]
    """Start and end, in the index of the run, of the block that counts up to the same place; zeros if there is none."""
    groups: int
    """Rows of the groups' numbers."""
    reasons: list[str]
    """The reasons in these rows (`GroupTable.reasons`)."""
    state: RunState
    """Thinned (`thinned`)."""


def digest_of(
    run_dir: Path, state: RunState, numbers: Numbers, *, lines: int, block: tuple[int, int] = (0, 0)
) -> bytes:
    """Returns the bytes of a digest. `state` and `numbers` count the metrics up to `numbers.size`, which are so many `lines`. `block`: see
    `Digest`."""
    groups, size = numbers.groups, numbers.size
    digest = Digest(
        size=size,
        mark=mark_of(run_dir / METRICS, size),
        version=__version__,
        fields=fields_of(RunState),
        lines=lines,
        block=block,
        groups=len(groups.rows),
        reasons=list(groups.reasons),
        state=thinned(state),
    )
    return MAGIC + framed_bytes(msgspec.msgpack.encode(digest))


def write_digest(path: Path, data: bytes) -> None:
    """Replaces the file. A disk that is full costs only the board's speed."""
    with suppress(OSError, HeadraceError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, flush=False)


def read_digest(path: Path, run_dir: Path) -> Digest | None:
    """Returns None for a file that is absent, torn, of another version or other numbers, or of other metrics."""
    try:
        data = path.read_bytes()
        body = unframed(data, len(MAGIC)) if data.startswith(MAGIC) else None
        digest = msgspec.msgpack.decode(body, type=Digest, dec_hook=as_counter) if body is not None else None
        if digest is None or (digest.version, digest.fields) != (__version__, fields_of(RunState)):
            return None
        if not digest.mark or digest.mark != mark_of(run_dir / METRICS, digest.size):
            return None
    except (OSError, msgspec.MsgspecError):
        return None
    return digest


def fields_of(kind: type[RunSums]) -> int:
    """Returns a checksum of the names of all fields of a class of sums, and of those that its fields have."""
    names: list[str] = []
    todo, known = [kind], set[Any]()
    while todo:
        one = todo.pop()
        if not (isinstance(one, type) and issubclass(one, RunSums)):
            todo += get_args(one)
        elif one not in known:
            known.add(one)
            fields = msgspec.structs.fields(one)
            names += [f"{one.__name__}.{field.name}" for field in fields]
            todo += [field.type for field in fields]
    return zlib.crc32("\n".join(sorted(names)).encode())


def thinned(state: RunState) -> RunState:
    """Returns a state with the same sums and shorter lists. The given one is not changed."""
    stride, tickets = stride_of(state.totals.steps), state.tickets
    return replace(
        state,
        whole=False,
        samples=(),
        rows=[row for row in state.rows[:-LAST] if row.report.step % stride == 0] + state.rows[-LAST:],
        swaps=[one for one in state.swaps[:-LAST] if one.update.version % stride == 0] + state.swaps[-LAST:],
        checks=state.checks[-LAST:],
        checkpoints=[one for one in state.checkpoints[:-LAST] if one.error] + state.checkpoints[-LAST:],
        engine=replace(state.engine, spans=state.engine.spans[-SPANS:]),
        tickets=replace(tickets, flying=sorted(tickets.flying), ready=sorted(tickets.ready)),  # equal sets, equal bytes
        naps=replace(state.naps, over=state.naps.over[-LAST:]),
    )
