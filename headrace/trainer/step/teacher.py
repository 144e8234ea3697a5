"""A teacher that the trainer holds: a frozen model whose whole distribution is compared with the policy's, at any temperature.

It reads what the policy is trained on, microbatch by microbatch, in a pass without gradient. Its layers lie on the ranks as the policy's do
(`placement/port.py`), its head whole on each: a policy whose head is split by rows is compared with its own rows of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import top_divergence
from headrace.algo.policy.tokens import TopTokens
from headrace.algo.recipe_parts import Distill
from headrace.core.errors import CheckpointError, ConfigError
from headrace.models.resolve import resolve_model, weight_files
from headrace.trainer.forward.divergence import AskedLogprobs, HeadOf, divergence, most_probable
from headrace.trainer.forward.forward import Forward, Lesson, LessonNumbers, softcap_of
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.forward.head import Scale
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Placement, chosen_forward
from headrace.trainer.step.checkpoint_files import SavedTensors
from headrace.trainer.step.reference import frozen

if TYPE_CHECKING:
    from jaxtyping import Float


MARK = "teacher/mark"
"""The name of the tensor of a checkpoint by which its teacher is known."""
SAMPLES, SAMPLE = 64, 1 << 12
"""Samples of a file of weights, and the bytes of each."""


class HeldTeacher(torch.nn.Module):
    weight: torch.nn.Parameter
    """[V, H] of its head."""
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        directory: Path,
        rule: Distill,
        device: torch.device,
        dtype: torch.dtype,
        *,
        placement: Placement,
        fused: bool,
    ) -> None:
        """`dtype`: of the computation. `fused`: whether it may use the kernels. Made after the policy lies on its ranks. Raises ConfigError for a model whose
        hidden states are not to be had, or that cannot lie on the ranks as the policy does."""
        super().__init__()
        self._rule, self._dtype, self._marks = rule, dtype, _marks(rule.model, directory)
        model, way = _loaded(directory, placement)
        if fused:
            fuse(way)
        head = model.get_output_embeddings()
        self._packed = getattr(head, "packed", None)
        tied = head.weight is model.get_input_embeddings().weight
        shared = tied and placement.plain
        weight = None if shared else _whole(model, head.weight, dtype).to(device)
        bias = getattr(head, "bias", None)
        self.bias = None if bias is None else _constant(_whole(model, bias, dtype).to(device))
        if not tied:  # nothing reads logits
            model.set_output_embeddings(torch.nn.Identity())
        self.trunk = frozen(model, dtype)
        placement.spread(self.trunk)
        if placement.plain:
            self.trunk.to(device)
        self._way = replace(way, model=self.trunk)
        self.weight = self.trunk.get_input_embeddings().weight if weight is None else _constant(weight)
        self._scale = Scale(softcap=softcap_of(self.trunk))

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: the marks of its name and of its weights."""
        return {MARK: self._marks}

    def check(self, saved: SavedTensors, directory: str) -> None:
        """Raises CheckpointError if the teacher of a checkpoint had the same name and other weights."""
        name, weights = saved.read(MARK).tolist() if MARK in saved else (0, 0)
        if name == int(self._marks[0]) and weights != int(self._marks[1]):
            raise CheckpointError(
                f"checkpoint {directory}: the weights of algo.distill.model = {self._rule.model} have changed since it was written; bring them back, or "
                "name the new teacher by another path"
            )

    @torch.no_grad()
    def lesson(self, pack: Pack) -> Lesson:
        """Forwards the pack; the caller opens the autocast context. Ids that stand for nothing, of which the policy may have more than the teacher, are read as
        the teacher's last one."""
        tokens = pack.tokens.clamp(max=self.trunk.get_input_embeddings().weight.shape[0] - 1)
        return partial(self._compared, self._way.hidden(replace(pack, tokens=tokens)))

    def _compared(self, hidden: Float[Tensor, "N H"], policy: HeadOf, asked: AskedLogprobs) -> LessonNumbers:
        """Compares at the places of the loss tokens, which lie among the hidden states. What was sampled has the temperature and the mask of sampling;
        distributions have `algo.distill.temperature`, and all tokens."""
        rule = self._rule
        own = HeadOf(hidden, self.weight, self.bias, self._scale, self._dtype, packed=self._packed)
        if not rule.compares:
            rows, kept = len(self.weight), asked.kept and asked.kept.below(len(self.weight))
            known = asked._replace(target=asked.target.clamp(max=rows - 1), kept=kept)
            with torch.no_grad():
                found = own.logprobs(known).logprob
            return LessonNumbers(teacher=torch.where(asked.target < rows, found, torch.nan))
        places, which = torch.unique(asked.predictor, return_inverse=True)  # sums of gradients have an order then (C8)
        policy, own = policy.at(places, rule.temperature), own.at(places, rule.temperature)
        found = divergence(policy, own, rule) if rule.over == "vocabulary" else _over_top(policy, own, rule)
        return LessonNumbers(divergence=found[which])

    @property
    def shares(self) -> bool:
        """Whether the model can read rows that share tokens."""
        return self._way.shares


def held_teacher(
    algos: Sequence[AlgoConfig],
    policy: Forward,
    device: torch.device,
    dtype: torch.dtype,
    *,
    placement: Placement,
    fused: bool,
) -> HeldTeacher | None:
    """Returns the teacher of these algorithms, if one has it. Raises ConfigError for one that cannot be compared with the policy."""
    rules = [algo.recipe.distill for algo in algos if algo.recipe.distill.model]
    if not rules:
        return None
    if not policy.chunked_head:
        raise ConfigError(
            f"algo.distill.model is compared in blocks of the vocabulary, and {type(policy.model).__name__}, the policy, shows its logits only; use "
            "[[teachers]], with algo.distill.over = teacher_top"
        )
    directory = resolve_model(rules[0].model, setting="algo.distill.model")
    try:
        return HeldTeacher(directory, rules[0], device, dtype, placement=placement, fused=fused)
    except ConfigError as error:
        raise ConfigError(f"algo.distill.model = {directory}: {error}") from error


def _over_top(policy: HeadOf, teacher: HeadOf, rule: Distill) -> Float[Tensor, " U"]:
    """[U] over the most probable tokens of one of both, and one bucket for the others."""
    rows = min(policy.weight.shape[0], teacher.weight.shape[0])
    ids = most_probable(teacher if rule.over == "teacher_top" else policy, rule.k, rows)
    places = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    asked = AskedLogprobs(places, ids.flatten(), None, rule.temperature)
    student = policy.logprobs(asked).logprob.view(ids.shape)
    with torch.no_grad():
        taught = teacher.logprobs(asked).logprob.view(ids.shape)
    return top_divergence(TopTokens(student, taught), rule)


def _loaded(directory: Path, placement: Placement) -> tuple[Any, Forward]:
    """Returns the model in the host's memory: in float32 it may be more than a device has beside the policy."""
    model = placement.load(directory, torch.device("cpu"), values=False)
    way = chosen_forward(placement, model, checkpointed=False)
    if not way.chunked_head:
        raise ConfigError(
            f"{type(model).__name__} shows its logits only, one row at a time, and they are compared in blocks of the vocabulary; use another teacher, or "
            "[[teachers]] with algo.distill.over = teacher_top"
        )
    return model, way


def _whole(model: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    values: Tensor = model.files.whole(model, tensor) if tensor.is_meta else tensor
    return values.detach().to(dtype)


def _marks(name: str, directory: Path) -> Tensor:
    """[2] int64: of the name, and of samples from all over the files of weights: a model that was trained further may differ in some kinds of its matrices alone."""
    found = blake2b(digest_size=7)
    for path in weight_files(directory):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for number in range(SAMPLES):
                file.seek(size * number // SAMPLES)
                found.update(file.read(SAMPLE))
    digests = blake2b(name.encode(), digest_size=7).digest(), found.digest()
    return torch.tensor([int.from_bytes(digest) for digest in digests])


def _constant(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)
