"""A packed buffer as a safetensors file, and back (https://github.com/huggingface/safetensors#format): eight bytes that say how
long the header is, the header as JSON, then the tensors without gaps. No tensor is copied on the way. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headrace.core.weights import Manifest, TensorSpec
from headrace.durable.regular_files import open_regular

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Torch's names of dtypes, and the format's."""

LONGEST_HEADER = 100_000_000
"""Alignment of the header in bytes, which the format requires."""


def write_tensors(path: Path, manifest: Manifest, buffer: memoryview, repeat_tied: bool = False) -> None:
    """Writes the `buffer` [manifest.nbytes]. Returns when the bytes are on the disk. `repeat_tied`: write tied parameters once more under each of
    their other names, because the format lets no two tensors share bytes."""
    header, end = {}, 0
    tensors = {spec.name: spec for spec in manifest.tensors}
    if repeat_tied:
        tensors |= {other: tensors[name] for other, name in manifest.tied.items()}
    for name, spec in tensors.items():
        header[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in tensors.values():
            file.write(buffer[spec.offset : spec.offset + spec.nbytes])
        file.flush()
        os.fsync(file.fileno())


def read_into(path: Path, manifest: Manifest, buffer: memoryview) -> None:
    """Fills the buffer [manifest.nbytes]. Raises ValueError if the file does not match the manifest, or is too short."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= LONGEST_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        header, start = json.loads(file.read(length)), 8 + length
        for spec in manifest.tensors:
            begin = _place(header, spec, path)
            file.seek(start + begin)
            if file.readinto(buffer[spec.offset : spec.offset + spec.nbytes]) != spec.nbytes:
                raise ValueError(f"{path.name} ends within {spec.name}")


def _place(header: dict[str, dict[str, Any]], spec: TensorSpec, path: Path) -> int:
    found = header.get(spec.name)
    if not found or found["dtype"] != _DTYPES.get(spec.dtype) or found["shape"] != list(spec.shape):
        raise ValueError(f"{path.name} does not hold {spec.name} of shape {spec.shape} in {spec.dtype}")
    begin, end = found["data_offsets"]
    if end - begin != spec.nbytes:
        raise ValueError(f"{path.name} holds {end - begin} bytes of {spec.name}, and {spec.nbytes} are right")
    return int(begin)
