"""Whole runs whose trainer is two ranks: they end like a run on one, and go on by themselves when a rank dies or is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace import cli
from headrace.commands.replay.replay import replay
from headrace.core.errors import WorkerDied
from headrace.durable.journal import count_steps
from headrace.facts.facts import RunEnded, StepTrained
from headrace.run.config import dump_config, load_config
from headrace.trainer.step.checkpoint import beside_of, saved_weights
from support import tiny_models
from support.tiny_run import Config, at_steps, of, ranks_of, tiny_config, weights_of

STEPS = 6


def config_of(directory: Path, model: Path, name: str, **train: Any) -> Config:
    """At least three microbatches for each of two ranks."""
    return tiny_config(
        directory,
        model,
        name=name,
        rollout={"max_tokens": 12},
        train={"steps": STEPS, "learning_rate": 1e-3, "microbatch_tokens": 48, "path": "torch", **train},
        engine={"exact": True},
        staleness={"groups_per_step": 4, "max_lag": 0},
    )


def final(directory: Path) -> dict[str, torch.Tensor]:
    saved = saved_weights(directory / "checkpoints" / f"step-{STEPS:06d}")
    return {name: saved.read(name) for name in saved}


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(tmp_path_factory.mktemp("ranks"), tiny_llama, "two", parallel={"shard": 2})
    result = headrace.train(config)
    assert result.reason == "finished"
    return Path(config["out"]) / "two"


@pytest.mark.whole
def test_a_run_on_two_ranks_ends_at_the_weights_of_one(undisturbed: Path, tiny_llama: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_llama, "one")
    headrace.train(config)
    one = Path(config["out"]) / "one"
    for step, other in zip(of(undisturbed, StepTrained), of(one, StepTrained), strict=True):
        assert step.report.microbatches >= 6
        assert step.report.loss_tokens == other.report.loss_tokens
        assert step.report.grad_norm == pytest.approx(other.report.grad_norm, rel=1e-3)
    expected = final(one)
    for name, tensor in final(undisturbed).items():
        assert (tensor - expected[name]).abs().max() < 1e-4, name
    assert (undisturbed / "logs" / "trainer-rank-0.log").exists() and (
        undisturbed / "logs" / "trainer-rank-1.log"
    ).exists()


@pytest.mark.slow
def test_a_run_on_two_stages_ends_at_the_weights_of_two_ranks(
    undisturbed: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline trains, publishes and saves what FSDP2 does. Its last stage is killed, and the run goes on."""
    config = config_of(tmp_path, tiny_llama, "piped", parallel={"pipeline": 2}, max_deaths=1)
    directory = Path(config["out"]) / "piped"
    harm = at_steps(config, {3: lambda: os.kill(ranks_of(os.getpid())[1], signal.SIGKILL)})
    assert headrace.train(config).reason == "finished"
    harm.join()
    assert "the trainer process of rank 1 was killed by SIGKILL" in capsys.readouterr().err
    for step, other in zip(of(directory, StepTrained), of(undisturbed, StepTrained), strict=True):
        assert step.report.loss_tokens == other.report.loss_tokens and step.report.microbatches >= 3
        assert step.report.grad_norm == pytest.approx(other.report.grad_norm, rel=1e-3)
    expected = final(undisturbed)
    for name, tensor in final(directory).items():
        assert (tensor - expected[name]).abs().max() < 1e-4, name
    assert replay(directory, 2, 3) == 0
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_whose_two_ranks_share_microbatches_ends_at_the_weights_of_one(tiny_llama: Path, tmp_path: Path) -> None:
    """A microbatch has 48 tokens on either mesh."""
    both = {"context": 2}
    together = config_of(tmp_path, tiny_llama, "together", microbatch_tokens=24, parallel=both)
    alone = config_of(tmp_path, tiny_llama, "alone")
    for config in (together, alone):
        assert headrace.train(config).reason == "finished"
    directories = [Path(config["out"]) / config["name"] for config in (together, alone)]
    for step, other in zip(*(of(directory, StepTrained) for directory in directories), strict=True):
        assert (step.report.microbatches, step.report.loss_tokens) == (
            other.report.microbatches,
            other.report.loss_tokens,
        )
        assert step.report.grad_norm == pytest.approx(other.report.grad_norm, rel=1e-3)
    expected = final(directories[1])
    for name, tensor in final(directories[0]).items():
        assert (tensor - expected[name]).abs().max() < 1e-4, name


@pytest.fixture(scope="module")
def tiny_mixture(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-mixture")
    vocabulary = json.loads((tiny_tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    even = len(vocabulary) + len(vocabulary) % 2  # a tensor group splits it equally
    tiny_models.make("qwen3_moe", vocab_size=even).save_pretrained(directory)
    shutil.copytree(tiny_tokenizer, directory, dirs_exist_ok=True)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("split", ["shard", "tensor"])
def test_a_mixture_whose_experts_lie_whole_on_two_ranks_learns_what_one_rank_does(
    split: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    """Routes that the engine recorded travel with tokens to the ranks of their experts."""
    directories = []
    for name, ranks in (("whole", {split: 2, "expert": 2}), ("one", {})):
        config = config_of(tmp_path, tiny_mixture, name, parallel=ranks)
        config["rollout"]["keep_routing"] = True
        assert headrace.train(config).reason == "finished"
        directories.append(Path(config["out"]) / name)
    two, one = directories
    for step, other in zip(of(two, StepTrained), of(one, StepTrained), strict=True):
        assert step.report.loss_tokens == other.report.loss_tokens and step.report.missing_routes == 0
        assert step.report.grad_norm == pytest.approx(other.report.grad_norm, rel=1e-3)
    expected = final(one)
    for name, tensor in final(two).items():
        assert (tensor - expected[name]).abs().max() < 1e-4, name


def test_a_replay_on_the_same_ranks_is_bit_for_bit(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(undisturbed, 2, 3) == 0
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_that_die_or_are_stopped_cost_no_step(
    undisturbed: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed, later rank 0 is stopped. The run goes on by itself, to weights that are bit-identical."""
    config = config_of(tmp_path, tiny_llama, "harmed", parallel={"shard": 2}, max_deaths=2)
    directory = Path(config["out"]) / "harmed"
    acts = {
        2: lambda: os.kill(ranks_of(os.getpid())[1], signal.SIGKILL),
        4: lambda: os.kill(ranks_of(os.getpid())[0], signal.SIGSTOP),
    }
    harm = at_steps(config, acts)
    result = headrace.train(config)
    harm.join()
    assert result.reason == "finished" and not ranks_of(os.getpid())
    output = capsys.readouterr().err
    assert "the trainer process of rank 1 was killed by SIGKILL" in output and "trainer-rank-1.log" in output
    assert "of rank 0 did not run for 5 seconds and was killed (trainer rank 0, pid" in output
    assert "death no. 2 of train.max_deaths = 2" in output
    reasons = [fact.reason for fact in of(directory, RunEnded)]
    assert len(reasons) == 3 and "rank 1" in reasons[0] and "rank 0" in reasons[1] and reasons[2] == "finished"
    assert of(directory, RunEnded)[-1].accounting.balance() == 0
    expected = final(undisturbed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in final(directory).items())


@pytest.mark.slow
def test_the_death_after_the_last_allowed_one_ends_the_run(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_llama, "ended", parallel={"shard": 2}, max_deaths=0)
    directory = Path(config["out"]) / "ended"
    harm = at_steps(config, {3: lambda: os.kill(ranks_of(os.getpid())[0], signal.SIGKILL)})
    with pytest.raises(WorkerDied, match="the trainer process of rank 0 was killed by SIGKILL") as caught:
        headrace.train(config)
    harm.join()
    assert any("--resume" in note for note in caught.value.__notes__) and not ranks_of(os.getpid())
    resumed = headrace.train(resume=directory, sets=["train.parallel.shard=1"])  # on another mesh
    assert resumed.reason == "finished"


@pytest.mark.slow
def test_the_mesh_changes_over_a_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    """Two ranks, then four, then one, by the command line: weights and optimizer's state are those of one rank all along."""
    one = config_of(tmp_path, tiny_llama, "one")
    headrace.train(one)
    elastic = config_of(tmp_path, tiny_llama, "elastic", steps=2, parallel={"shard": 2})
    (file := tmp_path / "elastic.toml").write_text(dump_config(load_config(elastic)))
    run = Path(elastic["out"]) / "elastic"
    assert cli.main(["train", str(file)]) == 0
    for steps, ranks in ((4, 4), (STEPS, 1)):
        sets = ["--set", f"train.steps={steps}", "--set", f"train.parallel.shard={ranks}"]
        assert cli.main(["train", "--resume", str(run), *sets]) == 0
    assert count_steps(run) == STEPS
    expected, found = weights_of(Path(one["out"]) / "one"), weights_of(run)
    assert {name for name in expected if name.startswith("exp_avg_sq/")}
    for name, tensor in expected.items():
        if not name.startswith("rng/"):
            assert (found[name] - tensor).abs().max() <= 1e-4 * max(1.0, float(tensor.abs().max())), name


@pytest.mark.slow
def test_a_critic_of_its_own_outlives_a_rank_and_goes_on_on_one(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of which one is killed end bit for bit like two that are not, and like one, which goes on where they end."""

    def trained(name: str, harm: bool = False, **train: Any) -> Path:
        config = config_of(tmp_path, tiny_llama, name, **train)
        config["algo"] = {"name": "ppo", "critic": {"model": str(tiny_llama), "model_learning_rate": 1e-3}}
        kill = {3: lambda: os.kill(ranks_of(os.getpid())[1], signal.SIGKILL)}
        harming = at_steps(config, kill) if harm else None
        assert headrace.train(config).reason == "finished"
        if harming:
            harming.join()
        return Path(config["out"]) / name

    def saved(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
        found = beside_of(run / "checkpoints" / f"step-{step:06d}")
        return {name: found.read(name) for name in found if name.startswith("critic/")}

    two = {"parallel": {"shard": 2}}
    whole, one = trained("critic", **two), trained("alone")
    harmed = trained("harmed", harm=True, **two, max_deaths=1)
    assert "the trainer process of rank 1 was killed by SIGKILL" in capsys.readouterr().err
    expected, weights = saved(whole), final(whole)
    assert "critic/trunk.model.norm.weight" in expected and expected["critic/exp_avg/weight"].any()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in final(harmed).items())
    assert expected.keys() == saved(harmed).keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved(harmed).items())
    for name, tensor in saved(one).items():
        assert (tensor - expected[name]).abs().max() <= 1e-4 * max(1.0, float(tensor.abs().max())), name
    for report in (step.report for step in of(whole, StepTrained)):
        assert report.critic and report.microbatches >= 6
    assert replay(whole, 2, 3) == 0 and "bit for bit" in capsys.readouterr().out
    headrace.train(resume=whole, sets=["train.parallel.shard=1", f"train.steps={STEPS + 1}"])
    assert saved(whole, STEPS + 1)["critic/steps"] == STEPS + 1
