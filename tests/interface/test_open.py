"""`headrace.open`: a run on the disk as the object that `headrace.train` returns, whatever has become of it."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from pathlib import Path

import pytest

import headrace
from headrace.core.errors import ConfigError, HeadraceError
from headrace.facts.facts import Evaluated
from headrace.facts.records import METRICS, StepRow, read_metrics
from headrace.processes.health.live_status import LiveStatus, write_live
from headrace.run.run_directory import LOCK
from headrace.views.report import write_report
from support.fact_stream import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "done")
    write_run(root / "dead", seed=1, end=False)
    for number, name in enumerate(("left", "right")):
        write_run(root / "two" / name, seed=number)
    (root / "two" / "config.toml").write_text("seed = 0\n")
    return root


def test_a_finished_run_is_what_train_returned(runs: Path) -> None:
    run = headrace.open(str(runs / "done"))
    facts = read_metrics(runs / "done")
    rows = [fact for fact in facts if isinstance(fact, StepRow)]
    evals = [fact for fact in facts if isinstance(fact, Evaluated)]
    assert (run.reason, run.step, run.directory) == ("finished", 30, runs / "done")
    assert (run.before, run.after) == (evals[0], evals[-1]) and run.adapters == {}
    assert run.history["step"] == [row.report.version for row in rows] == list(range(1, 31))
    assert run.history["reward"] == [row.reward_drawn for row in rows]
    assert run.held_out["reward"] == [evaluation.reward_mean for evaluation in evals]
    assert len(run.samples["completion"]) == 16 and math.isfinite(run.samples["reward"][0])
    assert repr(run) == f"<headrace run {runs / 'done'}: finished at step 30 of 30, held-out reward {_gain(evals)}>"


def _gain(evals: list[Evaluated]) -> str:
    return f"{evals[0].reward_mean:.3f} → {evals[-1].reward_mean:.3f} ± {evals[-1].reward_sem:.3f}"


def test_a_notebook_shows_a_report_that_is_as_new_as_the_facts(runs: Path, tmp_path: Path) -> None:
    place = shutil.copytree(runs / "done", tmp_path / "run")
    run = headrace.open(place)
    assert "Learning: held out" in run._repr_html_() and not run.report.exists(), "it writes nothing"
    write_report(place).write_text("as it was")
    assert "as it was" in run._repr_html_()
    os.utime(run.report, (0, 0))  # facts came after it
    assert "Learning: held out" in run._repr_html_()


def test_a_run_that_died_says_how_far_it_came(runs: Path) -> None:
    run = headrace.open(runs / "dead")
    assert (run.reason.startswith("died while") and run.after is None) or run.step == 30
    assert "Broken: the run died while" in run._repr_html_()


def test_a_run_that_goes_on_is_read_as_far_as_it_is(runs: Path, tmp_path: Path) -> None:
    place = shutil.copytree(runs / "done", tmp_path / "run")
    lines = (place / METRICS).read_bytes().splitlines(keepends=True)
    tenth = next(i for i, line in enumerate(lines) if b'"StepTrained"' in line and b'"step":9,' in line)
    (place / METRICS).write_bytes(b"".join(lines[: tenth + 1]))
    with (place / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_live(place, LiveStatus(pid=os.getpid(), written=time.time()))
        run = headrace.open(place)
        assert (run.reason, run.step, len(run.history["step"])) == ("still going on: training", 10, 10)
        assert run.before and run.after is None and "training" in run._repr_html_()
        (place / METRICS).write_bytes(b"".join(lines))
        assert headrace.open(place).step == 30, "opened again, it has what was added"


def test_what_was_measured_after_fewer_steps_is_no_result_of_a_run_that_was_given_more(
    runs: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(runs / "done", tmp_path / "run")
    lines = (place / METRICS).read_bytes().splitlines(keepends=True)
    assert any(b'"phase":"after"' in line for line in lines)
    more = [
        line.replace(b'"step":29,', b'"step":30,').replace(b'"version":30', b'"version":31')
        for line in lines
        if b'"StepTrained"' in line and b'"step":29,' in line
    ]
    (place / METRICS).write_bytes(b"".join([*lines, *more]))
    run = headrace.open(place)
    assert (run.step, run.after) == (31, None) and run.held_out["phase"][-1] == "after"


def test_several_adapters_are_opened_by_their_names(runs: Path) -> None:
    run = headrace.open(runs / "two")
    assert list(run.adapters) == ["left", "right"] and run.directory == runs / "two"
    assert run.history == run.adapters["left"].history != run.adapters["right"].history
    assert "adapters left, right" in repr(run)


def test_what_is_no_run_is_refused_with_where_there_may_be_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: it has no metrics.jsonl; .* such as .*dead"):
        headrace.open(runs)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no run: it has no metrics.jsonl$"):
        headrace.open(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"metrics.jsonl is a file, but a run is a directory: .*done may be the one"):
        headrace.open(runs / "done" / METRICS)
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(runs)
    with pytest.raises(ConfigError, match=r"there is no run done; there is one at runs/done"):
        headrace.open("done")
    assert headrace.open("runs/done").step == 30, "the remedy"


def test_facts_of_another_version_are_refused_or_left_out_aloud(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shutil.copytree(runs / "done", tmp_path / "run")
    lines = (place / METRICS).read_bytes().splitlines(keepends=True)
    changed = [line.replace(b'"fact":"Waited"', b'"fact":"HasWaited"') for line in lines]
    (place / METRICS).write_bytes(b"".join(changed))
    assert headrace.open(place).step == 30
    assert "lines of metrics.jsonl cannot be read and are left out" in capsys.readouterr().err
    (place / METRICS).write_bytes(b"".join(line.replace(b'"fact":', b'"kind":') for line in lines))
    with pytest.raises(HeadraceError, match=r"another version of headrace than .* wrote them"):
        headrace.open(place)


def test_a_star_import_leaves_python_s_own_open_alone() -> None:
    names: dict[str, object] = {}
    exec("from headrace import *", names)
    assert "train" in names and "open" not in names and "open" in dir(headrace)
