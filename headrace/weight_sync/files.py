"""Weight sync by files: a directory that both ends see, on this machine or over a network file system.

    DIRECTORY/model/000007/model.safetensors              what every reader of safetensors understands
    DIRECTORY/model/000007/update.json                    version, fingerprint and canonical order
    DIRECTORY/policy/000007/adapter_model.safetensors     an adapter, beside its adapter_config.json, as peft saves it

A version is written into a directory of another name, flushed to the disk, and renamed: whoever finds it finds all of it. The
two newest versions of each are kept, so that an engine which is replaced can load again what it served. Torch is imported where
it is used: the controller makes this value, and the controller loads no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.errors import IdentityError
from headrace.types import Struct
from headrace.weight_sync.safe_files import read_into, write_tensors
from headrace.weights import AdapterSpec, Manifest, WeightUpdate

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.packed import PackedBuffer

KEPT = 2
"""Versions of each model or adapter that stay on the disk."""

RECORD = "update.json"


class UpdateRecord(Struct, frozen=True):
    """The facts in `update.json`, beside the tensors."""

    update: WeightUpdate
    manifest: Manifest


class Files(Struct, frozen=True, tag="files"):
    """Protocol `Transport`."""

    directory: str
    """The directory, which belongs to the transport and is removed at its end."""

    @classmethod
    def open(cls) -> Files:
        return cls(tempfile.mkdtemp(prefix="headrace-weights-"))

    @property
    def inherited(self) -> tuple[int, ...]:
        return ()

    def sender(self, manifests: Mapping[str, Manifest], once: Collection[str] = ()) -> FilesSender:
        return FilesSender(Path(self.directory), manifests)

    def receiver(self, manifests: Mapping[str, Manifest]) -> FilesReceiver:
        return FilesReceiver()

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class FilesSender:
    """The trainer's end."""

    def __init__(self, directory: Path, manifests: Mapping[str, Manifest]) -> None:
        """Removes the files that an earlier process left in the directory: its versions may be others under the same
        numbers."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory, self._manifests = directory, manifests
        self._packed: dict[str, tuple[PackedBuffer, memoryview]] = {}
        self._written: dict[str, list[Path]] = {}

    def send(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> WeightUpdate:
        """Writes the parameters of the model, or of `adapter`. Raises OSError if they cannot be written."""
        started = time.perf_counter()
        name = adapter.name if adapter else ""
        manifest, (packed, buffer) = self._manifests[name], self._memory(name)
        packed.fill(parameters)
        target = self._directory / (name or "model") / f"{version:06d}"
        update = WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=packed.fingerprint(),
            nbytes=manifest.payload,
            seconds=0.0,
            where={"path": str(target)},
            adapter=adapter,
        )
        write_version(target, UpdateRecord(update, manifest), buffer)
        self._prune(name, target)
        return msgspec.structs.replace(update, seconds=time.perf_counter() - started)

    def _memory(self, name: str) -> tuple[PackedBuffer, memoryview]:
        from headrace.weight_sync.packed import PackedBuffer

        if name not in self._packed:
            buffer = memoryview(bytearray(self._manifests[name].nbytes))
            self._packed[name] = PackedBuffer(self._manifests[name], buffer), buffer
        return self._packed[name]

    def _prune(self, name: str, newest: Path) -> None:
        written = self._written.setdefault(name, [])
        written[:] = [*(path for path in written if path != newest), newest]
        while len(written) > KEPT:
            shutil.rmtree(written.pop(0), ignore_errors=True)


def write_version(target: Path, record: UpdateRecord, buffer: memoryview) -> None:
    """Writes one version whole or not at all. `buffer`: the packed buffer of the record's manifest. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    coming = target.with_name(f".{target.name}")
    shutil.rmtree(coming, ignore_errors=True)
    coming.mkdir()
    write_tensors(coming / tensors_file(record.update), record.manifest, buffer)
    _write_text(coming / RECORD, msgspec.json.encode(record))
    if spec := record.update.adapter:
        _write_text(coming / "adapter_config.json", json.dumps(peft_config(spec, record.manifest)).encode())
    _flush_directory(coming)
    shutil.rmtree(target, ignore_errors=True)  # the same version of before a failure
    coming.rename(target)
    _flush_directory(target.parent)


class FilesReceiver:
    """The engine's end. The layout comes with the files, so that a server can read updates that it was not prepared
    for."""

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the files are gone, torn, or not those of the update."""
        from headrace.weight_sync.packed import PackedBuffer

        path = Path(str(update.where["path"]))
        try:
            record = msgspec.json.decode((path / RECORD).read_bytes(), type=UpdateRecord)
            _check(record.update, update, path)
            buffer = memoryview(
                bytearray(record.manifest.nbytes)
            )  # never one that is served: this update may be refused
            read_into(path / tensors_file(update), record.manifest, buffer)
        except (OSError, msgspec.DecodeError, ValueError) as error:
            raise IdentityError(
                f"version {update.version} cannot be read from {path}: {error}. Trainer and engine must see the same directory, "
                f"and only the {KEPT} newest versions are kept"
            ) from error
        return PackedBuffer(record.manifest, buffer).verified(update)


def tensors_file(update: WeightUpdate) -> str:
    return "adapter_model.safetensors" if update.adapter else "model.safetensors"


def _check(found: WeightUpdate, wanted: WeightUpdate, path: Path) -> None:
    if wanted.adapter and (found.adapter is None or found.adapter.name != wanted.adapter.name):
        raise IdentityError(f"{path} holds no adapter {wanted.adapter.name}")
    if found.adapter and not wanted.adapter:
        raise IdentityError(f"{path} holds the adapter {found.adapter.name}, and a whole model was to be loaded")


def peft_config(spec: AdapterSpec, manifest: Manifest) -> dict[str, object]:
    """Returns `adapter_config.json` in peft's format, for engines that load adapters by path."""
    modules = {tensor.name.rpartition(".lora_")[0].rpartition(".")[2] for tensor in manifest.tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "use_rslora": spec.rslora,
        "rank_pattern": spec.rank_pattern,
        "alpha_pattern": spec.alpha_pattern,
        "target_modules": sorted(modules - {""}),
        "bias": "none",
        "inference_mode": True,
    }


def _write_text(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
