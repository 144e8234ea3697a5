"""Policies beside the one that is trained: the reference of the KL term, and the student's own older weights as a teacher."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.core.protocols import WeightSender
from headrace.core.reports import Captured
from headrace.core.weights import WeightUpdate
from headrace.trainer.forward.forward import Forward
from headrace.trainer.forward.lowered import lowered_by_autocast
from headrace.trainer.forward.routing import no_replay
from headrace.trainer.model.low_memory import local
from headrace.trainer.model.outline import cut
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Keep, Placement, on_host
from headrace.trainer.step.checkpoint_files import SavedTensors
from headrace.trainer.step.host_memory import HostCopy

if TYPE_CHECKING:
    from jaxtyping import Float


# --- A frozen copy of a model
# A frozen copy of a model, in the dtype of the computation wherever that loses nothing.


def frozen(model: Any, dtype: torch.dtype, *, moves: bool = False) -> Any:
    """Returns a copy in evaluation mode that gives the same numbers under autocast to `dtype`. `moves`: other weights than the present ones will be copied
    into it."""
    lowered = {id(parameter) for _, _, parameter in lowered_by_autocast(model)}
    embedding = model.get_input_embeddings()
    weight = model.files.whole(model, embedding.weight) if embedding.weight.is_meta else embedding.weight
    raised = not moves and type(embedding) is torch.nn.Embedding and _survives(weight, dtype)
    if not raised:
        lowered.discard(id(embedding.weight))
    # deepcopy takes the copies of parameters from here, so that there is never a second one in float32
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        low = id(parameter) in lowered or (raised and parameter is embedding.weight)
        value = parameter.detach().to(dtype if low else parameter.dtype, copy=True)
        memo[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
    copied = copy.deepcopy(model, memo).eval()
    if raised and dtype != embedding.weight.dtype:  # autocast does not lower embeddings: later sums are in float32
        original = embedding.weight.dtype
        copied.get_input_embeddings().register_forward_hook(lambda module, args, output: output.to(original))
    return copied


def _survives(weight: Float[Tensor, "*shape"], dtype: torch.dtype) -> bool:
    """Whether `dtype` holds the weight exactly, as it does for most models, which are published in bfloat16."""
    return bool((weight.to(dtype).to(weight.dtype) == weight).all())


# --- The reference model of the KL term
# The weights before the run, or the present ones without their adapters.
#
# Full training keeps a frozen copy. Its matrices have the dtype of the computation, to which autocast would lower them anyway:
# 2 bytes a parameter under bfloat16, and log-probs that equal the policy's bit for bit until a weight moves. Under LoRA the reference
# is the same model with its adapters switched off, which costs no memory.
#
# The copy is made before a checkpoint is restored, so that a resumed run has the reference that it started with. One that moves (`algo.kl.every`) is a part of the
# checkpoint.


PREFIX = "reference/"
"""Begins the names of its tensors in a checkpoint."""

ReplayRoutes = Callable[[Pack], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Reference:
    """`reference(pack, temperature)` -> [M] log-probs of the pack's targets, without gradient.

    Temperature, sampling mask and recorded experts are those of the policy; the caller opens the autocast context.
    """

    forward: Forward
    dtype: torch.dtype
    """The dtype of the computation."""
    switch: Callable[[], AbstractContextManager[Any]]
    """Open while the reference computes: it switches adapters off."""
    replay: ReplayRoutes
    bytes: int = field(kw_only=True)
    """The size of the weights that it has of its own; 0 under LoRA."""
    moves: bool = field(default=False, kw_only=True)
    """Whether it takes later weights of the policy."""

    @torch.no_grad()
    def __call__(self, pack: Pack, temperature: float) -> Float[Tensor, " M"]:
        untaught = replace(pack, top_ids=None, top_logprobs=None)
        with self.switch(), self.replay(pack):
            return self.forward.logprobs(untaught, temperature, self.dtype).logprob

    @torch.no_grad()
    def follow(self, model: Any, placement: Placement) -> None:
        """Takes the weights that the model has now."""
        for own, new in zip(self.forward.model.parameters(), model.parameters(), strict=True):
            if local(own).shape == local(new).shape:
                local(own).copy_(local(new))
            else:  # trained in another dtype than most, so that each rank has the whole
                own.copy_(placement.part(partial(cut, new.detach()), like=own))

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, where they lie."""
        return {f"{PREFIX}{name}": own.detach() for name, own in self.forward.model.named_parameters()}

    def read(self, saved: SavedTensors, placement: Placement) -> dict[str, Tensor]:
        """Returns what `restore` takes of a checkpoint's tensors: this rank's part of them. Empty for one whose reference did not move."""
        found = {name: own for name, own in self.state().items() if name in saved}
        return {name: placement.part(partial(saved.read, name), like=own) for name, own in found.items()}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `read` returned."""
        for name, own in self.state().items():
            if name in saved:
                own.copy_(saved[name])


def reference_of(
    forward: Forward,
    dtype: torch.dtype,
    replay_of: Callable[[Forward], ReplayRoutes] = lambda _: no_replay,
    *,
    moves: bool = False,
) -> Reference:
    """The reference of a model as it is now, in evaluation mode: the same model without its adapters, or a frozen copy of one without any.
    `replay_of`: makes what forces the recorded experts. `moves`: as for `frozen`. Raises what `replay_of` raises."""
    switch: Callable[[], AbstractContextManager[Any]]
    adapters = adapter_layers(forward.model)
    if adapters:
        own, switch, size, moves = forward, lambda: switched_off(adapters), 0, False
    else:
        own = replace(forward, model=frozen(forward.model, dtype, moves=moves))
        switch, size = nullcontext, sum(p.nbytes for p in own.model.parameters())

    return Reference(own, dtype, switch, replay_of(own), bytes=size, moves=moves)


# -- without adapters -------------------------------------------------------------------------------------------------------


def adapter_layers(model: torch.nn.Module) -> list[Any]:
    """peft's layers in a model."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:  # without peft the model has none
        return []
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


@contextmanager
def switched_off(layers: list[Any]) -> Iterator[None]:
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


# --- The student's own older weights as a teacher
# A snapshot from some steps ago, or a moving average.
#
# Self-distillation needs no second model on disk: the trainer keeps the shadow beside its weights, and publishes it through a second sender
# to a second engine. The average is that of Polyak and Juditsky (1992) with exponential weights, as in mean teachers (Tarvainen
# and Valpola, arXiv:1703.01780).


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
