"""Weight sync by files: a directory that both ends see, on this machine or over a network file system.

    DIRECTORY/model/000007/model.safetensors              what every reader of safetensors understands
    DIRECTORY/model/000007/update.json                    version, fingerprint and canonical order
    DIRECTORY/model/000008/changes.hrd                    the difference from 000007 (`delta/codec.py`), where such are sent
    DIRECTORY/policy/000007/adapter_model.safetensors     an adapter, beside its adapter_config.json, as peft saves it

A version is written into a directory of another name, flushed to the disk, and renamed: whoever finds it finds all of it. The
two newest versions of each are kept, with all that they are differences from, so that an engine which is replaced can load again what it
served. Torch is imported where it is used: the controller makes this value, and the controller loads no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from headrace.core.errors import IdentityError
from headrace.core.protocols import WeightReceiver, WeightSender
from headrace.core.types import Struct
from headrace.core.weights import AdapterSpec, Manifest, TensorSpec, WeightUpdate
from headrace.durable.atomic_files import open_regular, read_regular
from headrace.processes.health.owned_directory import OwnedDirectory
from headrace.weight_sync.fetching import FetchingReceiver
from headrace.weight_sync.kind import FULL, PLAIN, Encoding, Opening, TransportKind

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.fetching import OfferedVersion


# --- A packed buffer as a safetensors file
# A packed buffer as a safetensors file, and back (https://github.com/huggingface/safetensors#format): eight bytes that say how long the
# header is, the header as JSON, then the tensors without gaps. No tensor is copied on the way. Imports no torch.


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


# --- files ------------------------------------------------------------


KEPT = 2
"""Versions of each model or adapter that stay on the disk."""

RECORD, CHANGES = "update.json", "changes.hrd"
_LONGEST_RECORD = 1 << 26
"""Bytes of a record. 64 MiB are enough for a million tensors."""


class UpdateRecord(Struct, frozen=True):
    """The facts in `update.json`, beside the tensors."""

    update: WeightUpdate
    manifest: Manifest
    before: str = ""
    """The directory of the version that this one is the difference from; empty for a full copy."""


class Files(TransportKind, frozen=True, tag="files"):
    """Protocol `Transport`."""

    words: ClassVar = "files"
    about: ClassVar = "a directory that both see"
    reaches: ClassVar = frozenset({"child", "rollout host", "server", "fetching server"})
    condition: ClassVar = "where all see one directory: engine.shared_dir"
    writes_files: ClassVar = True
    keeps_for_sleepers: ClassVar = frozenset({"server", "fetching server"})
    sends_deltas: ClassVar = True
    serves_deltas: ClassVar = False
    keeps: ClassVar = "two versions"

    directory: str
    """The directory, which belongs to the transport and is removed at its end."""
    encoding: Encoding = FULL
    repeat_tied: bool = False
    """Whether a file holds tied parameters under each of their names, for servers that keep a copy of their own for each."""

    @classmethod
    def open(cls, opening: Opening = PLAIN) -> Files:
        directory = str(opening.directory or tempfile.mkdtemp(prefix="headrace-weights-"))
        return cls(directory, opening.form, opening.repeat_tied)

    def sender(self, manifests: Mapping[str, Manifest], once: Collection[str] = ()) -> FilesSender:
        return FilesSender(Path(self.directory), manifests, self.encoding, self.repeat_tied)

    def receiver(self, manifests: Mapping[str, Manifest]) -> FetchingReceiver:
        return FetchingReceiver(manifests, FilesSource())

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class FilesSender(WeightSender):
    """The trainer's end."""

    def __init__(
        self, directory: Path, manifests: Mapping[str, Manifest], form: Encoding, repeat_tied: bool = False
    ) -> None:
        """Removes the files that an earlier process left in the directory: its versions may be others under the same
        numbers."""
        from headrace.weight_sync.fetching import Offers

        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        once = [name for name in manifests if name or not form.delta]  # only differences need the version before
        self._directory, self._offers, self._repeat_tied = directory, Offers(manifests, once, form), repeat_tied
        self._written: dict[str, list[tuple[Path, bool]]] = {}
        """Directories, and whether each is a full copy."""

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        started = time.perf_counter()
        offered = self._offers.copy(adapter.name if adapter else "", parameters)
        seconds = time.perf_counter() - started
        return lambda: self._written_down(version, offered(), seconds, adapter)

    def _written_down(
        self, version: int, offer: OfferedVersion, seconds: float, adapter: AdapterSpec | None
    ) -> WeightUpdate:
        """Raises OSError if it cannot be written."""
        name = adapter.name if adapter else ""
        offers, manifest = self._offers, self._offers.manifests[name]
        target = self._directory / (name or "model") / f"{version:06d}"
        written = self._written.setdefault(name, [])
        whole = not offer.base or target in [path for path, _ in written]  # what others differ from is not replaced
        update = WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=offer.fingerprint,
            nbytes=manifest.payload,
            seconds=seconds,
            where={"path": str(target)} | ({} if whole else {"base": offer.base, "delta": len(offer.delta)}),
            adapter=adapter,
        )
        if whole:
            buffer = offers.slots.buffer(name, offer.number)
            write_version(target, UpdateRecord(update, manifest), buffer, self._repeat_tied)
        else:
            write_changes(target, UpdateRecord(update, manifest, str(written[-1][0])), offer.delta)
        self._prune(written, target, whole)
        return update

    def _prune(self, written: list[tuple[Path, bool]], newest: Path, whole: bool) -> None:
        written[:] = [*(entry for entry in written if entry[0] != newest), (newest, whole)]
        start = max((number for number, (_, full) in enumerate(written[: 1 - KEPT]) if full), default=0)
        for path, _ in written[:start]:
            shutil.rmtree(path, ignore_errors=True)
        del written[:start]


def write_version(target: Path, record: UpdateRecord, buffer: memoryview, repeat_tied: bool = False) -> None:
    """Writes one version whole or not at all. `buffer`: the packed buffer of the record's manifest. Raises OSError."""
    with _at_once(target, record) as coming:
        write_tensors(coming / tensors_file(record.update), record.manifest, buffer, repeat_tied)
        if spec := record.update.adapter:
            _write_text(coming / "adapter_config.json", json.dumps(peft_config(spec, record.manifest)).encode())


def write_changes(target: Path, record: UpdateRecord, delta: bytes) -> None:
    """Writes the difference from the version in `record.before`, whole or not at all. Raises OSError."""
    with _at_once(target, record) as coming:
        _write_text(coming / CHANGES, delta)


@contextmanager
def _at_once(target: Path, record: UpdateRecord) -> Iterator[Path]:
    """Yields a directory that becomes `target` when all of it is on the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    coming = target.with_name(f".{target.name}")
    shutil.rmtree(coming, ignore_errors=True)
    coming.mkdir()
    yield coming
    _write_text(coming / RECORD, msgspec.json.encode(record))
    _flush_directory(coming)
    shutil.rmtree(target, ignore_errors=True)  # the same version of before a failure
    coming.rename(target)
    _flush_directory(target.parent)


class FilesSource:
    """Protocol `Source`: the files of an engine whose layout is known."""

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        """Reads the newest full copy, and every difference since."""
        from headrace.weight_sync.delta.codec import apply

        with _readable(update) as path:
            differences, record = [], _record(path)
            _check(record.update, update, path)
            while record.before:
                with open_regular(path / CHANGES) as file:
                    differences.append(file.read())
                path = Path(record.before)
                record = _record(path)
            read_into(path / tensors_file(update), manifest, into)
            for delta in reversed(differences):
                apply(into, delta)
            return manifest.payload + sum(map(len, differences))
        raise AssertionError

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        with _readable(update) as path:
            _check(_record(path).update, update, path)
            with open_regular(path / CHANGES) as file:
                return file.read()
        raise AssertionError


class FilesReceiver:
    """The end of a server, for full copies. The layout comes with the files, so that it can read updates that it was not prepared
    for."""

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the files are gone, torn, or not those of the update."""
        from headrace.weight_sync.packed import PackedBuffer

        with _readable(update) as path:
            record = _record(path)
            _check(record.update, update, path)
            # never a buffer that is served: this update may be refused
            buffer = memoryview(bytearray(record.manifest.nbytes))
            read_into(path / tensors_file(update), record.manifest, buffer)
        return PackedBuffer(record.manifest, buffer).verified(update)


# --- Files for a server that reads nothing else and fetches nothing
# Whoever starts it on its machine (a rollout host, a worker elsewhere) fetches the weights by the run's transport, compares their fingerprint, and writes them
# into a directory of its own there: the trainer need not see it.


class CarriedWeights:
    def __init__(self, transport: TransportKind, repeat_tied: bool = False) -> None:
        """`transport`: by which they come here. `repeat_tied`: see `Opening`. Raises OSError if this machine has no directory for them."""
        self._transport, self._repeat_tied = transport, repeat_tied
        self._directory = OwnedDirectory("carried")
        self._written: dict[str, list[WeightUpdate]] = {}
        """Updates whose files are here, as a server reads them, by adapter; the newest last."""
        self._turn = asyncio.Lock()
        self._receiver: WeightReceiver | None = None
        self._manifests: Mapping[str, Manifest] = {}

    def open(self, manifests: Mapping[str, Manifest]) -> None:
        """`manifests`: the layouts of all that will be published."""
        self._manifests, self._receiver = manifests, self._transport.receiver(manifests)

    async def bring(self, update: WeightUpdate) -> WeightUpdate:
        """Returns the update as a server reads it from this machine's files. Raises IdentityError if its bytes cannot be had, or are not those that were
        published, and OSError if they cannot be written."""
        async with self._turn:
            return await asyncio.to_thread(self._bring, update)

    def _bring(self, update: WeightUpdate) -> WeightUpdate:
        from headrace.weight_sync.packed import PackedBuffer, manifest_for

        name = update.adapter.name if update.adapter else ""
        written = self._written.setdefault(name, [])
        for one in written:
            if (one.version, one.fingerprint) == (update.version, update.fingerprint):
                return one
        assert self._receiver, "it is opened before the first update"
        manifest, tensors = manifest_for(self._manifests, update), self._receiver.receive(update)
        buffer = memoryview(bytearray(manifest.nbytes))
        PackedBuffer(manifest, buffer).fill(tensors.items())
        place = Path(self._directory.path) / (name or "model") / f"{update.version:06d}"
        here = msgspec.structs.replace(update, where={"path": str(place)})
        write_version(place, UpdateRecord(here, manifest), buffer, self._repeat_tied)
        written.append(here)
        for old in written[:-KEPT]:
            shutil.rmtree(str(old.where["path"]), ignore_errors=True)
        del written[:-KEPT]
        return here

    def close(self) -> None:
        self._directory.remove()


@contextmanager
def _readable(update: WeightUpdate) -> Iterator[Path]:
    """Yields the directory of the update. Raises IdentityError if it cannot be read."""
    path = Path(str(update.where["path"]))
    try:
        yield path
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise IdentityError(
            f"version {update.version} cannot be read from {path}: {error}. Trainer and engine must see the same directory, "
            f"and only the {KEPT} newest versions are kept"
        ) from error


def _record(path: Path) -> UpdateRecord:
    return msgspec.json.decode(read_regular(path / RECORD, _LONGEST_RECORD), type=UpdateRecord)


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
