"""An environment of headrace's own is its file and one line: one that is planted is in settings, docs and refusals, and may give the reward,
without another edit."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.kinds import (
    ENVIRONMENTS,
    GATEWAY_KINDS,
    LIBRARIES,
    GatewayKind,
    LibraryKind,
    OwnKind,
)
from headrace.episodes.scoring.teacher.stage import NoReward
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_environment, build_scorer
from headrace.run.config import RunConfig, load_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
TWO_TURNS = "headrace.testing.fake_environments:TWO_TURNS"


def _load(kind: str, own: dict[str, Any] | None = None, **tables: Any) -> RunConfig:
    task = {"kind": "jsonl", "path": "rows.jsonl"}
    return load_config({"model": {"path": "m"}, "task": task, "environment": {"kind": kind, **(own or {})}, **tables})


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


def test_a_planted_library_and_a_planted_player_over_http_say_themselves_what_their_settings_are(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Path
) -> None:
    opened: list[OpenedWith] = []
    relay = ModuleType("relay")
    relay.__dict__["open_relay"] = lambda given: opened.append(given) or "a relay"  # type: ignore[func-returns-value]
    monkeypatch.setitem(sys.modules, "relay", relay)
    riddles = LibraryKind("riddles:open_riddles", "questions of a sphinx", name="the sphinx", options="`hint`")
    monkeypatch.setitem(LIBRARIES, "riddles", riddles)
    needs = ("name", "environment.name, the relay's address")
    facts = {"own": ("python",), "shared": ("name", "options"), "name": "the address", "options": "its marks"}
    monkeypatch.setitem(
        GATEWAY_KINDS, "relay", GatewayKind(about="a relay plays", opens="relay:open_relay", needs=needs, **facts)
    )
    reference = runpy.run_path(str(DOCS / "make_settings.py"))["reference"]()
    assert " riddles: questions of a sphinx. process: " in reference and " relay: a relay plays.\n" in reference
    assert " riddles: the sphinx. verifiers: " in reference and " relay: the address.\n" in reference
    assert " riddles: `hint`. verifiers: " in reference and " relay: its marks.\n" in reference
    known = _load("riddles", {"name": "thebes", "options": {"hint": "legs"}})
    assert known.environment.in_processes and known.environment.rewards
    with pytest.raises(ConfigError, match='and riddles, and this run has environment.kind = "relay"'):
        _load("relay", {"name": "a"}, orchestration={"kind": "join", "token_file": "x", "environments": 1})
    with pytest.raises(ConfigError, match="environment.name, the relay's address"):
        _load("relay")
    with pytest.raises(ConfigError, match="python"):
        _load("riddles", {"python": "python3"})
    config = _load("relay", {"name": "a"})
    assert build_environment(config, ChatEncoder(tiny_tokenizer)) == "a relay"
    assert [one.config for one in opened] == [config.environment]
