"""Dashboards: what each is given, read back with its own package, and one that fails, hangs or is slow."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.facts.facts import Fact, RunStarted, StepTrained, Warned
from headrace.facts.number_tables import scalars
from headrace.facts.recorder import Recorder
from headrace.facts.records import read_metrics, summarise
from headrace.facts.run_state import RunState
from headrace.views.build import open_recorder
from headrace.views.config import ObserveConfig
from headrace.views.sinks import queued
from headrace.views.sinks.queued import Dashboard, QueuedSink
from headrace.views.sinks.wandb import chosen_mode
from support.fact_stream import FactStream, standing
from support.runs.beside import until

FACTS = list(FactStream(steps=6).facts())
REWARDS = [fact.reward_mean for fact in FACTS if isinstance(fact, StepTrained)]


def record(config: ObserveConfig, run_dir: Path, facts: Sequence[Fact], resumed: int | None = None) -> None:
    recorder = open_recorder(config, run_dir, None if resumed is None else standing(FACTS, resumed))
    recorder.begin()
    for fact in facts:
        recorder.record(fact)
    recorder.close()
    assert not [warning for warning in recorder.state.warnings if "observe." in warning.message]


def killed_and_resumed(config: ObserveConfig, run_dir: Path, pause: float = 0.0) -> None:
    """All six steps; then, after a pause in seconds, a process that resumes after four and does the fifth again."""
    record(config, run_dir, FACTS)
    time.sleep(pause)
    again = [fact for fact in FACTS if isinstance(fact, StepTrained) and fact.report.step == 4]
    record(config, run_dir, [FactStream(steps=6).start(resumed_at=4), *again], resumed=4)


# -- the packages -----------------------------------------------------------------------------------------------------


def test_tensorboard_gets_the_scalars_and_forgets_what_was_discarded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed_and_resumed(ObserveConfig(terminal="off", tensorboard=True), tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/trained")
    assert [event.step for event in read] == [1, 2, 3, 4, 5]
    assert [event.value for event in read] == pytest.approx(REWARDS[:5])


def test_trackio_gets_the_scalars_locally(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    script = """
import sys
from pathlib import Path
from headrace.views.build import open_recorder
from headrace.views.config import ObserveConfig
from support.fact_stream import FactStream
recorder = open_recorder(ObserveConfig(terminal="off", trackio=True), Path(sys.argv[1]))
for fact in FactStream(steps=6).facts():
    recorder.record(fact)
recorder.close()
from trackio.sqlite_storage import SQLiteStorage
print([row["reward/trained"] for row in SQLiteStorage.get_logs("headrace", "demo") if "reward/trained" in row])
"""
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout.splitlines()[-1]) == pytest.approx(REWARDS)


def test_mlflow_gets_the_scalars_in_files_and_a_resumed_run_continues_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # and taken back afterwards
    from mlflow.tracking import MlflowClient

    killed_and_resumed(ObserveConfig(terminal="off", mlflow=True), tmp_path)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    points = client.get_metric_history(run.info.run_id, "reward/trained")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6, 5]
    assert [point.value for point in points] == pytest.approx([*REWARDS, REWARDS[4]])
    assert run.info.status == "FINISHED" and run.data.params["seed"] == "1"


@pytest.mark.slow
def test_wandb_gets_the_scalars_in_files_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr(
        queued, "PATIENCE", 900.0
    )  # wandb starts a process of its own, which took 60 s on a busy machine
    killed_and_resumed(
        ObserveConfig(terminal="off", wandb=True), tmp_path, pause=1.1
    )  # its files have the second in their name
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    points, names = [], set()
    for file in files:
        until(partial(_is_whole, file))
        for found in _wandb_records(file):
            row = {item.key or "/".join(item.nested_key): item.value_json for item in found.history.item}
            names |= {found.run.run_id} - {""}
            if "reward/trained" in row:
                points.append((int(row["step"]), float(row["reward/trained"])))
    assert len(names) == 1, "one run, continued"
    assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6, 5]
    assert [value for _, value in points] == pytest.approx([*REWARDS, REWARDS[4]])


def _is_whole(file: Path) -> bool:
    """wandb's own process may still be writing when `finish` has returned."""
    return any(found.HasField("exit") for found in _wandb_records(file))


def _wandb_records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in _log_records(file.read_bytes())]


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: blocks of 32 KiB of LevelDB's log format (checksum, length, kind) behind a header of 7 bytes."""
    place, parts = 7, []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too little for a head: zeros
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):  # it is being written
            return
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield b"".join(parts)
            parts = []


def test_wandb_is_asked_for_its_server_only_with_a_key(tmp_path: Path) -> None:
    login = tmp_path / "netrc"
    login.write_text("machine api.wandb.ai login user password k\n")
    login.chmod(0o600)
    none = {"NETRC": str(tmp_path / "none")}
    assert chosen_mode(none) == "offline" and chosen_mode({**none, "WANDB_API_KEY": "k"}) == "online"
    assert chosen_mode({"NETRC": str(login)}) == "online"
    assert chosen_mode({"NETRC": str(login), "WANDB_BASE_URL": "https://elsewhere.example"}) == "offline"
    assert chosen_mode({"NETRC": str(login), "WANDB_MODE": "disabled"}) == "disabled"


# -- dashboards that do not work --------------------------------------------------------------------------------------


class ScriptedDashboard:
    """Fails at the calls that it is made with, and waits for `gate` in each `log`."""

    def __init__(self, failing: Mapping[str, int] = {}, gate: threading.Event | None = None) -> None:
        self.failing, self.gate = dict(failing), gate
        self.got: list[int] = []
        self.entered = threading.Event()

    def _call(self, name: str) -> None:
        if self.failing.get(name, 0):
            self.failing[name] -= 1
            raise OSError(f"no {name} today")

    def start(self, fact: RunStarted) -> None:
        self._call("start")

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self.entered.set()
        if self.gate:
            self.gate.wait()
        self._call("log")
        self.got.append(step)

    def close(self) -> None:
        self._call("close")


def with_dashboard(run_dir: Path, dashboard: Dashboard, **given: float) -> tuple[Recorder, QueuedSink]:
    recorder = Recorder(run_dir)
    say = lambda words: recorder.record(Warned(recorder.state.now, words))  # noqa: E731
    sink = QueuedSink("mine", dashboard, say, **given)  # type: ignore[arg-type]
    recorder.add(sink)
    return recorder, sink


def warned(run_dir: Path) -> list[str]:
    return [
        fact.message for fact in read_metrics(run_dir) if isinstance(fact, Warned) and "observe.mine" in fact.message
    ]


def test_a_dashboard_that_fails_is_tried_again_counted_and_warned_of_once(tmp_path: Path) -> None:
    dashboard = ScriptedDashboard({"start": 2, "log": 1, "close": 1})
    recorder, sink = with_dashboard(tmp_path, dashboard)
    for fact in FACTS:
        recorder.record(fact)
    recorder.close()
    assert sink.failed == 4 and sink.dropped == 0 and dashboard.got[-1] == 6
    assert warned(tmp_path)[-1] == "observe.mine lacks the numbers of 4 facts: OSError: no start today"
    assert len(warned(tmp_path)) <= 2 and len(read_metrics(tmp_path)) == len(FACTS) + len(warned(tmp_path))


def test_a_dashboard_that_hangs_never_holds_the_run(tmp_path: Path) -> None:
    state, gate = RunState(), threading.Event()
    dashboard = ScriptedDashboard(gate=gate)
    recorder, sink = with_dashboard(tmp_path, dashboard, room=3, patience=0.05)
    small = [summarise(fact) if isinstance(fact, StepTrained) else fact for fact in FACTS]
    numbers = sum(bool(scalars(fact, state)[1]) for fact in small if state.fold(fact) is None)  # type: ignore[arg-type]
    for fact in FACTS:
        recorder.record(fact)
    assert dashboard.entered.wait(60)  # the start of the run is behind it
    recorder.close()
    assert dashboard.got == [] and sink.dropped > 10
    first, last = warned(tmp_path)
    assert "does not get all numbers, and the run goes on without: it is slower than the run" in first
    assert "had not ended after 0 s" in last and f"the numbers of {numbers} facts" in last
    gate.set()


def test_a_slow_dashboard_gets_everything_that_its_queue_holds(tmp_path: Path) -> None:
    gate = threading.Event()
    dashboard = ScriptedDashboard(gate=gate)
    recorder, sink = with_dashboard(tmp_path, dashboard)
    for fact in FACTS:
        recorder.record(fact)
    assert dashboard.entered.wait(60) and dashboard.got == []
    gate.set()
    recorder.close()
    steps = [step for step in dashboard.got if step]
    assert set(steps) == {1, 2, 3, 4, 5, 6} and not warned(tmp_path) and sink.dropped == 0


def test_a_run_that_never_began_starts_no_thread(tmp_path: Path) -> None:
    _, sink = with_dashboard(tmp_path, ScriptedDashboard({"close": 1}))
    before = threading.active_count()
    sink.close()
    assert threading.active_count() == before and not warned(tmp_path)
