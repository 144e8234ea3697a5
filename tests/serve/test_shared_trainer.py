"""Several clients' adapters over one base: losses and gradients against formulas written a second time, and nothing of one in another."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from headrace.algo.tinker import LOSSES
from headrace.core.errors import CheckpointError, ConfigError
from headrace.run.worker.build import build_shared_trainer
from headrace.run.worker.worker_messages import SharedStart
from headrace.trainer.shared.calls import AdamStep, Checkpoint, Example, SharedConfig, SharedLora, TrainingPass
from headrace.trainer.shared.shared_trainer import SharedTrainer
from headrace.weight_sync.directory import mark_of
from support import tiny_models

LORA = SharedLora(rank=4, seed=1)
CONFIG = SharedConfig(device="cpu", dtype="float32", microbatch_tokens=16)
STEP = {"learning_rate": 0.01, "eps": 1e-8, "weight_decay": 0.1}


def floats(values: Any) -> bytes:
    return np.array(values, np.float32).tobytes()


def example(seed: int, length: int = 9, width: int = 1) -> Example:
    """One with all the inputs that any loss reads; the first positions are a prompt."""
    rng = np.random.default_rng(seed)
    shape = (length, width)
    marked = np.arange(length) >= 3
    inputs = {
        "weights": rng.normal(size=shape),
        "logprobs": rng.normal(-4, 0.3, size=shape),
        "advantages": rng.normal(size=shape) * marked[:, None],
        "sequence_ratio_mask": np.broadcast_to(marked[:, None], shape),
    }
    tokens = rng.integers(3, 96, length).astype(np.int32)
    targets = rng.integers(3, 96, shape).astype(np.int32)
    return Example(
        tokens=tokens.tobytes(),
        targets=targets.tobytes(),
        width=width,
        inputs={name: floats(values) for name, values in inputs.items()},
    )


EXAMPLES = [example(0), example(1, 14), example(2, 5)]


def asked(
    model: str, loss: str, examples: list[Example] = EXAMPLES, backward: bool = True, **constants: float
) -> TrainingPass:
    chosen = LOSSES[loss].with_constants(constants)
    wanted = [
        Example(tokens=x.tokens, targets=x.targets, width=x.width, inputs={n: x.inputs[n] for n in LOSSES[loss].inputs})
        for x in examples
    ]
    return TrainingPass(model=model, examples=wanted, loss=loss, constants=chosen, backward=backward)


# -- the reference ----------------------------------------------------------------------------------------------------------


def ratio(p: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(p - x["logprobs"])


def ppo_of(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(r * advantages, torch.clip(r, low, high) * advantages).sum()


def gspo_of(p: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    inside = x["sequence_ratio_mask"] != 0
    mean = (p.detach() - x["logprobs"])[inside].sum() / inside.sum()
    return ppo_of(torch.exp(mean) * torch.exp(p) / torch.exp(p.detach()), x["advantages"], 0.95, 1.02)


FORMULAS: dict[str, tuple[Callable[[Tensor, Mapping[str, Tensor]], Tensor], dict[str, float]]] = {
    "cross_entropy": (lambda p, x: -(p * x["weights"]).sum(), {}),
    "importance_sampling": (lambda p, x: -(ratio(p, x) * x["advantages"]).sum(), {}),
    "ppo": (lambda p, x: ppo_of(ratio(p, x), x["advantages"], 0.8, 1.2), {}),
    "cispo": (
        lambda p, x: -(torch.clip(ratio(p, x), 0.9, 1.5).detach() * p * x["advantages"]).sum(),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5},
    ),
    "dro": (
        lambda p, x: -(p * x["advantages"] - 0.5 * 0.3 * (p - x["logprobs"]) ** 2).sum(),
        {"beta": 0.3},
    ),
    "gspo": (gspo_of, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}),
}


class Plain:
    """The model with W + (alpha / rank) B A in the place of each adapted matrix, dense logits, one example after another."""

    def __init__(self, adapter: Mapping[str, Tensor], rank: int, alpha: float = 32.0) -> None:
        self.model = tiny_models.reference("llama")
        self.adapter = {name: tensor.clone().requires_grad_() for name, tensor in adapter.items()}
        self.scale = alpha / rank

    def logprobs(self, x: Example) -> Tensor:
        """[N] or [N, K]"""
        base = dict(self.model.named_parameters())
        ends = "base_model.model.", ".lora_A.weight"
        for name in [name for name in self.adapter if name.endswith(ends[1])]:
            module = name.removeprefix(ends[0]).removesuffix(ends[1])
            b = self.adapter[name.replace("lora_A", "lora_B")]
            base[f"{module}.weight"] = base[f"{module}.weight"].detach() + self.scale * (b @ self.adapter[name])
        tokens = torch.from_numpy(np.frombuffer(x.tokens, np.int32).astype(np.int64))
        targets = torch.from_numpy(np.frombuffer(x.targets, np.int32).astype(np.int64)).view(len(tokens), x.width)
        logits = functional_call(self.model, base, kwargs={"input_ids": tokens[None]}).logits[0]
        found = logits.log_softmax(-1).gather(1, targets)
        return found[:, 0] if x.width == 1 else found

    def loss(self, name: str, examples: list[Example]) -> Tensor:
        total = torch.zeros(())
        for x in examples:
            p = self.logprobs(x)
            inputs = {
                key: torch.frombuffer(bytearray(raw), dtype=torch.float32).view(p.shape)
                for key, raw in x.inputs.items()
            }
            total = total + FORMULAS[name][0](p, inputs)
        return total


@pytest.fixture(scope="module")
def trainer() -> SharedTrainer:
    return SharedTrainer(tiny_models.saved("llama"), CONFIG)


@pytest.fixture
def model(trainer: SharedTrainer, request: pytest.FixtureRequest) -> Any:
    """An adapter that has made a step: before it, B is zero and A has no gradient."""
    name = request.node.name
    trainer.add(name, LORA)
    trainer.run(asked(name, "cross_entropy", [example(7)]))
    trainer.optim_step(AdamStep(model=name, **STEP))
    yield name
    trainer.remove(name)


def gradients(trainer: SharedTrainer, name: str) -> dict[str, Tensor]:
    return {key: p.grad.clone() for key, p in trainer._tenants[name].parameters.items()}


def state(trainer: SharedTrainer, name: str) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in trainer.parameters(name)}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_and_its_gradient_are_those_of_its_formula(trainer: SharedTrainer, model: str, loss: str) -> None:
    plain = Plain(state(trainer, model), LORA.rank)
    report = trainer.run(asked(model, loss, **FORMULAS[loss][1]))
    expected = plain.loss(loss, EXAMPLES)
    assert report.loss == pytest.approx(
        float(expected.detach()), rel=1e-4
    )  # float32, whose sums depend on the processor
    assert report.tokens == 28
    for raw, x in zip(report.logprobs, EXAMPLES, strict=True):
        torch.testing.assert_close(torch.frombuffer(bytearray(raw), dtype=torch.float32), plain.logprobs(x).detach())
    found = gradients(trainer, model)
    for name, gradient in zip(plain.adapter, torch.autograd.grad(expected, list(plain.adapter.values())), strict=True):
        scale = gradient.abs().max() + 1e-3
        torch.testing.assert_close(found[name] / scale, gradient / scale, rtol=1e-4, atol=2e-5)


def test_every_formula_has_its_reference() -> None:
    assert set(FORMULAS) == set(LOSSES)


def test_gradients_add_up_until_the_step_which_is_that_of_adamw(trainer: SharedTrainer, model: str) -> None:
    before = state(trainer, model)
    plain = Plain(before, LORA.rank)
    values = list(plain.adapter.values())
    trainer.run(asked(model, "cross_entropy", EXAMPLES[:1]))
    trainer.run(asked(model, "cross_entropy", EXAMPLES[1:]))
    found = gradients(trainer, model)
    expected = torch.autograd.grad(plain.loss("cross_entropy", EXAMPLES), values)
    for name, gradient in zip(plain.adapter, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-3)
    fresh = "fresh optimizer"
    trainer.add(fresh, SharedLora(rank=LORA.rank, seed=5))
    with torch.no_grad():
        for name, parameter in trainer._tenants[fresh].parameters.items():
            parameter.copy_(before[name])
    optimizer = torch.optim.AdamW(values, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for _ in range(3):
        trainer.run(asked(fresh, "cross_entropy"))
        done = trainer.optim_step(
            AdamStep(
                model=fresh, learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, grad_clip_norm=5.0
            )
        )
        optimizer.zero_grad()
        plain.loss("cross_entropy", EXAMPLES).backward()
        norm = torch.nn.utils.clip_grad_norm_(values, 5.0)
        assert done.grad_norm == pytest.approx(float(norm), rel=1e-3) and done.grad_norm > 5
        optimizer.step()
    for name, tensor in state(trainer, fresh).items():
        # Weights move by 0.06; a step of AdamW divides by the gradient's size, and so enlarges the rounding of small ones.
        torch.testing.assert_close(tensor, plain.adapter[name].detach(), rtol=1e-3, atol=1e-3)
    trainer.remove(fresh)


def test_several_targets_at_a_position(trainer: SharedTrainer, model: str) -> None:
    wide = [example(3, 6, width=3), example(4, 6)]
    plain = Plain(state(trainer, model), LORA.rank)
    report = trainer.run(asked(model, "cross_entropy", wide))
    assert report.loss == pytest.approx(float(plain.loss("cross_entropy", wide).detach()), rel=1e-5)
    first = torch.frombuffer(bytearray(report.logprobs[0]), dtype=torch.float32).view(6, 3)
    torch.testing.assert_close(first, plain.logprobs(wide[0]).detach())


def test_two_that_take_turns_come_to_what_each_comes_to_alone(trainer: SharedTrainer) -> None:
    work = {
        "one": (LORA, "cross_entropy", EXAMPLES),
        "two": (SharedLora(rank=2, seed=9, mlp=False), "ppo", [example(5, 12)]),
    }

    def turn(name: str, of: str) -> None:
        _, loss, examples = work[of]
        trainer.run(asked(name, loss, examples))
        trainer.optim_step(AdamStep(model=name, **STEP))

    for of in work:
        trainer.add(f"{of} alone", work[of][0])
        for _ in range(3):
            turn(f"{of} alone", of)
    for of in work:
        trainer.add(of, work[of][0])
    for _ in range(3):
        trainer.run(asked("one", "cross_entropy", EXAMPLES[:1]))  # a gradient that waits while the other one steps
        turn("two", "two")
        trainer.spoil("one", "planned")
        with pytest.raises(ValueError, match="planned"):
            trainer.optim_step(AdamStep(model="one"))
        turn("one", "one")
    for of in work:
        alone = state(trainer, f"{of} alone")
        for name, tensor in state(trainer, of).items():
            assert torch.equal(tensor, alone[name]), (of, name)
        assert trainer.version(of) == 3
    names = "".join(state(trainer, "two"))
    assert "q_proj" in names and "down_proj" not in names
    trainer._adapters.check_base()
    for name in [*work, *(f"{of} alone" for of in work)]:
        trainer.remove(name)


def test_a_saved_model_continues_bit_for_bit_and_without_its_optimizer_it_does_not(
    trainer: SharedTrainer, model: str, tmp_path: Path
) -> None:
    trainer.save(Checkpoint(model=model, directory=str(tmp_path / "one")))
    names = {"with": True, "without": False}
    for name, optimizer in names.items():
        trainer.add(name, SharedLora(rank=LORA.rank, seed=77))
        assert trainer.restore(Checkpoint(model=name, directory=str(tmp_path / "one"), optimizer=optimizer)) == 1
    for name in [model, *names]:
        trainer.run(asked(name, "cross_entropy"))
        assert trainer.optim_step(AdamStep(model=name, **STEP)).version == 2
    for name, tensor in state(trainer, model).items():
        assert torch.equal(tensor, state(trainer, "with")[name])
    assert any(
        not torch.equal(tensor, state(trainer, "without")[name]) for name, tensor in state(trainer, model).items()
    )
    trainer.add("other", SharedLora(rank=2, seed=1))
    with pytest.raises(CheckpointError, match="has shape"):
        trainer.restore(Checkpoint(model="other", directory=str(tmp_path / "one")))
    for name in [*names, "other"]:
        trainer.remove(name)


def test_what_cannot_be_done_changes_nothing(trainer: SharedTrainer, model: str) -> None:
    before = state(trainer, model)
    with pytest.raises(ValueError, match="no forward_backward since"):
        trainer.optim_step(AdamStep(model=model))
    bad = Example(
        tokens=np.array([1, 96], np.int32).tobytes(),
        targets=EXAMPLES[0].targets[:8],
        inputs={"weights": floats([1, 1])},
    )
    trainer.run(asked(model, "cross_entropy"))
    with pytest.raises(ValueError, match=r"data\[1\] has the token 96 in model_input, and the model has 0 to 95"):
        trainer.run(asked(model, "cross_entropy", [EXAMPLES[0], bad]))
    with pytest.raises(ValueError, match="a forward_backward before it failed: data"):
        trainer.optim_step(AdamStep(model=model))
    huge = Example(
        tokens=EXAMPLES[0].tokens, targets=EXAMPLES[0].targets, inputs={"weights": floats([float("inf")] * 9)}
    )
    trainer.run(asked(model, "cross_entropy", [huge]))
    with pytest.raises(ValueError, match="the norm of the gradient is"):
        trainer.optim_step(AdamStep(model=model))
    with pytest.raises(ValueError, match="sees at most 256"):
        trainer.run(asked(model, "cross_entropy", [example(0, 257)], backward=False))
    with pytest.raises(ValueError, match="no model nobody"):
        trainer.run(asked("nobody", "cross_entropy"))
    with pytest.raises(ValueError, match="already"):
        trainer.add(model, LORA)
    with pytest.raises(ValueError, match="choose no layer"):
        trainer.add("nothing", SharedLora(rank=2, seed=0, attention=False, mlp=False))
    with pytest.raises(ConfigError, match="rank"):
        trainer.add("wide", SharedLora(rank=64, seed=0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(trainer, model).items())
    trainer.run(asked(model, "cross_entropy"))
    assert trainer.optim_step(AdamStep(model=model)).version == 2, "and the next one is whole"


WILD: list[tuple[dict[str, float], str]] = [
    ({"eps": 0.0}, "have made weights that are not finite"),
    ({"eps": 1e-60}, "have made weights that are not finite"),
    ({"learning_rate": 1e30, "weight_decay": 1e30}, "have made weights that are not finite"),
    ({"learning_rate": 3e38, "weight_decay": 3e38}, "ended half-way"),
]


@pytest.mark.parametrize(("wild", "said"), WILD, ids=str)
def test_weights_that_are_no_numbers_are_neither_sampled_nor_saved(
    trainer: SharedTrainer, model: str, wild: dict[str, float], said: str, tmp_path: Path
) -> None:
    """A first step with eps = 0 divides zero by zero: B is zero then, and A has no gradient. A rate that torch cannot hold in float32 ends its step
    when moments are changed already."""
    trainer.save(Checkpoint(model=model, directory=str(tmp_path / "before")))
    before = state(trainer, model)
    trainer.add("fresh", LORA)
    trainer.run(asked("fresh", "cross_entropy"))
    message = f"{said}.*; load_state what was saved before"
    with pytest.raises(ValueError, match=message):
        trainer.optim_step(AdamStep(model="fresh", **wild))
    for ask in (
        lambda: trainer.run(asked("fresh", "cross_entropy")),
        lambda: trainer.optim_step(AdamStep(model="fresh")),
        lambda: trainer.save(Checkpoint(model="fresh", directory=str(tmp_path / "after"))),
        lambda: list(trainer.parameters("fresh")),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    assert trainer.restore(Checkpoint(model="fresh", directory=str(tmp_path / "before"))) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(trainer, "fresh").items())
    trainer.run(asked("fresh", "cross_entropy"))
    assert trainer.optim_step(AdamStep(model="fresh", **STEP)).version == 2
    trainer.remove("fresh")


def test_a_base_that_was_written_since_the_engine_loaded_it_is_refused(tiny_llama: Path) -> None:
    """A trainer that takes the place of one that died reads the files again."""
    start = SharedStart(str(tiny_llama), dataclasses.asdict(CONFIG), mark_of(tiny_llama))
    build_shared_trainer(start)
    weights = tiny_llama / "model.safetensors"
    before = weights.stat()
    try:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        with pytest.raises(ConfigError, match="written since the engine has loaded them"):
            build_shared_trainer(start)
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_constants_are_checked() -> None:
    assert LOSSES["ppo"].with_constants({"clip_high_threshold": 1.5}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.5,
    }
    for loss, given, said in [
        ("ppo", {"beta": 1.0}, "has beta"),
        ("ppo", {"clip_low_threshold": 1.3}, "above clip_high_threshold"),
        ("dro", {"beta": -1.0}, "at least 0"),
        ("dro", {"beta": float("inf")}, "at least 0"),
        ("gspo", {}, "no default for clip_low_threshold"),
    ]:
        with pytest.raises(ValueError, match=said):
            LOSSES[loss].with_constants(given)
