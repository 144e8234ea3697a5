"""Whole runs with fleets, for real: the tiny model, two servers of which one is stopped and one is killed; two replicas."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.facts.facts import FleetSample, MemberMoved, RunEnded
from headrace.run.fleets.pool_door import PoolQuestion, ask
from support.runs.beside import PATIENCE, until
from support.server_processes import checked_run, config_for, headrace_server, serving
from support.tiny_run import HOLD, at_steps, engines_of, hold, of, release, tiny_config, until_noted, when_step

SLOWLY = (
    HOLD
    + """
def share_of_e(prompts, completions, **columns):
    time.sleep(1.0)
    while is_held():
        time.sleep(0.1)
    return [text.count("e") / max(len(text), 1) for text in completions]
"""
)
"""A reward that lets the run go on while its servers are stopped and killed."""


def moves(run: Path) -> list[tuple[str, str]]:
    return [(fact.member, fact.state) for fact in of(run, MemberMoved)]


@pytest.mark.slow
def test_one_server_is_stopped_and_one_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    cache, run, steps = tmp_path / "cache", tmp_path / "runs" / "tiny", 40
    with serving(headrace_server(tiny_llama, cache)) as one, serving(headrace_server(tiny_llama, cache)) as two:
        engine = {"urls": [one.url, two.url], "member_patience": 20.0}
        config = config_for(tmp_path, tiny_llama, one, engine=engine, train={"steps": steps, "learning_rate": 1e-2})

        def stop_and_go_on() -> None:
            os.kill(one.process.pid, signal.SIGSTOP)
            until(lambda: (one.url, "away") in moves(run))
            time.sleep(5)
            os.kill(one.process.pid, signal.SIGCONT)
            until(lambda: (one.url, "serving") in moves(run))
            two.kill()
            until(lambda: (two.url, "away") in moves(run))
            release(tmp_path, steps - 2)

        (tmp_path / "reward.py").write_text(SLOWLY)
        hold(tmp_path, steps - 2)
        thread = when_step(run, 2, stop_and_go_on)
        result = headrace.train(config)
        thread.join()
    assert result.step == steps
    checked_run(run, steps)
    assert moves(run)[:3] == [(one.url, "away"), (one.url, "serving"), (two.url, "away")]
    last = of(run, FleetSample)[-1].members
    assert [member.state for member in last] == ["serving", "away"]


@pytest.mark.slow
def test_a_server_is_added_and_another_removed_while_a_run_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    cache, run, steps = tmp_path / "cache", tmp_path / "runs" / "tiny", 10
    first, second, third = (headrace_server(tiny_llama, cache) for _ in range(3))
    with serving(first) as one, serving(second) as two, serving(third) as three:
        config = config_for(
            tmp_path,
            tiny_llama,
            one,
            engine={"urls": [one.url, two.url]},
            train={"steps": steps, "learning_rate": 1e-2},
        )

        def change() -> None:
            added = ask(run, PoolQuestion("add", three.url), PATIENCE)
            assert not added.error, added.error
            removed = ask(run, PoolQuestion("remove", one.url), PATIENCE)
            assert not removed.error and [member.name for member in removed.members] == [two.url, three.url]

        thread = at_steps(config, {2: change})
        assert headrace.train(config).step == steps
        thread.join()
        checked_run(run, steps)
        assert (three.url, "serving") in moves(run) and (one.url, "removed") in moves(run)
        one.kill()
        longer = {**config, "train": {"steps": steps + 2, "learning_rate": 1e-2, "dtype": "float32"}}
        assert headrace.train(longer, resume=run).step == steps + 2
        names = [member.name for member in of(run, FleetSample)[-1].members]
        assert names == [two.url, three.url], "the resumed run goes on with the members that were left"


@pytest.mark.whole
def test_two_replicas_of_which_one_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    run, steps = tmp_path / "runs" / "tiny", 10
    config = tiny_config(tmp_path, tiny_llama, engine={"replicas": 2}, train={"steps": steps, "learning_rate": 1e-2})
    killed: list[int] = []

    def kill() -> None:
        pids = engines_of(os.getpid())
        assert len(pids) == 2
        killed.append(pids[0])
        os.kill(pids[0], signal.SIGKILL)
        until_noted(run, MemberMoved)

    thread = at_steps(config, {2: kill})
    result = headrace.train(config)
    thread.join()
    assert result.step == steps and killed
    checked_run(run, steps)
    assert [state for _, state in moves(run)][:1] == ["away"]
    samples = of(run, FleetSample)
    assert all(len(fact.members) == 2 for fact in samples)


@pytest.mark.slow
def test_a_resumed_run_may_have_another_number_of_members(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    config = tiny_config(tmp_path, tiny_llama, engine={"replicas": 2}, train={"steps": 4, "learning_rate": 1e-2})
    headrace.train(config)
    longer: dict[str, Any] = {
        **config,
        "engine": {**config["engine"], "replicas": 1},
        "train": {**config["train"], "steps": 6},
    }
    assert headrace.train(longer, resume=run).step == 6
    assert [end.accounting.balance() for end in of(run, RunEnded)] == [0, 0]
