"""What outlives the death of the trainer's process: the settings of the call, and a wish to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
from beside import Beside, until
from test_lora_run import config as lora_config  # noqa: F401  (a fixture)
from test_lora_run import loud_llama  # noqa: F401
from tiny_run import Config, of, tiny_config, when_step, workers_of

import headrace
from headrace.errors import WorkerDied
from headrace.observe.facts import RunEnded, RunStarted, Warned
from headrace.observe.records import StepRow
from headrace.orchestration.runs.hosting import Errands, host


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
        until(lambda: any("finishing this step" in one.message for one in of(run, Warned)))
        os.kill(trainer(), signal.SIGKILL)

    return when_step(run, step, act)


def rates(run: Path) -> list[float]:
    return [row.report.lr for row in of(run, StepRow)]


# -- the settings of the call -----------------------------------------------------------------------------------------------------


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


# -- a wish to end ----------------------------------------------------------------------------------------------------------------


def assert_left(result: headrace.RunResult, said: str) -> None:
    assert result.reason == "interrupted"
    assert [one.reason for one in of(result.directory, RunEnded)] == ["interrupted"], "it has not trained on"
    assert f"headrace train --resume {result.directory} repeats the steps that are in no checkpoint" in said
    assert "train.max_deaths" not in said


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
    for one in result.adapters.values():
        assert [fact.reason for fact in of(one.directory, RunEnded)] == ["interrupted"] == [one.reason]


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
        host(main, errands)
