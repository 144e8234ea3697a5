"""Whole runs with real processes on a tiny model: what a user does, and what can happen to them meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import headrace
from headrace import cli
from headrace.core.errors import (
    CheckpointError,
    ConfigError,
    HeadraceError,
    RunPaused,
    StalledError,
    WorkerDied,
)
from headrace.durable.journal import read_steps
from headrace.facts.facts import (
    CheckpointSaved,
    Evaluated,
    GroupEnded,
    IdentityChecked,
    RunEnded,
    Waited,
    Warned,
    WorkerLost,
)
from headrace.facts.records import StepRow
from headrace.loop.checkpoints import load_controller
from headrace.loop.evaluation import ROUNDING
from headrace.loop.turns import LAST_WORD
from headrace.run.config import dump_config, load_config
from support.runs import preloaded_python
from support.runs.beside import until
from support.runs.processes import gone
from support.tiny_run import Config, at_steps, of, tiny_config, trained_steps, until_noted, when_step, workers_of


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> Config:
    return tiny_config(tmp_path, tiny_llama, eval={"prompts": 8, "samples": 2}, watch={"identity_every": 1})


def assert_complete(directory: Path, steps: int, groups: int = 4) -> None:
    """C2 and C7 as a reader of the run's files can check them."""
    ended = of(directory, RunEnded)[-1]
    assert ended.reason == "finished" and ended.step == steps
    assert ended.accounting.balance() == 0 and ended.accounting.in_pipeline == 0
    assert ended.accounting.trained == steps * groups
    journal = list(read_steps(directory))
    assert [entry.step for entry in journal] == list(range(steps))
    prompts = [group.prompt.id for entry in journal for group in entry.groups]
    assert len(prompts) == len(set(prompts)), "a prompt was trained twice"
    assert max(lag for row in of(directory, StepRow) for lag in row.lags) <= 1


def newest_step(directory: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in (directory / "checkpoints").glob("step-*"))


@pytest.mark.whole
def test_a_run_from_python_with_a_plain_function_learns(config: Config, tmp_path: Path) -> None:
    seen: list[str] = []

    def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        seen.extend(answer)
        return [text.count("e") / 8 for text in completions]

    config["train"]["steps"] = 25
    del config["reward"]
    result = headrace.train(config, reward=reward)
    assert result.reason == "finished" and result.step == 25
    assert result.before is not None and result.after is not None
    assert result.after.reward_mean > 2 * result.before.reward_mean + 0.1, "it did not learn to say e"
    assert seen and all(int(answer) % 2 == 0 for answer in seen), "the row's other columns reach the function"
    assert_complete(result.directory, 25)
    checks = of(result.directory, IdentityChecked)
    assert len(checks) == 26 and all(check.ok for check in checks)
    html = result.report.read_text()
    assert "<svg" in html and "http://" not in html.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_eval_and_export_use_the_trained_weights(config: Config, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config["train"]["steps"] = 25
    result = headrace.train(config)
    measured = headrace.evaluate(config, run=result.directory)
    assert result.after is not None
    assert measured.reward_mean == pytest.approx(result.after.reward_mean, abs=0.15)
    untrained = headrace.evaluate(config)
    assert measured.reward_mean > 2 * untrained.reward_mean
    headrace.export(result.directory, tmp_path / "exported", "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 + 3?"}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    logits = model(tokens).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == "e"
    with pytest.raises(ConfigError, match="new or empty"):
        headrace.export(result.directory, tmp_path / "exported")


@pytest.mark.slow
def test_a_run_whose_last_weights_are_not_on_the_disk_is_nowhere_called_finished(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory that the last checkpoint is written into cannot be made: a file has its name."""
    directory, toml = Path(config["out"]) / "tiny", tmp_path / "config.toml"
    config["checkpoint"] = {"every": 4, "patience": 1.0}
    obstacle = directory / "checkpoints" / ".writing-step-000006"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("")
    toml.write_text(headrace_toml(config))
    assert cli.main(["train", str(toml)]) == 1
    output = capsys.readouterr()
    assert "all 6 steps are done, but the run is not finished" in output.err and "--resume" in output.err
    assert "finished at step" not in output.out and "stopped at step 6 of 6" in output.out
    assert "Resume with" in output.out and "--step 4" in output.out
    assert any("free disk space" in warning.message for warning in of(directory, Warned))
    assert cli.main(["status", str(directory)]) == 1 and "✗ all 6 steps are done" in capsys.readouterr().out
    assert "not finished" in (directory / "report.html").read_text()
    for refused in (["export", str(directory), "--to", str(tmp_path / "out")], ["eval", str(directory)]):
        assert cli.main(refused) == 2
        output = capsys.readouterr()
        assert "of step 4, and the run has done 6 steps" in output.err and "--step 4" in output.err
    assert not (tmp_path / "out").exists()
    assert headrace.export(directory, tmp_path / "older", step=4).name == "step-000004"
    assert cli.main(["eval", str(directory), "--step", "4"]) == 0
    assert f"step 4 of {directory}: reward" in capsys.readouterr().out
    obstacle.unlink()
    assert cli.main(["train", "--resume", str(directory)]) == 0
    assert headrace.export(directory, tmp_path / "out").name == "step-000006"
    assert_complete(directory, 6)


def kill_the_engine(run: Path, noted: int) -> None:
    """Returns when the run has noted so many deaths."""
    os.kill(workers_of(os.getpid())["engine"], signal.SIGKILL)
    until_noted(run, WorkerLost, noted)


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_nothing_is_lost(config: Config) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 10
    killer = at_steps(config, {2: lambda: kill_the_engine(directory, 1), 6: lambda: kill_the_engine(directory, 2)})
    result = headrace.train(config)
    killer.join()
    lost = of(directory, WorkerLost)
    assert [fact.deaths for fact in lost] == [1, 2] and all("SIGKILL" in fact.how for fact in lost)
    assert result.reason == "finished"
    assert_complete(directory, 10)


@pytest.mark.slow
def test_an_engine_that_keeps_dying_stops_the_run_with_a_checkpoint(config: Config) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 500
    config["engine"]["max_deaths"] = 1
    killer = at_steps(config, {3: lambda: kill_the_engine(directory, 1), 8: lambda: kill_the_engine(directory, 1)})
    with pytest.raises(WorkerDied, match=r"death no. 2 \(engine.max_deaths allows 1\)") as caught:
        headrace.train(config)
    killer.join()
    assert any("--resume" in note for note in caught.value.__notes__)
    last = of(directory, RunEnded)[-1]
    assert of(directory, CheckpointSaved)[-1].step == last.step
    assert last.accounting.balance() == 0 and last.accounting.in_pipeline == 0
    assert not workers_of(os.getpid()), "no process is left behind"


@pytest.mark.slow
def test_a_killed_trainer_stops_the_run_and_resume_finishes_it(config: Config) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"] |= {"steps": 10, "max_deaths": 0}
    killer = at_steps(config, {5: lambda: os.kill(workers_of(os.getpid())["trainer"], signal.SIGKILL)})
    with pytest.raises(WorkerDied, match="trainer process was killed by SIGKILL") as caught:
        headrace.train(config)
    killer.join()
    assert any(f"--resume {directory}" in note for note in caught.value.__notes__)
    result = headrace.train(config, resume=directory)
    assert result.reason == "finished"
    assert_complete(directory, 10)


@pytest.mark.slow
@pytest.mark.waits
def test_an_engine_that_hangs_stops_the_run_with_a_sentence(config: Config) -> None:
    directory = Path(config["out"]) / "tiny"
    headrace.train(config)  # imports what workers are forked with: to wait for that takes longer than what follows
    config["train"]["steps"] = 5000
    config["watch"] = {"warn_after": 5.0, "stop_after": 10.0}
    hang = when_step(directory, 8, lambda: os.kill(workers_of(os.getpid())["engine"], signal.SIGSTOP))
    with pytest.raises(StalledError, match=r"has waited \d+ s for .*engine"):
        headrace.train(config, resume=directory)
    hang.join()
    messages = [fact.message for fact in of(directory, Warned)]
    assert any("has waited" in one for one in messages), "it was said before it was acted on"
    assert not any("last word" in one for one in messages), "nobody waits for it again"
    assert not workers_of(os.getpid())


def command(config: Config, tmp_path: Path, *more: str) -> list[str]:
    toml = tmp_path / "config.toml"
    toml.write_text(headrace_toml(config))
    return [sys.executable, "-m", "headrace", "train", str(toml), *more]


def headrace_toml(config: Config) -> str:
    from headrace.run.config import dump_config, load_config

    return dump_config(load_config(config))


@pytest.fixture
def controller(config: Config, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*more: str, **variables: str) -> subprocess.Popen[str]:
        begin = (
            subprocess.Popen if variables else preloaded_python.Program
        )  # its libraries read variables at their start
        process = begin(
            command(config, tmp_path, *more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.mark.whole
def test_kill_9_of_the_controller_leaves_no_orphan_and_resume_loses_nothing(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000
    process = controller()
    rng = random.Random(os.getpid())
    pids: list[int] = []

    def kill() -> None:
        time.sleep(rng.random())
        pids.extend(workers_of(process.pid).values())
        os.kill(rng.choice(pids), signal.SIGSTOP)  # a stopped one does not read that its controller is gone
        process.kill()

    when_step(directory, 4, kill).join()
    assert process.wait(60) == -signal.SIGKILL and len(pids) == 2
    assert all(map(gone, pids))  # no worker outlives its controller
    steps = config["train"]["steps"] = newest_step(directory) + 5
    result = headrace.train(config, resume=directory)
    assert result.reason == "finished"
    assert_complete(directory, steps)


@pytest.mark.slow
def test_ctrl_c_once_leaves_cleanly_with_a_checkpoint(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000
    config["checkpoint"]["every"] = 0
    process = controller()
    when_step(directory, 3, lambda: process.send_signal(signal.SIGINT)).join()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 130, output
    ended = of(directory, RunEnded)[-1]
    assert ended.reason == "interrupted"
    assert of(directory, CheckpointSaved)[-1].step == ended.step
    assert ended.accounting.balance() == 0 and ended.accounting.in_pipeline == 0
    config["train"]["steps"] = ended.step + 3
    with pytest.raises(ConfigError, match="groups_per_step was 4, not 5"):
        headrace.train({**config, "staleness": {"groups_per_step": 5}}, resume=directory)
    result = headrace.train(config, resume=directory)
    assert "steps = 5000" in (directory / f"config.until-step-{ended.step}.toml").read_text()
    assert result.reason == "finished"
    assert_complete(directory, ended.step + 3)


def ready(run: Path) -> int:
    """Groups that were ready to be trained, whatever became of them."""
    return sum(fact.outcome == "ready" for fact in of(run, GroupEnded))


@pytest.mark.slow
def test_a_resume_with_another_algorithm_does_not_train_what_the_first_one_scored(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000
    config["staleness"]["max_lag"] = 2
    process = controller()

    def interrupt_while_groups_wait() -> None:
        """The trainer is stopped until four groups wait, besides those of its step."""
        trainer = workers_of(process.pid)["trainer"]
        os.kill(trainer, signal.SIGSTOP)
        until(lambda: ready(directory) >= 4 * trained_steps(directory) + 8)
        process.send_signal(signal.SIGINT)
        os.kill(trainer, signal.SIGCONT)

    when_step(directory, 3, interrupt_while_groups_wait).join()
    process.communicate(timeout=600)
    step = of(directory, RunEnded)[-1].step
    waiting = load_controller(directory / "checkpoints" / f"step-{step:06d}").buffer.ready
    assert waiting, "no group waited"
    config["train"]["steps"] = step + 2
    with pytest.raises(ConfigError, match=r"admitted with staleness.max_lag = 2.*raise max_lag"):
        headrace.train({**config, "staleness": {"groups_per_step": 4, "max_lag": 0}}, resume=directory)
    headrace.train({**config, "algo": {"name": "dr_grpo"}}, resume=directory)
    ended = of(directory, RunEnded)[-1]
    assert ended.accounting.dropped["settings_changed"] == len(waiting) and ended.accounting.balance() == 0
    assert any("finished groups of the checkpoint are dropped" in warning.message for warning in of(directory, Warned))
    trained = {group.ticket for one in read_steps(directory) if one.step >= step for group in one.groups}
    assert trained and not trained & {group.ticket for group in waiting}


@pytest.mark.slow
def test_an_exact_engine_beside_a_trainer_in_bfloat16_agrees_to_bfloat16(config: Config) -> None:
    config["train"] |= {"steps": 2, "dtype": "bfloat16"}
    checks = of(headrace.train(config).directory, IdentityChecked)
    assert [check.version for check in checks] == [0, 1, 2] and checks[0].tolerance == ROUNDING["bfloat16"].most
    assert all(ROUNDING["bfloat16"].least <= check.tolerance < ROUNDING["bfloat16"].most for check in checks[1:]), (
        "what the floor allows"
    )


@pytest.mark.slow
@pytest.mark.waits
def test_ctrl_c_once_is_enough_though_the_engine_is_stopped(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    """It holds up the drain, and answers nobody."""
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000
    config["checkpoint"]["every"] = 0
    config["partial"] = {"mode": "drain"}
    process = controller()

    def stop_and_interrupt() -> None:
        os.kill(workers_of(process.pid)["engine"], signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)

    when_step(directory, 3, stop_and_interrupt).join()
    pids = list(workers_of(process.pid).values())
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 130, output
    ended = of(directory, RunEnded)[-1]
    assert ended.reason == "interrupted" and newest_step(directory) == ended.step
    assert ended.accounting.balance() == 0 and ended.accounting.in_pipeline == 0
    (last,) = [fact for fact in of(directory, Waited) if fact.what == "the engine's last word"]
    assert last.seconds < LAST_WORD, "whoever pressed Ctrl-C waits"
    assert all(map(gone, pids))


@pytest.mark.slow
def test_a_run_whose_directory_is_deleted_stops_with_a_sentence(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000

    def delete() -> None:  # all at once: else it may still say how to go on from a checkpoint that is not deleted yet
        while directory.exists():
            with suppress(FileNotFoundError):
                directory.rename(directory.with_name("deleted"))
                shutil.rmtree(directory.with_name("deleted"), ignore_errors=True)

    process = controller()
    when_step(directory, 2, delete).join()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    assert ".segment was deleted, moved or replaced while it was written to" in output
    assert "--to DIR" not in output and not directory.exists()


@pytest.mark.slow
def test_ctrl_c_twice_leaves_now(config: Config, controller: Callable[..., subprocess.Popen[str]]) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000
    process = controller()

    def twice() -> None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)

    when_step(directory, 3, twice).join()
    pids = list(workers_of(process.pid).values())
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 130, output
    assert all(map(gone, pids))


NEVER_LOADS = """
import os, sys, time
parent = os.getppid()
while "headrace.run.worker.fork_server" in sys.orig_argv and os.getppid() == parent:
    time.sleep(0.05)
"""
"""A `sitecustomize.py` with which workers are never ready: the process that they are forked from does not begin with its imports."""


@pytest.mark.slow
def test_ctrl_c_while_the_model_is_loaded_leaves_no_directory(
    config: Config, controller: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    directory, site = Path(config["out"]) / "tiny", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NEVER_LOADS)
    process = controller(PYTHONPATH=os.pathsep.join([str(site), *filter(None, sys.path)]))
    until((directory / "logs" / "engine.log").exists)
    assert not (directory / "config.toml").exists(), "it does not look like a run yet"
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 130 and "nothing was written" in output, output
    assert not Path(config["out"]).exists()


def test_two_runs_in_one_directory_are_refused(
    config: Config, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = Path(config["out"]) / "tiny"
    config["train"]["steps"] = 5000
    process = controller()
    when_step(directory, 1, lambda: None).join()
    with pytest.raises(ConfigError, match="another process is training"):
        headrace.train(config, resume=directory)
    pids = list(workers_of(process.pid).values())
    process.kill()
    process.wait()
    assert all(map(gone, pids))
    with pytest.raises(ConfigError, match="already holds a run"):
        headrace.train(config)


@pytest.mark.slow
def test_resume_uses_an_older_checkpoint_when_the_newest_is_truncated(config: Config) -> None:
    config["train"]["steps"] = 6
    result = headrace.train(config)
    newest, older = (result.directory / "checkpoints" / f"step-{step:06d}" for step in (6, 4))
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    again = headrace.train(config, resume=result.directory)
    assert again.reason == "finished"
    assert_complete(result.directory, 6)
    (older / "files.json").unlink()
    for path in (result.directory / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="model.safetensors has 0 bytes"):
        headrace.train(config, resume=result.directory)


def test_a_reward_that_always_raises_stops_the_run_by_name(config: Config, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def share_of_e(completions, answer, **columns):\n"
        "    if completions != answer:  # which is what the rehearsal gives it\n"
        "        raise KeyError('no such column')\n"
        "    return [1.0] * len(completions)\n"
    )
    config["eval"]["prompts"] = 0
    with pytest.raises(RunPaused, match="reward_raised.*no such column"):
        headrace.train(config)


HALF = """
TABLE = {str(number): number for number in range(0, 400, 4)}

def share_of_e(completions, answer, **columns):
    if completions == answer:  # which is what the rehearsal gives it
        return [1.0] * len(completions)
    return [looked_up(right) + text.count("e") / 8 for text, right in zip(completions, answer)]

def looked_up(right):
    return 0 * TABLE[right]  # every other prompt is missing
"""


@pytest.mark.slow
def test_a_reward_that_fails_on_half_of_the_prompts_pauses_the_run_which_goes_on_when_it_is_mended(
    config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = (tmp_path / "reward.py").read_text()
    (tmp_path / "reward.py").write_text(HALF)
    config["observe"]["terminal"] = "plain"
    config["train"]["steps"] = 40
    (tmp_path / "mine.toml").write_text(dump_config(load_config(config)))
    directory = Path(config["out"]) / "tiny"

    assert cli.main(["train", str(tmp_path / "mine.toml"), "--name", "tiny"]) == cli.PAUSED == 4
    out, err = capfd.readouterr()
    assert len(of(directory, StepRow)) <= 2
    for said in (out, err):
        assert "in looked_up" in said and "return 0 * TABLE[right]" in said and "KeyError: '" in said, said
    assert "headrace: paused: " in err and "rollouts failed" in err and f"headrace train --resume {directory}" in err
    assert "FAILED reward_raised (the first, of a held-out prompt" in out
    before = of(directory, Evaluated)[0]
    assert before.asked == 8 and 0 < before.failed_prompts == 8 - before.prompts
    assert f"{before.prompts} of 8 prompts, {before.failed_prompts} failed: KeyError" in out
    assert cli.main(["status", str(directory)]) == 1
    assert "paused: " in capfd.readouterr().out
    ended = of(directory, RunEnded)[-1]
    assert ended.accounting.balance() == 0 and ended.accounting.in_pipeline == 0 and ended.accounting.failed
    page = (directory / "report.html").read_text()
    assert "KeyError" in page and "return 0 * TABLE[right]" in page

    (tmp_path / "reward.py").write_text(whole)
    assert cli.main(["train", "--resume", str(directory), "--set", f"train.steps={ended.step + 2}"]) == 0
    assert of(directory, RunEnded)[-1].reason == "finished"
    assert len(list(read_steps(directory))) == ended.step + 2


@pytest.mark.slow
def test_lag_without_a_trust_region_is_warned_of_at_the_start(config: Config) -> None:
    config["train"]["steps"] = 1
    config["eval"]["prompts"] = 0
    config["algo"] = {"loss": "ce"}
    result = headrace.train(config)
    assert result.reason == "finished", "warned of, not refused"
    messages = [warning.message for warning in of(result.directory, Warned)]
    assert any("staleness.max_lag = 1" in one and "2 of 128" in one for one in messages), messages


@pytest.mark.slow
def test_bad_input_is_refused_before_a_process_is_started(config: Config, tmp_path: Path) -> None:
    config["reward"]["function"] = str(tmp_path / "reward.py") + ":missing"
    with pytest.raises(ConfigError, match="missing"):
        headrace.train(config)
    assert not (Path(config["out"]) / "tiny").exists(), "worker processes have their logs there"
    config["reward"]["function"] = str(tmp_path / "reward.py") + ":share_of_e"
    config["train"]["steps"] = 1
    assert headrace.train(config).reason == "finished", "the mistake mended, the same name works"


def test_a_model_that_cannot_be_loaded_is_a_sentence_and_not_a_traceback(
    config: Config, tiny_llama: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    config["model"]["path"] = str(broken)
    with pytest.raises(HeadraceError, match="broken"):
        headrace.train(config)
