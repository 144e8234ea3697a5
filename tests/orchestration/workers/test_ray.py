"""Runs on a real Ray cluster of three nodes on this machine: nodes that are removed or frozen, and a run that is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_joining_run import free_port, joining, offering
from transformers import AutoModelForCausalLM

import headrace
from headrace.core.errors import ConfigError
from headrace.facts.facts import RunEnded, WorkerJoined, WorkerLost
from headrace.processes.health.live_status import read_live
from support.runs.beside import PATIENCE, Beside, until
from support.runs.processes import gone, stat
from support.tiny_run import SYNCHRONOUS, at_steps, of, tiny_config, weights_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (make test-slow does it)"),
]

Cluster = Any


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A node without CPUs, where the runs are."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    patient(lambda: made.add_node(num_cpus=0, include_dashboard=False))
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def cluster(head: Cluster) -> Cluster:
    """With two nodes of one CPU each: the test before may have removed one, which Ray counts until it has missed some of its
    heartbeats. (Ray starts nodes in the main thread only.)"""
    while len(head.worker_nodes) < 2:
        patient(lambda: head.add_node(num_cpus=1))
    head.wait_for_nodes(PATIENCE)
    return head


def patient(start: Callable[[], object]) -> None:
    """Ray gives a node 30 seconds to start, which a busy machine may not have."""
    for _ in range(10):
        with contextlib.suppress(Exception):
            start()
            return
    start()


def placed(directory: Path, model: Path, cluster: Cluster, **tables: Any) -> dict[str, Any]:
    tables["engine"] = {"threads": 1, **tables.get("engine", {})}
    return tiny_config(directory, model, orchestration={"kind": "ray", "address": cluster.address}, **tables)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        pid = int(stat(pid)[1])


def node_of(cluster: Cluster, run: Path) -> Any:
    """The node of the worker that took a seat last."""
    pids = set(ancestors(of(run, WorkerJoined)[-1].pid))
    (found,) = [node for node in cluster.worker_nodes if raylet_of(node) in pids]
    return found


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def remove(cluster: Cluster, run: Path) -> None:
    cluster.remove_node(node_of(cluster, run), allow_graceful=False)


def assert_went_on(run: Path, how: str) -> None:
    (lost,) = of(run, WorkerLost)
    assert how in lost.how and len(of(run, WorkerJoined)) == 2
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0


def test_local_joined_and_placed_runs_have_the_same_weights_bit_for_bit(
    cluster: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    headrace.train(tiny_config(tmp_path, tiny_llama, **SYNCHRONOUS, name="local"))
    port = free_port()
    with offering(tmp_path, port):
        headrace.train(joining(tmp_path, tiny_llama, port, **SYNCHRONOUS, name="joined"))
    result = headrace.train(placed(tmp_path, tiny_llama, cluster, **SYNCHRONOUS, name="placed"))
    assert result.step == 3
    local, *others = (weights_of(tmp_path / "runs" / name) for name in ("local", "joined", "placed"))
    for other in others:
        assert local.keys() == other.keys() and all(torch.equal(local[name], other[name]) for name in local)
    run = tmp_path / "runs" / "placed"
    (seat,) = of(run, WorkerJoined)
    assert gone(seat.pid)
    assert (run / "logs" / "engine.log").exists()


def test_placed_ranks_learn_what_local_ones_do_bit_for_bit_and_a_node_of_theirs_is_removed(
    cluster: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    """An engine and two ranks on three nodes. The node of a rank is removed, and a new one takes its place."""
    parallel = {"shard": 2}
    tables = {
        **SYNCHRONOUS,
        "train": {**SYNCHRONOUS["train"], "steps": 5, "microbatch_tokens": 48, "parallel": parallel},
    }
    headrace.train(tiny_config(tmp_path, tiny_llama, **tables, name="local"))
    while len(cluster.worker_nodes) < 4:
        patient(lambda: cluster.add_node(num_cpus=1))
    config = placed(tmp_path, tiny_llama, cluster, **tables, name="placed")
    config["orchestration"]["trainer"] = "elsewhere"
    run = tmp_path / "runs" / "placed"
    thread = at_steps(config, {2: lambda: remove(cluster, run)})
    assert headrace.train(config).step == 5
    thread.join()
    seats = [worker.who for worker in of(run, WorkerJoined)]
    assert len(seats) == 6 and seats.count("trainer rank 0") == seats.count("trainer rank 1") == 2
    assert (run / "logs" / "trainer-rank-1.log").exists()
    assert of(run, RunEnded)[0].reason.startswith("the trainer process of rank")
    local, other = weights_of(tmp_path / "runs" / "local"), weights_of(run)
    assert local.keys() == other.keys() and all(torch.equal(local[name], other[name]) for name in local)
    while len(cluster.worker_nodes) > 2:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)


def test_two_engines_are_on_two_nodes_and_one_more_is_refused_with_what_there_is(
    cluster: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"can never place 3 engines of 1 CPU each: it has room for 2\. It has 3 nodes"
    ):
        headrace.train(placed(tmp_path, tiny_llama, cluster, engine={"replicas": 3}, name="three"))
    assert time.monotonic() - began < PATIENCE
    nodes: list[int] = []

    def look() -> None:
        joined = [list(ancestors(worker.pid)) for worker in of(tmp_path / "runs" / "tiny", WorkerJoined)]
        nodes.extend(raylet_of(node) for node in cluster.worker_nodes for pids in joined if raylet_of(node) in pids)

    config = placed(tmp_path, tiny_llama, cluster, engine={"replicas": 2})
    thread = at_steps(config, {1: look})
    result = headrace.train(config)
    thread.join()
    assert result.step == 6 and len(set(nodes)) == 2


def test_a_node_is_removed_while_its_engine_generates(cluster: Cluster, tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    config = placed(tmp_path, tiny_llama, cluster, train={"steps": 6})
    thread = at_steps(config, {2: lambda: remove(cluster, run)})
    result = headrace.train(config)
    thread.join()
    assert result.step == 6
    assert_went_on(run, "is lost")


REMOVED_IN_SCORING = """
import pathlib, time
asked, done = pathlib.Path({asked!r}), pathlib.Path({done!r})

def reward(prompts, completions, **columns):
    calls = asked.with_suffix(".calls")
    calls.open("a").write("x")
    if len(calls.read_text()) == 5:
        asked.touch()
        while not done.exists():
            time.sleep(0.01)
    return [text.count("e") / max(len(text), 1) for text in completions]
"""


def test_a_node_is_removed_while_its_rollouts_are_scored(cluster: Cluster, tiny_llama: Path, tmp_path: Path) -> None:
    """Nothing is generated meanwhile: max_lag is 0, and the step waits for this group."""
    asked, done, run = tmp_path / "asked", tmp_path / "done", tmp_path / "runs" / "tiny"
    (tmp_path / "slow.py").write_text(REMOVED_IN_SCORING.format(asked=str(asked), done=str(done)))

    def act() -> None:
        until(asked.exists)
        remove(cluster, run)
        done.touch()

    thread = Beside(act)
    result = headrace.train(
        placed(
            tmp_path,
            tiny_llama,
            cluster,
            reward={"function": f"{tmp_path / 'slow.py'}:reward", "timeout": PATIENCE},
            staleness={"max_lag": 0, "groups_per_step": 2},
        )
    )
    thread.join()
    assert result.step == 6
    assert_went_on(run, "is lost")


def test_a_node_is_removed_while_weights_are_on_their_way(cluster: Cluster, tiny_llama: Path, tmp_path: Path) -> None:
    """Its engine is stopped as soon as a step is trained, so that it does not finish loading."""
    run = tmp_path / "runs" / "tiny"

    def act() -> None:
        node = node_of(cluster, run)
        os.kill(of(run, WorkerJoined)[-1].pid, signal.SIGSTOP)
        cluster.remove_node(node, allow_graceful=False)

    config = placed(tmp_path, tiny_llama, cluster, staleness={"max_lag": 0, "groups_per_step": 2}, train={"steps": 5})
    thread = at_steps(config, {2: act})
    result = headrace.train(config)
    thread.join()
    assert result.step == 5
    assert_went_on(run, "is lost")


def test_a_frozen_node_is_noticed_by_its_silence_and_its_seat_is_placed_on_the_other(
    cluster: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    """Ray itself would notice it after a minute. The node is removed in the end: it is no node any more for Ray."""
    run = tmp_path / "runs" / "tiny"
    frozen: list[Any] = []

    def act() -> None:
        node = node_of(cluster, run)
        worker = of(run, WorkerJoined)[-1].pid
        frozen.append(node)
        for pid in ancestors(worker):
            os.kill(pid, signal.SIGSTOP)
            if pid == raylet_of(node):
                return

    config = placed(tmp_path, tiny_llama, cluster, train={"steps": 8})
    thread = at_steps(config, {2: act})
    result = headrace.train(config)
    thread.join()
    assert result.step == 8
    assert_went_on(run, "is lost: it was silent for")
    os.kill(raylet_of(frozen[0]), signal.SIGCONT)
    cluster.remove_node(frozen[0], allow_graceful=False)


_CHILD = "import json, sys, headrace; headrace.train(json.loads(sys.argv[1]))"


def test_a_cluster_grows_for_a_run_and_ranks_that_compute_together_are_on_one_node(
    head: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    """The test is its autoscaler: it starts nodes when the run waits for them. Ranks would fit on two of them, and belong on the third."""
    for node in list(head.worker_nodes):  # of tests before: the engine would be placed there
        head.remove_node(node)
    train = {**SYNCHRONOUS["train"], "parallel": {"tensor": 2}}
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    even = AutoModelForCausalLM.from_pretrained(tiny_llama)
    even.resize_token_embeddings(52)  # two ranks of a tensor group split them
    even.save_pretrained(model)
    config = placed(tmp_path, model, head, **SYNCHRONOUS | {"train": train})
    place = config["orchestration"]
    place |= {"trainer": "elsewhere", "rank_resources": {"of_ranks": 1.0}}
    with pytest.raises(
        ConfigError, match=r"(?s)never place 2 ranks of 1 CPU and 1 of_ranks each, 2 of them together.*grows = true"
    ):
        headrace.train(config)
    place["grows"] = True
    started, nodes = subprocess.Popen([sys.executable, "-c", _CHILD, json.dumps(config)]), []
    try:
        run = tmp_path / "runs" / "tiny"
        until(lambda: "to place engine (1 CPU)" in str(read_live(run)))
        for has in (1, 1, 2):
            nodes.append(head.add_node(num_cpus=has, resources={"of_ranks": has}))
        assert started.wait(PATIENCE) == 0
    finally:
        started.kill()
        for node in nodes:
            head.remove_node(node)
    assert of(run, RunEnded)[-1].step == 3
    assert sorted(worker.who for worker in of(run, WorkerJoined)) == ["engine", "trainer rank 0", "trainer rank 1"]


@pytest.mark.parametrize("own", [False, True])
def test_a_killed_run_leaves_nothing_on_the_cluster(
    own: bool, cluster: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    """`own`: the run has a cluster of its own, which ends with it."""
    run = tmp_path / "runs" / "tiny"
    config = placed(tmp_path, tiny_llama, cluster, train={"steps": 10_000})
    if own:
        config["orchestration"]["address"] = "local"
    child = subprocess.Popen([sys.executable, "-c", _CHILD, json.dumps(config)])
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and '"StepTrained"' in metrics.read_text()):
        assert child.poll() is None
        time.sleep(0.1)
    (seat,) = of(run, WorkerJoined)
    worker, host, raylet, *_ = ancestors(seat.pid)
    child.kill()
    assert child.wait(PATIENCE) == -signal.SIGKILL
    assert all(gone(pid) for pid in (worker, host, *([raylet] if own else [])))


def test_a_run_stops_in_time_when_its_head_is_gone_and_goes_on_in_a_new_cluster(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Ray would end its process after 60 seconds without a word. No ticket is lost."""
    run = tmp_path / "runs" / "tiny"
    with alone() as cluster:
        # A policy that learns has no contrast in the end, and its run stops for that.
        still = {"steps": 10_000, "learning_rate": 1e-8}
        config = placed(tmp_path, tiny_llama, cluster, train=still, checkpoint={"every": 2})
        child = subprocess.Popen([sys.executable, "-c", _CHILD, json.dumps(config)])
        until(lambda: (run / "metrics.jsonl").exists() and '"StepTrained"' in (run / "metrics.jsonl").read_text())
        os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
        until(lambda: f"its head at {cluster.address}" in str(read_live(run)))
        assert child.wait(PATIENCE)
    stopped = of(run, RunEnded)[-1]
    assert f"headrace train --resume {run}" in stopped.reason
    before = stopped.step
    with alone() as cluster:
        sets = [f"orchestration.address={cluster.address}", f"train.steps={before + 2}"]
        words = [word for one in sets for word in ("--set", one)]
        subprocess.run([sys.executable, "-m", "headrace", "train", "--resume", str(run), *words], check=True)
    (*_, ended) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0 and ended.step == before + 2


@contextlib.contextmanager
def alone() -> Iterator[Cluster]:
    """A cluster of one node beside its head, for this test alone."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        patient(lambda: made.add_node(num_cpus=0, include_dashboard=False))
        patient(lambda: made.add_node(num_cpus=1))
        yield made
    finally:
        made.shutdown()
