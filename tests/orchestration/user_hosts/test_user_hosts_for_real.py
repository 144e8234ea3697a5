"""Runs whose reward functions and environments run in workers elsewhere, for real, over 127.0.0.1."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.facts.facts import GroupEnded, RunEnded, Warned, WorkerJoined, WorkerLost
from support.runs.beside import PATIENCE, Beside, until
from support.runs.offered_workers import free_port, offering, token_file
from support.runs.processes import alive
from support.tiny_run import HOLD, SYNCHRONOUS, at_steps, hold, of, release, tiny_config, until_noted, weights_of

ENV = (
    HOLD
    + '''
import asyncio, os

class Exported:
    """Looks a word up between two turns. The log has a line for each look."""

    def __init__(self, prompt, seed, **columns):
        self.prompt, self.seed, self.looks = prompt, seed, []

    async def step(self, agent, reply):
        if reply is None:
            return self.prompt
        if len(self.looks) == 2:
            return sum(self.looks) / 1e12
        while self.looks and is_held():
            (HERE / "middle").touch()
            await asyncio.sleep(0.02)
        with (HERE / "log").open("a") as log:
            log.write(f"{self.seed} {len(self.looks)}\\n")
        self.looks.append(int.from_bytes(os.urandom(4), "big"))
        return f"{self.looks[-1]}?"

    def export_state(self):
        return {"looks": self.looks}

    def restore(self, state):
        self.looks = state["looks"]
'''
)

SCORER, ENVIRONMENT = ("--offers", "scorer"), ("--offers", "environment")


def scored_elsewhere(directory: Path, model: Path, port: int, scorers: int = 1, **tables: Any) -> dict[str, Any]:
    place = {"scorers": scorers, "listen": f"127.0.0.1:{port}", "token_file": str(token_file(directory))}
    return tiny_config(directory, model, orchestration={**place, **tables.pop("orchestration", {})}, **tables)


def children_of(pid: int, module: str) -> list[int]:
    """The processes of the user's code that a host has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, stat = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == pid and module.encode() in words:
            found.append(int(entry.name))
    return found


REWARD_WORKER, ENVIRONMENT_WORKER = (
    "headrace.episodes.scoring.workers.reward_worker",
    "headrace.episodes.environments.workers.environment_worker",
)


@pytest.mark.slow
def test_a_run_that_is_scored_elsewhere_has_the_weights_of_the_local_run_bit_for_bit(
    tiny_llama: Path, tmp_path: Path
) -> None:
    headrace.train(tiny_config(tmp_path, tiny_llama, **SYNCHRONOUS, name="local"))
    port = free_port()
    config = scored_elsewhere(tmp_path, tiny_llama, port, **SYNCHRONOUS, name="elsewhere")
    with offering(tmp_path, port, *SCORER) as (worker,):
        result = headrace.train(config)
        assert worker.wait(PATIENCE) == 0
        assert worker.stderr and "the run needs this worker no more" in worker.stderr.read()
    run = tmp_path / "runs" / "elsewhere"
    local, there = weights_of(tmp_path / "runs" / "local"), weights_of(run)
    assert result.step == 3 and all(torch.equal(local[name], there[name]) for name in local)
    (seat,) = of(run, WorkerJoined)
    assert (seat.who, seat.pid) == ("scorer host", worker.pid) and not of(run, WorkerLost)
    log = (run / "logs" / "scorer-host.log").read_text()
    assert "headrace: scorer of the run at" in log


@pytest.mark.slow
def test_scorers_that_are_killed_stopped_and_asked_to_end_cost_no_group(tiny_llama: Path, tmp_path: Path) -> None:
    """Each time while calls are in their hands: the run is held, in its reward functions."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = scored_elsewhere(tmp_path, tiny_llama, port, scorers=2, train={"steps": 12})
    with offering(tmp_path, port, *SCORER, count=4) as workers:
        orphans: list[int] = []

        def seated() -> list[int]:
            lost = [death.how for death in of(run, WorkerLost)]
            return [
                worker.pid
                for worker in of(run, WorkerJoined)
                if not any(f"(process {worker.pid})" in how for how in lost)
            ]

        def end(sign: signal.Signals) -> None:
            before = len(of(run, WorkerLost))
            victim = next(pid for pid in seated() if children_of(pid, REWARD_WORKER))
            orphans.extend(children_of(victim, REWARD_WORKER))
            os.kill(victim, sign)
            until_noted(run, WorkerLost, before + 1)
            until_noted(run, WorkerJoined, min(4, 2 + before + 1))

        thread = at_steps(
            config, {1: lambda: end(signal.SIGKILL), 5: lambda: end(signal.SIGTERM), 8: lambda: end(signal.SIGSTOP)}
        )
        result = headrace.train(config)
        thread.join()
        codes = sorted(worker.wait(PATIENCE) for worker in workers if _state(worker) != "T")
        assert codes == [-signal.SIGKILL, 0, 0]
        (stopped,) = [worker for worker in workers if worker.poll() is None]
        stopped.kill()
        stopped.wait()
        until(lambda: not any(map(alive, orphans)))
    assert result.step == 12
    how = [death.how for death in of(run, WorkerLost)]
    assert [("its connection has ended" in one, "asked to end" in one, "it was silent" in one) for one in how] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert not any(fact.failures for fact in of(run, GroupEnded))
    (last,) = of(run, RunEnded)
    assert last.reason == "finished" and last.accounting.balance() == 0 and not last.accounting.failed


def _state(worker: subprocess.Popen[str]) -> str:
    try:
        return Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
def test_what_does_not_fit_the_run_is_turned_away_with_a_sentence(tiny_llama: Path, tmp_path: Path) -> None:
    """A wrong token, an offer that nobody waits for, and other code; then the right worker."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = scored_elsewhere(tmp_path, tiny_llama, port, train={"steps": 2})
    token_file(tmp_path, "another-token-of-many-letters", "wrong")
    said: list[tuple[str, int]] = []
    file = tmp_path / "reward.py"
    right = file.read_text()

    def refused(*more: str) -> tuple[str, int]:
        with offering(tmp_path, port, *more) as (worker,):
            return worker.communicate(timeout=PATIENCE)[1], worker.returncode

    def come() -> None:
        until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))  # the run listens, and has read its files
        said.append(refused(*SCORER, "--token-file", str(tmp_path / "wrong")))
        said.append(refused("--offers", "engine"))
        file.write_text(right.replace('count("e")', 'count("a")'))
        said.append(refused(*SCORER))
        file.unlink()
        said.append(refused(*SCORER))
        file.write_text(right)
        with offering(tmp_path, port, *SCORER) as (worker,):
            said.append(("", worker.wait(PATIENCE)))

    thread = Beside(come)
    result = headrace.train(config)
    thread.join()
    (wrong, engine, other, missing, (_, last)) = said
    assert result.step == 2 and last == 0
    assert wrong[1] == 2 and "its token is not the controller's" in wrong[0]
    assert engine[1] == 2 and 'this run takes no engine from elsewhere (orchestration.kind = "local")' in engine[0]
    assert other[1] == 2 and f"{file} is not the run's: its content differs" in other[0]
    assert missing[1] == 2 and f"the run's file {file} is not on this machine" in missing[0]
    warned = " ".join(warning.message for warning in of(run, Warned))
    assert "its worker does not have the run's files of functions or environments" in warned


@pytest.mark.slow
def test_code_that_changes_on_a_machine_during_the_run_ends_its_worker_and_not_the_run(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Its processes have loaded the right code; one that is started later would not."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = scored_elsewhere(tmp_path, tiny_llama, port, train={"steps": 6})
    file = tmp_path / "reward.py"
    with offering(tmp_path, port, *SCORER) as (first,):

        def change() -> None:
            (worker, *_) = children_of(first.pid, REWARD_WORKER)
            right = file.read_text()
            file.write_text(right.replace('count("e")', 'count("a")'))
            os.kill(worker, signal.SIGKILL)
            until_noted(run, WorkerLost)
            file.write_text(right)

        thread = at_steps(config, {2: change})
        with_second = Beside(lambda: _second(tmp_path, port, run))
        result = headrace.train(config)
        thread.join()
        with_second.join()
        assert first.wait(PATIENCE) == 2
    assert result.step == 6
    assert "the user's code has changed since this worker joined" in (run / "logs" / "scorer-host.log").read_text()
    (last,) = of(run, RunEnded)
    assert last.accounting.balance() == 0


def _second(directory: Path, port: int, run: Path) -> None:
    until_noted(run, WorkerLost)
    with offering(directory, port, *SCORER) as (worker,):
        worker.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_rollouts_of_a_lost_machine_go_on_elsewhere_from_their_last_turn(
    sign: signal.Signals, tiny_llama: Path, tmp_path: Path
) -> None:
    """Episodes export their state. They are held between two looks, and then their machine is lost: the first look is not made again."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    (tmp_path / "env.py").write_text(ENV)
    place = {"environments": 1, "listen": f"127.0.0.1:{port}", "token_file": str(token_file(tmp_path))}
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment={"function": f"{tmp_path / 'env.py'}:Exported", "workers": 1},
        engine={"context_length": 128},
        train={"steps": 4},
        orchestration=place,
    )
    hold(tmp_path, 1)
    with offering(tmp_path, port, *ENVIRONMENT, count=2) as workers:
        looked: list[str] = []

        def lose() -> None:
            until(lambda: (tmp_path / "middle").exists())
            looked.extend((tmp_path / "log").read_text().splitlines())
            os.kill(of(run, WorkerJoined)[0].pid, sign)
            until_noted(run, WorkerLost)
            release(tmp_path, 1)

        thread = Beside(lose)
        result = headrace.train(config)
        thread.join()
        (other,) = [worker for worker in workers if worker.pid != of(run, WorkerJoined)[0].pid]
        assert other.wait(PATIENCE) == 0
    assert result.step == 4
    assert [worker.pid for worker in of(run, WorkerJoined)][1] == other.pid
    assert not any(fact.failures for fact in of(run, GroupEnded))
    (last,) = of(run, RunEnded)
    assert last.reason == "finished" and last.accounting.balance() == 0 and not last.accounting.failed
    assert not any("Exception" in warning.message for warning in of(run, Warned))
    if sign == signal.SIGSTOP:
        return  # its processes are not stopped: they go on for nobody, until their host is killed
    lines = [tuple(line.split()) for line in (tmp_path / "log").read_text().splitlines()]
    before = {tuple(line.split()) for line in looked}
    went_on = {seed for seed, look in lines[len(looked) :] if look == "1" and (seed, "0") in before}
    assert any(lines.count((seed, "0")) == 1 for seed in went_on), "an episode was between its looks"
    twice = {line for line in lines if lines.count(line) > 1 and line[0] != "0"}  # 0: the rehearsal's
    over = {(seed, str(int(look) - 1)) for seed, look in before}
    assert not twice & over, "a step was taken again, though a later one had begun"
