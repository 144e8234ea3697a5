"""`headrace plan` goes by what headrace itself has measured on GPUs, and says "of a data sheet" of all else."""

from __future__ import annotations

import re

import pytest

from headrace.commands.plan.answer import PlanRequest, answer
from headrace.commands.plan.rates.hardware import GPUS, shared_rates, trainer_rates
from headrace.commands.plan.rates.hardware import rates as pools
from headrace.commands.plan.rates.own_runs import OwnRun, how_far, known, own_runs, with_own_runs
from headrace.commands.plan.rates.rates import Rates
from headrace.commands.plan.rates.shapes import SHAPES, shape_of
from headrace.run.config import load_config

NEAR = 1.5
H100 = GPUS["h100"]


def planned(card: str, model: str) -> Rates:
    return with_own_runs(shared_rates(GPUS[card], shape_of(model), 1024, model), GPUS[card], shape_of(model))


@pytest.mark.parametrize("run", own_runs(), ids=lambda run: f"{run.card}-{run.model}-{run.date}")
def test_what_was_measured_is_planned(run: OwnRun):
    """Of several runs of a card and a model, that of the newest is: all are held to it."""
    found = planned(run.card, run.model)
    for tokens, seconds in run.steps:
        assert seconds / NEAR < found.trainer.step + found.trainer.token * tokens < seconds * NEAR
    for count, context, seconds in run.passes:
        assert count / seconds / NEAR < found.engine.tokens_per_second(count, context) < count / seconds * NEAR


def test_the_step_that_a_data_sheet_had_wrong():
    """1.26 s were measured on an H100 (docs/gpu.md) where the data sheet's rates give a third of that."""
    sheet, tokens = trainer_rates(H100, SHAPES["135m"], 1), 66_304
    assert sheet.step + sheet.token * tokens < 0.4
    own = planned("h100", "135m").trainer
    assert own.step + own.token * tokens == pytest.approx(1.26, rel=0.5)


def test_a_run_speaks_for_its_card_and_for_models_of_its_size():
    assert known(H100, SHAPES["135m"]).all and known(H100, shape_of("0.3b")).all
    assert not known(H100, SHAPES["7b"]).engine and not known(GPUS["a100"], SHAPES["135m"]).trainer
    assert not known(H100, SHAPES["30b-a3b"]).all
    larger = planned("h100", "0.2b")
    assert larger.trainer.token == pytest.approx(planned("h100", "135m").trainer.token * 0.2 / 0.1345)
    assert larger.engine.pass_seconds(64) > planned("h100", "135m").engine.pass_seconds(64)


def test_the_source_says_whose_rates_they_are():
    assert re.match(
        r"passes of headrace's own run \(135m, 20\d\d-.*steps of headrace's own run", planned("h100", "135m").source
    )
    assert planned("h100", "7b").source.startswith("of a data sheet: ")
    many = with_own_runs(pools(H100, SHAPES["135m"], replica=1, trainer=2, max_running=64), H100, SHAPES["135m"])
    assert "the trainer too, of a data sheet" in many.source
    assert many.trainer == trainer_rates(H100, SHAPES["135m"], 2)


def test_a_plan_of_a_data_sheet_says_how_far_from_one_headrace_was():
    said = how_far(H100, SHAPES["7b"])
    assert (
        re.search(r"a step took 3\.\d times as long.*\(135m, 2026-11-27", said) and "a pass of 1,024 sequences" in said
    )
    assert not how_far(H100, SHAPES["135m"]) and not how_far(GPUS["a100"], SHAPES["7b"])


def test_the_notes_of_a_plan():
    config = load_config(
        {
            "name": "planned",
            "model": {"path": "somewhere"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "reward": {"function": "reasoning_gym"},
            "rollout": {"group_size": 4, "max_tokens": 32},
            "staleness": {"groups_per_step": 4},
        }
    )

    def notes(model: str) -> str:
        request = PlanRequest(config=config, hardware="h100", model=model, gpus=1, steps=2, lengths="20", prompts="20")
        return " ".join(answer(request, lambda line: None).notes)

    assert "data sheet" not in notes("135m")
    assert "rates are from data sheets" in notes("1.5b") and "compared with its data sheet" in notes("1.5b")
