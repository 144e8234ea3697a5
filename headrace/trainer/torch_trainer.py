"""The trainer in PyTorch: any Hugging Face causal LM on one device, one optimizer step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.packing import Plan, pack_rows, pack_sequence
from headrace.reports import TrainReport
from headrace.trainer import torch_checkpoint
from headrace.trainer.config import TrainConfig
from headrace.trainer.torch_forward import choose_forward
from headrace.trainer.torch_gradient import Gradient, Replay, Sums
from headrace.trainer.torch_learner import Learner
from headrace.trainer.torch_memory import lower_weights
from headrace.trainer.torch_model import enable_checkpointing, export_model, load_model, resolve_device, resolve_dtype
from headrace.trainer.torch_reference import reference_of
from headrace.trainer.torch_routing import RoutingReplay, no_replay
from headrace.types import Batch


class TorchTrainer:
    """`protocols.TrainerCore`. Raises ConfigError when the model or the settings cannot work."""

    def __init__(
        self, model_dir: Path, config: TrainConfig, algo: AlgoConfig, seed: int, keep_routing: bool = False
    ) -> None:
        """`keep_routing`: force the experts that the sampler chose."""
        torch.manual_seed(seed)
        self._model_dir, self._config, self._seed = model_dir, config, seed
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._model = load_model(model_dir, self._device)
        self._forward = choose_forward(self._model)
        replay = RoutingReplay(self._forward, self._dtype) if keep_routing else None
        self._replay: Replay = replay or no_replay
        self._reference = None
        if algo.reference_in_loss:  # before a checkpoint is restored: it stays the model that the run began with
            self._reference = reference_of(self._forward, self._dtype, keep_routing)
        if config.gradient_checkpointing:
            enable_checkpointing(self._model, replay.checkpoint_contexts if replay else None)
        if config.weights == "bfloat16":
            lower_weights(self._model, self._dtype)
        self._learner = Learner(config, algo, dict(self._model.named_parameters()))

    @property
    def version(self) -> int:
        return self._learner.version

    @property
    def path(self) -> str:
        """How the model is run, for people."""
        return f"{self._forward.path}, {str(self._dtype).removeprefix('torch.')}"

    def step(self, batch: Batch) -> TrainReport:
        """One optimizer step on the whole batch. A skipped step (`TrainReport.skipped`) leaves everything as it was."""
        learner = self._learner
        assert batch.step == learner.version, f"batch of step {batch.step} for weights of version {learner.version}"
        started = time.perf_counter()
        plan = self._plan(batch)
        if not plan.packs:
            seconds = time.perf_counter() - started
            return TrainReport(batch.step, batch.step, "no_tokens", dropped_tokens=plan.dropped_tokens, seconds=seconds)
        sums = self._gradients(plan, batch.temperature)
        lr = learner.lr
        norm = learner.update(sums.loss)
        skipped = "" if learner.version > batch.step else "nonfinite_gradient"
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
            reference_kl=sums.reference_kl / sums.tokens,
            teacher_kl=sums.teacher_kl / max(sums.taught, 1),
        )

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def score(self, tokens: Sequence[int]) -> list[float]:
        """[T-1] log-probs at temperature 1 of tokens[1:], in the dtype of training."""
        if len(tokens) < 2:
            return []
        with torch.no_grad(), torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._forward.logprobs(pack_sequence(tokens).to(self._device), 1.0, self._dtype).logprob.tolist()

    def save(self, directory: Path) -> None:
        torch_checkpoint.save(directory, self._model, self._learner.optimizer, self.version, self._seed)

    def restore(self, directory: Path) -> None:
        """Raises CheckpointError, with nothing changed."""
        self._learner.version = torch_checkpoint.restore(directory, self._model, self._learner.optimizer)

    def export(self, directory: Path, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
        """A directory that `transformers` loads, tokenizer and chat template included."""
        export_model(self._model, self._model_dir, directory, dtype)

    def _plan(self, batch: Batch) -> Plan:
        learner = self._learner
        budget, share = learner.config.microbatch_tokens, self._forward.packed
        return pack_rows(batch.rows, learner.aggregation, learner.algo.length_constant, budget, batch.step, share)

    def _gradients(self, plan: Plan, temperature: float) -> Sums:
        """Fills the parameters' gradients."""
        gradient = Gradient(
            self._forward, self._learner, temperature or 1.0, self._dtype, self._reference, self._replay
        )
        return gradient.of(plan.packs, self._device)
