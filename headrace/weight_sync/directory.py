"""Weights from directories: the model's own, which never change, and directories that are named while an engine serves.

Engines without a trainer read their weights here: those of teachers and references, and of a server. The file has both ends, as every
transport: the controller takes a mark of the files when the run starts (`offer`, `offer_adapter`), and every engine that reads them, even
one that replaces a dead engine hours later, refuses files that have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from headrace.errors import IdentityError
from headrace.weight_sync.files import FilesReceiver
from headrace.weight_sync.over_http.unprepared import UnpreparedReceiver
from headrace.weights import AdapterSpec, WeightUpdate

if TYPE_CHECKING:
    import torch

_READ = ("config.json", "*.safetensors", "*.bin", "*.index.json")
_ADAPTER = "adapter_model.safetensors"


def offer(model_dir: Path) -> WeightUpdate:
    """Returns the update that engines load: version 0, for the whole run. Reads no weights and imports no torch."""
    nbytes = sum(path.stat().st_size for path in _files(model_dir))
    return WeightUpdate(version=0, kind="full", fingerprint=mark_of(model_dir), nbytes=nbytes, seconds=0.0)


def offer_adapter(directory: Path, name: str, version: int) -> WeightUpdate:
    """A LoRA adapter that peft saved. Raises ValueError for one that cannot be served. Reads no weights."""
    try:
        described = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        nbytes = (directory / _ADAPTER).stat().st_size
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory} is not an adapter that peft saved (adapter_config.json and {_ADAPTER}): {error}"
        ) from None
    spec = _spec(described, name, directory)
    where = {"peft": str(directory.absolute())}
    mark = mark_of(directory)
    return WeightUpdate(
        version=version, kind="adapter", fingerprint=mark, nbytes=nbytes, seconds=0.0, where=where, adapter=spec
    )


def _spec(described: Any, name: str, directory: Path) -> AdapterSpec:
    if not isinstance(described, dict) or described.get("peft_type") != "LORA":
        raise ValueError(f"{directory} is not a LoRA adapter; only LoRA is served beside a model")
    for field in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if described.get(field):
            raise ValueError(f"{directory} has {field}, which is not served beside a model; merge it into its weights")
    if described.get("bias", "none") != "none":
        raise ValueError(f"{directory} trains biases, which are not served beside a model; merge it into its weights")
    return AdapterSpec(
        name=name,
        rank=int(described["r"]),
        alpha=float(described["lora_alpha"]),
        rslora=bool(described.get("use_rslora")),
        rank_pattern=described.get("rank_pattern") or {},
        alpha_pattern=described.get("alpha_pattern") or {},
    )


def mark_of(directory: Path) -> str:
    """A hash that changes when a file is written again: of names, sizes and times, because a teacher may have many gigabytes."""
    mark = xxhash.xxh3_128()
    for path in _files(directory):
        stat = path.stat()
        mark.update(f"{path.name}|{stat.st_size}|{stat.st_mtime_ns}|".encode())
    return mark.hexdigest()


def _files(directory: Path) -> list[Path]:
    return sorted({path for pattern in _READ for path in directory.glob(pattern)})


class DirectoryReceiver:
    """The engine's end. `read` returns the parameters of a model's directory in the serving dtype."""

    def __init__(self, model_dir: Path, read: Callable[[Path], Mapping[str, torch.Tensor]], dtype: torch.dtype) -> None:
        self._model_dir, self._read, self._dtype = model_dir, read, dtype
        self._fetching = UnpreparedReceiver()

    @property
    def received(self) -> int:
        return self._fetching.received

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises `IdentityError` when the files are not those of the offer, `ValueError` when they lack parameters."""
        if "path" in update.where:
            return FilesReceiver().receive(update)
        if "url" in update.where:
            return self._fetching.receive(update)
        peft = update.where.get("peft")
        directory = Path(str(peft)) if peft else self._model_dir
        if mark_of(directory) != update.fingerprint:
            raise IdentityError(
                f"the weights in {directory} are not those that were to be loaded: they have been written since. "
                "Restore the old files, or start a new run"
            )
        return self._adapter(directory) if peft else self._read(directory)

    def _adapter(self, directory: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return {name: tensor.to(self._dtype) for name, tensor in load_file(directory / _ADAPTER).items()}
