"""The trainer of several clients: one frozen base model, and for each client an adapter with its own gradient, optimizer and version.

Nothing is shared between two adapters but the frozen weights: a pass activates one adapter, so that only its parameters have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.algo.tinker import LOSSES, NamedLoss
from headrace.core.weights import AdapterSpec
from headrace.models.lora import LoraConfig
from headrace.trainer.forward.forward import choose_forward
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.model.adapters import ADAPTER_MODEL, Adapters, adaptable
from headrace.trainer.model.causal_lm import (
    computed_in,
    enable_checkpointing,
    load_model,
    resolve_device,
    resolve_dtype,
)
from headrace.trainer.packing import ROOT, Pack, Segment
from headrace.trainer.placement.port import Single
from headrace.trainer.shared.calls import (
    AdamStep,
    Checkpoint,
    Example,
    PassReport,
    SharedConfig,
    SharedLora,
    StepDone,
    TrainingPass,
)
from headrace.trainer.step import checkpoint
from headrace.trainer.step.checkpoint import Contents

# --- Examples of clients as microbatches
# Each is a sequence of its own, and every position is in the loss.


@dataclass(frozen=True)
class ExampleRow:
    """An example as tensors."""

    tokens: Tensor
    """[N] int64"""
    targets: Tensor
    """[N, K] int64"""
    inputs: dict[str, Tensor]
    """[N] float32 each, or [N, K] where K > 1"""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of its log-probs: [N], or [N, K] where K > 1."""
        positions, width = self.targets.shape
        return (positions,) if width == 1 else (positions, width)


def row_of(example: Example) -> ExampleRow:
    tokens = np.frombuffer(example.tokens, np.int32).astype(np.int64)
    targets = np.frombuffer(example.targets, np.int32).astype(np.int64).reshape(len(tokens), example.width)
    shape = (len(tokens),) if example.width == 1 else targets.shape
    inputs = {name: torch.from_numpy(np.frombuffer(x, np.float32).copy()) for name, x in example.inputs.items()}
    return ExampleRow(
        torch.from_numpy(tokens), torch.from_numpy(targets), {name: x.view(shape) for name, x in inputs.items()}
    )


def check_rows(rows: Sequence[ExampleRow], vocabulary: int, context: int) -> None:
    """Raises ValueError for tokens that the model does not have, and sequences that are longer than it can see."""
    for number, row in enumerate(rows):
        for name, tokens in (("model_input", row.tokens), ("target_tokens", row.targets)):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocabulary:
                raise ValueError(
                    f"data[{number}] has the token {low if low < 0 else high} in {name}, and the model has 0 to {vocabulary - 1}"
                )
        if len(row.tokens) > context:
            raise ValueError(
                f"data[{number}] has {len(row.tokens)} tokens, and the model sees at most {context}; shorten it"
            )


def packs_of(rows: Sequence[ExampleRow], budget: int) -> Iterator[tuple[Pack, Sequence[ExampleRow]]]:
    """Yields microbatches of at most `budget` tokens (more where one row alone is longer), with their rows."""
    waiting: list[ExampleRow] = []
    for row in rows:
        if waiting and sum(len(other.tokens) for other in waiting) + len(row.tokens) > budget:
            yield _pack(waiting), waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield _pack(waiting), waiting


def _pack(rows: Sequence[ExampleRow]) -> Pack:
    lengths = [len(row.tokens) for row in rows]
    starts = np.cumsum([0, *lengths])
    places = [torch.arange(length) for length in lengths]
    predictor = [
        (place + int(start)).repeat_interleave(row.targets.shape[1])
        for row, place, start in zip(rows, places, starts, strict=False)
    ]
    count = sum(map(len, predictor))
    sequence = torch.cat([torch.full((len(tensor),), number) for number, tensor in enumerate(predictor)])
    return Pack(
        tokens=torch.cat([row.tokens for row in rows]),
        positions=torch.cat(places),
        segments=tuple(Segment(int(start), length, ROOT) for start, length in zip(starts, lengths, strict=False)),
        predictor=torch.cat(predictor),
        target=torch.cat([row.targets.flatten() for row in rows]),
        sampled=torch.zeros(count),
        advantage=torch.zeros(count),
        weight=torch.ones(count),
        sequence=sequence,
        trajectory=sequence,
        turn=torch.zeros_like(sequence),
        row=sequence,
        lag=torch.zeros(count),
        apart=torch.zeros(count, dtype=torch.int8),
        unmixed=torch.ones(count, dtype=torch.bool),
    )


# --- shared trainer ------------------------------------------------------------


@dataclass(kw_only=True)
class Tenant:
    """The state of one client's adapter."""

    lora: LoraConfig
    parameters: dict[str, torch.nn.Parameter]
    version: int = 0
    spoiled: str = ""
    """The reason why the next optimizer step is refused: a pass before it failed, and its gradient would lack a part."""
    broken: str = ""
    """The reason why only `restore` can be done: a step has made weights that are no numbers."""
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0, foreach=True)

    def forget(self) -> None:
        """The gradients so far."""
        self.optimizer.zero_grad(set_to_none=True)


class SharedTrainer:
    """Raises ConfigError when the model cannot be trained, ValueError for requests that cannot be done."""

    def __init__(self, model_dir: Path, config: SharedConfig) -> None:
        self._config, self._placement = config, Single()
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._model = load_model(model_dir, self._device)
        self._forward = choose_forward(self._model, may_carry=not config.gradient_checkpointing)
        fuse(self._forward)
        self._modules = list(adaptable(self._model))
        self._adapters = Adapters(self._model, {}, self._dtype, model_dir)
        if config.gradient_checkpointing:
            enable_checkpointing(self._model)
        text: Any = self._model.config.get_text_config()
        self._vocabulary = self._model.get_input_embeddings().weight.shape[0]
        self._context = getattr(text, "max_position_embeddings", None) or 1 << 30
        self._tenants: dict[str, Tenant] = {}

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    # -- adapters -----------------------------------------------------------------------------------------------------------

    def add(self, name: str, lora: SharedLora) -> None:
        """Adds a new adapter, which changes nothing of the model's output yet."""
        if name in self._tenants:
            raise ValueError(f"there is a model {name} already")
        config = LoraConfig(
            rank=lora.rank, alpha=lora.alpha, targets=self._targets(lora), init_seed=lora.seed, publish="adapter"
        )
        self._adapters.add(name, config)
        self._tenants[name] = Tenant(lora=config, parameters=self._adapters.parameters(name))

    def remove(self, name: str) -> None:
        if self._tenants.pop(name, None):
            self._adapters.remove(name)

    def _targets(self, lora: SharedLora) -> tuple[str, ...]:
        """The ends of the names of the modules that are adapted."""
        ends: set[str] = set()
        for name in self._modules:
            block, _, end = name.rpartition(".")
            is_attention = "attn" in block.rpartition(".")[2] or "attention" in block.rpartition(".")[2]
            if lora.attention if is_attention else lora.mlp:
                ends.add(end)
        if not ends:
            raise ValueError("train_attn and train_mlp choose no layer of this model; set one of them to true")
        return tuple(sorted(ends))

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise ValueError(f"no model {name} is trained here")
        if (tenant := self._tenants[name]).broken:
            raise ValueError(tenant.broken)
        return tenant

    # -- gradients ----------------------------------------------------------------------------------------------------------

    def run(self, call: TrainingPass) -> PassReport:
        """Forwards the examples and, if asked to, adds their gradient to the adapter's. A failure leaves no gradient."""
        self._tenant(call.model)
        rows = [row_of(example) for example in call.examples]
        try:
            check_rows(rows, self._vocabulary, self._context)
            self._adapters.activate(call.model)
            with torch.set_grad_enabled(call.backward):
                return self._passes(rows, LOSSES[call.loss], call)
        except Exception as error:
            if call.backward:
                self.spoil(call.model, str(error))
            raise

    def _passes(self, rows: Sequence[ExampleRow], loss: NamedLoss, call: TrainingPass) -> PassReport:
        logprobs: list[bytes] = []
        total = 0.0
        for pack, members in packs_of(rows, self._config.microbatch_tokens):
            with computed_in(self._dtype, self._device):
                parts = self._logprobs(pack.to(self._device), members)
                losses = []
                for part, row in zip(parts, members, strict=True):
                    inputs = {name: tensor.to(self._device) for name, tensor in row.inputs.items()}
                    losses.append(loss.value(part, inputs, call.constants).sum())
                value = torch.stack(losses).sum()
                if call.backward:
                    value.backward()
            total += float(value.detach())
            logprobs += [part.detach().cpu().numpy().tobytes() for part in parts]
        return PassReport(logprobs=logprobs, loss=total, tokens=sum(len(row.tokens) for row in rows))

    def _logprobs(self, pack: Pack, rows: Sequence[ExampleRow]) -> list[Tensor]:
        """The log-probs of each row, with gradient."""
        whole = self._forward.logprobs(pack, 1.0, self._dtype).logprob
        parts = whole.split([row.targets.numel() for row in rows])
        return [part.view(row.shape) for part, row in zip(parts, rows, strict=True)]

    def spoil(self, name: str, why: str) -> None:
        """Drops the gradient, and refuses the next optimizer step: a pass that belonged to it cannot be done."""
        tenant = self._tenant(name)
        tenant.forget()
        tenant.spoiled = why

    def optim_step(self, call: AdamStep) -> StepDone:
        """Updates the adapter with its gradient, which is zero afterwards. Raises ValueError, with nothing updated, where there is no
        gradient, or none that is whole and finite."""
        tenant = self._tenant(call.model)
        spoiled, tenant.spoiled = tenant.spoiled, ""
        if spoiled:
            tenant.forget()
            raise ValueError(f"no step was made, because a forward_backward before it failed: {spoiled}")
        parameters = [p for p in tenant.parameters.values() if p.grad is not None]
        if not parameters:
            raise ValueError("no step was made: there was no forward_backward since the last one")
        norm = self._placement.norm(parameters)
        if not torch.isfinite(norm):
            tenant.forget()
            raise ValueError(f"no step was made: the norm of the gradient is {float(norm)}. The gradient was dropped")
        if 0 < call.grad_clip_norm < norm:
            self._placement.clip(parameters, norm, call.grad_clip_norm)
        for group in tenant.optimizer.param_groups:
            group |= {
                "lr": call.learning_rate,
                "betas": (call.beta1, call.beta2),
                "eps": call.eps,
                "weight_decay": call.weight_decay,
            }
        if problem := self._stepped(tenant, call):
            tenant.broken = f"{problem}; load_state what was saved before, or begin a new model"
            raise ValueError(tenant.broken)
        tenant.version += 1
        return StepDone(version=tenant.version, grad_norm=float(norm))

    def _stepped(self, tenant: Tenant, call: AdamStep) -> str:
        """Makes the step, after which there is no gradient. Returns why the adapter cannot be used any more; empty if it can."""
        try:
            tenant.optimizer.step()
        except Exception as error:  # torch has changed some of the weights and moments by then, and others not
            return f"a step with learning_rate = {call.learning_rate:g} and weight_decay = {call.weight_decay:g} ended half-way ({error})"
        finally:
            tenant.forget()
        if all(bool(torch.isfinite(p).all()) for p in tenant.parameters.values()):
            return ""
        return f"learning_rate = {call.learning_rate:g} and eps = {call.eps:g} have made weights that are not finite"

    # -- weights ------------------------------------------------------------------------------------------------------------

    def version(self, name: str) -> int:
        return self._tenant(name).version

    def spec(self, name: str, served_as: str, base: str) -> AdapterSpec:
        return self._tenant(name).lora.spec(served_as, base)

    def parameters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapter's tensors as peft names them."""
        self._tenant(name)
        yield from self._adapters.state(name).items()

    def save(self, call: Checkpoint) -> None:
        """Raises IdentityError if frozen weights have changed, OSError if the files cannot be written."""
        tenant = self._tenant(call.model)
        self._adapters.check_base()
        checkpoint.save(
            Path(call.directory),
            self._contents(call.model),
            tenant.optimizer,
            placement=self._placement,
            version=tenant.version,
            seed=tenant.lora.init_seed,
        )
        self._adapters.save_config(call.model, Path(call.directory))

    def restore(self, call: Checkpoint) -> int:
        """Returns the version. Raises CheckpointError, with nothing changed."""
        if (tenant := self._tenants.get(call.model)) is None:
            raise ValueError(f"no model {call.model} is trained here")
        contents = self._contents(call.model)
        tenant.version = checkpoint.restore(Path(call.directory), contents, tenant.optimizer, self._placement)
        tenant.forget()
        tenant.spoiled = tenant.broken = ""
        if not call.optimizer:
            tenant.optimizer.state.clear()
        return tenant.version

    def _contents(self, name: str) -> Contents:
        state = self._adapters.state(name)
        return Contents(ADAPTER_MODEL, state, self._tenants[name].parameters, self._adapters.base_mark)
