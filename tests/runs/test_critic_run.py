"""A run with a critic, from its first prompt to its checkpoints: groups of one, and a resume that goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headrace
from headrace.facts.records import StepRow
from support.tiny_run import of, tiny_config

pytestmark = pytest.mark.slow


def test_a_resumed_run_has_the_weights_and_the_critic_of_one_that_was_not_stopped(
    tmp_path: Path, tiny_llama: Path
) -> None:
    found = {}
    for name, ends in (("whole", (4,)), ("resumed", (2, 4))):
        directory = tmp_path / name
        directory.mkdir()
        for end in ends:
            settings = tiny_config(
                directory,
                tiny_llama,
                algo={"name": "ppo", "lam": 0.9, "critic": {"trunk": 0.1}},
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
