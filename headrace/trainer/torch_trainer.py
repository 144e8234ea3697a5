"""The trainer in PyTorch: any Hugging Face causal LM on one device, float32 masters, one optimizer step at a time.

It does not know which algorithm it serves: advantages come with the rows, the loss is a function of per-token numbers, and
the weight of every token is fixed for the whole step before its first microbatch (C9).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from headrace.algo.aggregate import AGGREGATIONS
from headrace.algo.config import AlgoConfig
from headrace.algo.losses import TokenLoss, k3, loss_of, ratio_of
from headrace.errors import ConfigError
from headrace.packing import Pack, Plan, pack_rows, pack_sequence
from headrace.reports import TrainReport
from headrace.trainer import torch_checkpoint
from headrace.trainer.config import TrainConfig
from headrace.trainer.torch_forward import choose_forward
from headrace.trainer.torch_model import enable_checkpointing, export_model, load_model, resolve_device, resolve_dtype
from headrace.trainer.torch_optimizer import apply, learning_rate, make_optimizer
from headrace.types import Batch


@dataclass
class Sums:
    """Over the loss tokens of a step."""

    tokens: int = 0
    loss: float = 0.0
    """Already weighted: the loss of the step."""
    entropy: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    kl: float = 0.0

    def add(self, pack: Pack, logprob: Tensor, entropy: Tensor, token: TokenLoss) -> None:
        ratio = ratio_of(logprob, pack.old_logprob)
        self.tokens += len(logprob)
        self.loss += float((token.loss.detach() * pack.weight).sum())
        self.entropy += float(entropy.sum())
        self.ratio += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.clipped += int(token.clipped.sum())
        self.kl += float(k3(logprob, pack.old_logprob).sum())


class TorchTrainer:
    """`protocols.TrainerCore`. Raises ConfigError when the model or the settings cannot work."""

    def __init__(self, model_dir: Path, config: TrainConfig, algo: AlgoConfig, seed: int) -> None:
        recipe = algo.recipe
        if recipe.aggregation == "token_sum" and not algo.length_constant:
            raise ConfigError(
                f"algo.name = {algo.name} divides by the longest completion there can be: set algo.length_constant, "
                "usually to rollout.max_tokens"
            )
        torch.manual_seed(seed)
        self.version = 0
        self._model_dir, self._config, self._seed = model_dir, config, seed
        self._loss, self._aggregation = loss_of(algo), AGGREGATIONS[recipe.aggregation]
        self._constant = algo.length_constant
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._model = load_model(model_dir, self._device)
        self._forward = choose_forward(self._model)
        if config.gradient_checkpointing:
            enable_checkpointing(self._model)
        self._optimizer = make_optimizer(self._model.named_parameters(), config)

    @property
    def path(self) -> str:
        """How the model is run, for people."""
        return f"{self._forward.path}, {str(self._dtype).removeprefix('torch.')}"

    def step(self, batch: Batch) -> TrainReport:
        """One optimizer step on the whole batch. A skipped step (`TrainReport.skipped`) leaves everything as it was."""
        assert batch.step == self.version, f"batch of step {batch.step} for weights of version {self.version}"
        started = time.perf_counter()
        plan = self._plan(batch)
        if not plan.packs:
            seconds = time.perf_counter() - started
            return TrainReport(batch.step, batch.step, "no_tokens", dropped_tokens=plan.dropped_tokens, seconds=seconds)
        sums = self._gradients(plan, batch.temperature)
        lr = learning_rate(self.version, self._config)
        norm = self._update(sums, lr)
        skipped = "" if self.version > batch.step else "nonfinite_gradient"
        return TrainReport(
            step=batch.step,
            version=self.version,
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
        )

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def score(self, tokens: Sequence[int]) -> list[float]:
        """[T-1] log-probs at temperature 1 of tokens[1:], in the dtype of training."""
        if len(tokens) < 2:
            return []
        with torch.no_grad(), self._autocast():
            logprobs, _ = self._forward.logprobs(pack_sequence(tokens).to(self._device), 1.0, self._dtype)
        return logprobs.tolist()

    def save(self, directory: Path) -> None:
        torch_checkpoint.save(directory, self._model, self._optimizer, self.version, self._seed)

    def restore(self, directory: Path) -> None:
        """Raises CheckpointError, with nothing changed."""
        self.version = torch_checkpoint.restore(directory, self._model, self._optimizer)

    def export(self, directory: Path, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
        """A directory that `transformers` loads, tokenizer and chat template included."""
        export_model(self._model, self._model_dir, directory, dtype)

    def _plan(self, batch: Batch) -> Plan:
        budget, share = self._config.microbatch_tokens, self._forward.packed
        return pack_rows(batch.rows, self._aggregation, self._constant, budget, share)

    def _gradients(self, plan: Plan, temperature: float) -> Sums:
        """Fills the parameters' gradients, summed over the step's microbatches."""
        sums = Sums()
        with self._autocast():  # one context for the step: weights are lowered once, not once a microbatch
            for pack in plan.packs:
                self._microbatch(pack.to(self._device), temperature or 1.0, sums)
        return sums

    def _microbatch(self, pack: Pack, temperature: float, sums: Sums) -> None:
        logprob, entropy = self._forward.logprobs(pack, temperature, self._dtype)
        token = self._loss(logprob, pack.old_logprob, pack.advantage)
        (token.loss * pack.weight).sum().backward()
        sums.add(pack, logprob.detach(), entropy, token)

    def _update(self, sums: Sums, lr: float) -> float:
        """Updates the weights and the version unless loss or gradient is not finite. Returns the gradient's norm."""
        if not torch.isfinite(torch.tensor(sums.loss)):
            self._optimizer.zero_grad(set_to_none=True)
            return float("nan")
        norm = apply(self._optimizer, lr, self._config.max_grad_norm)
        if norm < float("inf"):
            self.version += 1
        return norm

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)
