"""Effects of a trial that an earlier process computed from the same contents: seconds of a start on a CPU, each time the same numbers.

They are known by everything that they are made from: all weights as they are changed for the trial, tokens, the way of computing, and this code. Beyond that they
count only if the log-probs that this process has just computed under the changed weights are theirs, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from headrace.core.errors import HeadraceError
from headrace.core.reports import TrialScores
from headrace.durable.atomic_files import replace_file
from headrace.facts.machine_mark import cpu_model
from headrace.trainer.step import trial
from headrace.version import __version__

WORTH = 50_000_000
"""Values of a model from which on effects are kept: those of smaller ones are computed at once."""
MOST = 32
"""Files that are kept, the newest."""
SEAL = 16
"""Bytes of the checksum before the contents of a file."""


def contents_mark(tensors: Iterable[tuple[str, Tensor]], *others: object) -> str:
    """Returns a checksum of tensors on the CPU, bit for bit, of `others`, and of what else decides the bits of a result."""
    sums = xxhash.xxh3_128(Path(trial.__file__).read_bytes())
    sums.update(repr((__version__, torch.__version__, torch.get_num_threads(), cpu_model(), others)).encode())
    for name, tensor in tensors:
        sums.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sums.hexdigest()


class KnownEffects:
    """The file of one mark."""

    def __init__(self, directory: Path, mark: str) -> None:
        self._path = directory / mark

    def of(self, changed: Sequence[float]) -> dict[str, list[float]] | None:
        """Returns the effects (`TrialScores.kept`) beside these log-probs; None if they are not known, or damaged."""
        try:
            data = self._path.read_bytes()
            if data[:SEAL] != xxhash.xxh3_128_digest(data[SEAL:]):
                return None
            known = msgspec.msgpack.decode(data[SEAL:], type=TrialScores)
        except (OSError, msgspec.MsgspecError):
            return None
        return known.kept if known.changed == list(changed) else None

    def keep(self, scores: TrialScores) -> None:
        """A disk that cannot be written costs only the speed of the next start."""
        body = msgspec.msgpack.encode(scores)
        with suppress(OSError, HeadraceError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, xxhash.xxh3_128_digest(body) + body, flush=False)
            files = sorted(self._path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
            for old in files[:-MOST]:
                old.unlink(missing_ok=True)
