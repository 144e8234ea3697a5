"""The student's own older weights as a teacher: a snapshot from some steps ago, or a moving average.

Self-distillation needs no second model on disk: the trainer keeps the shadow beside its weights, and publishes it through a second sender
to a second engine. The average is that of Polyak and Juditsky (1992) with exponential weights, as in mean teachers (Tarvainen
and Valpola, arXiv:1703.01780).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.core.protocols import WeightSender
from headrace.core.reports import Captured
from headrace.core.weights import WeightUpdate
from headrace.trainer.placement.port import Keep, on_host
from headrace.trainer.step.host_copy import HostCopy

Parameters = Iterable[tuple[str, Tensor]]
Kind = Literal["snapshot", "average"]

FILE = "shadow.safetensors"
"""The shadow's file in a checkpoint: tensors by the parameters' names; kind and version are in its metadata."""


class Shadow:
    """Older weights of the student. `version` is the optimizer step of the snapshot, or of the last weights in the average."""

    def __init__(
        self,
        kind: Kind,
        *,
        every: int,
        decay: float,
        dtype: torch.dtype,
        sender: WeightSender,
        version: int,
        parameters: Parameters,
    ) -> None:
        """Starts as a copy of `parameters`. A snapshot is kept in `dtype`, in which it is served, an average in float32."""
        self.kind, self._every, self._decay, self._sender = kind, every, decay, sender
        self._dtype = dtype if kind == "snapshot" else torch.float32
        self.version = version
        self._tensors = self._copied(parameters)
        self._sent = -1
        """The version published last; -1 before the first."""
        self._publishes = 0
        self._copies = HostCopy()

    @torch.no_grad()
    def follow(self, version: int, parameters: Parameters) -> None:
        """Updates the shadow after the optimizer step that made `version`."""
        if self.kind == "average":
            for name, parameter in parameters:
                self._tensors[name].lerp_(parameter.float(), 1 - self._decay)
            self.version = version
        elif version % self._every == 0:
            for name, parameter in parameters:
                self._tensors[name].copy_(parameter)
            self.version = version

    def publish(self) -> WeightUpdate | None:
        """Publishes the shadow at the first call and then every `every` steps. Returns None if there is nothing new."""
        due = self._sent < 0 or (self.version != self._sent and self.version % self._every == 0)
        if not due:
            return None
        # The sender alternates between its two slots by the version, and versions of a shadow may all be even.
        update = self._sender.send(self._publishes, self._tensors.items())
        self._publishes, self._sent = self._publishes + 1, self.version
        return msgspec.structs.replace(update, version=self.version)

    def capture(self) -> tuple[Captured, Callable[[Path], None]]:
        """Copies the shadow to the host's memory, if there is room, and returns the rest of `save` (see `TorchTrainer.capture`)."""
        short = self._copies.short(self._tensors.items())
        keep = on_host if short else self._copies.keep
        return Captured(sum(tensor.nbytes for tensor in self._tensors.values()), short), self._captured(keep)

    def save(self, directory: Path) -> None:
        """Raises OSError."""
        self._captured(on_host)(directory)

    def _captured(self, keep: Keep) -> Callable[[Path], None]:
        facts = json.dumps({"kind": self.kind, "version": str(self.version)})
        tensors = {name: keep(name, tensor).contiguous() for name, tensor in self._tensors.items()}

        def write(directory: Path) -> None:
            try:
                save_file(tensors, directory / FILE, {"shadow": facts})
            except SafetensorError as error:
                raise OSError(f"could not write {FILE}: {error}") from error

        return write

    def restore(self, directory: Path) -> None:
        """Restores the shadow bit for bit. A checkpoint without one changes nothing: the shadow starts from its weights.

        Raises CheckpointError if the file holds another kind of shadow, or another model's.
        """
        path = directory / FILE
        if not path.exists():
            return
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["shadow"])
                found = {name: file.get_tensor(name) for name in self._tensors}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {directory.name}: {FILE} cannot be read ({error})") from error
        if facts["kind"] != self.kind:
            raise CheckpointError(
                f"checkpoint {directory.name} holds the student's {facts['kind']}, not its {self.kind}: resume with student = "
                f'"{facts["kind"]}" in the teacher, or start a new run'
            )
        if any(found[name].shape != tensor.shape for name, tensor in self._tensors.items()):
            raise CheckpointError(f"checkpoint {directory.name}: {FILE} belongs to another model; resume with its own")
        for name, tensor in self._tensors.items():
            tensor.copy_(found[name])
        self.version = int(facts["version"])

    def _copied(self, parameters: Parameters) -> dict[str, Tensor]:
        return {name: parameter.detach().to(self._dtype, copy=True) for name, parameter in parameters}
