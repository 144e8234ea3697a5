"""Settings of the bus: what cannot work with it is refused with its remedy."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.config import check, load_config, read_config
from headrace.run.hosts.bus.open_bus import open_bus
from headrace.run.hosts.bus_messages import RunNotice
from headrace.run.resume_rules import contents_of
from headrace.run.rollout_hosting import own_config
from headrace.run.seats import seats_of, threads_elsewhere
from headrace.run.starting import name_on_bus
from headrace.run.wording import placement
from headrace.settings.extras import install
from headrace.version import __version__
from headrace.weight_sync.config import way_of
from support.tiny_run import tiny_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no bus": ({"orchestration": {"bus": "kafka://x"}}, "use redis://HOST:PORT, rediss://HOST:PORT or jsonl:DIRECTORY"),
    "a password": (
        {"orchestration": {"bus": "redis://:secret@127.0.0.1:6379"}},
        "put it into a file .* orchestration.token_file",
    ),
    "forgetful files": ({"orchestration": {"bus_forgets": True}}, "files forget nothing; remove it"),
    "forgets what": (
        {"orchestration": {"bus": "", "bus_forgets": True}},
        "set orchestration.bus, or remove it",
    ),
    "a password of files": (
        {"orchestration": {"token_file": "x"}},
        'orchestration.token_file is for orchestration.kind = "join"',
    ),
    "engines that join": (
        {"orchestration": {"kind": "join", "token_file": "x"}},
        'rollout hosts, and orchestration.kind = "join" engines elsewhere; remove one',
    ),
    "engines that Ray places": (
        {"orchestration": {"kind": "ray"}},
        'rollout hosts, and orchestration.kind = "ray" engines elsewhere; remove one',
    ),
    "GPUs of engines that hosts start": (
        {"orchestration": {"kind": "ray", "trainer": "elsewhere", "gpus": 1}},
        "remove them .orchestration.rank_gpus and rank_resources are the ranks'",
    ),
    "an address of the trainer, which is elsewhere": (
        {"orchestration": {"kind": "ray", "trainer": "elsewhere"}, "weight_sync": {"host": "10.0.0.5"}},
        "engines fetch from the ranks, which are elsewhere .*; remove it",
    ),
    "a server for all": (
        {"engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}},
        'every rollout host starts an engine.kind = "vllm" of its own; remove it',
    ),
    "another server for all": (
        {"engine": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]}},
        'every rollout host starts an engine.kind = "sglang" of its own; remove it',
    ),
    "a fleet": ({"engine": {"replicas": 2}}, "start as many rollout hosts as you like"),
    "cores": ({"engine": {"cores": [0]}}, "give headrace rollouts its own"),
    "shared memory": ({"weight_sync": {"kind": "shared_memory"}}, 'use weight_sync.kind = "tcp"'),
    "a broadcast": ({"weight_sync": {"kind": "broadcast"}}, 'use weight_sync.kind = "tcp"'),
    "every address": ({"weight_sync": {"host": "0.0.0.0"}}, "name the one that rollout hosts reach"),
    "a barrier": ({"partial": {"mode": "barrier"}}, "set it to inflight, or remove orchestration.bus"),
    "cancelled groups": ({"partial": {"mode": "cancel_group"}}, "set it to inflight, or remove orchestration.bus"),
    "cancelled tokens": ({"staleness": {"overdue": "cancel"}}, "set it to drop, or remove orchestration.bus"),
    "a reference": (
        {"algo": {"kl": {"place": "reward", "coef": 0.1}}},
        "use algo.kl.place = loss, or remove orchestration.bus",
    ),
    "parity": ({"train": {"parity": "bitwise"}}, 'set it to "off", or remove orchestration.bus'),
    "a teacher": ({"teachers": [{"name": "math", "path": "there"}]}, "remove orchestration.bus, or the teachers"),
    "a gateway": ({"environment": {"kind": "gateway"}}, "hands out rollouts at one address"),
    "adapters": (
        {"lora": {"rank": 2}, "adapters": [{"name": "a"}, {"name": "b"}]},
        "orchestration.bus serves one policy",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_it_is_refused_with_its_remedy(case: str, tmp_path: Path) -> None:
    tables, said = REFUSED[case]
    place = {"bus": f"jsonl:{tmp_path}", **tables.get("orchestration", {})}
    config = tiny_config(tmp_path, tmp_path, **{**tables, "orchestration": place})
    with pytest.raises(ConfigError, match=said):
        load_config(config)


PLACES: dict[str, dict[str, Any]] = {"join": {"kind": "join", "token_file": "x"}, "ray": {"kind": "ray"}, "bus": {}}


def _on(kind: str, directory: Path) -> dict[str, Any]:
    return {"bus": f"jsonl:{directory}"} if kind == "bus" else {}


@pytest.mark.parametrize(
    ("kind", "server"),
    itertools.product(["join", "ray", "bus"], ["headrace", "vllm", "sglang"]),
)
def test_a_running_server_beside_engines_elsewhere_is_refused_for_what_was_set(
    kind: str, server: str, tmp_path: Path
) -> None:
    """`weight_sync.kind` was left out, and is not blamed. Each remedy works, and servers that workers start are taken."""
    engine = {"kind": server, "urls": ["http://127.0.0.1:1"]}
    both = tiny_config(tmp_path, tmp_path, orchestration=PLACES[kind] | _on(kind, tmp_path)) | {"engine": engine}
    with pytest.raises(ConfigError, match="engine.urls name.*remove (it|one of the two)") as refused:
        load_config(both)
    assert "weight_sync" not in str(refused.value)
    load_config({name: table for name, table in both.items() if name != "orchestration"})
    assert load_config({**both, "engine": {"kind": server}}).way.kind == "tcp"


@pytest.mark.parametrize(
    ("kind", "engine", "sync", "said"),
    [
        (
            "join",
            {"gpus": [0]},
            {},
            "engine.gpus are GPUs of this machine.*start headrace worker with CUDA_VISIBLE_DEVICES",
        ),
        ("ray", {"gpus": [0]}, {}, "engine.gpus are GPUs of this machine.*Ray gives each orchestration.gpus"),
        ("join", {"threads": 2}, {}, "engine.threads is of headrace's own engine"),
        ("join", {"cores": [0]}, {}, "engine.cores are cores of this machine"),
        ("join", {}, {"kind": "shared_memory"}, 'does not reach engine.kind = "vllm".*use weight_sync.kind = "tcp"'),
        ("bus", {"ticket_deaths": 2}, {}, 'engine.kind = "vllm" is a server; remove it'),
    ],
)
def test_what_a_server_elsewhere_cannot_have_is_refused(
    kind: str, engine: dict[str, Any], sync: dict[str, Any], said: str, tmp_path: Path
) -> None:
    place = PLACES[kind] | _on(kind, tmp_path)
    tables = tiny_config(tmp_path, tmp_path, orchestration=place, weight_sync=sync) | {"engine": {"kind": "vllm"}}
    load_config({**tables, "weight_sync": {}})
    with pytest.raises(ConfigError, match=said):
        load_config({**tables, "engine": {"kind": "vllm", **engine}})


def test_what_workers_elsewhere_give_a_server_is_taken(tmp_path: Path) -> None:
    """Ray gives each a number of CPUs, and the tickets that end a worker are known."""
    engine = {"kind": "vllm", "threads": 2, "ticket_deaths": 2, "replicas": 3}
    config = load_config(tiny_config(tmp_path, tmp_path, orchestration={"kind": "ray", "gpus": 2}) | {"engine": engine})
    assert threads_elsewhere(config.orchestration, config.engine, config.chosen) == 2
    assert placement(config, "")["engine"].startswith("3 vllm servers placed by Ray (local) with 2 GPUs each")
    sglang = {"engine": {"kind": "sglang"}, "weight_sync": {"kind": "files"}}
    assert load_config(tiny_config(tmp_path, tmp_path, orchestration=PLACES["join"]) | sglang).way.kind == "files"


def test_a_bus_alone_is_taken_and_weights_go_over_tcp(tmp_path: Path) -> None:
    config = load_config(tiny_config(tmp_path, tmp_path, orchestration={"bus": f"jsonl:{tmp_path}"}))
    assert way_of(config.weight_sync, config.ends).kind == "tcp"
    assert config.orchestration.at_home.bus == ""
    for kind in ("http", "files"):
        load_config(
            tiny_config(tmp_path, tmp_path, orchestration={"bus": f"jsonl:{tmp_path}"}, weight_sync={"kind": kind})
        )


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "ray", "rank_gpus": 1, "rank_resources": {"accelerator_type:H100": 0.001}, "grows": True},
        {"kind": "join", "token_file": "secret", "listen": "127.0.0.1:7400"},
    ],
)
def test_a_bus_brings_engines_and_the_ranks_of_the_trainer_come_from_elsewhere(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    """The remedy of `engines that join`. A host opens an engine of its own, whatever the ranks are."""
    place = {"bus": f"jsonl:{tmp_path}", "trainer": "elsewhere", **kind}
    config = load_config(
        tiny_config(tmp_path, tmp_path, orchestration=place, train={"parallel": {"shard": 2}, "threads": 1})
    )
    assert seats_of(config.orchestration, config.engine, config.train) == {
        "trainer": ["trainer rank 0", "trainer rank 1"]
    }
    assert config.way.kind == "tcp" and not config.orchestration.elsewhere
    assert config.orchestration.at_home == OrchestrationConfig()
    placed = placement(config, "")
    assert placed["engine"].startswith("rollout hosts on jsonl:") and "2 ranks" in placed["trainer"]


def test_servers_that_rollout_hosts_start_are_taken(tmp_path: Path) -> None:
    for kind in ("headrace", "vllm", "sglang"):
        tables = {"engine": {"kind": kind}, "orchestration": {"bus": f"jsonl:{tmp_path}"}}
        config = load_config(tiny_config(tmp_path, tmp_path) | tables)
        assert config.way.kind == "tcp"
        assert placement(config, "")["engine"].startswith(
            f"rollout hosts on jsonl:{tmp_path} with a {kind} server each"
        )


def test_a_copy_of_a_run_has_another_name_on_the_bus(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    name = name_on_bus(run, "r")
    assert name_on_bus(run, "r") == name and name.startswith("r-")
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert name_on_bus(copy, "r") != name
    assert name_on_bus(copy, "r") == name_on_bus(copy, "r")
    assert name_on_bus(run.rename(tmp_path / "moved"), "r") == name


REWARDS = "def exact(completions):\n    return [1.0] * len(completions)\n"


def noticed(place: Path, **tables: Any) -> RunNotice:
    """The notice of a run whose reward is in `place`."""
    (place / "rewards.py").write_text(REWARDS)
    reward = {"function": f"{place / 'rewards.py'}:exact"}
    config = load_config(tiny_config(place, place, reward=reward, orchestration={"bus": f"jsonl:{place}"}, **tables))
    contents = contents_of(config, of_sets=True)
    return RunNotice("s", __version__, config=dataclasses.asdict(config), contents=contents)


@pytest.mark.parametrize(
    "changed",
    ["rollout.temperature=0.5", "rollout.group_size=8", "rollout.top_p=0.5", "eval.samples=3", "seed=9", "reward.extract_truncated=true",
     "engine.weights=int8"],
)  # fmt: skip
def test_a_host_samples_and_scores_as_the_run_says(changed: str, tmp_path: Path) -> None:
    notice = noticed(tmp_path)
    free = ["engine.threads=1", "reward.timeout=9"]
    assert own_config(notice, free).engine.threads == 1
    with pytest.raises(ConfigError, match=f"a host cannot change .*{changed.partition('=')[0]}"):
        own_config(notice, [*free, changed])


def test_a_host_has_the_files_of_the_run_wherever_they_lie(tmp_path: Path) -> None:
    notice, there = noticed(tmp_path), tmp_path / "there" / "rewards.py"
    there.parent.mkdir()
    shutil.copy(tmp_path / "rewards.py", there)
    moved = [f"reward.function={there}:exact"]
    assert own_config(notice, moved).reward.specs[0].function == f"{there}:exact"
    there.write_text(there.read_text().replace("1.0", "2.0"))
    with pytest.raises(ConfigError, match=r"the files of reward\.function are not the run's"):
        own_config(notice, moved)
    (tmp_path / "rewards.py").write_text(there.read_text())
    with pytest.raises(ConfigError, match=r"the files of reward\.function are not the run's"):
        own_config(notice, [])


def test_a_host_has_the_files_of_the_evaluation_sets(tmp_path: Path) -> None:
    (tmp_path / "hard.py").write_text(REWARDS)
    (tmp_path / "hard.jsonl").write_text('{"prompt": "a"}\n')
    hard = {"reward": {"function": f"{tmp_path / 'hard.py'}:exact"}, "task": {"path": str(tmp_path / "hard.jsonl")}}
    notice = noticed(tmp_path, eval={"prompts": 4, "sets": [{"name": "hard", **hard}]})
    (tmp_path / "hard.jsonl").unlink()
    assert own_config(notice, []), "its rows come with the errands"
    (tmp_path / "hard.py").write_text(REWARDS.replace("1.0", "2.0"))
    with pytest.raises(ConfigError, match=r"the files of eval\.sets\.hard\.reward\.function are not the run's"):
        own_config(notice, [])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "hard.py").write_text(REWARDS)
    there = f"eval.sets.hard.reward.function={tmp_path / 'there' / 'hard.py'}:exact"
    assert own_config(notice, [there]), "the remedy"


def test_redis_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(tiny_config(tmp_path, tmp_path, orchestration={"bus": "redis://127.0.0.1:1"}))
    monkeypatch.setattr("headrace.run.place_problems.is_installed", lambda module: module != "redis")
    assert f"orchestration.bus = redis://127.0.0.1:1 needs the package redis: {install('redis')}" in check(config)[0]
    monkeypatch.setattr("headrace.run.hosts.bus.open_bus.is_installed", lambda module: module != "redis")
    with pytest.raises(ConfigError, match="jsonl:DIRECTORY needs none"):
        open_bus("redis://127.0.0.1:1", "run", say=print)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a directory that can be written"):
        open_bus(f"jsonl:{tmp_path / 'file'}", "run", say=print)
