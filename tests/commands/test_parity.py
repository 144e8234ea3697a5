"""`headrace doctor --parity`: agreement is found where it is, disagreement where it is made, and what it prints."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch

from headrace import cli
from headrace.commands.installed import parity
from headrace.commands.installed.parity import LIMITS, ParityRow, measure
from headrace.views.screen.console import Console
from support.tiny_models import saved

TOKENS = 12


def measured(model: str, *dtypes: str) -> dict[tuple[str, str, str, str], ParityRow]:
    rows = measure(saved(model), dtypes or ("float32",), TOKENS)  # type: ignore[arg-type]
    return {(one.dtype, one.path.split()[0], one.sampling, one.replayed): one for one in rows}


agreeing = cache(measured)


def test_every_path_of_the_engine_agrees_with_the_trainer_in_float32():
    found = agreeing("llama")
    for path in ("fused", "hugging"):
        one = found["float32", path, "plain", ""]
        assert one.judged and one.ok and one.tokens == len(parity.PROMPTS) * parity.SAMPLES * TOKENS
        assert 0 <= one.mean <= one.p99 <= one.largest < 1e-3


@pytest.mark.parametrize("sampling", parity.FILTERS)
def test_a_mask_that_is_replayed_brings_truncated_sampling_to_the_level_of_plain_sampling(sampling):
    found = agreeing("llama")
    told, untold = (
        next(one for key, one in found.items() if key[2:] == (sampling, said)) for said in ("mask", "no mask")
    )
    assert told.ok and told.largest < 1e-3
    assert not untold.judged and untold.mean > 10 * max(told.mean, 1e-6) and untold.mean > 0.01


@pytest.mark.slow
def test_experts_are_replayed_in_the_trainer_of_a_mixture():
    found = agreeing("qwen3_moe")
    assert found["float32", "fused", "plain", "experts"].ok
    assert not found["float32", "fused", "plain", "no experts"].judged
    assert found["float32", "fused", "top-k 50", "experts and mask"].ok
    assert {key[3] for key in found if key[2] == "top-p 0.95"} == {
        "experts and mask",
        "mask, no experts",
        "experts, no mask",
    }


@pytest.mark.slow
def test_rounding_is_larger_in_bfloat16_and_still_within_its_limits():
    found = agreeing("llama", "bfloat16", "float32")
    low, high = (found[dtype, "hugging", "plain", ""] for dtype in ("bfloat16", "float32"))
    assert low.mean > high.mean
    assert low.ok


@pytest.mark.slow
def test_a_path_that_does_not_serve_the_model_is_named_and_not_judged():
    found = [one for one in measure(saved("gpt_neox"), ("float32",), TOKENS) if one.sampling == "plain"]
    absent = {one.path: one.absent for one in found if one.absent}
    assert set(absent) == {"kernels", "fused"}
    assert "does not serve gpt_neox" in absent["fused"]
    assert [one.ok for one in found if not one.absent] == [True]


def engine_of_other_weights(monkeypatch):
    """What the engine is given is not what the trainer has: a bug of the kind that the report is for."""
    real = parity._Published.engine

    def broken(self, path):
        core = real(self, path)
        wrong = {name: tensor * 1.2 for name, tensor in self._trainer.parameters()}
        core.swap(
            core.prepare(parity.WeightUpdate(version=1, kind="full", fingerprint="", nbytes=0, seconds=0.0), wrong)
        )
        return core

    monkeypatch.setattr(parity._Published, "engine", broken)


def test_an_engine_that_computes_something_else_is_found(monkeypatch):
    engine_of_other_weights(monkeypatch)
    fused = next(one for one in measure(saved("llama"), ("float32",), TOKENS) if one.path.startswith("fused"))
    assert fused.sampling == "plain" and not fused.ok


@pytest.mark.slow
def test_the_command_prints_the_table_and_ends_with_0_or_1(monkeypatch, capsys):
    model = str(saved("llama"))
    assert cli.main(["doctor", "--parity", model, "--dtype", "float32"]) == 0
    told = capsys.readouterr().out
    assert "Engine and trainer agree." in told and "mean 0.001, p99 0.01" in told
    engine_of_other_weights(monkeypatch)
    assert cli.main(["doctor", "--parity", model, "--dtype", "float32"]) == 1
    assert "do not compute the same policy: " in capsys.readouterr().out


def test_dtype_alone_means_nothing(capsys):
    assert cli.main(["doctor", "--dtype", "float32"]) == 2
    assert "name the model" in capsys.readouterr().err


BASE = {"dtype": "bfloat16", "path": "fused llama", "sampling": "plain", "replayed": "", "judged": True, "tokens": 8}


def row(**changes) -> ParityRow:
    return ParityRow(
        **{
            **BASE,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({"mean": LIMITS["bfloat16"][0], "p99": LIMITS["bfloat16"][1], "largest": 9.0}, True),
        ({"mean": LIMITS["bfloat16"][0] * 1.01}, False),
        ({"p99": LIMITS["bfloat16"][1] * 1.01}, False),
        ({"mean": math.nan}, False),
        ({"dtype": "float32", "mean": 0.01}, False),
        ({"mean": 1.0, "judged": False}, True),
        ({"absent": "no compiler"}, True),
    ],
)
def test_the_limits(changes, ok):
    assert row(**changes).ok is ok


def test_nothing_measured_is_no_agreement():
    console = Console(record=True, width=100)
    assert parity._verdict([row(judged=False, absent="no compiler")], console) == 1
    assert "Nothing could be measured" in console.export_text()


def test_differences_put_what_is_no_number_last():
    class Scored:
        logprobs = (0.0, 0.0, 0.0)

    found = parity._differences([Scored()], [[-1.0, math.nan, 0.5]])  # type: ignore[list-item]
    assert found[:2] == [0.5, 1.0] and math.isnan(found[2])


def test_prompts_of_a_model_without_a_tokenizer_are_within_its_vocabulary():
    size = json.loads((saved("llama") / "config.json").read_text())["vocab_size"]
    prompts = parity._prompts(saved("llama"))
    assert len(prompts) == len(parity.PROMPTS)
    assert all(0 <= token < size for prompt in prompts for token in prompt)


@pytest.mark.slow
def test_the_demo_model_agrees_on_every_path():
    from headrace.models.resolve import resolve_model

    found = list(measure(resolve_model("smollm2-135m-instruct")))
    assert all(one.ok for one in found)
    assert {one.path.split()[0] for one in found if not one.absent} >= {"fused", "hugging"}
    assert torch.tensor([one.mean for one in found if one.judged]).isfinite().all()
