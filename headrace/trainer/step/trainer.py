"""The trainer in PyTorch: any Hugging Face causal LM on one device, one optimizer step at a time.

It trains all weights, or adapters of frozen ones (`trainer/model/adapters.py`): each is a `Learner`, and a batch says whose it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.errors import ConfigError
from headrace.packing import Plan, pack_rows, pack_sequence
from headrace.reports import TrainReport
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import choose_forward
from headrace.trainer.forward.fused_model import fuse, why_none
from headrace.trainer.forward.fused_products import reserve
from headrace.trainer.forward.routing import RoutingReplay, no_replay
from headrace.trainer.model.adapters import ADAPTER_MODEL, Adapters
from headrace.trainer.model.causal_lm import (
    enable_checkpointing,
    export_model,
    load_model,
    resolve_device,
    resolve_dtype,
)
from headrace.trainer.model.low_memory import lower_weights
from headrace.trainer.step import checkpoint
from headrace.trainer.step.bitwise import UnequalLogprobs, shared_arithmetic
from headrace.trainer.step.checkpoint import Kept
from headrace.trainer.step.gradient import Gradient, Replay, Sums
from headrace.trainer.step.learner import Assignment, Learner
from headrace.trainer.step.reference import reference_of
from headrace.types import Batch
from headrace.weights import AdapterSpec


class TorchTrainer:
    """`protocols.TrainerCore`. Raises ConfigError when the model or the settings cannot work."""

    def __init__(
        self,
        model_dir: Path,
        config: TrainConfig,
        algo: AlgoConfig,
        seed: int,
        keep_routing: bool = False,
        adapters: Mapping[str, Assignment] | None = None,
    ) -> None:
        """`keep_routing`: force the experts that the sampler chose. `adapters`: by name, what is trained in place of all weights;
        one by the empty name is published merged into them."""
        torch.manual_seed(seed)
        self._model_dir, self._config, self._seed = model_dir, config, seed
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._model = load_model(model_dir, self._device)
        self._forward = choose_forward(self._model)
        self._fused = () if config.path == "torch" else fuse(self._forward)
        if config.path == "kernels" and not self._fused:
            raise ConfigError(f'train.path = "kernels", and {why_none(self._device)}; use "auto" or "torch"')
        self._assignments = adapters or {"": Assignment(config, algo)}
        self._adapters = None
        if adapters:
            loras = {name: assignment.lora for name, assignment in adapters.items()}
            self._adapters = Adapters(self._model, loras, self._dtype, model_dir)
        self.arithmetic, unproven = shared_arithmetic(self._forward, self._fused, self._dtype, bool(adapters))
        if config.parity == "bitwise" and unproven:
            raise ConfigError(
                f'train.parity = "bitwise" asks for the engine\'s log-probs, and {unproven}; set train.parity = "off"'
            )
        replay = RoutingReplay(self._forward, self._dtype) if keep_routing else None
        self._replay: Replay = replay or no_replay
        self._reference = None
        if any(
            one.algo.reference_in_loss for one in self._assignments.values()
        ):  # before a checkpoint is restored: it stays the model that the run began with
            self._reference = reference_of(self._forward, self._dtype, keep_routing)
        if config.gradient_checkpointing:
            enable_checkpointing(self._model, replay.checkpoint_contexts if replay else None)
        if config.weights == "bfloat16":
            lower_weights(self._model, self._dtype)
        assignments = self._assignments.items()
        self._learners = {name: Learner(one.train, one.algo, self._trained(name)) for name, one in assignments}
        if self._fused:
            reserve(self._model, 0 if config.gradient_checkpointing else config.microbatch_tokens, self._dtype)

    def _trained(self, name: str) -> dict[str, torch.nn.Parameter]:
        return self._adapters.parameters(name) if self._adapters else dict(self._model.named_parameters())

    @property
    def version(self) -> int:
        """Of the model's weights; 0 for ever of a frozen base."""
        return self._learners[""].version if "" in self._learners else 0

    def version_of(self, adapter: str) -> int:
        return self._learners[adapter].version if adapter else self.version

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def path(self) -> str:
        """How the model is run, for people."""
        fused = f", fused {' '.join(self._fused)}" if self._fused else ""
        return f"{self._forward.path}{fused}, {self.dtype}"

    def step(self, batch: Batch) -> TrainReport:
        """One optimizer step on the whole batch. A skipped step (`TrainReport.skipped`) leaves everything as it was."""
        learner = self._activate(batch.adapter)
        assert batch.step == learner.version, f"batch of step {batch.step} for weights of version {learner.version}"
        started = time.perf_counter()
        plan = self._plan(batch)
        if not plan.packs:
            seconds = time.perf_counter() - started
            return TrainReport(batch.step, batch.step, "no_tokens", dropped_tokens=plan.dropped_tokens, seconds=seconds)
        try:
            sums = self._gradients(plan, batch.temperature, batch.adapter)
        except UnequalLogprobs:
            learner.forget()
            raise
        lr = learner.lr(batch.steps)
        norm = learner.update(sums.loss, sums.all_cut and batch.skippable, batch.steps)
        skipped = "" if learner.version > batch.step else "all_rejected" if norm == 0 else "nonfinite_gradient"
        return TrainReport(
            step=batch.step,
            version=learner.version,
            skipped=skipped,
            loss=sums.loss,
            grad_norm=norm,
            lr=lr,
            entropy=sums.entropy / sums.tokens,
            ratio_mean=sums.ratio / sums.tokens,
            ratio_max=sums.ratio_max,
            clip_fraction=sums.clipped / sums.tokens,
            kl=sums.kl / sums.tokens,
            loss_tokens=sums.tokens,
            forward_tokens=sum(len(pack.tokens) for pack in plan.packs),
            dropped_tokens=plan.dropped_tokens,
            microbatches=len(plan.packs),
            seconds=time.perf_counter() - started,
            lags=sums.diagnostics.report(),
            outside_tokens=sums.outside,
            missing_routes=sums.missing_routes,
            routing_conflicts=plan.routing_conflicts,
            reference_kl=sums.reference_kl / sums.tokens,
            bitwise_tokens=sums.bitwise,
            teacher_kl=sums.teacher_kl / max(sums.taught, 1),
            noise=sums.diagnostics.noise(),
        )

    def _activate(self, adapter: str) -> Learner:
        if self._adapters:
            self._adapters.activate(adapter)
        return self._learners[adapter]

    def adapters(self) -> list[AdapterSpec]:
        """Those that are published beside the base."""
        return [one.lora.spec(name) for name, one in self._assignments.items() if name]

    def parameters(self, adapter: str = "") -> Iterable[tuple[str, Tensor]]:
        """As they are published: all weights (with the adapter in them, where it is merged), the frozen base, or an adapter."""
        if self._adapters is None:
            return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())
        if adapter:
            return self._adapters.state(adapter).items()
        return self._adapters.merged("") if "" in self._learners else self._adapters.base()

    def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        """[T-1] log-probs at temperature 1 of tokens[1:], in the dtype of training."""
        self._activate(adapter)
        if len(tokens) < 2:
            return []
        with torch.no_grad(), torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._forward.logprobs(pack_sequence(tokens).to(self._device), 1.0, self._dtype).logprob.tolist()

    def save(self, directory: Path, adapter: str = "") -> None:
        """Raises IdentityError when frozen weights are not what they were."""
        learner = self._learners[adapter]
        if self._adapters:
            self._adapters.check_base()
        checkpoint.save(directory, self._kept(adapter), learner.optimizer, learner.version, self._seed)
        if self._adapters:
            self._adapters.save_config(adapter, directory)

    def restore(self, directory: Path, adapter: str = "") -> None:
        """Raises CheckpointError, with nothing changed."""
        learner = self._learners[adapter]
        learner.version = checkpoint.restore(directory, self._kept(adapter), learner.optimizer)

    def _kept(self, adapter: str) -> Kept:
        if self._adapters is None:
            return checkpoint.whole(self._model)
        state, trained = self._adapters.state(adapter), self._learners[adapter].parameters
        return Kept(ADAPTER_MODEL, state, trained, self._adapters.base_mark)

    def export(
        self,
        directory: Path,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        adapter: str = "",
        merge: bool = False,
    ) -> None:
        """A directory that `transformers` loads, tokenizer and chat template included; of an adapter one that peft loads, unless
        it is to be merged into the base weights. Raises OSError where the disk does not take it."""
        try:
            self._export(directory, dtype, adapter, merge)
        except SafetensorError as error:  # all that it says of a full disk
            raise OSError(str(error)) from error

    def _export(self, directory: Path, dtype: Literal["bfloat16", "float32"], adapter: str, merge: bool) -> None:
        if self._adapters is None:
            export_model(self._model, self._model_dir, directory, dtype)
        elif merge:
            model = load_model(self._model_dir, self._device)
            model.load_state_dict(dict(self._adapters.merged(adapter)), strict=False)  # tied ones and buffers are there
            export_model(model, self._model_dir, directory, dtype)
        else:
            self._adapters.export(adapter, directory)

    def _plan(self, batch: Batch) -> Plan:
        learner = self._learners[batch.adapter]
        budget, share = learner.config.microbatch_tokens, self._forward.packed
        return pack_rows(
            batch.rows,
            learner.aggregation,
            constant=learner.algo.length_constant,
            budget=budget,
            step=batch.step,
            share=share,
        )

    def _gradients(self, plan: Plan, temperature: float, adapter: str = "") -> Sums:
        """Fills the parameters' gradients."""
        learner = self._learners[adapter]
        reference = self._reference if learner.algo.reference_in_loss else None
        gradient = Gradient(
            forward=self._forward,
            learner=learner,
            temperature=temperature or 1.0,
            dtype=self._dtype,
            reference=reference,
            replay=self._replay,
            bitwise=self._config.parity == "bitwise",
        )
        return gradient.of(plan.packs, self._device)
