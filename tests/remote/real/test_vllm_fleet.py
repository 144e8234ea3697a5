"""Two servers of the real vLLM 0.32 on the CPU, of which one stands still in the middle of an update (as `test_vllm_real.py`: skipped
without vLLM; two minutes each on a quiet machine)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from real_vllm import MARKS, changed, config_for, reference, save_model, speaks, started, updates, when

import headrace
from headrace.core.steps import StepOutput
from headrace.core.types import Request, Sampling
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.remote import outages
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import Heard
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.facts.facts import FleetSample, GroupEnded, IdentityChecked, MemberMoved, RunEnded, WorkerLost
from headrace.facts.records import StepRow
from headrace.loop.world.world import FactList
from headrace.models.tokenizer import end_tokens
from support.server_processes import servers
from support.tiny_run import of

pytestmark = MARKS

LENGTH = 230
STOPPED = 60.0
"""Seconds that a server of a whole run is stopped."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen2-64"), tiny_tokenizer)


class _StandsStill(VllmDialect):
    """Stops the processes of one server that has requests, once, between the pause and the reading of the weights: it reads the request
    for that when it goes on."""

    at = 1
    """The first load at which it may, counted from 0."""
    stopped: tuple[int, ...] = ()
    """The processes."""
    member = ""
    """The name of the member that they are."""

    def __init__(self, ends: Collection[int], check_every: int) -> None:
        super().__init__(ends, check_every)
        self._count, self._had = 0, dict[str, int]()
        """Tokens of its requests."""

    def _heard(self, event: Any, request: Request) -> Heard:
        heard = super()._heard(event, request)
        self._had[request.id] = len(request.prefix) + sum(len(run.tokens) for run in heard.runs)
        if heard.end:
            del self._had[request.id]
        return heard

    async def _reload(self, connection: Connection, path: str, seconds: float) -> None:
        here = type(self)
        if self._count >= here.at and not here.stopped and sum(self._had.values()):
            here.stopped = tuple(processes(connection.url))
            here.member = member_of(here.stopped[0])
            send(here.stopped, signal.SIGSTOP)
        self._count += 1
        await super()._reload(connection, path, seconds)


def processes(url: str) -> list[int]:
    """Those of the server at this address."""
    port = url.rpartition(":")[2]
    named = {leader: Path(f"/proc/{leader}/cmdline").read_text().split("\0") for leader in servers()}
    (found,) = [servers()[leader] for leader, words in named.items() if words[words.index("--port") + 1] == port]
    return found


def member_of(pid: int) -> str:
    """The number in the name of the file that its output goes to."""
    return Path(f"/proc/{pid}/fd/1").resolve().stem.rpartition("-")[2]


def send(pids: tuple[int, ...], what: int) -> None:
    for pid in pids:
        os.kill(pid, what)


def of_stopped(moves: Sequence[MemberMoved], kind: type[_StandsStill]) -> list[MemberMoved]:
    return [fact for fact in moves if fact.member == kind.member]


def fleet_of(directory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> tuple[dict, type[_StandsStill]]:
    kind = type("_StandsStill", (_StandsStill,), {"at": at})
    speaks(monkeypatch, lambda server: kind(end_tokens(server.model_dir), server.check_every))
    monkeypatch.setattr(outages, "SILENT", 20.0)  # two servers on two busy cores may be silent for a while
    config = config_for(directory, model)
    cores = sorted(os.sched_getaffinity(0))[:2]
    config["engine"] |= {"replicas": 2, "cores": cores, "member_patience": 20.0, "context_length": 240}
    return config, kind


def test_requests_go_on_elsewhere_from_their_tokens_and_the_server_comes_back_with_the_newest_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model, *(changed(model, tmp_path / f"other-{seed}", seed) for seed in range(1, 5))]
    published, prompts = updates(models), {f"r{number}": (1, 7 + number, 20) for number in range(6)}
    config, stopping = fleet_of(tmp_path, model, monkeypatch, at=1)
    facts, heard = FactList(), list[StepOutput]()
    kept = [path.rename(path.with_name(f"kept-{path.name}")) if path == models[1] else path for path in models]
    shutil.copytree(kept[1], models[1])

    def told(name: str) -> list[int]:
        pairs = [pair for one in heard for pair in zip(one.request_ids, one.tokens, strict=True)]
        return [token for who, token in pairs if who == name]

    async def moved(state: str) -> MemberMoved:
        """The newest move of the member that was stopped: on a busy machine the other one may be missed for a while too."""
        while not (mine := of_stopped(facts.of(MemberMoved), stopping)) or mine[-1].state != state:
            await asyncio.sleep(0.01)
        return mine[-1]

    async def go() -> None:
        async with asyncio.timeout(1800), started(config, model, tmp_path, facts) as engine:
            assert isinstance(engine, Fleet)
            engine.listen(heard.append)
            await engine.load(published[0])
            drawn = Sampling(max_tokens=LENGTH, ignore_eos=True)
            asked = {
                name: asyncio.ensure_future(engine.generate(Request(name, prompt, drawn)))
                for name, prompt in prompts.items()
            }
            while not all(map(told, prompts)):
                await asyncio.sleep(0.001)
            await engine.load(published[1])
            left = await moved("away")
            assert left.requests > 0 and left.tokens >= left.requests
            completions = {name: await one for name, one in asked.items()}
            for name, completion in completions.items():
                assert len(completion.tokens) == LENGTH and told(name) == list(completion.tokens), "each token once"
                versions = completion.versions()
                by = [reference(path, prompts[name], completion) for path in kept[:2]]
                assert max(abs(by[v][t] - completion.logprobs[t]) for t, v in enumerate(versions)) < 1e-4
            assert {v for one in completions.values() for v in one.versions()} == {0, 1}
            shutil.rmtree(models[1])  # its request to read this version waits in its socket
            for update in published[2:]:
                await engine.load(update)
            shutil.rmtree(models[2])
            send(stopping.stopped, signal.SIGCONT)
            await moved("serving")
            while [member.state for member in engine.members] != ["serving"] * 2:
                await asyncio.sleep(0.01)
            for member in engine.members:
                completion = await member.engine.generate(Request("new", (1, 9, 20), Sampling(max_tokens=20)))
                expected = reference(models[-1], (1, 9, 20), completion)
                assert set(completion.versions()) == {4}
                assert max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True)) < 1e-4
            assert not facts.of(WorkerLost), "it is the same process"

    try:
        asyncio.run(go())
    finally:
        send(tuple(pid for pid in stopping.stopped if Path(f"/proc/{pid}").exists()), signal.SIGCONT)
    assert not servers()


SLOWLY = """
import os, time

def share_of_e(prompts, completions, **columns):
    time.sleep(1.0 if os.path.exists({flag!r}) else 0.0)
    return [text.count("e") / max(len(text), 1) for text in completions]
"""
"""A reward that makes a run last as long as the file is there."""


def test_a_run_goes_on_while_one_of_two_servers_is_stopped_for_a_minute(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps, flag = tmp_path / "runs" / "tiny", 80, tmp_path / "slowly"
    config, stopping = fleet_of(tmp_path, model, monkeypatch, at=3)
    config["rollout"] = {"group_size": 4, "max_tokens": 100}
    config["train"]["steps"] = steps
    flag.touch()
    (tmp_path / "reward.py").write_text(SLOWLY.format(flag=str(flag)))
    trained: list[int] = []

    def moves() -> list[MemberMoved]:
        return of_stopped(of(run, MemberMoved), stopping) if stopping.stopped else []

    def go_on() -> None:
        when(lambda: bool(moves()), lambda: trained.append(len(of(run, StepRow))), every=0.2)
        time.sleep(STOPPED)
        trained.append(len(of(run, StepRow)))
        send(stopping.stopped, signal.SIGCONT)
        when(lambda: moves()[-1].state == "serving", flag.unlink, every=0.2)

    thread = threading.Thread(target=go_on)
    thread.start()
    headrace.train(config)
    thread.join()
    (ended,) = of(run, RunEnded)
    rows, probes = of(run, StepRow), of(run, IdentityChecked)
    assert ended.reason == "finished" and ended.accounting.balance() == 0, ended.accounting
    assert len(rows) == steps and max(lag for row in rows for lag in row.lags) <= 1
    assert {probe.version for probe in probes} == set(range(steps + 1)) and all(probe.ok for probe in probes)
    assert not of(run, WorkerLost) and not servers()
    left, *others, back = moves()
    print(left, back, f"steps meanwhile: {trained[1] - trained[0]}", sep="\n")
    assert (left.state, back.state) == ("away", "serving") and len(others) % 2 == 0
    assert left.requests > 0 and left.tokens > 0, "and they went on elsewhere"
    assert not sum(group.lost_tokens for group in of(run, GroupEnded))
    assert trained[1] > trained[0], "the other one was enough"
    assert [member.state for member in of(run, FleetSample)[-1].members] == ["serving", "serving"]
