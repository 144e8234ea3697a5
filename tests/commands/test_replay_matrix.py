"""What was sampled is what is trained: masks, routes, LoRA, a reference and teachers, in all their combinations.

The gradient of a step against `plain_trainer`: float64, padded, nothing shared and nothing clever.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import seq_mean_token_sum
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.routing import RoutingReplay, no_replay
from headrace.trainer.packing import StepRows, pack_rows
from headrace.trainer.placement.port import Single
from headrace.trainer.step.gradient import Gradient
from headrace.trainer.step.learner import Learner
from headrace.trainer.step.reference import reference_of
from support import plain_trainer
from support.few import few

TEMPERATURE, KL, TEACHER, TOP, SCALE = 0.8, 0.3, 0.7, 4, 2.0
FAMILIES = ["llama", "qwen3_moe", "mixtral", "olmoe"]
DISTILL = ["none", "sampled", "forward"]


@dataclass(frozen=True)
class Case:
    family: str
    routing: bool
    masks: bool
    lora: bool
    reference: bool
    distill: str

    def __str__(self) -> str:
        words = [name for name in ("routing", "masks", "lora", "reference") if getattr(self, name)]
        return "-".join([self.family, *words, self.distill])

    @property
    def rows(self) -> list[Any]:
        return rows_of(self.family, self.routing, self.masks)

    @property
    def algo(self) -> AlgoConfig:
        settings: dict[str, Any] = {"name": "reinforce"}
        if self.reference:
            settings["kl"] = {"coef": KL}
        if self.distill != "none":
            top = {"k": TOP} if self.distill == "forward" else {}
            settings["distill"] = {"kind": self.distill, "coef": TEACHER, **top}
        return AlgoConfig(**settings)


@cache
def rows_of(family: str, routing: bool, masks: bool) -> list[Any]:
    experts = plain_trainer.experts_of(plain_trainer.model_of(family)) if routing else None
    return plain_trainer.rows(random.Random(7), masks=masks, experts=experts, top=TOP)


CASES = [
    Case(family, routing, *rest)
    for family in FAMILIES
    for routing in ((False,) if family == "llama" else (False, True))
    for rest in itertools.product((False, True), (False, True), (False, True), DISTILL)
]


# -- as the trainer does it -------------------------------------------------------------------------------------------------


def adapt(model: Any) -> None:
    """LoRA on attention and, where there are experts, on their stacks; B is not zero, as after some steps."""
    import peft

    stacks = ["mlp.experts.down_proj"] if hasattr(model.model.layers[0].mlp, "experts") else None
    settings = peft.LoraConfig(
        r=2, lora_alpha=2 * SCALE, target_modules=["q_proj", "o_proj"], target_parameters=stacks, lora_dropout=0.0
    )
    peft.get_peft_model(model, settings)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.2


@cache
def moved(family: str) -> Mapping[str, Tensor]:
    """What full training has made of the weights since the run began."""
    generator = torch.Generator().manual_seed(6)
    parameters = plain_trainer.model_of(family).named_parameters()
    return {name: p.detach() + 0.05 * torch.randn(p.shape, generator=generator) for name, p in parameters}


@cache
def chosen(family: str) -> Forward:
    forward = choose_forward(plain_trainer.model_of(family))
    assert forward.packed and forward.chunked_head
    return forward


def trained(case: Case, shared: bool) -> dict[str, Tensor]:
    """Gradients by name."""
    model = deepcopy(chosen(case.family).model)
    forward = replace(chosen(case.family), model=model, packed=shared)
    if not shared:
        model.set_attn_implementation("eager")
    if case.lora:
        adapt(model)
    reference = (
        reference_of(
            forward, torch.float32, lambda own: RoutingReplay(own, torch.float32) if case.routing else no_replay
        )
        if case.reference
        else None
    )
    if not case.lora:
        model.load_state_dict(moved(case.family), strict=False)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    placement = Single()
    learner = Learner(config=TrainConfig(device="cpu"), algo=case.algo, parameters=parameters, placement=placement)
    replay = RoutingReplay(forward, torch.float32) if case.routing else no_replay
    plan = pack_rows(StepRows(case.rows, learner.aggregation, constant=0, budget=40, step=0, share=shared))
    gradient = Gradient(
        forward=forward,
        learner=learner,
        placement=placement,
        temperature=TEMPERATURE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        reference=reference,
        replay=replay,
    )
    gradient.fill(plan)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}


# -- as one would write it down ---------------------------------------------------------------------------------------------


@cache
def expected(case: Case) -> dict[str, Tensor]:
    source = plain_trainer.model_of(case.family)
    model, rows = plain_trainer.plain(source), case.rows
    base = {name: p.detach() for name, p in model.named_parameters()}
    if case.lora:
        adapt(source)
        leaves = {n: p.detach().double().requires_grad_() for n, p in source.named_parameters() if "lora_" in n}
        weights = base | added(base, leaves)
    else:
        leaves = {name: p.double().requires_grad_() for name, p in moved(case.family).items()}
        weights = leaves
    scaled = plain_trainer.logits(model, weights, rows) / TEMPERATURE
    logprob = plain_trainer.logprobs(scaled, rows)
    loss = policy_loss(case, logprob)
    if case.reference:
        with torch.no_grad():
            ref = plain_trainer.logprobs(plain_trainer.logits(model, base, rows) / TEMPERATURE, rows)
        loss = loss + KL * (torch.exp(ref - logprob) - (ref - logprob) - 1)
    if case.distill == "forward":
        loss = loss + TEACHER * plain_trainer.forward_kl(scaled * TEMPERATURE, rows)  # at temperature 1
    counted = sum(any(row.mask) for row in rows)
    gradients = torch.autograd.grad(loss.sum() / counted, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), gradients, strict=True)
    }


def policy_loss(case: Case, logprob: Tensor) -> Tensor:
    """[M] REINFORCE with an importance weight of at most 2; a teacher adds log p_teacher - log p to the advantage."""
    rows = case.rows
    sampled, advantage = (plain_trainer.column(rows, of) for of in (lambda r: r.logprobs, lambda r: r.advantages))
    if case.distill == "sampled":
        teacher = plain_trainer.column(rows, lambda r: r.teacher.logprobs)
        advantage = advantage + TEACHER * torch.nan_to_num(teacher - logprob.detach(), nan=0.0)
    return -(logprob - sampled).exp().clamp(max=2.0).detach() * advantage * logprob


def added(base: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices that have an adapter: W + s·B·A; of a stack of experts, each with r rows of A and r columns of B."""
    found = {}
    for name, a in leaves.items():
        if "lora_A" not in name:
            continue
        b = leaves[name.replace("lora_A", "lora_B")]
        key = name.replace(".lora_A.default.weight", ".weight")
        if ".experts." in name:
            key = name.split(".experts.")[0] + ".experts.down_proj"
            count, (out, inner) = len(base[key]), base[key].shape[1:]
            # peft lays the experts' factors side by side: A [E·r, in], B [out, r·E] with the experts innermost
            lower, upper = a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count)
            product = torch.einsum("ore,eri->eoi", upper, lower)
            found[key] = base[key] + SCALE * (product if product.shape[1:] == (out, inner) else product.mT)
        else:
            found[key] = base[key] + SCALE * b @ a
    return found


MATRIX = list(itertools.product(CASES, (True, False)))
"""Each case with shared prompts in one pack, and row by row."""


def values(case: Case, shared: bool) -> set[tuple[str, Any]]:
    return {*vars(case).items(), ("shared", shared)}


def quick(case: Case, shared: bool) -> bool:
    """A third of the matrix, in which any two values meet: a diagonal. The others are for `make test-slow`."""
    distill = DISTILL.index(case.distill)
    return (distill + case.masks + case.lora + case.reference + shared + FAMILIES.index(case.family)) % 3 == 0


def marked(case: Case, shared: bool) -> Any:
    name = f"{case}-{'shared' if shared else 'row-by-row'}"
    return pytest.param(case, shared, id=name, marks=() if quick(case, shared) else pytest.mark.slow)


@pytest.mark.parametrize(("case", "shared"), few(itertools.starmap(marked, MATRIX), keep=12))
def test_the_gradient_of_a_step(case, shared):
    actual, wanted = trained(case, shared), expected(case)
    assert actual.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    assert scale > 1e-3
    for name, gradient in wanted.items():
        assert float((actual[name].double() - gradient).abs().max()) <= 2e-5 * scale, name


def test_the_matrix_is_whole():
    assert len(CASES) == 7 * 2 * 2 * 2 * 3
    every, some = (
        {pair for one in chosen for pair in itertools.combinations(sorted(values(*one), key=str), 2)}
        for chosen in (MATRIX, [one for one in MATRIX if quick(*one)])
    )
    assert every == some and sum(quick(*one) for one in MATRIX) == len(MATRIX) / 3
    assert AlgoConfig(name="reinforce").recipe.aggregation == seq_mean_token_sum.__name__
