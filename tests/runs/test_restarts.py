"""What outlives the death of the trainer's process: the settings of the call, and a wish to end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from test_lora_run import config as lora_config  # noqa: F401  (a fixture)
from test_lora_run import loud_llama  # noqa: F401

import headrace
from headrace.core.errors import WorkerDied
from headrace.facts.facts import RunEnded, RunStarted, Warned
from headrace.facts.records import StepRow
from headrace.processes.process_end import FORGIVEN
from headrace.run.config import load_config
from headrace.run.hosting import Errands, run_loop
from headrace.run.python_inputs import NO_INPUTS
from headrace.run.run import TrainCall
from support.runs.beside import Beside, until
from support.tiny_run import Config, at_steps, of, tiny_config, trained_steps, when_step, workers_of


@pytest.fixture
def config(tmp_path: Path, tiny_llama: Path) -> Config:
    return tiny_config(tmp_path, tiny_llama, train={"steps": 2}, checkpoint={"every": 1})


def kill_the_loading_trainer() -> Beside:
    """Kills it as soon as it is there, which is before it has answered."""

    def watch() -> None:
        until(lambda: "trainer" in workers_of(os.getpid()))
        os.kill(workers_of(os.getpid())["trainer"], signal.SIGKILL)

    return Beside(watch)


def trainer() -> int:
    return workers_of(os.getpid())["trainer"]


def stopped_at_step(run: Path, step: int, wish: Callable[[], object]) -> Beside:
    """Stops the trainer after that step, asks the run to end, and kills the trainer once the run knows of the wish."""

    def act() -> None:
        os.kill(trainer(), signal.SIGSTOP)
        wish()
        until(lambda: any("finishing this step" in warning.message for warning in of(run, Warned)))
        os.kill(trainer(), signal.SIGKILL)

    return when_step(run, step, act)


def rates(run: Path) -> list[float]:
    return [row.report.lr for row in of(run, StepRow)]


# -- the settings of the call -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trainer_that_dies_while_it_loads_comes_back_with_the_settings_of_the_call(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run = headrace.train(config).directory
    killer = kill_the_loading_trainer()
    result = headrace.train(resume=run, sets=["train.learning_rate=1e-3", "train.steps=4"])
    killer.join()
    assert "death no. 1 of train.max_deaths = 3" in capsys.readouterr().err
    assert result.step == 4 and len(of(run, RunStarted)) == 2, "it died before the run had begun"
    assert rates(run) == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])


@pytest.mark.slow
def test_so_does_the_trainer_of_several_adapters(
    lora_config: Config,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = {**lora_config, "adapters": [{"name": "a"}, {"name": "b"}], "train": {"steps": 2, "learning_rate": 1e-2}}
    run = headrace.train(both).directory
    killer = kill_the_loading_trainer()
    headrace.train({**both, "train": {"steps": 3, "learning_rate": 1e-3}}, resume=run)
    killer.join()
    assert "death no. 1 of train.max_deaths = 3" in capsys.readouterr().err
    for name in ("a", "b"):
        assert rates(run / name) == pytest.approx([1e-2, 1e-2, 1e-3])


# -- more than the trainer is gone ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_waits_for_what_went_with_its_trainer(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a node of its cluster: here it is the model's directory. At the start of a run its absence is refused at once."""
    model, away = shutil.copytree(tiny_llama, tmp_path / "model"), tmp_path / "away"
    config = tiny_config(tmp_path, model, train={"steps": 4}, checkpoint={"every": 1})
    heard: list[str] = []

    def said(words: str) -> bool:
        heard.append(capsys.readouterr().err)
        return words in "".join(heard)

    def act() -> None:
        killed = trainer()
        model.rename(away)
        os.kill(killed, signal.SIGKILL)
        until(lambda: said("the run cannot go on yet: "))
        away.rename(model)

    harm = when_step(tmp_path / "runs" / "tiny", 2, act)
    result = headrace.train(config)
    harm.join()
    assert said("model.path") and said("It is tried again every 10 s, for 1800 s (watch.stop_after)")
    assert result.step == 4 and len(of(result.directory, RunStarted)) == 2


# -- a wish to end ----------------------------------------------------------------------------------------------------------------


def assert_left(result: headrace.RunResult, message: str) -> None:
    assert result.reason == "interrupted"
    assert [end.reason for end in of(result.directory, RunEnded)] == ["interrupted"], "it has not trained on"
    assert f"headrace train --resume {result.directory} repeats the steps that are in no checkpoint" in message
    assert "train.max_deaths" not in message


@pytest.mark.slow
def test_a_trainer_that_dies_after_an_interrupt_is_not_started_again(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config |= {"train": {**config["train"], "steps": 100_000}, "checkpoint": {"every": 0}}
    harm = stopped_at_step(Path(config["out"]) / "tiny", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = headrace.train(config)
    harm.join()
    assert_left(result, capsys.readouterr().err)
    done = result.step
    again = headrace.train(resume=result.directory, sets=[f"train.steps={done + 1}"])
    assert again.reason == "finished" and again.step == done + 1


@pytest.mark.slow
def test_nor_is_that_of_several_adapters(
    lora_config: Config,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = {
        **lora_config,
        "adapters": [{"name": "a"}, {"name": "b"}],
        "train": {"steps": 100_000},
        "checkpoint": {"every": 0},
    }
    harm = stopped_at_step(Path(both["out"]) / "tiny" / "a", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = headrace.train(both)
    harm.join()
    assert "repeats the steps that are in no checkpoint" in capsys.readouterr().err
    for adapter in result.adapters.values():
        assert [fact.reason for fact in of(adapter.directory, RunEnded)] == ["interrupted"] == [adapter.reason]


@pytest.mark.slow
def test_nor_after_a_callback_has_asked_to_stop(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config |= {"train": {**config["train"], "steps": 100_000}, "checkpoint": {"every": 0}}
    stopped = threading.Event()
    harm = stopped_at_step(Path(config["out"]) / "tiny", 2, stopped.set)

    def enough(step: headrace.Step) -> None:
        assert stopped.wait(600)
        raise headrace.StopTraining

    result = headrace.train(config, on_step=enough)
    harm.join()
    assert_left(result, capsys.readouterr().err)


@pytest.mark.slow
def test_nor_if_the_callback_asks_only_after_the_death(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config |= {"train": {**config["train"], "steps": 100_000}, "checkpoint": {"every": 0}}
    directory = Path(config["out"]) / "tiny"

    def enough(step: headrace.Step) -> None:
        os.kill(trainer(), signal.SIGKILL)
        until(lambda: of(directory, RunEnded))
        raise headrace.StopTraining

    result = headrace.train(config, on_step=enough)
    assert result.reason == "interrupted" and len(of(directory, RunEnded)) == 1
    assert "repeats the steps that are in no checkpoint" in capsys.readouterr().err


def test_an_interrupt_that_the_ended_loop_cannot_hear_reaches_the_caller() -> None:
    errands: Errands = SimpleQueue()

    async def main(on_signal: Callable[..., None]) -> None:
        errands.put(lambda: (ended.wait(600), os.kill(os.getpid(), signal.SIGINT)))
        raise WorkerDied("trainer", "was killed")

    ended = threading.Event()
    Beside(lambda: (until(lambda: not any(one.name == "headrace-loop" for one in threading.enumerate())), ended.set()))
    with pytest.raises(KeyboardInterrupt):
        run_loop(main, errands)


# -- a trainer that hangs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.waits
def test_a_trainer_that_hangs_is_started_again_and_named_with_what_it_does(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config |= {"train": {**config["train"], "steps": 6}, "watch": {"warn_after": 30, "stop_after": 60}}
    harm = at_steps(config, {2: lambda: os.kill(trainer(), signal.SIGSTOP)})
    result = headrace.train(config)
    harm.join()
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"the trainer process hangs: no answer to \w+ for \d+ s \(trainer, pid \d+: does not answer", message
    ), message
    assert "stopped by a signal" in message and "death no. 1 of train.max_deaths = 3: the run goes on" in message
    assert "admission" not in message.split("the trainer process hangs")[1].split("the run goes on")[0]
    assert result.reason == "finished" and result.step == 6 and list((result.directory / "logs").glob("stacks-*.txt"))
    assert (
        trained_steps(result.directory) >= 6
        and [end.reason for end in of(result.directory, RunEnded)][-1] == "finished"
    )


def a_call(config: Config, **train: Any) -> TrainCall:
    settings = load_config({**config, "train": {**config["train"], **train}})
    resume = Path(config["out"])
    return TrainCall(config=settings, resume=resume, inputs=NO_INPUTS, callbacks=None, measurer=None)


def test_deaths_before_an_hour_of_progress_do_not_count(config: Config) -> None:
    call, killed = a_call(config, max_deaths=1), WorkerDied("trainer", "was killed by SIGKILL")
    for _ in range(5):
        call.worked = FORGIVEN + 1
        assert call.outlives(killed) and call.deaths.counted == 1
    assert not call.outlives(killed), "no progress since the last one"
    assert killed.__notes__ == ["it was its death no. 2 (train.max_deaths allows 1)"]
    assert a_call(config, max_deaths=2).outlives(killed), "more are borne where the setting says so"


def test_progress_lasts_to_the_last_step_and_no_longer(config: Config) -> None:
    """A trainer that hangs at its first step for hours, each time, has made none."""
    call = a_call(config)
    lane: Any = SimpleNamespace(session=SimpleNamespace(worked=5.0, asked=False), storage=SimpleNamespace(begun=False))

    async def main(on_signal: Callable[..., None]) -> None:
        raise WorkerDied("trainer", "hangs")

    with pytest.raises(WorkerDied):
        call.run_loop(main, [lane])
    assert call.worked == 5.0
