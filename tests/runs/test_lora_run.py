"""Whole LoRA runs with real processes on a tiny model: what is served, saved, resumed and exported is what was trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace.core.errors import CheckpointError, ConfigError
from headrace.facts.facts import IdentityChecked, RunEnded, WeightsLive
from headrace.facts.records import StepRow
from support.tiny_run import Config, of, tiny_config


@pytest.fixture(scope="session")
def loud_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With wide embeddings, which are frozen and tied to the head: from narrow ones no adapter could make a clear choice."""
    directory = tmp_path_factory.mktemp("loud") / "llama"
    shutil.copytree(tiny_llama, directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.get_input_embeddings().weight.data *= 6
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def config(loud_llama: Path, tmp_path: Path) -> Config:
    return tiny_config(tmp_path, loud_llama, train={"steps": 4}, lora={"rank": 8}, watch={"identity_every": 1})


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 40)[None]).logits.float().log_softmax(-1)


@pytest.mark.whole
def test_a_lora_run_learns_publishes_its_adapter_alone_and_resumes(config: Config, tmp_path: Path) -> None:
    config["train"] |= {"steps": 25, "learning_rate": 1e-2}
    config["eval"] = {"prompts": 8, "samples": 2}
    result = headrace.train(config)
    assert result.reason == "finished" and result.before is not None and result.after is not None
    assert result.after.reward_mean > 2 * result.before.reward_mean + 0.1, "it did not learn to say e"
    base, *adapters = [fact.update for fact in of(result.directory, WeightsLive)]
    assert base.kind == "full" and base.version == 0 and base.adapter is None
    assert [update.version for update in adapters] == list(range(26))
    assert {update.kind for update in adapters} == {"adapter"}
    assert {update.adapter.base for update in adapters} == {base.fingerprint}, "each names the base it belongs to"
    checks = of(result.directory, IdentityChecked)
    assert len(checks) == 26 and all(check.ok for check in checks) and max(c.max_abs_diff for c in checks) < 1e-4
    assert len({round(check.mean_abs_diff, 9) for check in checks}) > 1
    rows = of(result.directory, StepRow)
    assert max(lag for row in rows for lag in row.lags) <= 1 and min(lag for row in rows for lag in row.lags) >= 0
    again = headrace.train(config, sets=["train.steps=27"], resume=result.directory)
    assert again.step == 27 and of(again.directory, RunEnded)[-1].accounting.balance() == 0
    updates = [fact.update for fact in of(again.directory, WeightsLive)][27:]
    assert [(update.kind, update.version) for update in updates] == [
        ("full", 0),
        *(("adapter", v) for v in (25, 26, 27)),
    ]
    assert updates[0].fingerprint == base.fingerprint, "the base never moved"
    assert updates[1].fingerprint == adapters[-1].fingerprint, "the resumed adapter is the one that was served"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"rank": 4, "dora": True}, {"rank": 4, "publish": "merged"}])
def test_merged_weights_are_published_in_full(config: Config, lora: Config) -> None:
    result = headrace.train({**config, "lora": lora})
    updates = [fact.update for fact in of(result.directory, WeightsLive)]
    assert [(update.kind, update.version) for update in updates] == [("full", version) for version in range(5)]
    assert len({update.fingerprint for update in updates}) == 5
    assert max(check.max_abs_diff for check in of(result.directory, IdentityChecked)) < 1e-4


@pytest.mark.slow
def test_exports_say_what_was_trained(config: Config, tmp_path: Path, loud_llama: Path) -> None:
    directory = headrace.train(config).directory
    checkpoint = headrace.export(directory, tmp_path / "adapter")
    headrace.export(directory, tmp_path / "merged", "float32", merge=True)
    base = AutoModelForCausalLM.from_pretrained(loud_llama, dtype=torch.float32)
    untrained = logprobs(base)
    trained = logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert (trained - untrained).abs().max() > 1e-3
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logprobs(whole), trained, atol=1e-5)
    bare = AutoModelForCausalLM.from_pretrained(loud_llama, dtype=torch.float32)
    assert torch.equal(logprobs(peft.PeftModel.from_pretrained(bare, checkpoint)), trained), (
        "a checkpoint is peft's too"
    )
    measured = headrace.evaluate(config, directory, 4)
    assert measured.prompts == 4


@pytest.mark.slow
def test_what_cannot_be_exported_or_resumed_is_said(config: Config, tmp_path: Path) -> None:
    directory = headrace.train({**config, "train": {**config["train"], "steps": 1}}).directory
    with pytest.raises(ConfigError, match="lora.rank was 8, not 4"):
        headrace.train({**config, "lora": {"rank": 4}}, resume=directory)
    full = {**config, "name": "full", "lora": {}, "train": {**config["train"], "steps": 1}}
    whole = headrace.train(full).directory
    with pytest.raises(ConfigError, match="no adapter to merge"):
        headrace.export(whole, tmp_path / "x", merge=True)
    (whole / "config.toml").write_text((directory / "config.toml").read_text())
    with pytest.raises(CheckpointError, match="holds all weights of a model, no adapter"):
        headrace.export(whole, tmp_path / "y")
