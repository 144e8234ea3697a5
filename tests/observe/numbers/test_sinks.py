"""Dashboards: what each is given, read back with its own package, and one that fails, hangs or is slow."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace
from rich.console import Console

from headrace.core.errors import ConfigError, HeadraceError
from headrace.facts.facts import Fact, RunStarted, StepTrained, WarmStarted, Warned
from headrace.facts.health import Health, health
from headrace.facts.number_tables import scalars
from headrace.facts.recorder import Recorder
from headrace.facts.records import StepRow, read_metrics, summarise
from headrace.facts.run_state import RunState
from headrace.views.build import open_recorder
from headrace.views.config import ObserveConfig, check_installed
from headrace.views.screen.live import frame
from headrace.views.sinks import queued
from headrace.views.sinks.mlflow import plainly_named
from headrace.views.sinks.queued import Dashboard, QueuedSink, hushed, id_on_dashboards
from headrace.views.sinks.wandb import WandbRun, chosen_mode
from headrace.views.sinks.webhook import EVERY, HELD, Alert, AlertChoice, Webhook, address_of, body_of, post
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
from headrace.views.config import ObserveConfig, check_installed
from support.fact_stream import FactStream
recorder = open_recorder(ObserveConfig(terminal="off", trackio=True), Path(sys.argv[1]))
for fact in FactStream(steps=6).facts():
    recorder.record(fact)
recorder.close()
from trackio.sqlite_storage import SQLiteStorage
name = "demo-" + (Path(sys.argv[1]) / "dashboard_id").read_text()[:6]
print([row["reward/trained"] for row in SQLiteStorage.get_logs("headrace", name) if "reward/trained" in row])
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


def test_a_run_is_known_to_dashboards_by_an_id_that_no_other_run_has(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    first = id_on_dashboards(tmp_path / "run")
    assert first == id_on_dashboards(tmp_path / "run"), "a resumed run goes on there"
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert len({first, id_on_dashboards(copy)}) == 2 and id_on_dashboards(tmp_path / "run") == first
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert id_on_dashboards(tmp_path / "run") != first, "the run that was there before is another one"


def test_mlflow_keeps_runs_of_one_place_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    from mlflow.tracking import MlflowClient

    place = tmp_path / "run"
    for once in ("first", "second"):
        place.mkdir()
        killed_and_resumed(ObserveConfig(terminal="off", mlflow=True), place)
        place.rename(tmp_path / once)
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    assert [len(client.get_metric_history(run.info.run_id, "reward/trained")) for run in runs] == [7, 7]


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


@pytest.mark.slow  # wandb starts a process of its own
def test_wandb_keeps_runs_of_one_process_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs = {}
    for number, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        runs[name] = WandbRun(tmp_path / name)
        runs[name].start(FactStream(steps=6).start())
        runs[name].log(1, {"reward/trained": float(number)}, 0.0)
    for name, run in runs.items():
        run.close()
        (file,) = (tmp_path / name).glob("wandb/offline-run-*/*.wandb")
        until(partial(_is_whole, file))
        rows = [
            {item.key or "/".join(item.nested_key): item.value_json for item in found.history.item}
            for found in _wandb_records(file)
        ]
        assert [float(row["reward/trained"]) for row in rows if "reward/trained" in row] == [float(name == "second")]


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
    assert sink.thread.failed == 4 and sink.thread.dropped == 0 and dashboard.got[-1] == 6
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
    assert dashboard.got == [] and sink.thread.dropped > 10
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
    assert set(steps) == {1, 2, 3, 4, 5, 6} and not warned(tmp_path) and sink.thread.dropped == 0


def test_a_run_that_never_began_starts_no_thread(tmp_path: Path) -> None:
    _, sink = with_dashboard(tmp_path, ScriptedDashboard({"close": 1}))
    before = threading.active_count()
    sink.close()
    assert threading.active_count() == before and not warned(tmp_path)


# -- messages ---------------------------------------------------------------------------------------------------------


class Inbox(BaseHTTPRequestHandler):
    """Answers with the next status of `answers`, then with 200, and keeps what it took."""

    answers: ClassVar[list[int]] = []
    got: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.answers.pop(0) if self.answers else 200
        if status == 200:
            self.got.append(body)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *given: object) -> None: ...


@pytest.fixture
def inbox() -> Iterator[str]:
    Inbox.answers, Inbox.got = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Inbox)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hooks/a-secret"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_is_told_of_where_its_people_are(inbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="which is not set: export HEADRACE_WEBHOOK=https"):
        open_recorder(ObserveConfig(terminal="off", webhook=True), tmp_path)
    monkeypatch.setenv("HEADRACE_WEBHOOK", "hooks.example/x")
    with pytest.raises(ConfigError, match="is no http"):
        check_installed(ObserveConfig(webhook=True))
    monkeypatch.setenv("HEADRACE_WEBHOOK", inbox)
    record(ObserveConfig(terminal="off", webhook=True), tmp_path, FACTS)
    events = [body["event"] for body in Inbox.got]
    assert (events[0], events[-1]) == ("started", "ended")
    assert all(body["text"] == body["content"] and body["text"].startswith("demo: ") for body in Inbox.got)
    assert Inbox.got[-1]["text"].startswith("demo: finished after step 6") and Inbox.got[-1]["step"] == 6


@pytest.mark.parametrize(
    ("answers", "arrives"), [([500, 429], True), ([302, 302, 302], False), ([404] * 3, False)], ids=str
)
def test_a_message_is_tried_three_times_and_its_loss_is_said_without_the_address(
    answers: list[int], arrives: bool, inbox: str
) -> None:
    Inbox.answers = answers
    said: list[str] = []
    sink = Webhook(inbox, said.append, pauses=(0.0, 0.0))
    state = RunState()
    state.fold(FACTS[0])
    sink.record(FACTS[0], state)
    sink.close()
    assert len(Inbox.got) == arrives and not Inbox.answers
    assert bool(said) != arrives and "a-secret" not in "".join(said)
    assert (
        arrives or f"lacks 1 messages: HeadraceError: its server answered {answers[-1] if answers else ''}" in said[0]
    )


@pytest.mark.parametrize("call", ["@everyone", "@channel", "<!channel>", "<!subteam^S1>", "<@U123>", "<#C1>"])
def test_words_of_a_model_in_a_warning_call_nobody(call: str) -> None:
    body = json.loads(body_of("demo", 1, Alert("warning", f"the judge wrote {call}, a@b and x < 3")))
    assert body["allowed_mentions"] == {"parse": []} and body["text"] == body["content"]
    assert (
        call not in body["text"]
        and body["text"].replace("\u200b", "") == f"demo: the judge wrote {call}, a@b and x < 3"
    )


@pytest.mark.parametrize("wrong", ["/hooks/ a-secret", ":a-secret/hooks", "[::1/a-secret"])
def test_an_address_that_no_request_can_go_to_is_refused_at_start_and_never_said(wrong: str, inbox: str) -> None:
    """http.client names the address in the error that it raises for these."""
    address = f"http://{wrong}" if wrong.startswith("[") else f"http://127.0.0.1{wrong}"
    with pytest.raises(ConfigError, match="is no http") as refused:
        address_of({"HEADRACE_WEBHOOK": address})
    with pytest.raises(HeadraceError) as failed:
        post(address, b"{}")
    assert "a-secret" not in f"{refused.value} {failed.value}"
    assert address_of({"HEADRACE_WEBHOOK": f"{inbox}\r\n"}) == inbox


def test_a_verdict_is_sent_when_it_has_turned_and_stayed() -> None:
    """A gradient without a finite norm in steps 41 to 60 of 100, each of more than a minute. The verdict is of the last ten steps."""
    state, choice, sent = RunState(), AlertChoice(), {}
    for fact in FactStream(steps=100).facts():
        row = summarise(fact) if isinstance(fact, StepTrained) else fact
        if isinstance(row, StepRow) and 40 <= row.report.step < 60:
            row = replace(row, report=replace(row.report, grad_norm=math.nan))
        row = replace(row, t=20 * row.t)
        state.fold(row)
        for alert in choice.of(row, state):
            if alert.event == "verdict":
                sent[state.step] = alert.text
    broken = next(step for step, text in sent.items() if "Broken: " in text)
    healed = next(step for step in sent if step > broken)
    assert 41 + HELD - 1 <= broken <= 41 + HELD and "the gradient" in sent[broken]
    assert healed > 60 and "Broken" not in sent[healed]
    assert len(sent) <= 4


def test_a_verdict_is_not_looked_at_in_every_step_of_a_quick_run() -> None:
    asked = []

    def judge(state: RunState) -> Health:
        asked.append(state.step)
        return health(state)

    state, choice = RunState(), AlertChoice(judge)
    for fact in FactStream(steps=60).facts():
        row = summarise(fact) if isinstance(fact, StepTrained) else fact
        state.fold(row)
        list(choice.of(row, state))
    assert 1 < len(asked) <= state.now / EVERY + 2 < 10


def test_warnings_are_sent_once_each_and_not_without_end() -> None:
    choice, state = AlertChoice(), RunState()
    texts = [alert.text for n in range(60) for alert in choice.of(Warned(1.0, f"trouble {n // 2}"), state)]
    assert texts == [*(f"trouble {n}" for n in range(20)), "more warnings are not sent: headrace status has all"]


# -- what was trained before the run ------------------------------------------------------------------------------------

WARM = WarmStarted(
    t=0.0,
    model="m",
    path="rows.jsonl",
    rows=6,
    held_out_rows=2,
    epochs=2,
    tokens=90,
    seconds=1.0,
    learning_rate=1e-5,
    losses=(2.0, 1.5, 1.25, math.nan),
    held_out=(2.5, 1.75, 1.5),
    mark="m",
    loss="dpo",
    agreed=(0.5, 0.75, 1.0),
)


class Noting(ScriptedDashboard):
    """Notes all that it is told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def start(self, fact: RunStarted) -> None:
        self.told.append("start")

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self.told += [(step, dict(values))] if any(name.startswith("warm") for name in values) else []


def test_a_dashboard_has_the_losses_of_a_warm_start_once_it_knows_the_run(tmp_path: Path) -> None:
    """They are recorded before the run begins; a resumed process records none."""
    dashboard = Noting()
    recorder, _ = with_dashboard(tmp_path, dashboard)
    for fact in (WARM, *FACTS):
        recorder.record(fact)
    recorder.close()
    loss, held_out = "warm_start/loss", "warm_start/held_out_loss"
    agreed = "warm_start/agreed"
    assert dashboard.told[:4] == ["start", (1, {loss: 2.0}), (2, {loss: 1.5}), (3, {loss: 1.25})]
    expected = [
        (step, {held_out: value, agreed: share})
        for step, value, share in ((0, 2.5, 0.5), (2, 1.75, 0.75), (4, 1.5, 1.0))
    ]
    assert [told for told in dashboard.told[4:] if told != "start"] == expected


def test_tensorboard_keeps_a_warm_start_whose_steps_are_numbered_like_those_that_are_done_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, warm = ObserveConfig(terminal="off", tensorboard=True), replace(WARM, losses=(5.0, 4.0, 3.0, 2.0, 1.0, 0.5))
    record(config, tmp_path, [warm, *FACTS])
    recorder = open_recorder(config, tmp_path, standing([warm, *FACTS], 4))
    recorder.begin()
    recorder.record(FactStream(steps=6).start(resumed_at=4))
    recorder.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("warm_start/loss")] == [*enumerate(warm.losses, 1)]
    assert [event.step for event in read.Scalars("reward/trained")] == [1, 2, 3, 4]


def test_threads_that_are_silent_at_once_leave_the_streams_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before, first, second = (sys.stdout, sys.stderr), threading.Event(), threading.Event()

    def early() -> None:
        with hushed():
            print("greeting")
            first.set()
            second.wait(60)

    thread = threading.Thread(target=early)
    thread.start()
    first.wait(60)
    with hushed():
        second.set()
        thread.join()
        print("greeting")
    assert (sys.stdout, sys.stderr) == before
    print("of the run")
    assert capsys.readouterr().out == "of the run\n"


def test_names_that_mlflow_refuses_are_written_otherwise_and_none_is_lost() -> None:
    pytest.importorskip("mlflow")
    from mlflow.utils.validation import _validate_metric_name  # type: ignore[attr-defined]

    names = [
        "reward/a(b)",
        "reward/a_b_",
        "reward/größe",
        "reward/a:b",
        "reward/π²",
        "reward/..",
        "x" * 400,
        "reward/a,b",
    ]
    found = plainly_named({name: float(place) for place, name in enumerate(names)})
    for name in found:
        _validate_metric_name(name)
    assert sorted(found.values()) == [float(place) for place in range(len(names))]
    assert found["reward/a_b_"] == 1.0 and found["reward/größe"] == 2.0, "a name that is taken keeps its number"


def test_a_count_that_was_not_zero_once_has_a_point_at_each_later_step(tmp_path: Path) -> None:
    """A dashboard would go on showing the last point otherwise."""
    steps = [fact for fact in FACTS if isinstance(fact, StepTrained)]
    state, seen = RunState(), []
    for number, fact in enumerate(steps):
        row = replace(summarise(fact), mixed_tokens=7 * (number == 2))
        state.fold(row)
        seen.append(scalars(row, state)[1].get("lag/mixed_tokens"))
    assert seen == [None, None, 7.0, 0.0, 0.0, 0.0]


def test_a_reward_function_named_like_a_number_of_the_run_hides_none() -> None:
    row = next(summarise(fact) for fact in FACTS if isinstance(fact, StepTrained))
    row = replace(row, components={"trained": 123.0, "std": 7.0, "exact": 5.0})
    state = RunState()
    state.fold(row)
    values = scalars(row, state)[1]
    assert values["reward/trained"] == row.reward_mean and values["reward/std"] == row.reward_std
    assert (values["reward/trained#2"], values["reward/std#2"], values["reward/exact"]) == (123.0, 7.0, 5.0)


def test_the_live_view_shows_the_losses_of_a_warm_start() -> None:
    state = RunState()
    for fact in (replace(WARM, losses=WARM.losses[:3]), *FACTS):
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)
    console = Console(width=250, file=io.StringIO())
    console.print(frame(state))
    (line,) = [line for line in console.file.getvalue().splitlines() if "warm start" in line]  # type: ignore[attr-defined]
    assert all(
        words in line for words in ("loss 2.000 → 1.250 a pair (dpo)", "held-out 2.500 → 1.500", "50% → 100% agree")
    )
