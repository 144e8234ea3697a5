"""`headrace doctor --cluster`: nodes that differ, that are too small, too far away or silent. On a fake of Ray with the real `NodeHost`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.commands.installed import cluster_check
from headrace.commands.installed.cluster_check import examine_cluster, findings_of, findings_of_joining, versions
from headrace.commands.installed.doctor import DoctorFinding
from headrace.core.errors import ConfigError, HeadraceError
from headrace.processes.joining.dial import dial
from headrace.processes.joining.same_model import agree
from headrace.processes.placed.examined import answer
from headrace.processes.placed.host import NodeHost
from headrace.processes.placed.placed import ClusterNode, NodeShare
from headrace.run.config import load_config
from headrace.testing.fake_cluster import FakeCluster, FakeMachine
from headrace.version import __version__
from support.tiny_run import tiny_config

TOKEN = "a-token-of-many-characters"
Sections = dict[str, list[DoctorFinding]]


@pytest.fixture(autouse=True)
def fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte between machines instead of 32: all of them are this one."""
    monkeypatch.setattr(cluster_check, "SENT", cluster_check.SENT // 64)


def findings(directory: Path, model: Path, nodes: list[NodeShare], begin: Any = None, **tables: Any) -> Sections:
    place = {"kind": "ray", **tables.pop("orchestration", {})}
    config = load_config(tiny_config(directory, model, engine={"threads": 2}, orchestration=place, **tables))

    async def go() -> Sections:
        cluster = FakeCluster(nodes, begin or (lambda machine: NodeHost()))
        for machine in cluster.machines.values():  # all of them are this machine
            machine.node = ClusterNode(machine.node.id, "10.0.0.1", machine.node.has)
        return await findings_of(config, cluster, within=0)

    return asyncio.run(go())


def last(sections: Sections) -> list[DoctorFinding]:
    return [*sections.values()][-1]


def bad(sections: Sections) -> list[tuple[str, str]]:
    return [(one.what, one.value) for found in sections.values() for one in found if one.state == "bad"]


def test_every_node_that_could_hold_an_engine_is_asked(tiny_llama: Path, tmp_path: Path) -> None:
    sections = findings(tmp_path, tiny_llama, [NodeShare(4), NodeShare(2), NodeShare(1)])
    assert not bad(sections)
    assert [*sections] == ["Cluster", "Node 10.0.0.1 (4 CPUs), node 1", "Node 10.0.0.1 (2 CPUs), node 2"]
    room, trainer = sections["Cluster"]
    assert room == DoctorFinding("room", "ok", "3 engines of 2 CPUs; the run wants 1")
    assert "stays on this machine" in trainer.value
    whats = [one.what for one in last(sections)]
    assert whats == ["headrace", "Python", "torch", "transformers", "clock", "machine", "model", "network"]
    *_, model, network = last(sections)
    assert model.value == str(tiny_llama) and "MB/s from 127.0.0.1:" in network.value


def test_no_room_and_machines_that_cannot_reach_the_run_are_said(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCluster, "own", "10.0.0.9")
    ((_, room), (_, reach)) = bad(findings(tmp_path, tiny_llama, [NodeShare(1)]))
    assert "can never place an engine of 2 CPUs each" in room
    assert "nodes on other machines (10.0.0.1)" in reach and 'such as "10.0.0.9:0"' in reach


class Another(NodeHost):
    async def look(self) -> dict[str, str]:
        return {**await super().look(), "headrace": "0.0.9", "torch": ""}

    async def clock(self) -> float:
        return await super().clock() - 3600

    async def fetch(self, address: str, token: str, count: int) -> tuple[str, float]:
        return await super().fetch(address, "0" * len(token), count)


def test_a_mixed_fleet_is_refused_and_a_node_without_the_token_gets_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    sections = findings(tmp_path, tiny_llama, [NodeShare(2)], lambda machine: Another())
    assert [what for what, _ in bad(sections)] == ["headrace", "torch", "network"]
    found = {one.what: one for one in last(sections)}
    assert (
        found["headrace"].remedy
        == f"the run has {__version__}: install the same in the environment that its worker is started from"
    )
    assert (
        found["clock"].state == "note" and found["clock"].value.startswith("3600.") and "behind" in found["clock"].value
    )
    assert "500000 bytes are missing" in found["network"].value


def test_a_node_without_headrace_is_asked_no_more(tiny_llama: Path, tmp_path: Path) -> None:
    class Bare(NodeHost):
        async def look(self) -> dict[str, str]:
            return {"headrace": "", "Python": "3.9", "host": "b", "torch": "", "transformers": ""}

    sections = findings(tmp_path, tiny_llama, [NodeShare(2)], lambda machine: Bare())
    assert [what for what, _ in bad(sections)] == ["headrace", "Python", "torch", "transformers"]
    assert all(one.what not in ("model", "network") for one in last(sections))


def test_a_silent_node_and_one_that_is_gone_are_said(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_check, "PATIENCE", 0.1)

    def begin(machine: FakeMachine) -> NodeHost:
        machine.frozen = True
        machine.awake.clear()
        return NodeHost()

    assert bad(findings(tmp_path, tiny_llama, [NodeShare(2)], begin)) == [("the node", "did not answer in 0.1 seconds")]


# --- a directory that all machines see -------------------------------------------------------------------------------------------

RANKS = {"trainer": "elsewhere", "listen": "127.0.0.1:0"}


class Elsewhere(NodeHost):
    """A node with another directory under the same path."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    async def leave(self, path: str, word: str) -> str:
        return await super().leave(self._there(path), word)

    async def find(self, path: str, word: str, within: float) -> tuple[str, float]:
        return await super().find(self._there(path), word, within)

    async def drop(self, path: str) -> None:
        await super().drop(self._there(path))

    def _there(self, path: str) -> str:
        return str(self._root / Path(path).name)


class Stale(NodeHost):
    """A node that does not see that a file was replaced."""

    async def find(self, path: str, word: str, within: float) -> tuple[str, float]:
        os.truncate(path, 0)
        return await super().find(path, word, within)


class Full(NodeHost):
    async def leave(self, path: str, word: str) -> str:
        return await super().leave(f"{path}/below/a/file", word)


def shared(sections: Sections) -> list[DoctorFinding]:
    return [one for found in sections.values() for one in found if one.what == "shared directory"]


def placed(directory: Path, model: Path, hosts: list[NodeHost]) -> list[DoctorFinding]:
    """What is found about the directory by the run's machine, and by a node for each host."""
    number = lambda machine: int(machine.node.id.split()[-1]) - 1  # noqa: E731
    nodes = [NodeShare(4)] * len(hosts)
    return shared(
        findings(
            directory, model, nodes, lambda machine: hosts[number(machine)], orchestration=RANKS, out=str(directory)
        )
    )


def test_every_machine_reads_what_the_others_wrote(tiny_llama: Path, tmp_path: Path) -> None:
    found = placed(tmp_path, tiny_llama, [NodeHost(), NodeHost()])
    assert [one.state for one in found] == ["ok"] * 3
    assert all(
        "checkpoints, which all ranks write" in one.value and "files of 2 others seen" in one.value for one in found
    )
    assert not [*tmp_path.glob(".shared*")]


def test_a_machine_with_another_directory_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    here, same, there = placed(tmp_path, tiny_llama, [NodeHost(), Elsewhere(other)])
    assert "wrote is not there within 0 s" in here.value and "Node 10.0.0.1 (4 CPUs), node 2" in here.value
    assert "set out to one that all of them see" in here.remedy
    assert same.state == there.state == "bad"
    assert "what the run's machine wrote is not there" in there.value
    assert not [*other.iterdir()] and not [*tmp_path.glob(".shared*")]


def test_an_older_version_and_a_place_without_room_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    here, stale = placed(tmp_path, tiny_llama, [Stale()])
    assert here.state == "ok" and "is there in an older version within 0 s" in stale.value
    here, full = placed(tmp_path, tiny_llama, [Full()])
    assert here.state == "ok" and "cannot write into it: No such file or directory" in full.value


def test_without_ranks_elsewhere_nothing_is_shared(tiny_llama: Path, tmp_path: Path) -> None:
    assert not shared(findings(tmp_path, tiny_llama, [NodeShare(2)]))


def test_the_same_versions_are_the_same() -> None:
    there = {
        version.what: version.value
        for version in versions(dict.fromkeys(("headrace", "Python", "torch", "transformers"), ""))
    }
    assert set(there.values()) == {"none"}
    here = {"headrace": __version__, "Python": "{}.{}".format(*sys.version_info), "torch": "1", "transformers": "1"}
    assert [version.state for version in versions(here)] == ["ok", "ok", "bad", "bad"]


# --- workers that join ---------------------------------------------------------------------------------------------------------


def examined(directory: Path, model: Path, come: Any, ranks: bool = False, more: Any = None, **engine: Any) -> Sections:
    """`come`: called with the address in threads of its own, one for each seat. `ranks`: whether the trainer joins too. `more`: settings of
    `orchestration` beside those."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (token := directory / "token").write_text(TOKEN)
    token.chmod(0o600)
    place = {"kind": "join", "listen": address, "token_file": str(token), "trainer": "elsewhere" if ranks else "local"}
    place |= more or {}
    config = load_config(tiny_config(directory, model, engine=engine, orchestration=place, out=str(directory)))
    seats = config.engine.replicas + ranks
    threads = [threading.Thread(target=come, args=(address,), daemon=True) for _ in range(seats)]
    for thread in threads:
        thread.start()
    found = asyncio.run(findings_of_joining(config))
    for thread in threads:
        thread.join()
    return found


def offered(address: str, model: Path, examine: Any = answer, token: str = "", kind: Any = "engine") -> str:
    """Returns what a worker hears in the end."""
    while True:
        try:
            dial(address, kind, token or TOKEN, agree=lambda terms: agree(terms, str(model)), examine=examine)
        except OSError:
            time.sleep(0.05)
        except HeadraceError as error:
            return str(error)


def test_workers_that_join_are_asked_like_nodes(tiny_llama: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    sections = examined(tmp_path, tiny_llama, lambda address: heard.append(offered(address, tiny_llama)), replicas=2)
    assert not bad(sections)
    assert sections["Workers"] == [DoctorFinding("workers", "ok", "2 came; the run has 2 seats")]
    assert [one.what for one in last(sections)] == [
        *("headrace", "Python", "torch", "transformers", "clock", "machine", "model", "network")
    ]
    network = last(sections)[-1].value
    assert "MB/s from 127.0.0.1:" in network and network.endswith(" MB/s back")
    assert heard == ["the doctor has asked all that it wanted to know; the run takes its workers when it starts"] * 2


def test_workers_that_run_the_user_s_code_are_counted_and_asked_for_its_files(tiny_llama: Path, tmp_path: Path) -> None:
    def come(address: str) -> None:
        offered(address, tiny_llama, kind="scorer")
        (tmp_path / "reward.py").write_text("def share_of_e(completions):\n    return [0.0] * len(completions)\n")
        offered(address, tiny_llama, kind="scorer")

    sections = examined(tmp_path, tiny_llama, come, more={"kind": "local", "scorers": 2})
    assert sections["Workers"] == [DoctorFinding("workers", "ok", "2 came; the run has 2 seats")]
    first, second = (found for title, found in sections.items() if ", scorer: " in title)
    (code,) = [one for one in first if one.what == "user code"]
    assert (code.state, code.value) == ("ok", "1 file") and "model" not in [one.what for one in first]
    (code,) = [one for one in second if one.what == "user code"]
    assert code.state == "bad" and "its content differs" in code.value


def test_workers_that_join_read_what_the_others_wrote(tiny_llama: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    kinds = ["engine", "trainer"]
    come = lambda address: heard.append(offered(address, tiny_llama, kind=kinds.pop()))  # noqa: E731
    sections = examined(tmp_path, tiny_llama, come, ranks=True)
    assert not bad(sections) and len(heard) == 2
    assert sections["Workers"][0] == DoctorFinding("workers", "ok", "2 came; the run has 2 seats")
    assert len(shared(sections)) == 3
    assert all("files of 2 others seen" in one.value for one in shared(sections))
    assert not [*tmp_path.glob(".shared*")]


def test_a_worker_with_other_packages_is_shown_and_one_with_another_token_is_not_asked(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = NodeHost.look

    async def look(host: NodeHost) -> dict[str, str]:
        return {**await own(host), "headrace": "0.0.9", "torch": ""}

    monkeypatch.setattr(NodeHost, "look", look)
    heard: list[str] = []

    def come(address: str) -> None:
        heard.append(offered(address, tiny_llama, token="another-token-of-many"))
        heard.append(offered(address, tmp_path))

    found = examined(tmp_path, tiny_llama, come)
    assert "its token is not the controller's" in heard[0] and "the doctor has asked" in heard[1]
    assert [what for what, _ in bad(found)] == ["headrace", "torch"]
    assert [one.what for one in found["Workers"]] == ["workers", "a stranger"]


def test_workers_that_do_not_come_are_missed(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_check, "ARRIVALS", 0.1)
    assert bad(examined(tmp_path, tiny_llama, lambda address: None)) == [("workers", "0 came; the run has 1 seat")]


def test_other_runs_and_options_without_a_config_are_refused(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match='orchestration.kind = "local" has none'):
        examine_cluster(load_config(tiny_config(tmp_path, tiny_llama)))
    assert cli.main(["doctor", "--set", "seed=1"]) == 2
    assert "--cluster CONFIG; name it" in capsys.readouterr().err
