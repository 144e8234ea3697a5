"""Whole runs of a tiny model with rollout hosts in processes of their own: over files and over Redis, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.core.errors import ConfigError
from headrace.durable.journal import SteppedRecord, read_only
from headrace.facts.facts import Evaluated, GroupEnded, RunEnded, Warned, WeightsLive, Withdrawn, WorkerJoined
from headrace.run.starting import SILENT_BUS
from support import fake_servers
from support.bus.redis_server import a_redis_server
from support.runs import preloaded_python
from support.runs.beside import PATIENCE, until
from support.server_processes import servers
from support.tiny_run import (
    SYNCHRONOUS,
    at_steps,
    held_reward,
    kill_when,
    of,
    release,
    tiny_config,
    trained_steps,
    weights_of,
    workers_of,
)


@contextmanager
def hosts(bus: str, count: int, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Rollout hosts, as a person would start them."""
    words = [sys.executable, "-m", "headrace", "rollouts", "--bus", bus, "--set", "engine.threads=1", *more]
    started = [
        preloaded_python.Program(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for _ in range(count)
    ]
    try:
        yield started
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
            one.communicate()


def on_bus(directory: Path, model: Path, bus: str, **tables: Any) -> dict[str, Any]:
    return tiny_config(directory, model, orchestration={"bus": bus}, **tables)


def tickets_of(run: Path) -> list[int]:
    return [ticket for step in read_only(run, SteppedRecord) for ticket in step.tickets]


def finished(run: Path, steps: int, groups: int = 4) -> None:
    (ended,) = of(run, RunEnded)[-1:]
    assert ended.reason == "finished" and ended.step == steps
    assert ended.accounting.balance() == 0 and ended.accounting.trained == steps * groups
    tickets = tickets_of(run)
    assert len(tickets) == len(set(tickets)) == steps * groups, "each ticket is trained at most once"


def warned(run: Path) -> list[str]:
    return [fact.message for fact in of(run, Warned)]


def measured(run: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    found = {(one.phase, one.name): (one.prompts, one.reward_mean, one.looks) for one in of(run, Evaluated)}
    assert {name for _, name in found} == {"", "once", "letters"} and len(found) == 6
    return found


@pytest.mark.whole
def test_a_run_over_files_has_the_weights_of_the_local_run_bit_for_bit(tiny_llama: Path, tmp_path: Path) -> None:
    """So are its measurements. One set has the held-out prompts, another prompts, a reward and a system message of its own."""
    bus, rewards = f"jsonl:{tmp_path / 'bus'}", tmp_path / "rewards.py"
    rewards.write_text(
        "def letters(completions, **columns):\n    return [text.count('o') / 9 for text in completions]\n"
    )
    (tmp_path / "hard.jsonl").write_text('{"prompt": "a?"}\n{"prompt": "b?"}\n{"prompt": "c?"}\n')
    letters = {
        "task": {"path": str(tmp_path / "hard.jsonl"), "system": "go"},
        "reward": {"function": f"{rewards}:letters"},
    }
    sets = [{"name": "once", "samples": 1}, {"name": "letters", "prompts": 3, **letters}]
    tables = {**SYNCHRONOUS, "eval": {"prompts": 4, "samples": 2, "sets": sets}}
    headrace.train(tiny_config(tmp_path, tiny_llama, **tables, name="local"))
    config = on_bus(tmp_path, tiny_llama, bus, **tables, name="bus")
    with hosts(bus, 1) as (host,):
        result = headrace.train(config)
        output = host.communicate(timeout=PATIENCE)[1]
        assert (host.returncode, "the run is over" in output) == (0, True), output
    assert result.step == 3 and result.before and result.after and not result.after.failures
    run = tmp_path / "runs" / "bus"
    finished(run, 3, groups=2)
    (joined,) = of(run, WorkerJoined)
    assert joined.who.startswith("rollout host ") and joined.pid == host.pid
    assert measured(run) == measured(tmp_path / "runs" / "local")
    local, other = weights_of(tmp_path / "runs" / "local"), weights_of(run)
    assert local.keys() == other.keys() and all(torch.equal(local[name], other[name]) for name in local)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "redis"])
def test_a_host_that_is_killed_with_groups_in_hand_costs_no_ticket(tiny_llama: Path, tmp_path: Path, kind: str) -> None:
    """And the other one drains at SIGTERM, so that a third has to do the rest."""
    with a_redis_server(tmp_path) if kind == "redis" else nullcontext() as server:
        bus = server.url if server else f"jsonl:{tmp_path / 'bus'}"
        run = tmp_path / "runs" / "tiny"
        config = on_bus(tmp_path, tiny_llama, bus, train={"steps": 12}, rollout={"max_tokens": 24})
        with hosts(bus, 2) as (killed, drained), hosts(bus, 0) as later:

            def kill() -> None:
                killed.kill()
                until(lambda: any("is lost: it was silent" in message for message in warned(run)))

            def drain() -> None:
                later.append(subprocess.Popen([*drained.args, "--groups", "8"], text=True, stderr=subprocess.PIPE))  # type: ignore[misc]
                drained.terminate()

            thread = at_steps(config, {3: kill, 6: drain})
            result = headrace.train(config)
            thread.join()
            output = drained.communicate(timeout=PATIENCE)[1]
            assert drained.returncode == 0 and "SIGTERM: taking no more" in output
            assert later[0].wait(PATIENCE) == 0
        assert result.step == 12
        finished(run, 12)
        assert any("has left" in message for message in warned(run))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["headrace", "vllm", "sglang"])
def test_hosts_with_a_server_each_go_on_when_a_host_and_a_server_are_killed(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """Each host starts its own, which fetches every version from the trainer, or reads what its host has fetched. The server of a host that is killed
    ends with it."""
    bus, run = f"jsonl:{tmp_path / 'bus'}", tmp_path / "runs" / "tiny"
    engine: dict[str, Any] = {"kind": kind, "dtype": "float32", "context_length": 64}
    if kind != "headrace":
        python = fake_servers.interpreter(tmp_path)
        subprocess.run([python, "-m", "pip", "install", str(Path(headrace.__file__).parents[1])], check=True)
        engine |= {"python": str(python)}
    config = on_bus(tmp_path, tiny_llama, bus, train={"steps": 8}) | {"engine": engine}
    with hosts(bus, 2) as (killed, loses):

        def kill() -> None:
            os.kill(next(iter(servers(loses.pid).values()))[0], signal.SIGKILL)
            killed.kill()
            until(lambda: not servers(killed.pid))

        thread = at_steps(config, {2: kill})
        result = headrace.train(config)
        thread.join()
        output = loses.communicate(timeout=PATIENCE)[1]
    assert result.step == 8 and "it is started again" in output, output
    finished(run, 8)
    assert {update.where.get("port") for update in (live.update for live in of(run, WeightsLive))} != {None}, "over TCP"


@pytest.mark.slow
def test_a_run_whose_trainer_is_killed_goes_on_with_the_hosts_that_it_has(tiny_llama: Path, tmp_path: Path) -> None:
    bus, run = f"jsonl:{tmp_path / 'bus'}", tmp_path / "runs" / "tiny"
    config = on_bus(tmp_path, tiny_llama, bus, train={"steps": 6, "max_deaths": 1})
    with hosts(bus, 1) as (host,):
        thread = at_steps(config, {3: lambda: os.kill(workers_of(os.getpid())["trainer"], signal.SIGKILL)})
        result = headrace.train(config)
        thread.join()
        output = host.communicate(timeout=PATIENCE)[1]
    assert result.step == 6 and "the trainer has died: waiting for the run to go on" in output, output
    assert host.returncode == 0 and "the run is over" in output
    finished(run, 6)


POISON = """
import os, signal
from pathlib import Path

SEEN, POISON = Path(__file__).with_name("seen"), Path(__file__).with_name("poison")

def kills_its_host(prompts, completions, **columns):
    seen = SEEN.read_text().splitlines() if SEEN.exists() else []
    if not POISON.exists() and len(seen) >= 5 and prompts[0] not in seen:
        POISON.write_text(prompts[0])
    if POISON.exists() and POISON.read_text() == prompts[0]:
        os.kill(os.getppid(), signal.SIGKILL)
    SEEN.write_text("\\n".join({*seen, prompts[0]}))
    return [text.count("e") / max(len(text), 1) for text in completions]
"""


@pytest.mark.slow
def test_a_ticket_that_ends_every_host_is_given_up_and_the_run_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    """A reward function kills the host that called it, at one prompt. Whoever watches the host starts it again."""
    bus, run = f"jsonl:{tmp_path / 'bus'}", tmp_path / "runs" / "tiny"
    (tmp_path / "poison.py").write_text(POISON)
    config = on_bus(
        tmp_path, tiny_llama, bus, train={"steps": 6}, reward={"function": f"{tmp_path / 'poison.py'}:kills_its_host"}
    )
    codes: list[int] = []

    def supervise() -> None:
        while True:
            with hosts(bus, 1) as (one,):
                codes.append(one.wait(PATIENCE))
            if codes[-1] != -signal.SIGKILL:
                return

    thread = threading.Thread(target=supervise)
    thread.start()
    result = headrace.train(config)
    thread.join()
    assert result.step == 6 and codes == [-signal.SIGKILL] * 3 + [0]
    finished(run, 6)
    (failed,) = [group for group in of(run, GroupEnded) if group.outcome == "failed"]
    assert failed.reason == "engine_died" and failed.failures == {"engine_died": 4}


@pytest.mark.slow
def test_redis_is_killed_in_the_middle_of_a_run_and_started_again(tiny_llama: Path, tmp_path: Path) -> None:
    with a_redis_server(tmp_path) as server:

        def again() -> None:
            server.kill()
            server.start()

        run = tmp_path / "runs" / "tiny"
        with hosts(server.url, 2) as both:
            config = on_bus(tmp_path, tiny_llama, server.url, train={"steps": 10})
            thread = at_steps(config, {3: again})
            result = headrace.train(config)
            thread.join()
            assert [one.wait(PATIENCE) for one in both] == [0, 0]
        assert result.step == 10
        finished(run, 10)
        assert any("does not answer" in message for message in warned(run))
        assert SILENT_BUS in [fact.key for fact in of(run, Withdrawn)], "it answers again"


@pytest.mark.slow
def test_a_run_that_is_killed_is_resumed_with_the_same_hosts(tiny_llama: Path, tmp_path: Path) -> None:
    """C7: they notice its new process, and open their engines anew."""
    bus, run = f"jsonl:{tmp_path / 'bus'}", tmp_path / "runs" / "tiny"
    config = on_bus(tmp_path, tiny_llama, bus, train={"steps": 10}, reward=held_reward(tmp_path, 4))
    with hosts(bus, 2) as both:
        kill_when(config, lambda: trained_steps(run) >= 4)
        release(tmp_path, 4)
        result = headrace.train(resume=run)
        assert [one.wait(PATIENCE) for one in both] == [0, 0]
    assert result.step == 10
    finished(run, 10)


def test_a_server_that_forgets_is_refused_unless_it_is_allowed(tiny_llama: Path, tmp_path: Path) -> None:
    with a_redis_server(tmp_path, "--appendonly", "no") as server:
        config = on_bus(tmp_path, tiny_llama, server.url)
        with pytest.raises(ConfigError, match="keeps no append-only file.*orchestration.bus_forgets = true"):
            headrace.train(config)
