"""Tensors in the files of a checkpoint: whole ones in one file, or parts of them in a file of each rank, without pickles.

    STEM.safetensors                        every tensor whole
    STEM-00001-of-00004.safetensors         what the first of four ranks wrote. `parts` in the file's metadata has, by name, the shape of the whole tensor and
                                            the places that are here, by dimensions

Both are safetensors files. A file is written as its tensors come, without a copy of them, and read in ranges: whoever needs a part of a tensor, split in
whatever way, reads those ranges of the files that it lies in.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.models.resolve import LONGEST_HEADER, read_header
from headrace.trainer.model.outline import Region
from headrace.trainer.placement.port import Piece

PARTS = "parts"
"""The key in a file's metadata."""

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's spelling."""

_CHUNK = 1 << 26
"""Bytes that are written at once."""


def part_file(stem: str, rank: int, ranks: int) -> str:
    return f"{stem}-{rank + 1:05}-of-{ranks:05}.safetensors"


def write(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Writes a file in the order of the mapping. The values are in the host's memory. Raises OSError (disk full, say)."""
    header: dict[str, Any] = {}
    parts = {name: [list(piece.shape), piece.region] for name, piece in pieces.items() if piece.region is not None}
    if parts:
        header["__metadata__"] = {PARTS: json.dumps(parts)}
    end = 0
    for name, (values, *_) in pieces.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": _DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= LONGEST_HEADER, f"{len(text)} bytes of names"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values, *_ in pieces.values():
            if values.numel():
                data = values.contiguous().reshape(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), _CHUNK):
                    file.write(data[start : start + _CHUNK])


class _Place(NamedTuple):
    """A part of a tensor in a file."""

    path: Path
    region: Region | None


class SavedTensors:
    """The tensors of several files, whole or in parts. Nothing but headers is read until `read` is called.

    Raises CheckpointError for files that cannot be read, or do not have the whole of a tensor."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._places: dict[str, list[_Place]] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        spelled = {spelling: dtype for dtype, spelling in _DTYPES.items()}
        for path in paths:
            try:
                stored = read_header(path)
                with safe_open(path, "pt") as file:
                    parts = json.loads((file.metadata() or {}).get(PARTS, "{}"))
                for name, tensor in stored.items():
                    shape, region = parts.get(name, (tensor.shape, None))
                    self._places.setdefault(name, []).append(_Place(path, region))
                    self.shapes[name], self.dtypes[name] = torch.Size(shape), spelled[tensor.dtype]
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                raise unreadable(path, error) from error
        for name, places in self._places.items():
            count = sum(_count(place.region, self.shapes[name]) for place in places)
            if count != self.shapes[name].numel():
                raise CheckpointError(
                    f"checkpoint {places[0].path.parent.name}: its files have {count} of the {self.shapes[name].numel()} values of {name}; "
                    "resume from an older checkpoint"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The values of a tensor, or a part of them, in memory of their own. Raises CheckpointError where a file cannot be read."""
        wanted = region if region is not None else [[(0, size)] for size in self.shapes[name]]
        found = torch.empty([sum(end - start for start, end in runs) for runs in wanted], dtype=self.dtypes[name])
        if found.numel():
            for place in self._places[name]:
                here = place.region if place.region is not None else [[(0, size)] for size in self.shapes[name]]
                overlap = [list(_common(mine, theirs)) for mine, theirs in zip(wanted, here, strict=True)]
                if all(overlap):
                    self._copy(place.path, name, overlap, found)
        return found

    def _copy(self, path: Path, name: str, overlap: Sequence[Sequence[tuple[slice, slice]]], found: Tensor) -> None:
        try:
            with safe_open(path, "pt") as file:
                stored = file.get_slice(name)
                for boxes in itertools.product(*overlap):
                    source = stored[tuple(theirs for _, theirs in boxes)] if boxes else stored[...]
                    found[tuple(mine for mine, _ in boxes)] = source
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error


def _count(region: Region | None, shape: torch.Size) -> int:
    return shape.numel() if region is None else prod(sum(end - start for start, end in runs) for runs in region)


def _common(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Iterator[tuple[slice, slice]]:
    """Yields the stretches of places that both have: as places among mine, and among theirs."""
    mine_at = 0
    for start, end in mine:
        theirs_at = 0
        for other, other_end in theirs:
            low, high = max(start, other), min(end, other_end)
            if low < high:
                first, second = mine_at + low - start, theirs_at + low - other
                yield slice(first, first + high - low), slice(second, second + high - low)
            theirs_at += other_end - other
        mine_at += end - start


def unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path.parent.name}: {path.name} cannot be read ({error}); resume from an older checkpoint"
    )
