"""A real run on a tiny model: preferences from a service that fails now and then, and a judge, journaled and repeated bit for bit."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_judges import by_length
from test_services import lengths

import headrace
from headrace.commands.replay import replay
from headrace.core.errors import ConfigError
from headrace.durable.journal import read_steps
from headrace.episodes.scoring.parts import SCORES
from headrace.facts.facts import ScorerAsked
from headrace.facts.records import StepRow
from headrace.testing.fake_service import FakeService
from headrace.views.screen.console import Console
from support.tiny_run import of, tiny_config


@contextmanager
def serving(server: FakeService) -> Iterator[FakeService]:
    """In a thread, because `headrace.train` has the loop of this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.slow
def test_a_run_learns_from_preferences_of_a_service_and_a_judge(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(FakeService(lengths, by_length, faults=[None, None, "500", "html", "half"])) as server:
        service = {"name": "long", "url": f"{server.url}/score", "weight": 0.01}
        judge = {"name": "short", "url": f"{server.url}/v1", "model": "m", "criterion": "Short.", "mode": "rank"}
        config = tiny_config(
            tmp_path,
            tiny_llama,
            reward={"function": "", "services": [service], "judges": [judge]},
            algo={"name": "dpo"},
            train={"steps": 3},
            checkpoint={"every": 0},
            watch={"identity_every": 0},
        )
        run = headrace.train(config).directory
    steps = of(run, StepRow)
    assert [row.report.version for row in steps] == [1, 2, 3] and all(row.report.pairs > 0 for row in steps)
    assert steps[0].report.loss == pytest.approx(0.6931, abs=1e-3), "the policy is the reference"
    asked = of(run, ScorerAsked)
    assert {(one.scorer, one.what) for one in asked} == {("long", "service"), ("short", "judge")}
    assert sum(one.retries for one in asked) == 3 and not any(one.failures for one in asked)
    assert sum(one.tokens for one in asked) > 0
    groups = [group for step in read_steps(run) for group in step.groups]
    for group in groups:
        rewards = [rollout.reward for rollout in group.scored]
        assert group.pairs and all(rewards[chosen] > rewards[rejected] for chosen, rejected in group.pairs)
        assert all(rollout.rewards.keys() == {"long", "short"} for rollout in group.scored)
    assert len((run / SCORES).read_bytes().splitlines()) == len(asked)
    page = (run / "report.html").read_text()
    assert "What each part of the reward took" in page and ">judge<" in page
    console = Console(file=io.StringIO(), width=400)
    assert replay.replay(run, 1, 3, console) == 0, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_service_that_is_not_there_is_refused_before_a_model_is_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    service = {"name": "gone", "url": "http://127.0.0.1:9/score"}
    config = tiny_config(tmp_path, tiny_llama, reward={"function": "", "services": [service]})
    with pytest.raises(ConfigError, match=r"start gone, or correct its settings"):
        headrace.train(config)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
