"""Steps of a real run on a tiny model, done again: bit for bit, and caught where something was changed."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headrace
from headrace import cli
from headrace.commands.replay import replay
from headrace.commands.replay import rerun as rerun_module
from headrace.commands.replay.replay import beyond, differing, is_exact, outcome_of, why_inexact
from headrace.commands.replay.rerun import ReplayState, plan_rerun, rerun
from headrace.commands.show import diff
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.reports import LagStats, Noise, TrainReport
from headrace.core.weights import FORM
from headrace.durable.journal import (
    AnyRecord,
    Journal,
    LiveRecord,
    ReadyRecord,
    SteppedRecord,
    count_steps,
    read_journal,
)
from headrace.durable.segments import JOURNAL
from headrace.facts.kept_settings import configs_until
from headrace.native.arithmetic import machine_mark
from headrace.native.resources import available_cores
from headrace.processes.health.family import Family, family
from headrace.run.config import RunConfig, dump_config, load_config
from headrace.run.run_directory import RunDirectory
from headrace.trainer.config import TrainConfig
from headrace.views.screen.console import Console
from support.tiny_run import tiny_config, when_step

STEPS = 5
FORGED = FORM + "0" * 32


def make_config(directory: Path, model: Path, **more: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {"train": {"steps": STEPS}, "staleness": {"groups_per_step": 3}, "checkpoint": {"keep": 2}}
    return tiny_config(directory, model, **{**tables, "watch": {"identity_every": 0}, **more})


@pytest.fixture(scope="module")
def finished(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 4 and 5 are kept."""
    directory = tmp_path_factory.mktemp("replay")
    return headrace.train(make_config(directory, tiny_llama)).directory


@pytest.mark.slow
def test_leaving_a_rerun_early_ends_its_trainer(finished: Path) -> None:
    children = Family()

    async def first_stage_only() -> ReplayState:
        async with rerun(plan_rerun(finished, 4, 5)) as stages:
            async for stage in stages:
                assert [child.who for child in children.children()] == ["trainer"]
                return stage
        raise AssertionError("there are two steps")

    with family(children):
        stage = asyncio.run(first_stage_only())
    assert stage.step == 1 and not children.children(), "no generator that somebody abandoned holds it"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def replayed(run: Path, first: int, last: int | None = None) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    code = replay.replay(run, first, last, console)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def rewrite(run: Path, change: Any) -> None:
    """The journal with other records, numbered and with the right checksums: no damage, a forgery."""
    records = [change(record) for record in read_journal(run)]
    shutil.rmtree(run / JOURNAL)
    journal = Journal(run)
    for record in records:
        journal.write(record)
    journal.close()


def test_every_step_from_the_beginning_is_bit_for_bit(finished: Path) -> None:
    code, output = replayed(finished, 1, STEPS)
    assert code == 0, output
    assert output.count("bit for bit") == STEPS and f"{STEPS} steps gave the same result" in output
    assert "from the run's beginning" in output


@pytest.mark.slow
def test_with_other_cores_the_trainer_has_the_threads_of_the_run(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, here = machine_mark(())["threads"], available_cores()
    monkeypatch.setattr("headrace.native.arithmetic.usable_cores", lambda: 7)  # the affinity of this process
    monkeypatch.setattr("headrace.processes.launch.local.usable_cores", lambda: 7)
    begun: list[int] = []
    start = rerun_module.trainer_start

    def noted(config: RunConfig, *more: Any) -> Any:
        begun.append(config.train.threads)
        return start(config, *more)

    monkeypatch.setattr(rerun_module, "trainer_start", noted)
    assert machine_mark(())["threads"] == "7" and here
    code, output = replayed(finished, 5)
    assert code == 0 and "bit for bit" in output and "tolerance" not in output, output
    assert begun == [int(threads)]


def test_a_replay_says_what_of_the_machine_differs(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = machine_mark(())["cpu"]
    monkeypatch.setattr("headrace.native.arithmetic.cpu_model", lambda: "Another 3000")
    code, output = replayed(finished, 5)
    assert code == 0 and f"another machine (cpu was {cpu}, here Another 3000): means are compared" in output, output
    assert "GPU" not in output and "threads" not in output


def test_a_step_of_other_kernels_is_compared_by_its_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines call processors with other instruction sets alike, and another version of headrace has other kernels."""
    train = TrainConfig(path="auto")
    here = machine_mark(())
    assert is_exact(train, here) and is_exact(train, {name: here[name] for name in here if name != "kernels"})
    monkeypatch.setenv("HEADRACE_INSTRUCTIONS", "x86-64-v2")
    assert why_inexact(train, here).startswith(f"the run had another machine (kernels was {here['kernels']}, here ")


def test_parts_with_other_cores_are_repeated_each_with_its_own_threads(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was resumed where fewer cores are, with the same settings."""
    marks = {step: {"threads": "2" if step < 4 else "1"} for step in range(1, STEPS + 1)}
    monkeypatch.setattr(rerun_module, "machines_of", lambda run_dir: marks)
    parts = list(rerun_module._by_settings(rerun_module.RerunPlan(finished, None, 1, STEPS)))
    assert [(config.train.threads, end) for config, end in parts] == [(2, 3), (1, STEPS)]


def test_a_forged_advantage_and_a_forged_fingerprint_are_caught_at_their_steps(run: Path) -> None:
    step = next(one for one in read_journal(run) if isinstance(one, SteppedRecord) and one.report.step == 3)

    def forge(record: AnyRecord) -> AnyRecord:
        if isinstance(record, LiveRecord) and record.version == 2:
            return LiveRecord(record.t, 2, FORGED)
        if not isinstance(record, ReadyRecord) or record.group.ticket != step.tickets[0]:
            return record
        row = record.group.rows[0]
        row = msgspec.structs.replace(row, advantages=tuple(value * 1.001 for value in row.advantages))
        group = msgspec.structs.replace(record.group, rows=(row, *record.group.rows[1:]))
        return msgspec.structs.replace(record, group=group)

    rewrite(run, forge)
    code, output = replayed(run, 1, STEPS)
    assert code == 1 and "step 2 is the first whose result differs" in output, output
    assert f"instead of {FORGED}" in output
    verdicts = [
        "DIFFERS" if "DIFFERS" in line else "same"
        for line in output.splitlines()
        if "bit for" in line or "DIFFERS" in line
    ]
    assert verdicts == ["same", "DIFFERS", "same", "DIFFERS", "DIFFERS"], output


def test_another_learning_rate_is_caught_at_the_first_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("learning_rate = 0.01", "learning_rate = 0.011"))
    assert cli.main(["replay", str(run), "--step", "5"]) == 1
    message = " ".join(capsys.readouterr().out.split())
    assert "from the checkpoint of step 4" in message and "step 5 is the first" in message


def test_a_checkpoint_with_other_weights_is_caught_before_any_step(run: Path) -> None:
    rewrite(
        run,
        lambda one: LiveRecord(one.t, one.version, FORGED) if isinstance(one, LiveRecord) and one.version == 4 else one,
    )
    with pytest.raises(CheckpointError, match="step-000004 holds other weights .* than the run served as version 4"):
        replayed(run, 5)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(run: Path) -> None:
    weights = run / "checkpoints/step-000004/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    code, output = replayed(run, 5)
    assert code == 0 and "truncated" in output and "from the run's beginning, after repeating 4 steps" in output


@pytest.mark.slow
def test_a_run_that_was_resumed_with_other_settings_is_replayed_with_those_of_the_time(run: Path) -> None:
    here = [f'out="{run.parent}"', 'name="run"']
    (run / "config.toml").write_text(dump_config(load_config(run / "config.toml", here)))
    headrace.train(load_config(run / "config.toml", ["train.steps=7", "train.learning_rate=0.02"]), resume=run)
    assert (run / "config.until-step-5.toml").exists()
    code, output = replayed(run, 5, 7)
    assert code == 0 and output.count("bit for bit") == 3, output


@pytest.mark.slow
def test_the_trainer_of_that_moment_scores_the_rollouts_again(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens that no swap met were sampled with the very weights that the trainer has before the step."""
    assert cli.main(["inspect", str(finished), "--step", "5", "--rescore", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "computed again" in told["source"] and len(told["rollouts"]) == 12
    gaps = [
        (lag, abs(a - b))
        for one in told["rollouts"]
        for lag, a, b in zip(one["lags"], one["logprobs"], one["trainer"], strict=True)
        if len(one["spans"]) == 1
    ]
    fresh, old = ([gap for lag, gap in gaps if (lag == 0) is want] for want in (True, False))
    assert fresh or old
    assert max(fresh, default=0.0) < 1e-4
    assert not old or max(old) > 1e-4, "older weights are other weights"


def test_settings_of_the_time_are_kept_for_every_step(tmp_path: Path) -> None:
    """Which settings did step s: those of the first file whose number is above s, else the current ones."""

    def settings() -> list[tuple[int, str]]:
        return [(until, path.read_text()) for until, path in configs_until(tmp_path)]

    with RunDirectory.create(tmp_path) as run:
        run.begin("a")
        run.keep_config("a", 3)
        assert settings() == []
        run.keep_config("b", 5)
        run.keep_config("c", 5)  # b did no step
        assert settings() == [(5, "a")]
        run.keep_config("d", 9)
        assert settings() == [(5, "a"), (9, "c")]
        run.keep_config("e", 7)  # resumed from an older checkpoint: what c and d did after step 7 is set aside
        assert settings() == [(5, "a"), (7, "c")] and (tmp_path / "config.toml").read_text() == "e"
        run.keep_config("e", 6)  # a damaged journal: the same settings, from an older checkpoint
        assert settings() == [(5, "a"), (6, "c")]
        run.keep_config("e", 3)
        assert settings() == [(3, "a")]


@pytest.mark.slow
def test_a_run_that_was_killed_is_replayed_over_the_kill(tiny_llama: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, tiny_llama, checkpoint={"every": 4, "keep": 1})
    config["train"]["steps"] = 1000
    (tmp_path / "config.toml").write_text(dump_config(load_config(config)))
    command = [sys.executable, "-m", "headrace", "train", str(tmp_path / "config.toml")]
    run = tmp_path / "runs/tiny"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        when_step(run, 6, process.kill).join()
    done = count_steps(run)
    config["train"]["steps"] = done + 3
    assert headrace.train(config, resume=run).reason == "finished"
    code, output = replayed(run, 1, done + 3)
    assert code == 0 and output.count("bit for bit") == done + 3, output


@pytest.mark.slow
def test_two_synchronous_runs_of_an_exact_engine_do_not_part(tiny_llama: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    more = {
        "staleness": {"groups_per_step": 3, "max_lag": 0},
        "train": {"steps": 3, "learning_rate": 1e-2, "dtype": "float32"},
    }
    config = make_config(tmp_path, tiny_llama, **more)
    config["engine"] |= {"exact": True}
    a, b = (headrace.train({**config, "name": name}).directory for name in ("a", "b"))
    assert diff.report(a, b, console) == 0, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_machine_has_a_mark() -> None:
    here = machine_mark((0, 1))
    assert here["threads"] == "2" and here["torch"] and here["cpu"] and here == machine_mark((4, 5))


def test_elsewhere_means_are_compared_within_a_tolerance_and_counts_exactly() -> None:
    before = TrainReport(4, 5, loss=0.5, grad_norm=1.0, loss_tokens=100)
    nearly = msgspec.structs.replace(before, grad_norm=1.0001)
    assert (
        outcome_of(nearly, before, fingerprint="f", recorded="f", inexact="", tolerance=1e-3).problem
        == "grad_norm 1.0001 instead of 1.0"
    )
    other = outcome_of(nearly, before, fingerprint="f", recorded="another", inexact="a GPU", tolerance=1e-3)
    assert other.problem == "" and other.verdict == "within tolerance"
    far = msgspec.structs.replace(before, loss_tokens=99)
    assert (
        outcome_of(far, before, fingerprint="f", recorded="f", inexact="a GPU", tolerance=1e-3).problem
        == "loss_tokens 99 instead of 100"
    )
    assert (
        outcome_of(before, before, fingerprint="f", recorded="", inexact="", tolerance=1e-3).verdict
        == "report bit for bit, no fingerprint"
    )


def test_what_is_not_there_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 steps, so there is no step 6"):
        replayed(finished, 5, 6)
    with pytest.raises(ConfigError, match="counted from 1"):
        replayed(finished, 3, 2)
    with pytest.raises(ConfigError, match="not the directory of a run"):
        replayed(tmp_path, 1)


def test_reports_are_compared_field_by_field() -> None:
    nan = float("nan")
    before = TrainReport(0, 1, loss=nan, grad_norm=1.0, loss_tokens=100, seconds=1.0)
    later = msgspec.structs.replace(before, noise=Noise(10, 0.04, 2, 0.01))  # which an earlier version did not report
    assert differing(later, before) == [] and differing(before, later) == ["noise"]
    assert differing(msgspec.structs.replace(before, seconds=9.0), before) == []
    lags = (LagStats("0", 3, 1.0, 0.0, 1.0, 0.0, 0.0),)
    other = msgspec.structs.replace(before, grad_norm=1.0000000000000002, lags=lags)
    assert differing(other, before) == ["grad_norm", "lags"] and beyond(other, before, 1e-3) == []
    assert beyond(msgspec.structs.replace(before, grad_norm=1.01, loss_tokens=99), before, 1e-3) == [
        "loss_tokens",
        "grad_norm",
    ]
