"""SIGTERM, which machines send some time before they kill: a checkpoint, one line, and an exit code that says that the run can go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_run import NEVER_LOADS, command

import headrace
from headrace.facts.facts import CheckpointSaved, RunEnded
from headrace.run.hosting import TERMINATED, Termination, complete
from support.runs.beside import until
from support.tiny_run import Config, of, tiny_config, when_step, workers_of

LINE = "headrace: SIGTERM: the run ends after this step, with a checkpoint, or without one in "


@pytest.fixture
def config(tmp_path: Path, tiny_llama: Path) -> Config:
    return tiny_config(tmp_path, tiny_llama, train={"steps": 100_000}, checkpoint={"every": 0})


@pytest.fixture
def controller(config: Config, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(**variables: str) -> subprocess.Popen[str]:
        words, both = command(config, tmp_path), subprocess.STDOUT
        environment = {**os.environ, **variables}
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=both, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def job_of(pid: int) -> list[int]:
    """A process and all that it has started, directly or not: those that systemd or Slurm send a signal to."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # gone meanwhile
            continue
    job = [pid]
    for one in job:
        job += [child for child, parent in parents.items() if parent == one]
    return job


@pytest.mark.slow
def test_sigterm_to_all_processes_ends_a_run_with_a_checkpoint(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = Path(config["out"]) / "tiny"
    process = controller()

    def end() -> None:
        job = job_of(process.pid)
        assert {process.pid, *workers_of(process.pid).values()} < set(job), "workers, and what runs the reward"
        for pid in [*job[::-1], process.pid]:  # twice to the controller, as `timeout` does
            os.kill(pid, signal.SIGTERM)

    when_step(directory, 3, end).join()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert output.count(LINE + "25 s (orchestration.grace)\n") == 1 and "ended by SIGTERM" in output, output
    assert "without a checkpoint of its last step" not in output
    (ended,) = of(directory, RunEnded)
    assert ended.reason == "interrupted" and of(directory, CheckpointSaved)[-1].step == ended.step
    assert ended.accounting.balance() == 0 and not sum(ended.accounting.failed.values())
    result = headrace.train(resume=directory, sets=[f"train.steps={ended.step + 2}"])
    assert result.reason == "finished" and result.step == ended.step + 2


@pytest.mark.slow
def test_its_time_is_limited(config: Config, controller: Callable[..., subprocess.Popen[str]]) -> None:
    """The trainer hangs, so there is no checkpoint."""
    directory = Path(config["out"]) / "tiny"
    config["orchestration"] = {"grace": 2.0}
    process = controller()

    def end() -> None:
        os.kill(workers_of(process.pid)["trainer"], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)

    when_step(directory, 3, end).join()
    job = job_of(process.pid)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert "SIGTERM was sent 2 s ago (orchestration.grace): leaving now" in output
    assert f"headrace train --resume {directory} repeats the steps that are in no checkpoint" in output
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in job))
    (ended,) = of(directory, RunEnded)
    assert ended.reason == "interrupted" and not of(directory, CheckpointSaved)
    result = headrace.train(resume=directory, sets=[f"train.steps={ended.step + 1}"])
    assert result.reason == "finished"


@pytest.mark.slow
def test_while_the_model_is_loaded_it_leaves_no_directory(
    config: Config, controller: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NEVER_LOADS)
    process = controller(PYTHONPATH=os.pathsep.join([str(site), *filter(None, sys.path)]))
    until((Path(config["out"]) / "tiny" / "logs" / "engine.log").exists)
    process.terminate()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143 and "nothing was written" in output, output
    assert not Path(config["out"]).exists()


@pytest.mark.slow
def test_in_python_it_ends_the_script_after_the_run(config: Config) -> None:
    before = signal.getsignal(signal.SIGTERM)
    directory = Path(config["out"]) / "tiny"

    def sent(step: headrace.Step) -> None:
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        headrace.train(config, on_step=sent)
    assert ended.value.code == TERMINATED == 143 and signal.getsignal(signal.SIGTERM) == before
    (one,) = of(directory, RunEnded)
    assert one.reason == "interrupted" and of(directory, CheckpointSaved)[-1].step == one.step


# -- where it is handled ----------------------------------------------------------------------------------------------------------


async def end_myself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(600)


def test_it_ends_what_the_loop_does_and_what_is_done_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="143"), Termination():
        complete(end_myself())
    assert capsys.readouterr().err == "headrace: ended by SIGTERM\n"
    with pytest.raises(SystemExit, match="143"), Termination():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


AT_WORK = """
import asyncio, os, signal, time
from headrace.run import hosting
hosting.LEFT_BEHIND = 0.2
async def main():
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
    await asyncio.to_thread(time.sleep, 600)
with hosting.Termination():
    hosting.complete(main())
"""


def test_it_waits_for_no_thread_that_downloads_for_an_hour() -> None:
    done = subprocess.run([sys.executable, "-c", AT_WORK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (143, "headrace: ended by SIGTERM, with a thread still at work\n")


def test_a_handler_of_the_caller_stays() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Termination():
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: heard)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


WORKER = """
import os, signal, subprocess, sys, time
from headrace.processes.health.family import leave_sigterm_to_controller
leave_sigterm_to_controller()
os.kill(os.getpid(), signal.SIGTERM)
forked = os.fork()
if forked == 0:
    time.sleep(600)
started = subprocess.Popen(["sleep", "600"])
time.sleep(0.1)
os.kill(forked, signal.SIGTERM)
started.terminate()
print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), started.wait())
"""


def test_a_worker_outlives_it_and_what_it_starts_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=600)
    assert done.stdout == "-15 -15\n", done.stderr
