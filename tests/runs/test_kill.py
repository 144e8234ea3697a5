"""C7 with real processes: kill -9 anywhere, again and again, and nothing is lost, trained twice, or otherwise than without.

First the simulated run of `headrace/testing/faultsim/lives.py` in forked children with real files, hundreds of kills; then whole runs of
the tiny model, in which engine, trainer, controller or all of them are killed. `HEADRACE_KILLS=300` sets how many of the latter
the slow test makes.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.commands.replay import replay
from headrace.durable.journal import end_of_journal, read_steps
from headrace.facts.facts import RunEnded
from headrace.facts.records import StepRow, read_metrics
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.checks import RunHistory
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.lives import trial
from headrace.testing.faultsim.oracles import trained_in
from support.few import few
from support.kill_child import FINISHED, live
from support.runs import preloaded_python
from support.tiny_run import tiny_config, workers_of

# --- the simulated run, and its files -----------------------------------------------------------------------------------

KILLED = -signal.SIGKILL


def _until_finished(directory: Path, case: Case, rng: random.Random) -> int:
    """How often it was killed."""
    for number in range(40):
        soon = rng.random() < 0.5
        at = rng.randrange(12) if soon else rng.randrange(25 + 12 * case.steps * case.groups)
        kill = Fault("kill", number, at, rng.random()) if number < 30 else None
        code = live(directory, case, number, kill)
        if code == FINISHED:
            return number
        assert code == KILLED, "its traceback is above"
    raise AssertionError("the run does not end")


@pytest.mark.parametrize("seed", few(range(40), keep=2))
def test_a_process_killed_at_any_write_loses_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    modes: list[Any] = ["inflight", "stream", "abort_resume", "save_resume", "drain", "barrier"]
    case = Case(seed, modes[seed % 6], max_lag=seed // 6 % 3, steps=3 + seed % 3, checkpoint_every=seed % 4)
    kills = _until_finished(tmp_path, case, rng)
    assert kills > 0, "nobody was killed: choose other moments"
    history = RunHistory(case.shape, remembers=False)
    history.trained = trained_in(tmp_path)
    history.finish(tmp_path, case.steps, case.groups)
    history.trained_all(case.seed, case.steps * case.groups)
    if case.synchronous:
        assert history.weights == trial(case).weights
    ended = [fact for fact in read_metrics(tmp_path) if isinstance(fact, RunEnded)][-1]
    assert ended.reason == "finished" and ended.accounting.balance() == 0


# --- the tiny model -----------------------------------------------------------------------------------------------------

CHILD = """
import json, sys, pathlib, headrace
config, directory = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
resume = directory if (directory / "config.toml").exists() else None
headrace.train(config, resume=resume)
"""

STEPS, GROUPS = 5, 3


def _config(
    tmp_path: Path, model: Path, name: str, train: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return tiny_config(
        tmp_path,
        model,
        name=name,
        rollout={"max_tokens": 24},
        train={"steps": STEPS, **(train or {})},
        engine={"exact": True, "max_deaths": 100},
        staleness={"groups_per_step": GROUPS, "max_lag": 0},
        checkpoint={"every": 3},
        **more,
    )


def _start(config: dict[str, Any]) -> subprocess.Popen[str]:
    directory = Path(config["out"]) / config["name"]
    return preloaded_python.Program(
        [sys.executable, "-c", CHILD, json.dumps(config), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _kill(process: subprocess.Popen[str], whom: str) -> None:
    workers = workers_of(process.pid)
    pids = {"controller": [process.pid], "all": [process.pid, *workers.values()]}
    for pid in pids.get(whom, [workers[whom]] if whom in workers else []):
        os.kill(pid, signal.SIGKILL)


def _records(directory: Path) -> int:
    return end_of_journal(directory)


def _killed_until_finished(config: dict[str, Any], kills: list[str], rng: random.Random) -> None:
    """One kill after the other, each some records after the one before; then on to the end."""
    directory = Path(config["out"]) / config["name"]
    process, everywhere = _start(config), 2 * STEPS * GROUPS + 2 * STEPS
    try:
        for place, whom in enumerate(kills):
            after = max(_records(directory), rng.randrange(everywhere * place // len(kills), everywhere))
            deadline = time.monotonic() + 240
            while process.poll() is None and _records(directory) < after and time.monotonic() < deadline:
                time.sleep(0.002)
            if process.poll() is None:
                time.sleep(rng.random() * 0.05)
                _kill(process, whom)
            if whom != "engine" or process.poll() is not None:  # a dead engine is replaced
                process.communicate(timeout=600)
                process = _start(config)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()


def _killed_behind_a_checkpoint(config: dict[str, Any], whom: str) -> None:
    """Kills once, as soon as the checkpoint of step 3 is there, so that what it holds is what the run goes on with."""
    directory = Path(config["out"]) / config["name"]
    process = _start(config)
    try:
        deadline = time.monotonic() + 240
        while not (saved := directory / "checkpoints" / "step-000003").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        _kill(process, whom)
        assert saved.exists() and len(list(read_steps(directory))) < STEPS, "killed too late"
        process.communicate(timeout=600)
    finally:
        process.kill()
        process.communicate()
    _killed_until_finished(config, [], random.Random(0))


def _check(directory: Path, undisturbed: Path) -> None:
    import torch

    ended = [fact for fact in read_metrics(directory) if isinstance(fact, RunEnded)][-1]
    assert ended.reason == "finished" and ended.accounting.balance() == 0 and ended.accounting.in_pipeline == 0
    trained, expected = [list(_prompts(path)) for path in (directory, undisturbed)]
    assert trained == expected, "other prompts, or in another order"
    one, other = (_trained(path / "checkpoints" / f"step-{STEPS:06d}") for path in (directory, undisturbed))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{name} is not bit-identical to the undisturbed run's"


def _trained(checkpoint: Path) -> dict[str, Any]:
    """The weights, those of a critic, a process reward or a reference that moves, and the factors that change from step to step."""
    import torch
    from safetensors.torch import load_file

    (weights,) = checkpoint.glob("*model.safetensors")
    beside = load_file(checkpoint / "optimizer.safetensors")
    kept = json.loads((checkpoint / "trainer.json").read_text())
    return {
        **load_file(weights),
        **{name: beside[name] for name in beside if name.startswith(("critic/", "process/", "reference/"))},
        "factors": torch.tensor([kept["kl"], kept["entropy"][0]], dtype=torch.float64),
    }


def _another(model: Path, directory: Path) -> Path:
    """Returns a model of the same shape and tokens with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(shutil.copytree(model, directory) / "model.safetensors")
    noise = torch.Generator().manual_seed(5)
    noisy = {name: values + 0.05 * torch.randn(values.shape, generator=noise) for name, values in weights.items()}
    save_file(noisy, directory / "model.safetensors", {"format": "pt"})
    return directory


def _prompts(directory: Path) -> list[tuple[int, tuple[str, ...]]]:
    return [(step.step, tuple(group.prompt.id for group in step.groups)) for step in read_steps(directory)]


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = _config(tmp_path_factory.mktemp("undisturbed"), tiny_llama, "whole")
    _killed_until_finished(config, [], random.Random(0))
    return Path(config["out"]) / "whole"


@pytest.mark.whole
def test_killed_anywhere_the_weights_come_out_bit_identical(
    tiny_llama: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, tiny_llama, "killed")
    chance = random.Random(os.getpid())
    _killed_until_finished(config, [chance.choice(("engine", "trainer")), "all"], chance)
    _check(Path(config["out"]) / "killed", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"algo": {"name": "chord"}, "demonstrations": {"rows_per_step": 2}},
        {"algo": {"name": "luffy"}, "demonstrations": {}},
        {"train": {"epochs": 2, "minibatches": 3}},
        {"algo": {"name": "dcpo"}},
        {"algo": {"experience": {"rollouts": 2}}},
        {"algo": {"name": "prime", "process": {"learning_rate": 0.02}}, "lora": {"rank": 4}},
        {"algo": {"name": "ppo", "critic": {"model_learning_rate": 1e-3}}},
        {"algo": {"kl": {"coef": 0.5, "target": 1e-3, "every": 2}}},
        {"algo": {"entropy": {"coef": 0.01, "target": 4.5}}},
        {"algo": {"name": "gkd", "distill": {}}},
    ],
    ids=[
        "demonstrations",
        "compared",
        "updates",
        "memory",
        "experience",
        "process",
        "critic",
        "divergence",
        "entropy",
        "teacher",
    ],
)
def test_so_do_those_of_steps_that_need_more_than_their_groups(
    tiny_llama: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    if "demonstrations" in more:
        path = tmp_path / "answers.jsonl"
        asked = (
            [f"{n} + {n}?" for n in range(200)] if more["algo"]["name"] == "luffy" else [f"{n} + 1" for n in range(7)]
        )
        path.write_text("".join(json.dumps({"prompt": prompt, "answer": "eee"}) + "\n" for prompt in asked))
        more = {**more, "demonstrations": {**more["demonstrations"], "path": str(path)}}
    if critic := more.get("algo", {}).get("critic"):
        more = {"algo": more["algo"] | {"critic": critic | {"model": str(tiny_llama)}}}
    if "distill" in more.get("algo", {}):
        more = {"algo": more["algo"] | {"distill": {"model": str(_another(tiny_llama, tmp_path / "teacher"))}}}
    if "experience" in more.get("algo", {}):  # prompts that come again and again
        rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(6)]
        (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
        more = {**more, "task": {"kind": "jsonl", "path": str(tmp_path / "few.jsonl"), "held_out": 0}}
    for name, kills in (("whole", []), ("killed", ["trainer", "all"])):
        _killed_until_finished(_config(tmp_path, tiny_llama, name, **more), kills, random.Random(7))
    _killed_behind_a_checkpoint(_config(tmp_path, tiny_llama, "restored", **more), "all")
    for name in ("killed", "restored"):
        _check(tmp_path / "runs" / name, tmp_path / "runs" / "whole")
    if "experience" in more.get("algo", {}):
        assert sum(len(group.again) for step in read_steps(tmp_path / "runs" / "killed") for group in step.groups) > 4
    if "lora" in more:
        assert [
            name
            for name in _trained(tmp_path / "runs" / "killed" / "checkpoints" / f"step-{STEPS:06d}")
            if "process/" in name
        ]
    if critic:
        assert "critic/trunk.model.norm.weight" in _trained(
            tmp_path / "runs" / "killed" / "checkpoints" / f"step-{STEPS:06d}"
        )
    if "kl" in more.get("algo", {}):
        found = read_metrics(tmp_path / "runs" / "killed")
        moved = {fact.report.version: fact.report.reference_kl > 0 for fact in found if isinstance(fact, StepRow)}
        assert moved == {1: False, 2: True, 3: False, 4: True, 5: False}, "the reference is the policy of 2 and of 4"
        console = Console(file=io.StringIO(), width=400)
        assert replay.replay(tmp_path / "runs" / "killed", 4, STEPS, console) == 0, (
            "from the checkpoint between two moves"
        )
        assert console.file.getvalue().count("bit for bit") == 2  # type: ignore[attr-defined]
    if "demonstrations" in more:
        assert all(step.demonstrations for step in read_steps(tmp_path / "runs" / "killed"))


@pytest.mark.slow
def test_hundreds_of_kills(tiny_llama: Path, undisturbed: Path, tmp_path: Path) -> None:
    rng, left = (
        random.Random(int(os.environ.get("HEADRACE_SEED", os.getpid()))),
        int(os.environ.get("HEADRACE_KILLS", 200)),
    )
    for number in range(left // 5):
        config = _config(tmp_path, tiny_llama, f"run-{number}")
        _killed_until_finished(config, rng.choices(["engine", "controller", "trainer", "all"], k=5), rng)
        _check(Path(config["out"]) / config["name"], undisturbed)
