"""The trial: every trained value is changed for a moment, so that one publish shows which parameters reach what an engine multiplies by.

A step changes weights by so little that log-probs in bfloat16 hardly show a layer that kept its old ones. A trial changes each value by 3 to 12 %,
which shows at any precision, and changes it back, bit for bit. What log-probs would look like if one kind of parameter had kept its old values is
computed here, by changing that kind back alone; `loop/evaluation.py` compares the engine's with each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash
from torch import Tensor

from headrace.core.errors import HeadraceError
from headrace.core.reports import TrialScores
from headrace.durable.atomic_files import replace_file
from headrace.native.arithmetic import cpu_model
from headrace.trainer.model.low_memory import local
from headrace.version import __version__

if TYPE_CHECKING:
    from jaxtyping import Float


BLOCK = 4
"""The most neighbouring layers that are told from the others together: the effect of a single one is a quarter of theirs."""
FILL = 0.01
"""Takes the place of zero in parameters that are zero everywhere (new adapters, biases of new models)."""

_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 23),
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
}
"""The integers of the same size, and the bits of the mantissa."""
_LAYER = re.compile(r"\.(\d+)\.")


def kind_of(name: str) -> str:
    """The name without the numbers of layers and experts: `model.layers.*.mlp.up_proj.weight`."""
    return _LAYER.sub(".*.", name)


def hypotheses(names: list[str]) -> dict[str, list[str]]:
    """Returns the parameters that may have kept their old values together, by name: each kind, and each block of neighbouring layers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(kind_of(name), []).append(name)
    numbered = {name: int(match[1]) for name in names if (match := _LAYER.search(name))}
    layers = max(numbered.values(), default=-1) + 1
    blocks = -(-layers // BLOCK) if layers > BLOCK else layers
    if blocks > 1:
        for block in range(blocks):
            first, end = block * layers // blocks, (block + 1) * layers // blocks
            label = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
            found[label] = [name for name, number in numbered.items() if first <= number < end]
    return found


class Trial:
    """Changes the parameters when it is made."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        held = ((name, local(parameter.detach())) for name, parameter in parameters.items())
        # Others are another stage's, or integers of a quantised model, which are not trained.
        self._values = {name: tensor for name, tensor in held if not tensor.is_meta and tensor.dtype in _BITS}
        self._filled = {name for name, values in self._values.items() if not values.any()}
        self._hypotheses = hypotheses(list(parameters))
        for name in self._values:
            self._change(name)

    def end(self) -> None:
        for name in self._values:
            self._change_back(name)

    def kept(self) -> Iterator[str]:
        """Yields what may have kept its old values. Meanwhile those parameters have them."""
        for label, names in self._hypotheses.items():
            here = [name for name in names if name in self._values]
            for name in here:
                self._change_back(name)
            yield label
            for name in here:
                self._change(name)

    @torch.no_grad()
    def _change(self, name: str) -> None:
        values = self._values[name]
        if name not in self._filled:
            _flip(values)
            return
        # Signs by chance, the same in every process: what is equal for all tokens, or for all of a layer's outputs, changes no log-prob.
        draw = torch.Generator().manual_seed(values.numel())
        values.copy_(torch.randint(2, values.shape, generator=draw) * 2 * FILL - FILL)

    @torch.no_grad()
    def _change_back(self, name: str) -> None:
        self._values[name].zero_() if name in self._filled else _flip(self._values[name])


def _flip(values: Float[Tensor, "*shape"]) -> None:
    """Flips one bit of every mantissa: 6 to 12 % of a vector's value up or down, 3 to 6 % of a matrix's. A second call undoes it."""
    integers, mantissa = _BITS[values.dtype]
    weight = 3 if values.dim() == 1 else 4
    values.view(integers).bitwise_xor_(1 << (mantissa - weight))


# --- Effects of a trial that an earlier process computed from the same contents
# Seconds of a start on a CPU, each time the same numbers.
#
# They are known by everything that they are made from: all weights as they are changed for the trial, tokens, the way of computing, and this code. Beyond that they
# count only if the log-probs that this process has just computed under the changed weights are theirs, bit for bit.


WORTH = 50_000_000
"""Values of a model from which on effects are kept: those of smaller ones are computed at once."""
MOST = 32
"""Files that are kept, the newest."""
SEAL = 16
"""Bytes of the checksum before the contents of a file."""


def contents_mark(tensors: Iterable[tuple[str, Tensor]], *others: object) -> str:
    """Returns a checksum of tensors on the CPU, bit for bit, of `others`, and of what else decides the bits of a result."""
    sums = xxhash.xxh3_128(Path(__file__).read_bytes())
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
