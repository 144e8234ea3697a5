"""Weights from directories: the model's own, which never change, and directories that are named while an engine serves.

Engines without a trainer read their weights here: those of teachers and references, and of a server. The file has both ends, as every
transport: the controller takes a mark of the files when the run starts (`offer`), and every engine that reads them, even one that replaces a
dead engine hours later, refuses files that have changed since. Of an adapter (`offer_adapter`), which is small, the mark is a hash of all its
bytes, and the engine makes its tensors from the bytes that it has hashed: files that are copied have the times of others, and a save may come
between two looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import xxhash
from msgspec import Meta

from headrace.core.errors import IdentityError
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.durable.atomic_files import open_regular, read_regular
from headrace.weight_sync.files import FilesReceiver
from headrace.weight_sync.unprepared import UnpreparedReceiver, place_of

if TYPE_CHECKING:
    import torch

_READ = ("config.json", "*.safetensors", "*.bin", "*.index.json")
_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_PART = 1 << 20
"""Bytes that are hashed at once."""
_LONGEST = 1 << 22
"""Bytes of a config. One that names thousands of modules has a few hundred thousand."""


class _PeftConfig(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that decide what an adapter computes, as peft writes them."""

    r: Annotated[int, Meta(ge=1, lt=1 << 20)]
    lora_alpha: float
    peft_type: str = ""
    bias: str = "none"
    use_rslora: bool | None = None
    init_lora_weights: bool | str | None = None
    rank_pattern: dict[str, Annotated[int, Meta(ge=1, lt=1 << 20)]] | None = None
    alpha_pattern: dict[str, float] | None = None


_HARMLESS = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *(
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    ),  # the tensors say it
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "ensure_weight_tying", "velora_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # `init_lora_weights` says whether they are used
    "qalora_group_size",
}
"""Fields of a config, beside those that are read, that change no output of an adapter beside its model. Any other one that is set is refused:
peft gets new ones with each version, and most of them change what is computed."""
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin a training that leave the model's own weights as they are."""


def offer(model_dir: Path) -> WeightUpdate:
    """Returns the update that engines load: version 0, for the whole run. Reads no weights and imports no torch."""
    nbytes = sum(path.stat().st_size for path in _files(model_dir))
    return WeightUpdate(version=0, kind="full", fingerprint=mark_of(model_dir), nbytes=nbytes, seconds=0.0)


def offer_adapter(directory: Path, name: str, version: int) -> WeightUpdate:
    """A LoRA adapter that peft saved. Raises ValueError for one that cannot be served."""
    try:
        content = read_regular(directory / _CONFIG, _LONGEST)
        kind = msgspec.json.decode(content, type=dict[str, Any]).get("peft_type")
        if kind != "LORA":
            raise ValueError(f"its peft_type is {kind}, and only LORA is served beside a model")
        described = msgspec.json.decode(content, type=_PeftConfig)
        with open_regular(directory / _ADAPTER) as file:
            mark, nbytes = _mark_of_adapter(content, file), file.tell()
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{directory} is not an adapter that peft saved ({_CONFIG} and {_ADAPTER}): {error}") from None
    _check_fields(msgspec.json.decode(content), directory)
    spec = _spec(described, name, directory)
    where = {"peft": str(directory.absolute())}
    return WeightUpdate(
        version=version, kind="adapter", fingerprint=mark, nbytes=nbytes, seconds=0.0, where=where, adapter=spec
    )


def _check_fields(config: Mapping[str, Any], directory: Path) -> None:
    known = _HARMLESS | set(_PeftConfig.__struct_fields__)
    if other := [name for name, value in config.items() if value and name not in known]:
        raise ValueError(
            f"{directory} has {other[0]}, which is not served beside a model: it may change what the adapter computes. Merge it into its weights, "
            f"or, if it changes nothing, remove {other[0]} from {_CONFIG}"
        )


def _spec(described: _PeftConfig, name: str, directory: Path) -> AdapterSpec:
    if described.bias != "none":
        raise ValueError(f"{directory} trains biases, which are not served beside a model; merge it into its weights")
    if described.init_lora_weights not in _STARTS:
        raise ValueError(
            f"{directory} belongs to a model whose own weights peft has changed (init_lora_weights = {described.init_lora_weights}), and is not "
            "served beside the model as it was; merge it into its weights, or save it with path_initial_model_for_weight_conversion"
        )
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


def _mark_of_adapter(config: bytes, tensors: BinaryIO) -> str:
    """`tensors`: the file, which is read to its end."""
    mark = xxhash.xxh3_128(config)
    while part := tensors.read(_PART):
        mark.update(part)
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
        if place_of(update):
            return self._fetching.receive(update)
        if peft := update.where.get("peft"):
            return self._adapter(Path(str(peft)), update)
        self._check(update)
        found = self._read(self._model_dir)
        self._check(update)  # they may have been written while they were read
        return found

    def _check(self, update: WeightUpdate) -> None:
        if mark_of(self._model_dir) != update.fingerprint:
            raise IdentityError(
                f"the weights in {self._model_dir} are not those that were to be loaded: they have been written since. "
                "Restore the old files, or start a new run"
            )

    def _adapter(self, directory: Path, update: WeightUpdate) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            config = read_regular(directory / _CONFIG, _LONGEST)
            with open_regular(directory / _ADAPTER) as file:  # a pipe would be waited for without end
                content = file.read(update.nbytes + 1)
            if _mark_of_adapter(config, BytesIO(content)) != update.fingerprint:
                raise IdentityError(
                    f"the adapter in {directory} is not the one that was to be loaded: it has been written since. Load it again"
                )
            return {name: tensor.to(self._dtype) for name, tensor in load(content).items()}
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{directory / _ADAPTER} cannot be read as a safetensors file: {error}") from None
