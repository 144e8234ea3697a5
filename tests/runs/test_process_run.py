"""A run with a process reward that is learned, from its first prompt to its checkpoints: a resume goes on bit for bit, and a replay finds every step again."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import headrace
from headrace.commands.replay import replay
from headrace.facts.records import StepRow
from support.tiny_run import of, tiny_config

pytestmark = pytest.mark.slow


def test_a_resumed_run_has_both_adapters_of_one_that_was_not_stopped_and_its_steps_are_repeated(
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
                algo={"name": "prime", "process": {"beta": 1.0, "learning_rate": 0.02}},
                lora={"rank": 4},
                staleness={"max_lag": 0},
                train={"steps": end, "threads": 1, "microbatch_tokens": 24},
                engine={"threads": 1, "exact": True},
            )
            run = headrace.train(settings, resume=directory / "runs" / "tiny" if end > ends[0] else None).directory
        reports = [row.report for row in of(run, StepRow)]
        assert [report.version for report in reports] == [1, 2, 3, 4]
        assert all(report.process and report.microbatches > 1 for report in reports)
        assert reports[0].process.process_accuracy == 0.5 and reports[-1].process.process_reward
        (saved,) = (run / "checkpoints").glob("step-000004/**/optimizer.safetensors")
        found[name] = load_file(saved) | load_file(saved.with_name("adapter_model.safetensors"))
    assert found["whole"].keys() == found["resumed"].keys()
    assert any(name.startswith("process/") and tensor.any() for name, tensor in found["whole"].items())
    for key, tensor in found["whole"].items():
        assert torch.equal(tensor, found["resumed"][key]), key
    console = Console(file=io.StringIO(), width=400)
    assert replay.replay(run, 1, 4, console) == 0
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert output.count("bit for bit") == 4, output
