"""Differences that do not pay: what a run says of them, before it starts and while it runs, and that its remedies are right."""

from __future__ import annotations

import asyncio
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import Warned
from headrace.loop.world import virtual_time
from headrace.run.config import load_config
from headrace.run.python_inputs import with_python_inputs
from headrace.run.rehearse import rehearse
from headrace.weight_sync.delta.efficiency import DeltaWatch
from headrace.weight_sync.kind import FULL, Encoding
from support.fake_world import FakeWorld
from support.few import few
from support.tiny_run import of, tiny_config

DELTA = Encoding(delta=True, anchor_every=4)


def published(share: float | None, version: int = 0) -> WeightUpdate:
    """`share`: the size of the difference; None where a full copy was sent."""
    where = {} if share is None else {"base": "f", "delta": int(1000 * share)}
    return WeightUpdate(version=version, kind="full", fingerprint="f", nbytes=1000, seconds=0.0, where=where)


def said(watch: DeltaWatch, *shares: float | None) -> list[int]:
    """The places of the versions at which it said something."""
    return [place for place, share in enumerate(shares) for _ in watch.check(published(share))]


def test_it_says_it_once_after_three_versions_of_which_most_bytes_travelled() -> None:
    assert said(DeltaWatch(DELTA), *[None] * 20) == [3], "the first one is Adam's first step"
    assert said(DeltaWatch(DELTA), None, 0.4, 0.5, None, 0.4) == [3]
    assert said(DeltaWatch(DELTA), None, 0.1, None, 0.1, 0.1, None, None, None, None) == [6], (
        "when the mean is above half"
    )


def test_an_anchor_is_no_sign_of_poor_differences() -> None:
    paying = [None, *([0.01] * 4 + [None]) * 6]
    assert said(DeltaWatch(DELTA), *paying) == []
    assert said(DeltaWatch(Encoding(delta=True, anchor_every=1)), *[None, 0.02] * 10) == []


def test_full_copies_that_were_asked_for_are_no_news() -> None:
    assert said(DeltaWatch(FULL), *[None] * 9) == said(DeltaWatch(), *[None] * 9) == []


@pytest.mark.parametrize(
    ("dtype", "reason", "remedy"),
    [
        (
            "float32",
            "in float32 nearly every value changes in every step",
            'set engine.dtype = "bfloat16", or weight_sync.encoding = "full"',
        ),
        ("bfloat16", "at this learning rate most values change in a step", 'set weight_sync.encoding = "full"'),
    ],
)
def test_the_sentence_has_the_share_the_reason_and_a_remedy_that_is_not_set_already(
    dtype: str, reason: str, remedy: str
) -> None:
    watch = DeltaWatch(DELTA, dtype)
    sentences = [one for share in (None, 0.4, None, None) for one in watch.check(published(share))]
    assert sentences == [f'weight_sync.encoding = "delta" sends 80 % of the weights a version: {reason}; {remedy}']


def test_a_pipeline_warns_while_it_runs(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, steps=8, deltas=DeltaWatch(DELTA, "float32"))
    virtual_time.run(world.run())
    (warned,) = [fact for fact in world.facts.of(Warned) if "sends 100 % of the weights" in fact.message]
    live = [fact.t for fact in world.facts.of(headrace.facts.facts.WeightsLive)]
    assert live[4] <= warned.t < live[6], "behind the fourth version of eight that was trained"


# -- real runs ----------------------------------------------------------------------------------------------------------


CONTRAST = """
def alternating(prompts, completions, **columns):
    return [float(number % 2) for number in range(len(completions))]
"""
"""A reward from which even a model that a high rate has ruined takes its steps."""


def config_of(directory: Path, model: Path, **tables: Any) -> dict[str, Any]:
    (directory / "contrast.py").write_text(CONTRAST)
    return tiny_config(
        directory,
        model,
        **{
            "reward": {"function": f"{directory / 'contrast.py'}:alternating"},
            "weight_sync": {"kind": "tcp", "encoding": "delta"},
            "train": {"steps": 5, "learning_rate": 1e-4, "dtype": "float32"},
            "staleness": {"groups_per_step": 2, "max_lag": 0},
            **tables,
        },
    )


NOTED, MEASURED = "will send about a third of the weights at every version, or more", "of the weights a version: "
POOR_RATE = {"steps": 5, "learning_rate": 0.3, "dtype": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "noted", "measured"),
    [
        ({}, 1, 1),
        ({"engine": {"dtype": "bfloat16"}}, 0, 0),
        ({"weight_sync": {"kind": "tcp", "encoding": "full"}}, 0, 0),
        ({"engine": {"dtype": "bfloat16"}, "train": POOR_RATE}, 0, 1),
        (
            {
                "engine": {"dtype": "bfloat16"},
                "train": POOR_RATE,
                "weight_sync": {"kind": "tcp", "encoding": "full"},
            },
            0,
            0,
        ),
    ],
    ids=["float32", "its remedy: bfloat16", "its remedy: full", "a high learning rate", "its remedy"],
)
def test_a_run_warns_and_its_remedies_end_that(
    tables: dict[str, Any], noted: int, measured: int, tiny_llama: Path, tmp_path: Path
) -> None:
    assert headrace.train(config_of(tmp_path, tiny_llama, **tables)).reason == "finished"
    messages = [fact.message for fact in of(tmp_path / "runs" / "tiny", Warned) if "weight_sync" in fact.message]
    assert sum(NOTED in message for message in messages) == noted
    assert sum(MEASURED in message for message in messages) == measured
    assert len(messages) == noted + measured


# -- the rehearsal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "notes"),
    few(
        starmap(
            pytest.param,
            [
                ({}, True),
                ({"engine": {"dtype": "bfloat16"}}, False),
                ({"weight_sync": {"kind": "tcp", "encoding": "full"}}, False),
                ({"lora": {"rank": 2, "publish": "merged"}}, False),
            ],
        ),
        keep=2,
    ),
)
def test_the_rehearsal_notes_what_the_settings_make_certain(
    tables: dict[str, Any], notes: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    config, inputs = with_python_inputs(load_config(config_of(tmp_path, tiny_llama, **tables)), (), None)
    found = asyncio.run(rehearse(config, inputs))
    said = [note for note in found.notes if "weight_sync" in note]
    assert [NOTED in note and 'set engine.dtype = "bfloat16"' in note for note in said] == [True] * notes
    assert max(map(len, found.page().splitlines())) <= 80
