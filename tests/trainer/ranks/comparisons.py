"""What ranks compute, and what one device does: steps and checkpoints; and their comparison. A piece of work of a rank is a
function of this module, so that every process finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import astuple
from rank_processes import RankProcesses
from sharded_case import CPU, Case, shifted, trainer_of_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.core.errors import ConfigError
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.model.adapters import Adapters
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.port import Microbatches, Placement, Single
from headrace.trainer.placement.sharded import Sharded
from headrace.trainer.step.trainer import TorchTrainer
from support import tiny_models
from support.plain_trainer import same_numbers


def gathered(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors that the ranks hold, whole; those that several have are the first one's."""
    whole = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in held.items() if not t.is_meta
    }
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size() if dist.is_initialized() else [whole]
    if dist.is_initialized():
        dist.all_gather_object(everyone, whole)
    found: dict[str, Tensor] = {}
    for tensors in everyone:
        found = {**tensors, **found}
    return found


def refused(directory: Path, case: Case) -> str:
    with pytest.raises(ConfigError) as caught:
        trainer_of_rank(directory, case)
    return str(caught.value)


def exact_steps(
    directory: Path, placement: Placement, place: int = 0, places: int = 1, lora: LoraConfig | None = None
) -> dict[str, Tensor]:
    """Three clipped steps of at least three microbatches, through the model's own logits. `place`: of `places` that share the batch. `lora`: train
    this adapter instead of all weights."""
    model = load_model(directory, CPU).double()
    adapters = Adapters(model, {"": lora}, torch.float64, directory) if lora else None
    model.double()
    named = adapters.parameters("") if adapters else {}
    shifted(named.values())
    placement.spread(model)
    named = named or dict(model.named_parameters())
    parameters = list(named.values())
    optimizer = placement.optimizer(named.items(), TrainConfig(learning_rate=1e-3, weight_decay=0.1))
    mine = tiny_models.prompts(5, 9, 7, 6, 8, 4)[place::places]

    def nll(tokens: list[int]) -> Tensor:
        given = torch.tensor([tokens])
        logits = model(input_ids=given, use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, given[0, 1:], reduction="sum") / 30

    def microbatch(number: int) -> AbstractContextManager[Tensor]:
        return nullcontext(nll(mine[number]))

    for _ in range(3):
        work = Microbatches(packs=mine, loss=microbatch, body=len, precision=nullcontext, parameters=parameters)  # type: ignore[arg-type]
        placement.accumulate(work)
        norm = placement.norm(parameters)
        assert norm > 0.5
        placement.clip(parameters, norm, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: placement.whole(parameter) for name, parameter in named.items()}


def exact_steps_of_rank(directory: Path, parallel: ParallelConfig, lora: LoraConfig | None = None) -> dict[str, Tensor]:
    places = parallel.ranks // parallel.tensor
    return exact_steps(directory, Sharded(parallel, CPU), dist.get_rank() // parallel.tensor, places, lora)


NEAR = {"gemma3_text": 1e-9, "one-key-head": 5e-9}
"""Norms of transformers compute in float32 in every dtype (Gemma's multiply with their weights in it too), and round sums of another
order, such as those over repeated key heads, otherwise: 1.4e-9 on an Intel Xeon with one key head, of
weights that move by more than 1e-3. The others come to 1e-12."""


def compare_exact(ranks: RankProcesses, name: str, parallel: ParallelConfig, lora: LoraConfig | None = None) -> None:
    directory = tiny_models.saved(name)
    expected, before = exact_steps(directory, Single(), lora=lora), load_model(directory, CPU).state_dict()
    for found in ranks.run(exact_steps_of_rank, directory, parallel, lora):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert lora or (one - before[key]).abs().max() > 1e-3, key
            assert (found[key] - one).abs().max() <= NEAR.get(name, 1e-12), key


def weights(trainer: TorchTrainer) -> dict[str, Tensor]:
    """Those that are published, and the critic's."""
    critic, whole = trainer._learners[""].critic, trainer._placement.whole
    found = {name: tensor.clone() for name, tensor in trainer.parameters()}
    return found | {f"critic.{name}": whole(p).clone() for name, p in (critic.named_parameters() if critic else [])}


def steps(trainer: TorchTrainer, case: Case, until: int) -> list[Any]:
    return [trainer.step(case.batch(trainer.version)) for _ in range(trainer.version, until)]


def three_steps(directory: Path, case: Case) -> tuple[list[Any], dict[str, Tensor], list[float], float]:
    """Reports, weights, a score, and the share of the weights that this rank holds."""
    one = trainer_of_rank(directory, case)
    one.score([3, 1, 4, 1, 5])  # without a backward pass that would free what it gathered
    reports = steps(one, case, 3)
    score = one.score([3, 1, 4, 1, 5])
    parameters = [p for p in one._model.parameters() if "lora" not in case or not p.requires_grad]
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return reports, weights(one), score, held / sum(p.numel() for p in parameters)


def compare_steps(ranks: RankProcesses, case: Case, share: float, near: float = 3e-5) -> None:
    """`share`: of the weights that each rank holds, nearly. `near`: largest difference of a weight after steps at a rate of 1e-3."""
    directory, case = tiny_models.saved(case["model"]), case.saved
    one = case.trainer(directory)
    expected_reports = steps(one, case, 3)
    for reports, found, score, held in ranks.run(three_steps, directory, case):
        for report, other in zip(reports, expected_reports, strict=True):
            assert (report.version, report.loss_tokens) == (other.version, other.loss_tokens)
            assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
            assert (report.kl, report.entropy, report.ratio_max, report.reference_kl) == pytest.approx(
                (other.kl, other.entropy, other.ratio_max, other.reference_kl), rel=1e-3, abs=1e-6
            )
            same_numbers(report, other)
            assert (report.critic is None) == (other.critic is None)
            if report.critic and other.critic:
                assert astuple(report.critic) == pytest.approx(astuple(other.critic), rel=1e-3, abs=1e-5)
        for key, tensor in weights(one).items():  # Adam makes ±lr of the rounding of a gradient near zero
            assert (found[key] - tensor).abs().max() <= near, key
        assert score == pytest.approx(one.score([3, 1, 4, 1, 5]), abs=1e-4)
        assert held == pytest.approx(share, abs=0.02)


def save_after_two(directory: Path, case: Case, to: Path) -> None:
    one = trainer_of_rank(directory, case)
    steps(one, case, 2)
    one.save(to / "checkpoint")
    one.export(to / "export", "float32")


def third_step(directory: Path, case: Case, checkpoint: Path) -> tuple[dict[str, Tensor], Tensor]:
    one = trainer_of_rank(directory, case)
    one.restore(checkpoint)
    steps(one, case, 3)
    return weights(one), torch.get_rng_state()


def three_in_a_row(directory: Path, case: Case) -> tuple[dict[str, Tensor], Tensor]:
    one = trainer_of_rank(directory, case)
    steps(one, case, 3)
    return weights(one), torch.get_rng_state()


def resume(ranks: RankProcesses, case: Case, to: Path, *, near: float = 3e-5, also: Sequence[Case] = ()) -> None:
    """Two steps, a checkpoint, and the third step: bit for bit on the same mesh, and equally on one device, from one device, and on the meshes of
    `also`. `near`: largest difference of a weight, of which Adam makes ±lr where a gradient is near zero."""
    directory, case = tiny_models.saved(case["model"]), case.saved
    ranks.run(save_after_two, directory, case, to)
    whole = ranks.run(three_in_a_row, directory, case)
    resumed = ranks.run(third_step, directory, case, to / "checkpoint")
    for (one, state), (other, other_state) in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert torch.equal(state, other_state)
    assert all(torch.equal(whole[0][0][key], found[key]) for found, _ in whole for key in found)
    single = case.trainer(directory)
    single.restore(to / "checkpoint")
    assert single.version == 2
    steps(single, case, 3)
    again = case.trainer(directory)
    steps(again, case, 2)
    again.save(to / "single")
    others = [found for found, _ in ranks.run(third_step, directory, case, to / "single")]
    for mesh in (one.saved for one in also):
        others += [found for found, _ in ranks.run(third_step, directory, mesh, to / "checkpoint")]
    for key, tensor in weights(single).items():
        for found in (whole[0][0], *others):
            assert (tensor - found[key]).abs().max() <= near, key


def capture_and_go_on(directory: Path, case: Case, to: Path) -> tuple[int, int]:
    """Two steps, a capture, a third step, and only then the files. Returns the bytes of this rank's files, and of all that was captured."""
    one = trainer_of_rank(directory, case)
    steps(one, case, 2)
    report, write = one.capture()
    assert not report.short
    steps(one, case, 3)
    write(to / "checkpoint")
    dist.barrier()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = sum(path.stat().st_size for path in (to / "checkpoint").glob(f"*-{rank + 1:05}-of-{ranks:05}.safetensors"))
    return own, report.nbytes
