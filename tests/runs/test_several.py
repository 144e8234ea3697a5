"""Several adapters trained at once: each learns its own task, with versions, books and a directory of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_lora_run import config, loud_llama  # noqa: F401  (fixtures)

import headrace
from headrace import cli
from headrace.core.errors import ConfigError, TrainingError
from headrace.durable.journal import read_steps
from headrace.facts.facts import CheckpointSaved, IdentityChecked, RunEnded, RunStarted, WeightsLive
from headrace.facts.records import StepRow
from headrace.run.config import dump_config, load_config
from support.runs.beside import until
from support.tiny_run import Config, of


@pytest.fixture
def two(config: Config, tmp_path: Path) -> Config:  # noqa: F811
    """One is to say e, the other o, on other schedules."""
    return {
        **config,
        "adapters": [
            {"name": "e", "train": {"steps": 6}},
            {
                "name": "o",
                "reward": {"function": f"{tmp_path / 'reward.py'}:share_of_o"},
                "train": {"steps": 4, "learning_rate": 2e-2},
                "lora": {"rank": 4, "init_seed": 1},
                "staleness": {"max_lag": 0, "groups_per_step": 2},
            },
        ],
    }


@pytest.mark.slow
def test_ctrl_c_while_the_model_is_loaded_leaves(two: Config, tmp_path: Path) -> None:
    for adapter in two["adapters"]:
        adapter["train"]["steps"] = 100_000
    toml, logs = tmp_path / "two.toml", Path(two["out"]) / two["name"] / "logs"
    toml.write_text(dump_config(load_config(two)))
    command = [sys.executable, "-m", "headrace", "train", str(toml)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until((logs / "trainer.log").exists)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=600)[0]
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output


@pytest.mark.slow
def test_ctrl_c_after_one_has_ended_lets_the_other_write_its_checkpoint(two: Config, tmp_path: Path) -> None:
    two["checkpoint"] = {"every": 0}
    for adapter, steps in zip(two["adapters"], (100_000, 1), strict=True):
        adapter["train"]["steps"] = steps
    toml, directory = tmp_path / "two.toml", Path(two["out"]) / two["name"]
    toml.write_text(dump_config(load_config(two)))
    command = [sys.executable, "-m", "headrace", "train", str(toml)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: (directory / "o" / "metrics.jsonl").exists() and bool(of(directory / "o", RunEnded)))
        done = len(of(directory / "e", StepRow))
        until(lambda: len(of(directory / "e", StepRow)) > done + 1)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=600)[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    ended = of(directory / "e", RunEnded)[-1]
    assert ended.reason == "interrupted" and of(directory / "e", CheckpointSaved)[-1].step == ended.step > 0


@pytest.mark.slow
def test_each_learns_its_own_task_and_keeps_its_own_books(two: Config) -> None:
    two["eval"] = {"prompts": 8, "samples": 2}
    for adapter in two["adapters"]:
        adapter["train"] = {"steps": 20}
    result = headrace.train(two)
    assert list(result.adapters) == ["e", "o"]
    texts = {}
    for name, bound in (("e", 1), ("o", 0)):
        one = result.adapters[name]
        assert one.reason == "finished" and one.directory == result.directory / name and one.report.exists()
        assert one.before is not None and one.after is not None
        error = one.before.reward_sem + one.after.reward_sem
        assert one.after.reward_mean > one.before.reward_mean + 2 * error, f"{name} did not learn"
        ended, rows = of(one.directory, RunEnded)[-1], of(one.directory, StepRow)
        groups = 4 if name == "e" else 2
        assert ended.accounting.balance() == 0 and ended.accounting.trained == 20 * groups
        assert (
            0 <= min(lag for row in rows for lag in row.lags) <= max(lag for row in rows for lag in row.lags) <= bound
        )
        adapters = [fact.update for fact in of(one.directory, WeightsLive) if fact.update.adapter]
        assert [update.version for update in adapters] == list(range(21))
        assert {update.adapter.name for update in adapters} == {name}
        assert all(check.ok for check in of(one.directory, IdentityChecked))
        journal = list(read_steps(one.directory))
        texts[name] = [text for entry in journal[-4:] for group in entry.groups for text in texts_of(group)]
    assert letters(texts["e"], "e") > letters(texts["e"], "o") and letters(texts["o"], "o") > letters(texts["o"], "e")


def texts_of(group: Any) -> list[str]:
    return [scored.episode.last.text for scored in group.scored]


def letters(texts: list[str], letter: str) -> int:
    return sum(text.count(letter) for text in texts)


@pytest.mark.slow
def test_all_go_on_together_after_a_resume(two: Config, tmp_path: Path) -> None:
    first = headrace.train(two)
    longer = {**two, "adapters": [{**one, "train": {**one["train"], "steps": 8}} for one in two["adapters"]]}
    again = headrace.train(longer, resume=first.directory)
    for name in ("e", "o"):
        one = again.adapters[name]
        assert one.step == 8 and of(one.directory, RunStarted)[-1].resumed_at == first.adapters[name].step
        assert [entry.step for entry in read_steps(one.directory)] == list(range(8))
        assert of(one.directory, RunEnded)[-1].accounting.balance() == 0
    with pytest.raises(ConfigError, match="several adapters; name the directory of one: .*tiny/e or .*tiny/o"):
        headrace.export(first.directory, tmp_path / "x")


@pytest.mark.slow
def test_one_that_fails_ends_the_run_and_the_others_have_checkpoints(two: Config, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        (tmp_path / "reward.py").read_text() + "\ndef flat(prompts, **columns):\n    return [0.0 for _ in prompts]\n"
    )
    two["checkpoint"] = {"every": 0}
    two["adapters"][0]["train"] = {"steps": 100_000}
    two["adapters"][1] |= {"reward": {"function": f"{tmp_path / 'reward.py'}:flat"}, "rollout": {"patience": 30}}
    with pytest.raises(TrainingError, match="30 groups in a row could not be trained") as caught:
        headrace.train(two)
    assert any("it was the adapter o" in note for note in caught.value.__notes__)
    directory = Path(two["out"]) / "tiny"
    saved = of(directory / "e", CheckpointSaved)[-1]
    assert not saved.error and saved.step > 0
    assert of(directory / "e", RunEnded)[-1].reason == "interrupted"


@pytest.mark.slow
def test_a_finished_run_says_how_each_adapter_goes_on(two: Config, capsys: pytest.CaptureFixture[str]) -> None:
    for number, adapter in enumerate(two["adapters"]):
        adapter["train"]["steps"] = 1 + number
    directory = headrace.train(two).directory
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(directory)]) == 0
    output = capsys.readouterr().out
    assert "is finished: all of its 2 steps are done" in output
    remedy = output.split("for instance: headrace ")[1].split()
    assert remedy[-4:] == ["--set", "adapters.e.train.steps=2", "--set", "adapters.o.train.steps=4"]
    assert cli.main(remedy) == 0
    assert {one: len(list(read_steps(directory / one))) for one in ("e", "o")} == {"e": 2, "o": 4}
