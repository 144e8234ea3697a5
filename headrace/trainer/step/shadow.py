"""The student's own older weights, as a teacher: a snapshot of some steps ago, or a moving average.

Self-distillation needs no second model on disk: the trainer keeps the shadow beside its weights, and publishes it to an engine
of its own through a sender of its own. The average is that of Polyak and Juditsky (1992) with exponential weights, as mean
teachers have it (Tarvainen and Valpola, arXiv:1703.01780).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.protocols import WeightSender
from headrace.weights import WeightUpdate

Parameters = Iterable[tuple[str, Tensor]]
Kind = Literal["snapshot", "average"]

FILE = "shadow.safetensors"
"""In a checkpoint: the shadow under the parameters' names; kind and version in its metadata."""


class Shadow:
    """`version`: the optimizer step whose weights it is, or whose weights were the last to enter the average."""

    def __init__(
        self,
        kind: Kind,
        every: int,
        *,
        decay: float,
        dtype: torch.dtype,
        sender: WeightSender,
        version: int,
        parameters: Parameters,
    ) -> None:
        """Begins as the student is now. A snapshot is kept in `dtype`, in which it is served, an average in float32."""
        self.kind, self._every, self._decay, self._sender = kind, every, decay, sender
        self._dtype = dtype if kind == "snapshot" else torch.float32
        self.version = version
        self._tensors = self._copied(parameters)
        self._sent = -1
        """The version that was published last."""
        self._publishes = 0

    @torch.no_grad()
    def follow(self, version: int, parameters: Parameters) -> None:
        """After the optimizer step that made `version`."""
        if self.kind == "average":
            for name, parameter in parameters:
                self._tensors[name].lerp_(parameter.float(), 1 - self._decay)
            self.version = version
        elif version % self._every == 0:
            for name, parameter in parameters:
                self._tensors[name].copy_(parameter)
            self.version = version

    def publish(self) -> WeightUpdate | None:
        """None where there is nothing new: at first what there is, then every `every` steps."""
        due = self._sent < 0 or (self.version != self._sent and self.version % self._every == 0)
        if not due:
            return None
        # The sender alternates between its two slots by the version, and versions of a shadow may all be even.
        update = self._sender.send(self._publishes, self._tensors.items())
        self._publishes, self._sent = self._publishes + 1, self.version
        return msgspec.structs.replace(update, version=self.version)

    def save(self, directory: Path) -> None:
        """Raises OSError."""
        facts = {"kind": self.kind, "version": str(self.version)}
        try:
            save_file(
                {n: t.contiguous() for n, t in self._tensors.items()}, directory / FILE, {"shadow": json.dumps(facts)}
            )
        except SafetensorError as error:
            raise OSError(f"could not write {FILE}: {error}") from error

    def restore(self, directory: Path) -> None:
        """Bit for bit. A checkpoint of a run that had no such teacher changes nothing: the shadow begins at its weights.

        Raises CheckpointError when the file is of another kind or another model.
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
