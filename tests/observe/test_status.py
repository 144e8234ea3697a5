"""`headrace status`: of the living, the silent, the finished and the dead; and a live run that is asked where it stands."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import cli
from headrace.commands.show.status import ask_for_stacks, report
from headrace.core.errors import ConfigError, HeadraceError
from headrace.durable.spelling import encode
from headrace.facts.facts import Accounting, CheckpointSaved, RunEnded, RunStarted, TicketDrawn, Warned, WorkerLost
from headrace.facts.records import METRICS
from headrace.facts.run_state import RunState
from headrace.facts.waits import Lasting
from headrace.processes.health.live_status import Follower, LiveStatus, Status, as_dict, judge, read_live, write_live
from headrace.run.config import dump_config, load_config
from headrace.run.run_directory import RunDirectory, held, shown_waiting
from headrace.views.screen import status_view
from headrace.views.screen.console import Console
from support.runs import preloaded_python
from support.runs.beside import until
from support.tiny_run import tiny_config, when_step

STARTED = RunStarted(0.0, "tiny", "a model · a task", 0, 10, 4, 2, 8, 1, 1, {})
NOBODY = 2**22 + 1
"""No process has this id."""


def state_of(*facts: Any) -> RunState:
    state = RunState()
    for fact in facts:
        state.fold(fact)
    return state


def ended(reason: str) -> RunEnded:
    return RunEnded(9.0, reason, 3, Accounting(), 0.0, 0.0)


def live(written: float, pid: int = os.getpid(), **more: Any) -> LiveStatus:
    return LiveStatus(pid=pid, written=written, waits=(Lasting("trainer", "8 scored groups", 3.0),), **more)


# --- who lives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alive", "facts", "said", "life", "words"),
    [
        (True, [STARTED, TicketDrawn(1.0, 0, "p")], live(99.0), "alive", "training"),
        (True, [], None, "starting", "just starting"),
        (True, [STARTED], live(50.0, NOBODY), "starting", "just starting"),
        (True, [STARTED], live(50.0), "silent", "has written no status for 50 s: its process is running"),
        (
            True,
            [STARTED],
            live(3700.0),
            "silent",
            "its last status is from 3600 s later than now (was the clock set back?)",
        ),
        (True, [STARTED], live(3700.0, NOBODY), "starting", "just starting"),
        (True, [STARTED], live(99.0, silent=31.0), "silent", "its event loop has not turned for 31 s"),
        (True, [STARTED, ended("the trainer died")], live(99.0), "alive", "going on after: the trainer died"),
        (False, [STARTED, ended("finished")], live(99.0), "finished", "finished"),
        (False, [STARTED, ended("interrupted")], None, "interrupted", "interrupted"),
        (False, [STARTED, ended("the disk is full")], live(99.0), "stopped", "the disk is full"),
        (False, [STARTED, TicketDrawn(1.0, 0, "p")], live(99.0), "died", "died while training and left no message"),
        (False, [], None, "died", "died while loading the model and left no message"),
        (False, [STARTED], live(99.0, verdict="ended by its watchdog: x"), "died", "ended by its watchdog: x"),
        (False, [STARTED, ended("finished"), STARTED], live(99.0), "died", "and left no message"),
    ],
)
def test_a_run_is_alive_silent_ended_or_dead(
    alive: bool, facts: list[Any], said: LiveStatus | None, life: str, words: str
) -> None:
    status = judge(state_of(*facts), said, alive, 100.0)
    assert status.life == life and words in status.words
    assert status.ok == (life not in ("died", "stopped"))


def test_the_lock_tells_the_living_from_the_dead(tmp_path: Path) -> None:
    assert not held(tmp_path)
    with RunDirectory(tmp_path):
        assert held(tmp_path) and held(tmp_path), "asking does not change it"
    assert not held(tmp_path)
    with RunDirectory(tmp_path):
        pass


def test_a_run_that_cannot_go_on_yet_after_its_trainer_s_death_is_alive_and_says_what_it_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / METRICS).write_bytes(b"".join(encode(fact) + b"\n" for fact in (STARTED, ended("the trainer died"))))
    with shown_waiting(tmp_path, "its next attempt to go on, since: no node of the cluster has 2 GPUs", 34.0):
        assert report(tmp_path) == 0
    said = capsys.readouterr().out
    assert "going on after: the trainer died" in said
    assert "34.0 s  run, for its next attempt to go on, since: no node of the cluster has 2 GPUs" in said
    assert report(tmp_path) == 1, "nobody goes on"
    with RunDirectory(tmp_path), shown_waiting(tmp_path, "another process is training there", 40.0):
        live = read_live(tmp_path)
        assert live and live.waits[0].seconds == 34.0, "what that one writes is left alone"
    with pytest.raises(ConfigError, match="as it was"), shown_waiting(tmp_path, "", 0.0):
        raise ConfigError("as it was")


# --- what is read ------------------------------------------------------------------------------------------------------


def test_a_follower_reads_what_was_added_and_starts_over_when_a_resume_has_cut_it(tmp_path: Path) -> None:
    follower, metrics = Follower(tmp_path), tmp_path / METRICS
    assert follower.look(True, 0.0).life == "starting"
    lines = [encode(fact) + b"\n" for fact in (STARTED, Warned(1.0, "one"), Warned(2.0, "two"))]
    metrics.write_bytes(lines[0] + lines[1] + lines[2][:10])  # torn, or still being written
    follower.look(True, 0.0)
    assert [warning.message for warning in follower.state.warnings] == ["one"]
    with metrics.open("ab") as file:
        file.write(lines[2][10:])
    follower.look(True, 0.0)
    assert [warning.message for warning in follower.state.warnings] == ["one", "two"]
    (tmp_path / "part").write_bytes(lines[0])
    (tmp_path / "part").replace(metrics)
    follower.look(True, 0.0)
    assert follower.state.started is not None and follower.state.warnings == []


def test_half_a_status_is_never_seen_and_a_strange_one_is_none(tmp_path: Path) -> None:
    write_live(tmp_path, live(1.0))
    write_live(tmp_path, live(2.0))
    assert read_live(tmp_path) == live(2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    (tmp_path / "status.json").write_text('{"pid": "seven"}')
    assert read_live(tmp_path) is None


# --- what is shown -----------------------------------------------------------------------------------------------------

TOLD = state_of(
    STARTED,
    TicketDrawn(1.0, 0, "p"),
    CheckpointSaved(2.0, 3, "checkpoints/step-000003", 0.1),
    CheckpointSaved(3.0, 4, "", 0.1, "the disk is full"),
    WorkerLost(4.0, "engine", "was killed by SIGKILL", 1, 8),
    Warned(5.0, "rollouts has waited 120 s for the engine (the run stops at 1800 s)"),
)
WAITS = (
    Lasting("rollouts", "the engine", 31.0),
    Lasting("rollouts", "the engine", 2.0),
    Lasting("trainer", "4 groups", 1.0),
)
TELLING = Status(
    "alive",
    "training",
    LiveStatus(pid=7, written=time.time(), waits=WAITS, workers={"engine": 8, "trainer": 9}, picture="logs/x"),
)


def test_a_pipe_gets_plain_lines_and_a_terminal_a_panel_that_say_the_same() -> None:
    shown = {}
    for terminal in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
        status_view.show(console, "runs/tiny", TELLING, TOLD)
        shown[terminal] = file.getvalue()
    assert "╭" in shown[True] and "╭" not in shown[False] and "\x1b" not in shown[False]
    for text in shown.values():
        for words in (
            "runs/tiny",
            "controller 7, engine 8, trainer 9",
            "0 of 10",
            "drawn 1 = trained 0 + dropped 0 + failed 0 + pipeline 1",
            "step 3",
            "31.0 s  rollouts, for the engine   × 2",
            "1.0 s  trainer, for 4 groups",
            "the engine process was killed by SIGKILL",
            "rollouts has waited 120 s",
            "logs/x",
        ):
            assert words in text, (words, text)


def test_what_programs_read() -> None:
    tree = json.loads(json.dumps(as_dict(TELLING, TOLD)))
    assert (tree["life"], tree["ok"], tree["pid"], tree["step"], tree["steps"]) == ("alive", True, 7, 0, 10)
    assert tree["accounting"]["drawn"] == 1 and tree["accounting"]["balance"] == 0
    assert tree["checkpoint"]["step"] == 3 and tree["lag"]["bound"] == 1
    assert tree["waits"][0] == {"owner": "rollouts", "what": "the engine", "seconds": 31.0, "endless": False}
    assert tree["deaths"] == [[4.0, "engine", "was killed by SIGKILL"]]
    assert json.dumps(as_dict(Status("died", "x", None), RunState()))


# --- a live run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_config(tmp_path, tiny_llama, train={"steps": 5000})


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["status", *arguments])
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_asked_while_it_lives_after_kill_9_and_after_its_end(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(config["out"]) / "tiny"
    (tmp_path / "config.toml").write_text(dump_config(load_config(config)))
    command = [sys.executable, "-m", "headrace", "train", str(tmp_path / "config.toml")]
    with (tmp_path / "stderr").open("w") as stderr:
        process = preloaded_python.Program(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        when_step(directory, 3, lambda: None).join()
        until(lambda: f"controller {process.pid}, engine" in asked(capsys, str(directory))[1])  # said every two seconds
        code, out = asked(capsys, str(directory))
        assert code == 0 and "● training" in out and ", for the" in out
        code, out = asked(capsys, str(directory), "--stacks")
        assert code == 0 and f"--- controller, pid {process.pid}" in out and "task " in out
        assert re.search(r"--- engine, pid \d+: \w", out) and re.search(r"--- trainer, pid \d+: \w", out)
        assert out.count("worker.py") >= 2, "both workers have shown their stacks"
        assert process.poll() is None
        tree = json.loads(asked(capsys, str(directory), "--json")[1])
        assert set(tree["workers"]) >= {"engine", "trainer"} and tree["accounting"]["balance"] == 0
        when_step(directory, tree["step"] + 2, lambda: None).join()
        assert process.poll() is None, "it has gone on"
        assert (directory / "logs" / "stacks-1.txt").read_text() in (tmp_path / "stderr").read_text()
    finally:
        process.kill()
        process.wait()
    code, out = asked(capsys, str(directory))
    assert code == 1 and "died while training and left no message" in out and "waited" in out
    assert re.search(r"drawn \d+ = trained", out), "what its facts say is there after its death"
    with pytest.raises(HeadraceError, match="is not running"):
        ask_for_stacks(directory)
    steps = json.loads(asked(capsys, str(directory), "--json")[1])["step"] + 2
    config["train"]["steps"] = steps
    headrace.train(config, resume=directory)
    code, out = asked(capsys, str(directory), "--watch")
    assert code == 0 and "✓ finished" in out and f"{steps} of {steps}" in out


HOLDS = """
import sys, time
from pathlib import Path
from headrace.run.run_directory import RunDirectory
held = RunDirectory(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(100)
"""


def test_a_stopped_controller_is_alive_but_silent(tmp_path: Path) -> None:
    """Its lock is held and its process is there: what the kernel says of it is told."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        write_live(tmp_path, live(time.time() - 60, process.pid))
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        status = Follower(tmp_path).look(held(tmp_path), time.time())
        assert status.life == "silent" and "its process is stopped by a signal" in status.words
    finally:
        process.kill()
        process.wait()
    assert not held(tmp_path)
