"""An environment of headrace's own is its file and one line: one that is planted is in settings, docs and refusals, and may give the reward,
without another edit."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.episodes.environments.kinds import ENVIRONMENTS, OwnKind
from headrace.episodes.scoring.teacher.stage import NoReward
from headrace.run.build import build_scorer
from headrace.run.config import RunConfig, load_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
TWO_TURNS = "headrace.testing.fake_environments:TWO_TURNS"


def _load(kind: str, **tables: Any) -> RunConfig:
    task = {"kind": "jsonl", "path": "rows.jsonl"}
    return load_config({"model": {"path": "m"}, "task": task, "environment": {"kind": kind}, **tables})


def test_a_planted_environment_is_known_everywhere_and_gives_the_reward_if_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "duel", OwnKind(TWO_TURNS, "two turns of a duel", rewards=True))
    monkeypatch.setitem(ENVIRONMENTS, "stroll", OwnKind(TWO_TURNS, "two turns of a stroll"))
    reference = runpy.run_path(str(DOCS / "make_settings.py"))["reference"]()
    assert "single_turn: one completion of the prompt. " in reference
    assert " duel: two turns of a duel. stroll: two turns of a stroll. The others" in reference
    with pytest.raises(ConfigError, match="is not one of the environments: single_turn.*, duel, stroll"):
        _load("chess")
    assert [_load(kind).environment.rewards for kind in ("single_turn", "duel", "stroll")] == [False, True, False]
    assert isinstance(build_scorer(_load("duel")), NoReward)
    with pytest.raises(ConfigError, match="nothing gives rewards: set reward.function"):
        build_scorer(_load("stroll"))
    assert _load("duel").environment.turns == 2
