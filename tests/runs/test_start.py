"""The start of a run: what is begun side by side, once, what is shown meanwhile, and that a refusal ends all of it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.episodes.scoring import functions
from headrace.episodes.scoring.workers import processes
from headrace.facts.facts import WeightsLive
from headrace.processes.launch import forking
from headrace.run import build as building
from headrace.run import open_parts as opening
from headrace.run import row_trial as rehearsing
from headrace.run.auto.measurer import _descendants
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.views.screen import start_line
from headrace.views.screen.start_line import StartSteps
from support.tiny_run import of, tiny_config


def test_everything_of_the_user_is_loaded_once(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task by the rehearsal alone, and the reward by one process, which is tried and judged by its first answer."""
    counted: dict[str, int] = {}

    def counting(owner: Any, name: str) -> None:
        found = getattr(owner, name)

        def called(*arguments: Any, **more: Any) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return found(*arguments, **more)

        monkeypatch.setattr(owner, name, called)

    for owner, name in (
        (rehearsing, "build_task"), (building, "build_task"), (rehearsing, "ChatEncoder"), (opening, "ChatEncoder"),
        (opening, "loaded_model"),
        (functions, "check_functions"), (processes, "begin_worker"), (rehearsing, "begin_worker"),
    ):  # fmt: skip
        counting(owner, name)
    assert headrace.train(tiny_config(tmp_path, tiny_llama, train={"steps": 1})).step == 1
    assert counted == {"build_task": 1, "ChatEncoder": 1, "begin_worker": 1}


def test_a_refusal_ends_all_that_was_begun(tiny_llama: Path, tmp_path: Path) -> None:
    """Even if the reward's file hangs: nobody waits for it."""
    config = tiny_config(tmp_path, tiny_llama, task={"path": "/nowhere.jsonl"})
    (tmp_path / "reward.py").write_text("import time\ntime.sleep(3600)\n")
    kept = list(forking._servers.running.values())
    before = set(_descendants(os.getpid()))
    with pytest.raises(ConfigError, match="nowhere"):
        headrace.train(config)
    assert [one for one in forking._servers.running.values() if one not in kept] == []
    until = time.monotonic() + 60
    while (left := set(_descendants(os.getpid())) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_trainer_gets_ready_for_its_steps_when_the_first_weights_are_live(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: list[int] = []
    reserve = ProcessTrainer.reserve

    async def noted(self: ProcessTrainer) -> None:
        live.append(len(of(tmp_path / "runs/tiny", WeightsLive)))
        await reserve(self)

    monkeypatch.setattr(ProcessTrainer, "reserve", noted)
    headrace.train(tiny_config(tmp_path, tiny_llama, train={"steps": 1}))
    assert live == [1]


def test_a_start_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_line, "EVERY", 0.01)

    def shown(terminal: bool) -> str:
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr("sys.stderr", screen)

        async def go() -> None:
            steps = StartSteps()
            async with steps.shown():
                while terminal and not screen.getvalue():  # before a step, as between two, nothing is named
                    await asyncio.sleep(0.001)
                for what in ("reading the tokenizer", "reading the task"):
                    with steps.doing(what), steps.doing("trying the reward"):
                        until = time.monotonic() + 60
                        while what not in screen.getvalue() and time.monotonic() < until:
                            await asyncio.sleep(0.001)

        asyncio.run(go())
        return screen.getvalue()

    assert shown(terminal=False).splitlines() == [
        "headrace: reading the tokenizer, trying the reward",
        "headrace: reading the task, trying the reward",
    ]
    drawn = shown(terminal=True)
    assert "\rheadrace: 0 s, reading the tokenizer, trying the reward\x1b[K" in drawn and drawn.endswith("\r\x1b[K")
    assert "\rheadrace: 0 s\x1b[K" in drawn, "no comma before nothing"
    assert json.dumps(drawn).count("\\n") == 0
