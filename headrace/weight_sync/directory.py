"""Weights that never change, from a model's directory: for engines that serve a teacher or a reference, and have no trainer.

Both ends in one file, as with every transport: the controller marks the files at the start of the run (`offer`), and an engine
that reads them, the first one or one that replaces a dead one hours later, refuses files that are others by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from headrace.errors import IdentityError
from headrace.weights import WeightUpdate

if TYPE_CHECKING:
    import torch

_READ = ("config.json", "*.safetensors", "*.bin", "*.index.json")


def offer(model_dir: Path) -> WeightUpdate:
    """What is to be loaded: version 0, for good. Reads no weights and imports no torch."""
    nbytes = sum(path.stat().st_size for path in _files(model_dir))
    return WeightUpdate(version=0, kind="full", fingerprint=mark_of(model_dir), nbytes=nbytes, seconds=0.0)


def mark_of(model_dir: Path) -> str:
    """Changes when a file is written again. Over names, sizes and times, not contents: a teacher may have many gigabytes."""
    mark = xxhash.xxh3_128()
    for path in _files(model_dir):
        stat = path.stat()
        mark.update(f"{path.name}|{stat.st_size}|{stat.st_mtime_ns}|".encode())
    return mark.hexdigest()


def _files(model_dir: Path) -> list[Path]:
    return sorted({path for pattern in _READ for path in model_dir.glob(pattern)})


class DirectoryReceiver:
    """The engine's end. `read` gives the parameters of a directory, in the serving dtype."""

    def __init__(self, model_dir: Path, read: Callable[[Path], Mapping[str, torch.Tensor]]) -> None:
        self._model_dir, self._read = model_dir, read

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises `IdentityError` when the files are not those of the offer, `ValueError` when they lack parameters."""
        if mark_of(self._model_dir) != update.fingerprint:
            raise IdentityError(
                f"the weights in {self._model_dir} are not those that the run began with: they were written again meanwhile. "
                "Give the old files back, or start a new run"
            )
        return self._read(self._model_dir)
