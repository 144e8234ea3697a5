"""Workers that a cluster places: on a fake of it, in virtual time and with real workers. Ray itself: `test_ray.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine_process import PROMPT, opened
from test_joining import RUN, Engine, telemetry_of

from headrace.core.errors import ConfigError, StalledError, WorkerDied
from headrace.core.protocols import Job
from headrace.core.types import Request, Sampling
from headrace.facts.facts import Warned, Withdrawn, WorkerJoined, WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.processes.frames import HEAD
from headrace.processes.joining import joined
from headrace.processes.joining.greeting import Agreed, Terms
from headrace.processes.joining.joined import ALONE, Team
from headrace.processes.joining.listener import Listener
from headrace.processes.joining.same_model import terms_of
from headrace.processes.placed.placed import (
    LOST_HEAD,
    ClusterNode,
    NodeShare,
    PlacedLauncher,
    PlacedWorker,
    refusal,
    watch_head,
)
from headrace.processes.placed.ray_cluster import RayCluster
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.config import load_config
from headrace.run.seats import check_seats, threads_elsewhere
from headrace.run.starting import transport_of
from headrace.run.wording import placement
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_arrivals import FakeArrivals
from headrace.testing.fake_cluster import FakeCluster, FakeMachine, ScriptedHost
from headrace.testing.fake_worker import FakeProcess
from headrace.testing.makers import request
from headrace.version import __version__
from headrace.weight_sync.tcp import Tcp
from support.runs.processes import gone

SAME = {"headrace": __version__, "Python": "{}.{}".format(*sys.version_info), "host": "b"}
ASKED = Request("r", (1, 2), Sampling(max_tokens=8))
ALL = tuple(range(100, 108))
TWO = ("engine 1", "engine 2")


class OnNode(Engine):
    """Samples a token a second on a node."""

    def __init__(self, machine: FakeMachine, life: int, refuses: str = "") -> None:
        super().__init__(life, refuses)
        self.network = machine


class Place:
    """A launcher over a fake cluster, in virtual time."""

    def __init__(
        self,
        tmp: Path,
        nodes: list[NodeShare],
        begin: Callable[[FakeMachine], FakeProcess] = lambda machine: OnNode(machine, life=100),
        versions: Callable[[FakeMachine], dict[str, str]] = lambda machine: SAME,
        agreed: Callable[[FakeMachine], Agreed] = lambda machine: Agreed("/its/model"),
    ) -> None:
        self.facts, arrivals = FactList(), FakeArrivals()
        self.telemetry = telemetry_of(self.facts)
        self.cluster = FakeCluster(
            nodes, lambda machine: ScriptedHost(machine, arrivals, begin, versions(machine), agreed(machine))
        )
        self.launcher = PlacedLauncher(
            self.cluster, arrivals, bundle=NodeShare(2), terms=Terms("m", {}), logs=tmp, telemetry=self.telemetry
        )
        self.engine = ProcessEngine(self.launcher, Job("engine", "engine"), 3, self.telemetry)

    async def start(self) -> None:
        await self.launcher.open(["engine"])
        await self.engine.launch()
        await self.engine.open(EngineStart("/the/run's", {}, {}))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, act)

    @property
    def hosts(self) -> list[str]:
        return [worker.host for worker in self.facts.of(WorkerJoined)]

    @property
    def how(self) -> list[str]:
        return [death.how for death in self.facts.of(WorkerLost)]


def in_virtual_time(case: Callable[[], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        return await case()

    return virtual_time.run(go())


# --- the head of the cluster ---------------------------------------------------------------------------------------------------


def test_a_head_that_comes_back_in_time_was_a_named_wait(tmp_path: Path) -> None:
    """The engine works on meanwhile: nothing of it goes through the head."""

    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2)], lambda machine: OnNode(machine, life=1000))
        await place.start()
        watching = asyncio.ensure_future(watch_head(place.cluster, place.telemetry, tmp_path / "runs" / "one"))
        place.cluster.missing = "Connection refused"
        await asyncio.sleep(20)
        (wait,) = place.telemetry.waits.lasting()
        assert wait.owner == "cluster" and wait.what == "its head at 10.0.0.1:6379" and wait.endless
        (warned,) = [fact for fact in place.facts.of(Warned) if fact.key == LOST_HEAD]
        assert "does not answer (Connection refused)" in warned.message and "stops in 40 s" in warned.message
        assert (await place.engine.generate(ASKED)).tokens
        place.cluster.missing = ""
        await asyncio.sleep(10)
        assert not place.telemetry.waits.lasting() and warned.key in [fact.key for fact in place.facts.of(Withdrawn)]
        await asyncio.sleep(100)
        assert [fact.key for fact in place.facts.of(Warned)].count(LOST_HEAD) == 1 and not watching.done()
        watching.cancel()
        await place.engine.close()

    in_virtual_time(case)


def test_a_head_that_stays_away_ends_the_run_before_the_cluster_does(tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2)])
        loop = asyncio.get_running_loop()
        began = loop.time()
        place.after(12, lambda: setattr(place.cluster, "missing", "it is silent"))
        with pytest.raises(
            StalledError, match="has not answered for 4. s .it is silent.*headrace train --resume .*runs/one"
        ) as ended:
            await watch_head(place.cluster, place.telemetry, tmp_path / "runs" / "one")
        assert 12 + 40 <= loop.time() - began <= 12 + place.cluster.survives - 10
        assert "Start the head and its nodes again" in str(ended.value)

    in_virtual_time(case)


def test_the_head_of_a_ray_cluster_is_asked_without_ray() -> None:
    async def case() -> None:
        cluster = RayCluster("auto")
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        cluster.head = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert not await cluster.head_problem()
        server.close()
        await server.wait_closed()
        assert "refused" in (await cluster.head_problem()).lower()

    asyncio.run(case())


def test_a_head_whose_name_is_not_known_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(host: str, port: int) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio, "open_connection", unknown)
    cluster = RayCluster("auto")
    cluster.head = "nowhere:6379"
    assert asyncio.run(cluster.head_problem()) == "Name or service not known"


# --- nodes that fail ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_started_again_in_its_bundle_and_goes_on_with_its_tokens(tmp_path: Path) -> None:
    lives = iter((3, 100))

    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2), NodeShare(8)], lambda machine: OnNode(machine, next(lives)))
        await place.start()
        bundles = [len(machine.bundles) for machine in place.cluster.machines.values()]
        assert (await place.engine.generate(ASKED)).tokens == ALL
        assert place.hosts == ["node 1", "node 1"], "its bundle is its own"
        assert [len(machine.bundles) for machine in place.cluster.machines.values()] == bundles == [1, 0]
        assert place.how == ["on 10.0.0.1 (process 1) ended with exit code 1"]
        (lost,) = place.facts.of(WorkerLost)
        assert lost.requests_reissued == 1
        await place.engine.close()

    in_virtual_time(case)
    assert (tmp_path / "engine.log").read_text().startswith("was killed"), "its words are in the run's log"


def test_a_frozen_node_is_noticed_by_its_silence_and_the_seat_is_placed_elsewhere(tmp_path: Path) -> None:
    """The cluster itself notices nothing, and would place the next worker on the same node: it has the most room."""

    async def case() -> None:
        place = Place(tmp_path, [NodeShare(8), NodeShare(2)])
        await place.start()
        frozen = place.telemetry.clock() + 3
        place.after(3.0, lambda: place.cluster.freeze("node 1"))
        assert (await place.engine.generate(ASKED)).tokens == ALL
        assert place.hosts == ["node 1", "node 2"]
        (lost,) = place.facts.of(WorkerLost)
        assert lost.how == "on 10.0.0.1 (process 1) is lost: it was silent for 6 seconds"
        assert 4 <= lost.t - frozen <= 7, "a beat a second, five may be missing"
        await place.engine.close()

    in_virtual_time(case)


def test_a_node_that_is_removed_is_a_lost_worker_whose_seat_waits_until_there_is_room(tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2)])
        await place.start()
        place.after(3.0, lambda: place.cluster.remove("node 1"))
        place.after(60.0, lambda: place.cluster.add(NodeShare(4)))
        assert (await place.engine.generate(ASKED)).tokens == ALL
        assert place.how == ["on 10.0.0.1 (process 1) is lost: its node is gone"]
        messages = [warning.message for warning in place.facts.of(Warned)]
        assert "start has waited 10 s for the cluster at fake to place engine (2 CPUs)" in messages
        await place.engine.close()

    in_virtual_time(case)


def test_a_doubted_node_is_used_again_when_the_others_stay_full(tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2), NodeShare(2)])
        await place.start()
        (other,) = await place.cluster.reserve(NodeShare(2))  # another job's
        await other.placed()
        place.after(3.0, lambda: place.cluster.freeze("node 1"))
        place.after(20.0, lambda: thaw(place.cluster.machines["node 1"]))
        began = place.telemetry.clock()
        assert (await place.engine.generate(ASKED)).tokens == ALL
        assert place.hosts == ["node 1", "node 1"] and place.telemetry.clock() - began > 100
        await place.engine.close()

    in_virtual_time(case)


def test_the_launcher_of_a_run_that_goes_on_knows_which_node_fell_silent(tmp_path: Path) -> None:
    """Ray notices a silent node after a minute; until then it would place the next rank there, which is another death."""

    async def case() -> None:
        place = Place(tmp_path, [NodeShare(8), NodeShare(2)])
        await place.start()
        place.cluster.freeze("node 1")
        await asyncio.sleep(10.0)
        assert len(place.how) == 1
        await place.engine.close()
        for berth in place.launcher._berths.values():
            await berth.release()

        def launcher(seats: int) -> PlacedLauncher:
            team = Team(seats) if seats > 1 else ALONE
            given = {"terms": Terms("m", {}), "logs": tmp_path, "telemetry": place.telemetry}
            return PlacedLauncher(place.cluster, FakeArrivals(), bundle=NodeShare(2), team=team, **given)

        (one,) = seats = ["trainer"]
        again = launcher(1)
        await again.open(seats)
        assert (await again.place(one))[1].id == "node 2"
        # A team for which the other node has no room: after some time the doubted one is tried.
        team = ["trainer rank 0", "trainer rank 1"]
        began, wide = asyncio.get_running_loop().time(), launcher(2)
        await wide.open(team)
        found = await asyncio.gather(*map(wide.place, team))
        assert [node.id for _, node in found] == ["node 1", "node 1"] and len({id(berth) for berth, _ in found}) == 2
        assert asyncio.get_running_loop().time() - began == pytest.approx(120.0)
        assert len(place.cluster.machines["node 1"].bundles) == 2

    in_virtual_time(case)


def thaw(machine: FakeMachine) -> None:
    machine.frozen = False
    machine.awake.set()


def test_a_node_that_freezes_while_the_worker_starts_there_is_a_death(tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2), NodeShare(2)])
        await place.launcher.open(["engine"])
        place.cluster.freeze("node 1")
        worker = place.launcher.worker(Job("engine", "engine"), lambda method, payload: None)
        await worker.start()
        assert await worker.watch() == "on 10.0.0.1 is lost: it did not start in time"
        with pytest.raises(WorkerDied):
            worker.push("start", None)
        await worker.end()
        again = place.launcher.worker(Job("engine", "engine"), lambda method, payload: None)
        await again.start()
        assert place.hosts == ["node 2"]
        await again.end()

    in_virtual_time(case)


# --- nodes that do not fit ---------------------------------------------------------------------------------------------------


def test_a_placement_that_can_never_be_had_is_refused_with_what_there_is() -> None:
    nodes = [ClusterNode("a", "10.0.0.1", NodeShare(4)), ClusterNode("b", "10.0.0.2", NodeShare(4, 1))]
    cluster = FakeCluster([])
    cluster.address = "10.0.0.1:6379"
    assert refusal(nodes, NodeShare(4), TWO, cluster) == ""
    assert refusal(nodes, NodeShare(2, 1), TWO[:1], cluster) == ""
    message = refusal(nodes, NodeShare(2, 1), TWO, cluster)
    assert (
        "the fake cluster (orchestration.address = 10.0.0.1:6379) can never place 2 engines of 2 CPUs and 1 GPU each: it has room for 1."
        in message
    )
    assert "It has 2 nodes: 10.0.0.1 (4 CPUs), 10.0.0.2 (4 CPUs and 1 GPU). Start more nodes, lower" in message
    assert "can never place an engine of 5 CPUs each" in refusal(nodes, NodeShare(5), TWO[:1], cluster)
    assert "It has 0 nodes: no node." in refusal([], NodeShare(1), TWO[:1], cluster)


RANKS = [f"trainer rank {rank}" for rank in range(4)]


def launcher_on(cluster: FakeCluster, tmp: Path, team: Team, grows: bool = False) -> PlacedLauncher:
    return PlacedLauncher(
        cluster,
        FakeArrivals(),
        bundle=NodeShare(1),
        terms=Terms("m", {}),
        logs=tmp,
        telemetry=telemetry_of(FactList()),
        team=team,
        grows=grows,
    )


@given(cpus=st.lists(st.integers(0, 5), min_size=1, max_size=4), size=st.sampled_from([1, 2, 4]), must=st.booleans())
def test_ranks_that_belong_on_one_node_are_placed_there_or_refused(cpus: list[int], size: int, must: bool) -> None:
    async def case() -> None:
        cluster = FakeCluster([NodeShare(count) for count in cpus])
        launcher = launcher_on(cluster, Path(), Team(size, must))
        whole = size if must else 1
        if sum(count // whole * whole for count in cpus) < len(RANKS):
            with pytest.raises(ConfigError, match="can never place 4 ranks of 1 CPU each") as refused:
                await launcher.open(RANKS)
            assert ("of them together on one node" in str(refused.value)) == (whole > 1)
            return
        await launcher.open(RANKS)
        nodes = [(await launcher.place(rank))[1].id for rank in RANKS]
        for first in range(0, len(RANKS), whole):
            assert len(set(nodes[first : first + whole])) == 1
        await launcher.leave(RANKS[0])  # what it is in goes with it, and comes again together
        again = [(await launcher.place(rank))[1].id for rank in RANKS]
        for first in range(0, len(RANKS), whole):
            assert len(set(again[first : first + whole])) == 1

    in_virtual_time(case)


def test_a_cluster_that_grows_is_awaited_until_it_has_the_nodes(tmp_path: Path) -> None:
    """The remedy of the refusal. What is there has too few CPUs, and GPUs of another type."""

    async def case() -> None:
        cluster = FakeCluster([NodeShare(1), NodeShare(8, 8, {"accelerator_type:A100": 1})])
        with pytest.raises(ConfigError, match="set orchestration.grows = true where the cluster adds nodes on demand"):
            await launcher_on(cluster, tmp_path, Team(2)).open(RANKS + RANKS + RANKS)
        launcher = launcher_on(cluster, tmp_path, ALONE, grows=True)
        launcher.bundle = NodeShare(1, 1, {"accelerator_type:H100": 0.001})
        await launcher.open(["engine"])
        asyncio.get_running_loop().call_later(
            300.0, cluster.add, NodeShare(1, 1, {"accelerator_type:H100": 1, "more": 1})
        )
        assert (await launcher.place("engine"))[1].id == "node 3" and asyncio.get_running_loop().time() >= 300.0

    in_virtual_time(case)


def test_it_is_refused_before_anything_is_reserved_and_what_is_only_busy_is_awaited(tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2)])
        with pytest.raises(ConfigError, match="can never place 2 engines"):
            await place.launcher.open(["engine 1", "engine 2"])
        assert not place.cluster.machines["node 1"].bundles
        (other,) = await place.cluster.reserve(NodeShare(1))
        place.after(50.0, lambda: place.cluster.give_back(other))
        await place.start()
        assert place.telemetry.clock() == 50
        await place.engine.close()

    in_virtual_time(case)


@pytest.mark.parametrize(
    ("versions", "agreed", "words"),
    [
        ({**SAME, "headrace": "0.0.9"}, Agreed("/m"), "node b of the cluster has headrace 0.0.9, and the run has"),
        ({**SAME, "headrace": ""}, Agreed("/m"), "has no headrace, and the run has .*install the same on all nodes"),
        ({**SAME, "Python": "3.9"}, Agreed("/m"), "has Python 3.9, and the run has"),
        (SAME, Agreed(unable="its model differs"), "the node 10.0.0.1 cannot serve this run: its model differs"),
    ],
)
def test_a_node_with_something_else_is_refused_at_the_start(
    tmp_path: Path, versions: dict[str, str], agreed: Agreed, words: str
) -> None:
    async def case() -> None:
        place = Place(tmp_path, [NodeShare(2)], versions=lambda machine: versions, agreed=lambda machine: agreed)
        with pytest.raises(ConfigError, match=words):
            await place.start()
        await place.engine.close()

    in_virtual_time(case)


def test_later_such_a_node_counts_as_a_death_and_another_one_is_tried(tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(
            tmp_path,
            [NodeShare(2)],
            versions=lambda machine: {**SAME, "headrace": "0.0.9"} if machine.node.id == "node 2" else SAME,
        )
        await place.start()
        place.cluster.add(NodeShare(4))
        place.cluster.add(NodeShare(2))
        place.after(3.0, lambda: place.cluster.remove("node 1"))
        assert (await place.engine.generate(ASKED)).tokens == ALL
        assert (
            place.hosts == ["node 1", "node 3"] and "on 10.0.0.2 is lost: the node b of the cluster has" in place.how[1]
        )
        await place.engine.close()

    in_virtual_time(case)


def test_what_shares_files_with_the_run_cannot_be_placed(tmp_path: Path) -> None:
    async def case() -> None:
        launcher = Place(tmp_path, []).launcher
        for job in (Job("shared trainer", "trainer"), Job("engine", "engine", inherited=(3,))):
            with pytest.raises(ConfigError, match="a cluster cannot place the"):
                launcher.worker(job, lambda method, payload: None)

    in_virtual_time(case)


# --- real workers ------------------------------------------------------------------------------------------------------------


def with_real_workers(model: Path, logs: Path, use: Callable[[PlacedLauncher], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        record, clock = FactList().record, asyncio.get_running_loop().time
        telemetry = Telemetry(record, clock, Waits(record, clock, 1e6, 2e6))
        listener, cluster = Listener("a token of many characters"), FakeCluster([NodeShare(1), NodeShare(1)])
        await listener.open()
        launcher = PlacedLauncher(
            cluster,
            listener,
            bundle=NodeShare(1),
            terms=terms_of(str(model), model),
            logs=logs,
            telemetry=telemetry,
            silence=20.0,
        )
        try:
            async with asyncio.timeout(300):
                return await use(launcher)
        finally:
            await cluster.aclose()
            await listener.close()

    return asyncio.run(go())


def pid_of(worker: PlacedWorker) -> int:
    assert worker._arrived
    return worker._arrived.hello.pid


@pytest.mark.slow
@pytest.mark.waits
def test_a_placed_engine_survives_a_kill_and_a_stop_and_its_host_ends_it(tiny_llama: Path, tmp_path: Path) -> None:
    """A stopped process keeps its connection: only its silence gives it away."""

    async def use(launcher: PlacedLauncher) -> int:
        async with opened(tiny_llama, launcher, Tcp.open(), context_length=256) as (
            engine,
            publish,
        ):
            alone = await engine.generate(request("alone", PROMPT, 200, seed=1))
            for harm in (signal.SIGKILL, signal.SIGSTOP):
                running = asyncio.ensure_future(engine.generate(request(f"r{harm}", PROMPT, 200, seed=1)))
                worker = engine._keeper._worker
                assert isinstance(worker, PlacedWorker)
                os.kill(pid_of(worker), harm)
                worker.channel.silence = (
                    0.5  # from here on: a slow machine must not take a worker that starts for a silent one
                )
                answer = await running
                assert answer.tokens == alone.tokens and answer.stop == "length"
                assert engine._keeper._worker is not worker
                assert await asyncio.to_thread(gone, pid_of(worker)), "not even a stopped one is left"
            assert (await engine.load(publish(1))).version == 1
            last = engine._keeper._worker
        assert isinstance(last, PlacedWorker)
        return pid_of(last)

    assert gone(with_real_workers(tiny_llama, tmp_path, use))


def test_a_worker_that_ends_before_it_connects_is_a_death_and_its_words_are_in_the_log(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async def use(launcher: PlacedLauncher) -> None:
        worker = launcher.worker(Job("engine", "engine"), lambda method, payload: None)
        await launcher.arrivals.close()  # type: ignore[attr-defined]  # nobody answers
        await worker.start()
        assert (await worker.watch()).endswith("ended with exit code 1")
        await worker.end()
        assert "headrace: [Errno" in (tmp_path / "engine.log").read_text()

    with_real_workers(tiny_llama, tmp_path, use)


LONELY = """
import asyncio, socket, sys
from headrace.processes.placed.host import NodeHost
async def main():
    host = NodeHost()
    print(await host.start("engine", sys.argv[1], {"HEADRACE_TOKEN": "x"}), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_a_host_that_is_killed_leaves_no_worker_not_even_a_stopped_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # it is connected to, and says nothing
        address = f"127.0.0.1:{server.getsockname()[1]}"
        host = subprocess.Popen([sys.executable, "-c", LONELY, address], stdout=subprocess.PIPE, text=True)
        assert host.stdout
        worker = int(host.stdout.readline())
        connection, _ = server.accept()
        hello = connection.recv(HEAD)  # it is this worker and not another process, and it has asked for its signal
        assert len(hello) == HEAD
        os.kill(worker, signal.SIGSTOP)
        host.kill()
        host.communicate()
        assert gone(worker)
        connection.close()


# --- settings ----------------------------------------------------------------------------------------------------------------

ON_RAY: dict[str, Any] = {**RUN, "orchestration": {"kind": "ray"}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"orchestration": {"kind": "ray", "token_file": "/a/token"}}, 'token_file is for orchestration.kind = "join"'),
        ({"orchestration": {"gpus": 1}}, 'orchestration.gpus is for orchestration.kind = "ray"'),
        ({"orchestration": {**RUN["orchestration"], "address": "auto"}}, "address is for orchestration.kind = .ray"),
        ({"orchestration": {"listen": "10.0.0.5:1"}}, 'listen is for orchestration.kind = "join" or "ray"'),
        ({"orchestration": {"kind": "ray", "address": "ray://10.0.0.5:10001"}}, "not through Ray's client"),
        ({"orchestration": {"kind": "ray", "listen": "0.0.0.0:7"}}, "set it to the one that the nodes reach"),
        (
            {"orchestration": {"kind": "ray", "resources": {"GPU": 1}}},
            "resources names GPU, and Ray gives engine.threads CPUs and orchestration.gpus GPUs; set these",
        ),
        ({"orchestration": {"kind": "ray", "resources": {"fast": 1.5}}}, "fast = 1.5, and Ray takes whole numbers"),
        ({"orchestration": {"kind": "ray", "resources": {"fast": 0.00001}}}, "at most four decimal places; round it"),
        ({"weight_sync": {"kind": "shared_memory"}}, "does not reach engines elsewhere"),
        ({"engine": {"cores": (0,)}}, "remove it; Ray gives each engine.threads CPUs"),
        (
            {"engine": {"kind": "headrace", "urls": ("http://127.0.0.1:1",)}},
            'kind = "ray" workers elsewhere start the engines',
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_a_remedy(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**ON_RAY, **tables})


def test_a_run_without_ray_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "is_installed", lambda module: module != "ray")
    with pytest.raises(ConfigError, match="needs Ray, which is not installed: .*pip install 'ray>=2"):
        check_seats(load_config(ON_RAY).orchestration)


def test_a_bundle_has_the_engine_s_threads_and_weights_travel_over_tcp(tmp_path: Path) -> None:
    config = load_config(
        {**ON_RAY, "engine": {"threads": 3}, "orchestration": {"kind": "ray", "listen": "10.0.0.5:0", "gpus": 2}}
    )
    assert threads_elsewhere(config.orchestration, config.engine, config.chosen) == 3
    way = transport_of(config, tmp_path)
    assert isinstance(way, Tcp) and way.host == "10.0.0.5" and way.inherited == ()
    assert "an engine placed by Ray (local) with 2 GPUs each" in placement(config, "hf")["engine"]
