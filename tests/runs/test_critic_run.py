"""A run with a critic, from its first prompt to its checkpoints: groups of one, and a resume that goes on bit for bit."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import headrace
from headrace.commands.replay import replay
from headrace.core.errors import ConfigError
from headrace.facts.records import StepRow
from support.tiny_run import of, tiny_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("own", [False, True], ids=["a head", "a model of its own"])
def test_a_resumed_run_has_the_weights_and_the_critic_of_one_that_was_not_stopped(
    tmp_path: Path, tiny_llama: Path, own: bool
) -> None:
    found = {}
    critic = {"model": str(tiny_llama), "model_learning_rate": 1e-3} if own else {"trunk": 0.1}
    for name, ends in (("whole", (4,)), ("resumed", (2, 4))):
        directory = tmp_path / name
        directory.mkdir()
        for end in ends:
            settings = tiny_config(
                directory,
                tiny_llama,
                algo={"name": "ppo", "lam": 0.9, "critic": critic},
                rollout={"group_size": 1},
                staleness={"max_lag": 0},
                train={"steps": end, "threads": 1, "microbatch_tokens": 24},
                engine={"threads": 1, "exact": True},
            )
            run = headrace.train(settings, resume=directory / "runs" / "tiny" if end > ends[0] else None).directory
        reports = [row.report for row in of(run, StepRow)]
        assert [report.version for report in reports] == [1, 2, 3, 4]
        assert all(report.critic and report.microbatches > 1 for report in reports) and reports[-1].critic.value_mean
        (saved,) = (run / "checkpoints").glob("step-000004/**/optimizer.safetensors")
        found[name] = load_file(saved) | load_file(saved.with_name("model.safetensors"))
    assert found["whole"].keys() == found["resumed"].keys() and found["whole"]["critic/weight"].any()
    for key, tensor in found["whole"].items():
        assert torch.equal(tensor, found["resumed"][key]), key
    console = Console(file=io.StringIO(), width=400)
    assert replay.replay(run, 1, 4, console) == 0
    assert console.file.getvalue().count("bit for bit") == 4  # type: ignore[attr-defined]
    changed = {key for key, tensor in found["whole"].items() if key.startswith("critic/trunk.")}
    assert bool(changed) == own


def test_a_critic_that_reads_other_tokens_or_too_few_is_refused_before_anything_starts(
    tmp_path: Path, tiny_llama: Path
) -> None:
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    short = shutil.copytree(tiny_llama, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    for model, message in (
        (other, "has another vocabulary than the policy, whose tokens it reads: 2 of"),
        (short, "was made for 16 tokens, and rollouts may have"),
        (tmp_path / "none", "algo.critic.model = .* is not a directory"),
    ):
        settings = tiny_config(tmp_path, tiny_llama, algo={"name": "ppo", "critic": {"model": str(model)}})
        with pytest.raises(ConfigError, match=message):
            headrace.train(settings)
