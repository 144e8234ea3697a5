"""The learning rate over the steps, how it is drawn, and what is said of a resumed run that changes it."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import cli
from headrace.facts.facts import Warned
from headrace.facts.records import StepRow
from headrace.run.config import dump_config, load_config
from headrace.run.rehearse import rehearse
from headrace.trainer.config import TrainConfig, change_of_rate, drawn, learning_rate
from support.tiny_run import of, tiny_config


def test_learning_rates():
    constant = TrainConfig(steps=10, learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(step, constant) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = TrainConfig(steps=12, learning_rate=1.0, warmup_steps=4, schedule="cosine")
    rates = [learning_rate(step, cosine) for step in range(13)]
    assert rates[4] == 1 and rates[8] == pytest.approx(0.5) and rates[12] == pytest.approx(0)
    assert all(a > b for a, b in pairwise(rates[4:]))
    linear = TrainConfig(steps=12, learning_rate=1.0, warmup_steps=4, schedule="linear")
    assert [learning_rate(step, linear) for step in (3, 4, 6, 10, 12, 13)] == [1, 1, 0.75, 0.25, 0, 0]


def test_the_curve_is_drawn_with_the_rates_at_its_corners() -> None:
    cosine = TrainConfig(steps=12, learning_rate=1.0, warmup_steps=4, schedule="cosine")
    curve, numbers = drawn(cosine).splitlines()
    assert len(curve) == 12 and curve[4] == "█" and curve[-1] == "▁" and curve[:4] == "▃▅▇█"
    assert numbers == "0.25 at step 1, 1 at step 5, 0.0381 at step 12"
    assert drawn(TrainConfig(steps=12, learning_rate=1e-5)) == "1e-05 in every step"
    long = TrainConfig(steps=24, learning_rate=1.0, warmup_steps=4, schedule="cosine")
    curve, numbers = drawn(long, before=cosine, done=12).splitlines()
    assert curve[11] == "▁" and curve[12] > curve[11] and "0.0381 at step 12, 0.655 at step 13" in numbers


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"steps": 24}, "rises again: 0.0381 at step 12, 0.655 at step 13, then to 0.00616 at step 24, because train.schedule"),
        ({"steps": 24, "schedule": "linear"}, 'because train.schedule = "linear" now ends at train.steps = 24 instead of 12'),
        ({"steps": 24, "schedule": "constant", "learning_rate": 0.0381}, "the learning rate goes on: 0.0381 at step 12, 0.0381"),
        ({"steps": 13}, "falls: 0.0381 at step 12, 0.0302 at step 13, because"),
        ({"max_grad_norm": 2.0, "steps": 12}, ""),
    ],
)  # fmt: skip
def test_a_schedule_that_goes_on_otherwise_is_told(now: dict[str, Any], words: str) -> None:
    given = {"learning_rate": 1.0, "warmup_steps": 4, "schedule": "cosine"}
    message = change_of_rate(TrainConfig(steps=12, **given), TrainConfig(**{**given, **now}), 12)
    assert words in message and bool(message) == bool(words), message


def test_constant_rates_and_a_run_that_has_not_begun_need_no_words() -> None:
    assert not change_of_rate(TrainConfig(steps=5), TrainConfig(steps=9, learning_rate=1e-3), 5)
    assert not change_of_rate(TrainConfig(steps=5, schedule="cosine"), TrainConfig(steps=9, schedule="cosine"), 0)


@pytest.mark.slow
def test_a_finished_cosine_run_that_is_extended_says_what_the_rate_does(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"steps": 3, "schedule": "cosine", "learning_rate": 1e-3}
    config = tiny_config(tmp_path, tiny_llama, train=given, checkpoint={"every": 1})
    run = headrace.train(config).directory
    longer = load_config(run / "config.toml", ["train.steps=6"])
    told = asyncio.run(rehearse(longer, resume=run, thorough=True))
    (said,) = (note for note in told.notes if "the learning rate rises again: 0.00025 at step 3, 0.0005 at" in note)
    assert f"note: {said[:30]}" in told.page() and re.search(r"rate +[▁▂▃▄▅▆▇█]{6}\n", told.page())

    capsys.readouterr()
    again = headrace.train(longer, resume=run)
    assert said in [fact.message for fact in of(run, Warned)] and again.step == 6
    rates = [row.report.lr for row in of(run, StepRow)]
    assert rates[2] == pytest.approx(0.00025) and rates[3] == pytest.approx(0.0005)

    # the remedy, on the run as it was
    kept = tmp_path / "kept"
    kept.mkdir()
    other = headrace.train({**config, "out": str(kept)}).directory
    remedy = said.split("To keep 0.00025, set ")[1].replace(" = ", "=").split(" and ")
    sets = [word for setting in ("train.steps=6", *remedy) for word in ("--set", setting)]
    assert cli.main(["train", "--resume", str(other), *sets]) == 0
    assert [row.report.lr for row in of(other, StepRow)][2:] == pytest.approx([0.00025] * 4)
    assert not [fact for fact in of(other, Warned) if "rises" in fact.message]
    assert dump_config(load_config(other / "config.toml")).count('schedule = "constant"') == 1
