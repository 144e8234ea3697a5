"""vLLM's end of weight sync, at its public extension point: a weight transfer engine (vLLM 0.32, `distributed/weight_transfer/base.py`).

The run sends each update to `/update_weights`: with the trainer's address and token, or with handles of its memory on the same GPU. One worker
of each machine fetches the packed buffer, whole or as a difference, and the others map it (`machine_memory.py`), or each opens the trainer's;
every one compares the fingerprint (C3), and only then gives the tensors to the model's own `load_weights`, which divides them among ranks, fuses
and quantises them. So an update whose bytes are refused leaves the weights as they are. An adapter is written into files, which `/v1/load_lora_adapter` loads afterwards.

vLLM has an engine for such handles itself (its backend "ipc"). It takes a pickle over HTTP (`VLLM_ALLOW_INSECURE_SERIALIZATION`), and compares nothing.

vLLM reloads module by module, and makes what it derives from weights (packed, fused or quantised copies) anew in each module that was given
tensors. A module without any is left as it was, with no more than a warning. So a tied parameter is given to each of its modules, and a module that
was given nothing is an error.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync.in_vllm.adapter_files import write_adapter
from headrace.weight_sync.in_vllm.read_back import borrowed, unlike
from headrace.weight_sync.in_vllm.receiving import Receiving

SHOWN = 3
"""Names of modules in a message."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Every update names its trainer, so nothing is to be prepared."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    update: dict[str, Any]
    """A `WeightUpdate` as JSON. In `where` it has `url` and `token`, or `handle`, `layout` and `memory`; for an adapter also the directory to
    write (`files`)."""


class HeadraceTransferEngine(WeightTransferEngine):
    init_info_cls, update_info_cls = NoInitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._receiving = Receiving(self.device.type, self.device.index)
        self._directories: set[Path] = set()
        """The directories of the adapters that were written."""

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Does nothing. That it can be called shows the run that it is here."""

    def start_weight_update(self) -> None:
        """Does nothing: the model is not touched before the bytes have arrived and are the right ones."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Raises IdentityError, and leaves the model as it is, if the bytes cannot be had or are not those that were published."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # there torch has nothing to wait for, and raises
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        update = msgspec.convert(update_info.update, WeightUpdate)
        receiver = self._receiving.of(update)
        tensors = receiver.receive(update)
        if update.adapter:
            manifest = receiver.manifest(update.adapter.name)
            target = Path(update.where["files"])
            self._directories.add(target.parent)
            write_adapter(target, update, manifest, tensors)
            return
        tied = receiver.manifest("").tied
        given = {**tensors, **{other: tensors[name] for other, name in tied.items()}}
        initialize_layerwise_reload(self.model)
        self.model.load_weights(given.items())
        missed = modules_without_weights(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        if missed:
            shown = ", ".join(missed[:SHOWN])
            raise IdentityError(f"vLLM loaded no weights into {shown}: it would serve those of before")
        if kept := borrowed(self.model, given):
            raise IdentityError(
                f"vLLM has copied nothing into {', '.join(kept[:SHOWN])}: they lie in memory that a later version is written to"
            )
        wrong, read = unlike(self.model, given, update.version)
        if wrong:
            raise IdentityError(
                f"vLLM loaded version {update.version} and multiplies in {', '.join(wrong[:SHOWN])} by other weights ({len(wrong)} of {read} parameters "
                "that were read back): it kept copies of earlier ones"
            )

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` has done all."""

    def shutdown(self) -> None:
        """Deletes the files of adapters, and of the memory that workers share. Every connection was closed when its bytes had arrived."""
        self._receiving.close()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):  # that of the run has other adapters
                directory.parent.rmdir()


def modules_without_weights(model: torch.nn.Module) -> list[str]:
    """Returns the names of the modules with parameters that a layerwise reload has given no tensor so far: vLLM only warns of them. Buffers
    alone (rotary tables) are in no checkpoint, and its attention layers have scales of their own, which need not be in one."""
    found = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        takes_some = any(parameter is not None for parameter in module._parameters.values())
        if takes_some and info.can_load() and info.load_numel <= 0 and not is_deferred_attention_layer(module):
            found.append(name)
    return found
