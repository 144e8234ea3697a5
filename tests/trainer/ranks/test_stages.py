"""Ranks that form a pipeline compute what one device computes: gradients, steps, checkpoints, log-probs, whatever is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparisons import gathered, refused, resume, save_after_two, steps, third_step, three_in_a_row, weights
from rank_processes import RankProcesses
from sharded_case import CPU, GROUPS, Case, Piped, shifted, trainer_of_rank
from torch import Tensor

from headrace.trainer.config import TrainConfig
from headrace.trainer.dealing.share import head_of
from headrace.trainer.forward.forward import Forward, within
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.packing import Pack, pack_sequence
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.port import Microbatches, Placement, Single
from headrace.trainer.placement.staged import Staged
from headrace.trainer.step.checkpoint import saved_weights
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.whole_step import pairs_of
from support import tiny_models
from support.few import few
from support.plain_trainer import same_numbers

# -- gradients ---------------------------------------------------------------------------------------------------------------


def gradients(trainer: TorchTrainer, case: Case) -> tuple[float, float, dict[str, Tensor], int]:
    """Loss, norm, gradients (all of them on the rank that leads), microbatches."""
    given, learner = case.batch(0), trainer._learners[""]
    if "lora" in case:
        shifted(learner.parameters.values())
    plan = trainer._plans(given)[0]
    sums = trainer._gradient(given.temperature, pairs=pairs_of(head_of(given)) if "pairs" in case else None).fill(plan)
    there = {name: p.grad for name, p in learner.parameters.items() if p.grad is not None}
    norm = trainer._placement.norm([p for p in learner.parameters.values() if p.grad is not None])
    found = gathered(there)
    learner.forget()
    return sums.loss, float(norm), found, len(plan.packs)


def gradients_of_rank(directory: Path, case: Case) -> tuple[float, float, dict[str, Tensor], int]:
    return gradients(trainer_of_rank(directory, case), case)


def compare(ranks: RankProcesses, case: Case, tolerance: float = 3e-6, least: int = 3) -> None:
    directory = tiny_models.saved(case["model"])
    loss, norm, expected, _ = gradients(case.trainer(directory), case)
    found = ranks.run(gradients_of_rank, directory, case)
    for one in found:
        assert one[3] >= least
        assert one[:2] == pytest.approx((loss, norm), rel=max(tolerance, 3e-6))
    assert found[0][2].keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[0][2][name] - gradient).abs().max() <= tolerance * gradient.abs().max().clamp(min=1e-30), name


INTERLEAVED, ZERO = {"schedule": "interleaved"}, {"schedule": "zero_bubble"}
CASES = {
    "llama": Piped(model="llama"),
    "qwen3 (tied)": Piped(model="qwen3-deep", parallel={"schedule": "gpipe"}),
    "gemma3 (tied)": Piped(model="gemma3-deep", parallel=INTERLEAVED),
    "qwen3_moe": Piped(model="qwen3_moe-deep", parallel=ZERO),
    "a reference": Piped(model="qwen3-deep", algo={"kl": {"coef": 0.1}}, parallel=INTERLEAVED),
    "preferences": Piped(model="qwen3", algo={"name": "dpo"}, pairs=((0, 1), (0, 3), (4, 2), (5, 8), (9, 6))),
    "LoRA": Piped(model="qwen3", lora={"rank": 4}),
}
MORE = {
    "tied": Piped(model="llama-tied-biased"),
    "uneven": Piped(model="llama-deep"),
    "gpt2": Piped(model="gpt2"),
    "gemma2, row by row": Piped(model="gemma2"),
    "mixtral": Piped(model="mixtral"),
    "llama, gpipe": Piped(model="llama", parallel={"schedule": "gpipe"}),
    "llama, interleaved": Piped(model="llama-deep", parallel=INTERLEAVED),
    "qwen3, zero bubble": Piped(model="qwen3-deep", parallel=ZERO),
    "gemma3, zero bubble": Piped(model="gemma3-deep", parallel=ZERO),
    "recorded experts": Piped(model="qwen3_moe", routing=True),
    "recorded experts, interleaved": Piped(model="qwen3_moe-deep", routing=True, parallel=INTERLEAVED),
    "checkpointed experts": Piped(model="qwen3_moe", routing=True, train={"gradient_checkpointing": True}),
    "checkpointed experts, gpipe": Piped(
        model="qwen3_moe", routing=True, train={"gradient_checkpointing": True}, parallel={"schedule": "gpipe"}
    ),
    "sampling masks": Piped(model="qwen3", masks=True),
    "a teacher": Piped(model="llama", algo={"name": "opd_topk", "distill": {"k": 3}}, top=3),
    "kept": Piped(
        model="llama",
        algo={"denominator": "kept", "old": "trainer", "correction": {"mode": "mask", "low": 0.5, "high": 2.0}},
    ),
    "m2po": Piped(model="llama", algo={"name": "m2po", "tau": 0.05}),
    "preferences in one pack": Piped(
        model="qwen3",
        algo={"name": "dpo"},
        pairs=((0, 1), (0, 3), (4, 2), (5, 8), (9, 6)),
        train={"microbatch_tokens": 1000},
    ),
    "DoRA": Piped(model="llama", lora={"rank": 4, "dora": True}),
    "LoRA with a reference": Piped(model="llama", lora={"rank": 4}, algo={"kl": {"coef": 0.1}}),
    "checkpointed layers": Piped(model="qwen3-deep", train={"gradient_checkpointing": True}, parallel=INTERLEAVED),
}


@pytest.mark.parametrize("name", few(CASES, keep=3))
def test_two_stages_have_the_gradient_of_one_device(name: str, two: RankProcesses) -> None:
    compare(two, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_two_stages_have_the_gradient_of_one_device_whatever_is_trained(name: str, two: RankProcesses) -> None:
    compare(two, MORE[name], least=2 if "one pack" in name else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-deep", "gemma3-deep", "llama-deep", "qwen3_moe-deep"])
@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 4},
        {"pipeline": 4, "schedule": "gpipe"},
        {"replicate": 2},
        {"replicate": 2, "schedule": "interleaved"},
    ],
    ids=lambda parallel: "-".join(map(str, parallel.values())),
)
def test_four_ranks_have_the_gradient_of_one_device(name: str, parallel: dict[str, Any], four: RankProcesses) -> None:
    compare(four, Piped(model=name, groups=(*GROUPS, *GROUPS), parallel=parallel))


SPLIT = {
    "llama": Piped(model="llama-deep", masks=True),
    "qwen3 (tied)": Piped(model="qwen3-deep", algo={"kl": {"coef": 0.1}}, parallel={"schedule": "gpipe"}),
    "gemma3 (tied)": Piped(model="gemma3-deep", parallel=INTERLEAVED),
    "qwen3_moe": Piped(model="qwen3_moe-deep", routing=True, parallel=INTERLEAVED),
    "kept gathered": Piped(model="qwen3-deep", parallel={"reshard": False}),
    "checkpointed": Piped(model="qwen3-deep", train={"gradient_checkpointing": True}),
    "LoRA": Piped(model="llama-deep", lora={"rank": 4}),
    "kept": Piped(MORE["kept"]),
    "gemma2, row by row": Piped(model="gemma2"),
    "filled up": Piped(model="qwen3-deep", groups=((5, 1), (30, 1), (4, 4))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_stages_that_ranks_split_have_the_gradient_of_one_device(name: str, four: RankProcesses) -> None:
    case = Piped(SPLIT[name], parallel={"shard": 2, **SPLIT[name].get("parallel", {})})
    compare(four, Piped({"groups": (*GROUPS, *GROUPS), **case}), least=2 if name == "filled up" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"replicate": 2, "pipeline": 2}, {"pipeline": 4}], ids=str)
@pytest.mark.parametrize("name", ["qwen3-deep", "llama-deep"])
def test_eight_ranks_have_the_gradient_of_one_device(name: str, parallel: dict[str, int], eight: RankProcesses) -> None:
    case = Piped(model=name, groups=(*GROUPS, *GROUPS), parallel={"shard": 2, **parallel} if parallel else {"shard": 4})
    compare(eight, case)


@pytest.mark.slow
def test_four_ranks_train_an_adapter(four: RankProcesses) -> None:
    for parallel in ({"pipeline": 4}, {"replicate": 2}):
        compare(four, Piped(model="llama-deep", groups=(*GROUPS, *GROUPS), parallel=parallel, lora={"rank": 4}))


@pytest.mark.slow
def test_two_stages_round_as_one_device(two: RankProcesses) -> None:
    """Rounding to bfloat16 falls otherwise where sums are in another order."""
    compare(two, Piped(model="qwen3-deep", train={"dtype": "bfloat16"}), 1e-2)
    compare(two, Piped(model="qwen3-deep", train={"dtype": "bfloat16", "weights": "bfloat16"}), 3e-2)


# -- in float64 --------------------------------------------------------------------------------------------------------------


def exact_steps(directory: Path, placement: Placement, place: int = 0, places: int = 1) -> dict[str, Tensor]:
    """Three clipped steps of six microbatches, or of as many for each of `places`, through the model's own logits."""
    model = load_model(directory, CPU).double()
    placement.spread(model)
    forward, named = Forward(model, packed=False, chunked_head=True), dict(model.named_parameters())
    parameters = list(named.values())
    optimizer = placement.optimizer(named.items(), TrainConfig(learning_rate=1e-3, weight_decay=0.1))
    packs = [pack_sequence(tokens) for tokens in tiny_models.prompts(5, 9, 7, 6, 8, 4)[place::places]]

    def nll(pack: Pack) -> Tensor:
        logits = within(model, lambda: model.get_output_embeddings()(forward._hidden(pack))[pack.predictor])
        return torch.nn.functional.cross_entropy(logits, pack.target, reduction="sum") / 30

    @contextmanager
    def microbatch(number: int) -> Iterator[Tensor]:
        yield nll(packs[number])

    for _ in range(3):
        work = Microbatches(
            packs=packs,
            loss=microbatch,
            body=lambda number: forward.hidden(packs[number]),
            precision=nullcontext,
            parameters=parameters,
        )
        placement.accumulate(work)
        there = [p for p in parameters if p.grad is not None]
        norm = placement.norm(there)
        assert norm > 0.5
        placement.clip(there, norm, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return gathered(named)


def exact_steps_of_rank(directory: Path, parallel: ParallelConfig) -> dict[str, Tensor]:
    return exact_steps(directory, Staged(parallel, CPU), dist.get_rank() % parallel.batches, parallel.batches)


def compare_exactly(ranks: RankProcesses, name: str, parallel: ParallelConfig) -> None:
    directory = tiny_models.saved(name)
    expected = exact_steps(directory, Single())
    found = ranks.run(exact_steps_of_rank, directory, parallel)[0]
    assert found.keys() == expected.keys()
    before = load_model(directory, CPU).state_dict()
    for key, one in expected.items():
        assert (one - before[key]).abs().max() > 1e-3, key
        assert (found[key] - one).abs().max() <= 1e-12, key


@pytest.mark.parametrize("name", few(["llama-deep", "qwen3-deep", "gemma3-deep"], keep=1))
def test_three_steps_in_float64_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    compare_exactly(two, name, ParallelConfig(pipeline=2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("name", ["llama-deep", "qwen3-deep", "gemma3-deep"])
def test_three_steps_in_float64_with_every_schedule(name: str, schedule: Any, two: RankProcesses) -> None:
    compare_exactly(two, name, ParallelConfig(pipeline=2, schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-deep", "qwen3-deep", "gemma3-deep"])
def test_three_steps_in_float64_on_four_stages(name: str, four: RankProcesses) -> None:
    compare_exactly(four, name, ParallelConfig(pipeline=4))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("name", ["llama-deep", "qwen3-deep", "gemma3-deep"])
def test_three_steps_in_float64_on_stages_that_ranks_split(name: str, schedule: Any, four: RankProcesses) -> None:
    compare_exactly(four, name, ParallelConfig(pipeline=2, shard=2, schedule=schedule))


# -- steps, log-probs, checkpoints -------------------------------------------------------------------------------------------


def three_steps(directory: Path, case: Case) -> tuple[list[Any], dict[str, Tensor], list[float], float]:
    """Reports, weights, a score, and the share of the weights that this rank holds."""
    one = trainer_of_rank(directory, case)
    reports = steps(one, case, 3)
    score = one.score([3, 1, 4, 1, 5])
    parameters = [p for p in one._model.parameters() if "lora" not in case or not p.requires_grad]
    held = sum(p.numel() for p in parameters if not p.is_meta)
    return reports, weights(one), score, held / sum(p.numel() for p in parameters)


STEPS = {
    "qwen3": Piped(model="qwen3-deep", algo={"kl": {"coef": 0.1}}, train={"max_grad_norm": 0.1, "weight_decay": 0.1}),
    "LoRA": Piped(model="gemma3-deep", lora={"rank": 4}, parallel=INTERLEAVED),
}


@pytest.mark.parametrize("name", few(STEPS, keep=1))
def test_three_steps_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    case = STEPS[name]
    directory = tiny_models.saved(case["model"])
    one = case.trainer(directory)
    expected_reports = steps(one, case, 3)
    expected, score = weights(one), one.score([3, 1, 4, 1, 5])
    shares = []
    for reports, found, found_score, share in two.run(three_steps, directory, case):
        for report, other in zip(reports, expected_reports, strict=True):
            assert (report.version, report.loss_tokens) == (other.version, other.loss_tokens)
            assert report.microbatches >= other.microbatches and report.microbatches < other.microbatches + 2
            assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
            assert (report.kl, report.entropy, report.ratio_max, report.reference_kl) == pytest.approx(
                (other.kl, other.entropy, other.ratio_max, other.reference_kl), rel=1e-3, abs=1e-6
            )
            same_numbers(report, other)
        for key, tensor in expected.items():  # Adam makes ±lr of the rounding of a gradient near zero
            assert (found[key] - tensor).abs().max() <= 3e-5, key
        assert found_score == pytest.approx(score, abs=1e-4)
        shares.append(share)
    tied = tiny_models.make(case["model"]).get_output_embeddings().weight.numel()
    assert sum(shares) == pytest.approx(1 + tied / sum(tensor.numel() for tensor in expected.values()), abs=1e-3)
    assert max(shares) < 0.75


RESUMED = {
    "qwen3": Piped(model="qwen3-deep"),
    "bfloat16": Piped(
        model="qwen3-deep",
        train={"weights": "bfloat16", "dtype": "bfloat16", "learning_rate": 1e-2},
        parallel=INTERLEAVED,
    ),
    "LoRA": Piped(model="llama", lora={"rank": 4}),
}


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bfloat16", "LoRA"))]
)
def test_a_checkpoint_goes_on_bit_for_bit_and_equally_on_other_meshes(
    name: str, two: RankProcesses, tmp_path: Path
) -> None:
    near = 3e-5 if name != "bfloat16" else 0.1  # rounded with other random numbers
    resume(two, RESUMED[name], tmp_path, near=near, also=[Case(RESUMED[name], parallel={})])


@pytest.mark.slow
def test_a_checkpoint_of_two_stages_goes_on_on_four(two: RankProcesses, four: RankProcesses, tmp_path: Path) -> None:
    case = Piped(RESUMED["qwen3"], groups=(*GROUPS, *GROUPS))
    directory = tiny_models.saved(case["model"])
    two.run(save_after_two, directory, case, tmp_path)
    expected, _ = two.run(three_in_a_row, directory, case)[0]
    for parallel in ({"pipeline": 4}, {"replicate": 2}):
        for found, _ in four.run(third_step, directory, Piped(case, parallel=parallel), tmp_path / "checkpoint"):
            for key, tensor in expected.items():
                assert (tensor - found[key]).abs().max() <= 3e-5, key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "bfloat16", "LoRA"])
def test_a_checkpoint_of_split_stages_goes_on_on_every_mesh(
    name: str, two: RankProcesses, four: RankProcesses, tmp_path: Path
) -> None:
    case = Piped(RESUMED[name], groups=(*GROUPS, *GROUPS))
    case["parallel"] = {"shard": 2, **case.get("parallel", {})}
    if name == "LoRA":
        case["model"] = "llama-deep"  # four stages want four layers
    near = 3e-5 if name != "bfloat16" else 0.1
    others = [Case(case, parallel=parallel) for parallel in ({"shard": 4}, {"pipeline": 4, "shard": 1})]
    resume(four, case, tmp_path, near=near, also=others)
    expected, _ = four.run(three_in_a_row, tiny_models.saved(case["model"]), case)[0]
    for one in (Case(case, parallel={}), Piped(case, parallel={})):
        for found, _ in two.run(third_step, tiny_models.saved(case["model"]), one, tmp_path / "checkpoint"):
            for key, tensor in expected.items():
                assert (tensor - found[key]).abs().max() <= near, key


def published_after_two(directory: Path, case: Case) -> dict[str, Tensor]:
    one = trainer_of_rank(directory, case)
    steps(one, case, 2)
    return weights(one)


def test_what_is_published_and_exported_is_what_is_saved(two: RankProcesses, tmp_path: Path) -> None:
    case = Piped(model="qwen3-deep")
    directory = tiny_models.saved(case["model"])
    two.run(save_after_two, directory, case, tmp_path)
    saved, exported = saved_weights(tmp_path / "checkpoint"), load_model(tmp_path / "export", CPU)
    for key, parameter in exported.named_parameters():
        assert torch.equal(parameter, saved.read(key)), key
    names = [name for name, _ in exported.named_parameters()]
    for found in two.run(published_after_two, directory, case):
        assert list(found) == names and all(torch.equal(found[name], saved.read(name)) for name in names)


# -- what does not go --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "words"),
    [("granite-scaled", "makes more of its logits than a product"), ("llama", "has 2 layers; lower")],
)
def test_a_model_that_cannot_be_cut_is_refused(model: str, words: str, two: RankProcesses) -> None:
    case = Piped(model=model, parallel=INTERLEAVED if model == "llama" else {})
    for said in two.run(refused, tiny_models.saved(model), case):
        assert words in said
