"""Settings of fleets: what each member gets, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.engine_problems import engine_problems
from headrace.engine.servers.server_process import visible
from headrace.native.resources import usable_cores
from headrace.run.fleets.core_shares import in_words, members_of, share_problems, split
from headrace.serve.config import ServeConfig

ONE, TWO = "http://127.0.0.1:8101", "http://127.0.0.1:8102"
SERVERS = EngineConfig(kind="headrace", urls=(ONE, TWO))
REPLICAS = EngineConfig(replicas=2)


def test_cores_are_shared_as_evenly_as_they_can_be() -> None:
    assert split((0, 1, 2, 3, 4), 2) == [(0, 1, 2), (3, 4)]
    assert split((4, 5), 2) == [(4,), (5,)] and split((), 3) == [(), (), ()]


def test_every_member_has_its_share() -> None:
    one, two = members_of(replace(REPLICAS, cores=(0, 1, 2))).values()
    assert (one.cores, one.threads, two.cores, two.threads) == ((0, 1), 2, (2,), 1)
    assert (one.replicas, one.is_fleet) == (1, False)
    shared = members_of(REPLICAS)
    assert {member.threads for member in shared.values()} == {max(1, usable_cores() // 2)}
    assert [member.threads for member in members_of(replace(REPLICAS, threads=6)).values()] == [3, 3]
    assert (
        in_words(members_of(replace(REPLICAS, cores=(0, 1))))
        == "engine 1: cores 0, 1 thread; engine 2: cores 1, 1 thread"
    )


def test_every_server_is_a_member_and_one_engine_is_no_fleet() -> None:
    members = members_of(SERVERS)
    assert list(members) == [ONE, TWO] and [member.urls for member in members.values()] == [(ONE,), (TWO,)]
    assert members_of(EngineConfig()) == {"": EngineConfig()} and not EngineConfig().is_fleet
    assert replace(REPLICAS, member_patience=5.0).for_worker == EngineConfig(kv_gib=2.0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(SERVERS, replicas=2), "engine.urls names servers that are running; remove one of them"),
        (replace(SERVERS, urls=(ONE, f"{ONE}/")), f'engine.urls names "{ONE}" more than once'),
        (replace(REPLICAS, device="cuda"), 'engine.kind = "headrace" with engine.gpus'),
        (replace(REPLICAS, kind="vllm", gpus=(0,)), "engine.gpus names 1, too few for engine.replicas = 2"),
        (replace(REPLICAS, gpus=(0, 1)), "engine.gpus is about servers"),
        (replace(REPLICAS, cores=(0,)), "engine.cores names 1, too few for engine.replicas = 2"),
        (EngineConfig(member_patience=5.0), "engine.member_patience is about fleets"),
        (replace(SERVERS, urls=(ONE,), member_patience=5.0), "engine.member_patience is about fleets"),
        (EngineConfig(patience=5.0), "engine.patience is about servers"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(config: EngineConfig, words: str) -> None:
    (problem,) = engine_problems(config)
    assert words in problem


@pytest.mark.parametrize(
    ("config", "device", "words"),
    [
        (REPLICAS, "cpu", ""),
        (REPLICAS, "cuda", "share the cores of this machine, not its GPUs"),
        (replace(REPLICAS, kind="vllm"), "cuda", "say which they may use: engine.gpus"),
        (replace(REPLICAS, kind="vllm", gpus=(0, 1)), "cuda", ""),
        (replace(REPLICAS, kind="vllm"), "cpu", "share them out: engine.cores"),
        (replace(REPLICAS, kind="headrace"), "cpu", ""),
    ],
)
def test_replicas_that_would_take_the_same_cores_or_gpus_are_refused(
    config: EngineConfig, device: str, words: str
) -> None:
    problems = [*share_problems(config, device)]
    assert len(problems) == bool(words) and all(words in problem for problem in problems)


def test_servers_of_a_run_share_gpus_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(REPLICAS, kind="vllm", gpus=(0, 1, 3))
    shares = [member.gpus for member in members_of(config).values()]
    assert shares == [(0, 1), (3,)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible(gpus) for gpus in (*shares, ())] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "3"},
        {},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible((3,)) == {"CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(ConfigError, match=r"engine.gpus names GPU 4, and CUDA_VISIBLE_DEVICES=4,5,6,7 leaves 4"):
        visible((4,))


def test_what_fits_is_taken() -> None:
    started = replace(REPLICAS, kind="vllm", gpus=(0, 1), cores=(0, 1))
    for config in (
        SERVERS,
        replace(SERVERS, member_patience=5.0, patience=9.0),
        replace(REPLICAS, patience=9.0),
        started,
    ):
        assert not [*engine_problems(config)]


def test_a_server_serves_one_engine() -> None:
    with pytest.raises(ConfigError, match="a server serves one engine"):
        ServeConfig(model="x", engine=REPLICAS)
