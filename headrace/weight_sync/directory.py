"""Weights from directories: the model's own, which never change, and directories that are named while an engine serves.

Engines without a trainer read their weights here: those of teachers and references, and of a server. The file has both ends, as every
transport: the controller takes a mark of the files when the run starts (`offer`, `offer_adapter`), and every engine that reads them, even
one that replaces a dead engine hours later, refuses files that have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import xxhash
from msgspec import Meta

from headrace.core.errors import IdentityError
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.durable.atomic_files import open_regular, read_regular
from headrace.weight_sync.files import FilesReceiver
from headrace.weight_sync.http_ranges import UnpreparedReceiver

if TYPE_CHECKING:
    import torch

_READ = ("config.json", "*.safetensors", "*.bin", "*.index.json")
_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_LONGEST = 1 << 22
"""Bytes of a config. One that names thousands of modules has a few hundred thousand."""


class _PeftConfig(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that decide what an adapter computes, as peft writes them."""

    r: Annotated[int, Meta(ge=1, lt=1 << 20)]
    lora_alpha: float
    peft_type: str = ""
    bias: str = "none"
    use_rslora: bool | None = None
    use_dora: Any = None
    modules_to_save: Any = None
    trainable_token_indices: Any = None
    rank_pattern: dict[str, Annotated[int, Meta(ge=1, lt=1 << 20)]] | None = None
    alpha_pattern: dict[str, float] | None = None


def offer(model_dir: Path) -> WeightUpdate:
    """Returns the update that engines load: version 0, for the whole run. Reads no weights and imports no torch."""
    nbytes = sum(path.stat().st_size for path in _files(model_dir))
    return WeightUpdate(version=0, kind="full", fingerprint=mark_of(model_dir), nbytes=nbytes, seconds=0.0)


def offer_adapter(directory: Path, name: str, version: int) -> WeightUpdate:
    """A LoRA adapter that peft saved. Raises ValueError for one that cannot be served. Reads no weights."""
    try:
        content = read_regular(directory / _CONFIG, _LONGEST)
        kind = msgspec.json.decode(content, type=dict[str, Any]).get("peft_type")
        if kind != "LORA":
            raise ValueError(f"its peft_type is {kind}, and only LORA is served beside a model")
        described = msgspec.json.decode(content, type=_PeftConfig)
        with open_regular(directory / _ADAPTER) as file:
            nbytes = file.seek(0, 2)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{directory} is not an adapter that peft saved ({_CONFIG} and {_ADAPTER}): {error}") from None
    spec = _spec(described, name, directory)
    where = {"peft": str(directory.absolute())}
    mark = mark_of(directory)
    return WeightUpdate(
        version=version, kind="adapter", fingerprint=mark, nbytes=nbytes, seconds=0.0, where=where, adapter=spec
    )


def _spec(described: _PeftConfig, name: str, directory: Path) -> AdapterSpec:
    for field in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if getattr(described, field):
            raise ValueError(f"{directory} has {field}, which is not served beside a model; merge it into its weights")
    if described.bias != "none":
        raise ValueError(f"{directory} trains biases, which are not served beside a model; merge it into its weights")
    return AdapterSpec(
        name=name,
        rank=described.r,
        alpha=described.lora_alpha,
        rslora=bool(described.use_rslora),
        rank_pattern=described.rank_pattern or {},
        alpha_pattern=described.alpha_pattern or {},
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
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            open_regular(directory / _ADAPTER).close()  # a pipe would be waited for without end
            return {name: tensor.to(self._dtype) for name, tensor in load_file(directory / _ADAPTER).items()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{directory / _ADAPTER} cannot be read as a safetensors file: {error}") from None
