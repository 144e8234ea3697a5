"""What outlives the death of the trainer's process: the settings of the call, and a wish to end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from beside import Beside, until
from test_lora_run import config as lora_config  # noqa: F401  (a fixture)
from test_lora_run import loud_llama  # noqa: F401
from tiny_run import Config, of, tiny_config, workers_of

import headrace
from headrace.observe.facts import RunStarted
from headrace.observe.records import StepRow


@pytest.fixture
def config(tmp_path: Path, tiny_llama: Path) -> Config:
    return tiny_config(tmp_path, tiny_llama, train={"steps": 2}, checkpoint={"every": 1})


def kill_the_loading_trainer() -> Beside:
    """Kills it as soon as it is there, which is before it has answered."""

    def watch() -> None:
        until(lambda: "trainer" in workers_of(os.getpid()))
        os.kill(workers_of(os.getpid())["trainer"], signal.SIGKILL)

    return Beside(watch)


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
    both["watch"] = {"trial": False}
    run = headrace.train(both).directory
    killer = kill_the_loading_trainer()
    headrace.train({**both, "train": {"steps": 3, "learning_rate": 1e-3}}, resume=run)
    killer.join()
    assert "death no. 1 of train.max_deaths = 3" in capsys.readouterr().err
    for name in ("a", "b"):
        assert rates(run / name) == pytest.approx([1e-2, 1e-2, 1e-3])
