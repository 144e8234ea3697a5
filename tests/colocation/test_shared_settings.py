"""Settings of shared and of lent devices: what cannot work with them is refused with its remedy, and what memory is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import EngineConfig
from headrace.models.lora import LoraConfig
from headrace.native.resources import GIB
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.config import RunConfig, check, read_config
from headrace.run.fleets.core_shares import nothing_to_lend, settings_of_lent
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import MemoryNeed, MemoryPlan, ModelShape, needs, notes, read_shape
from headrace.trainer.config import TrainConfig
from support.tiny_run import tiny_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a cache without sleep": (
        {"orchestration": {"placement": "apart", "kv": "drop"}},
        "about an engine that sleeps; set",
    ),
    "engines that join": (
        {"orchestration": {"kind": "join", "token_file": "x"}},
        "brings engines of others; remove one",
    ),
    "Ray": ({"orchestration": {"kind": "ray"}}, 'orchestration.kind = "ray" brings engines of others'),
    "a bus": ({"orchestration": {"bus": "jsonl:there"}}, "orchestration.bus brings engines of others; remove one"),
    "a server": (
        {"engine": {"kind": "headrace"}},
        'that cannot; use engine.kind = "native" or engine.kind = "vllm", or remove',
    ),
    "a server that runs": ({"engine": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]}}, "is a server that cannot"),
    "another machine": (
        {"engine": {"kind": "vllm", "urls": ["http://10.0.0.1:8000"]}},
        "is for one machine, and http://10.0.0.1:8000 is another one (engine.urls); remove",
    ),
    "another GPU": ({"engine": {"kind": "vllm", "gpus": [1]}}, "GPU 0, is not among engine.gpus = [1]; leave that out"),
    "another way": (
        {"weight_sync": {"kind": "tcp"}},
        'weight_sync.kind = "tcp" does not keep them for it; leave it out',
    ),
    "CUDA's memory": ({"weight_sync": {"kind": "cuda_ipc"}}, "does not keep them for it; leave it out"),
    "a fleet": ({"engine": {"replicas": 2}}, "is for one engine; remove engine.replicas"),
    "ranks": ({"train": {"parallel": {"shard": 2}}}, "and train.parallel makes 2; remove one of the two"),
    "a teacher": (
        {"teachers": [{"name": "math", "path": "there"}]},
        "does not put the engines to sleep that teachers have",
    ),
    "a reference": ({"algo": {"kl": {"place": "reward", "coef": 0.1}}}, "that algo.kl.place = reward has"),
    "cores of the engine": ({"engine": {"cores": [0]}}, "engine.cores divides what"),
    "cores of the trainer": ({"train": {"cores": [0]}}, "train.cores divides what"),
    "two devices": ({"engine": {"device": "cpu"}, "train": {"device": "cuda"}}, "is for one device"),
    "adapters": ({"lora": {"rank": 2}, "adapters": [{"name": "a"}, {"name": "b"}]}, "is for one policy; remove it"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_it_is_refused_with_its_remedy(case: str, tmp_path: Path) -> None:
    tables, words = REFUSED[case]
    place = {"placement": "shared", **tables.get("orchestration", {})}
    config = read_config(tiny_config(tmp_path, tmp_path, **{**tables, "orchestration": place}))
    assert [problem for problem in check(config) if words in problem], check(config)


def test_a_plain_run_may_share(tmp_path: Path) -> None:
    for kv in ("host", "drop"):
        assert (
            check(read_config(tiny_config(tmp_path, tmp_path, orchestration={"placement": "shared", "kv": kv}))) == []
        )


VLLM = {"dtype": "float32", "kind": "vllm"}


@pytest.mark.parametrize(
    "tables",
    [
        {"engine": VLLM},
        {"engine": {**VLLM, "gpus": [0, 1]}},
        {"engine": VLLM, "weight_sync": {"kind": "http"}},
        {"engine": VLLM, "weight_sync": {"kind": "cuda_ipc"}},
        {"engine": VLLM, "orchestration": {"kv": "drop"}},
        {"engine": VLLM, "lora": {"rank": 2}},
    ],
)
def test_a_vllm_server_may_share(tables: dict[str, Any], tmp_path: Path) -> None:
    place = {"placement": "shared", **tables.pop("orchestration", {})}
    assert check(read_config(tiny_config(tmp_path, tmp_path, orchestration=place, **tables))) == []


def test_a_vllm_that_runs_here_may_share(tmp_path: Path) -> None:
    text = tiny_config(tmp_path, tmp_path, orchestration={"placement": "shared"}, engine=VLLM)
    joined = {name: value for name, value in text["engine"].items() if name in ("dtype", "kind", "context_length")}
    config = read_config({**text, "engine": {**joined, "urls": ["http://localhost:8000"]}})
    assert check(config) == []


def test_what_works_on_a_run_without_training_it_has_an_engine_that_is_awake() -> None:
    assert OrchestrationConfig(placement="shared", kv="drop").at_home == OrchestrationConfig()


def plan(shared: bool, device: Any) -> MemoryPlan:
    return MemoryPlan(
        engine=EngineConfig(kv_gib=1.0),
        engine_device=device,
        train=TrainConfig(),
        train_device=device,
        train_dtype="bfloat16",
        lora=LoraConfig(),
        adapters=0,
        reference_in_loss=False,
        shared=shared,
    )


def said(found: list[MemoryNeed], shared: bool, free: float) -> list[str]:
    return list(notes(found, Machine(2, 64 * GIB, int(free), None, None), shared))


def test_memory_is_needed_by_one_at_a_time(tiny_llama: Path) -> None:
    shape: ModelShape = read_shape(tiny_llama)
    found = needs(shape, plan(True, "cpu"))
    both = sum(one.bytes for one in found)
    engine = sum(one.bytes for one in found if one.who == "engine" and not one.what.startswith("Python"))
    step = sum(one.bytes for one in found if one.what == "gradients" or one.what.startswith("activations"))
    enough = both - min(engine, step)
    assert engine > GIB and said(found, True, enough + 1) == [] and said(found, True, enough - 1)
    assert said(found, False, enough + 1) and said(found, False, both + 1) == []


def test_what_leaves_a_gpu_is_counted_on_the_host(tiny_llama: Path) -> None:
    shape = read_shape(tiny_llama)
    on_host = {
        need.what: need.bytes
        for need in needs(shape, plan(True, "cuda"))
        if need.who == "trainer" and need.where == "cpu"
    }
    assert on_host["weights and AdamW while the engine has the GPU"] == 12 * shape.parameters
    assert not [need for need in needs(shape, plan(False, "cuda")) if "while the engine" in need.what]


# -- lending ----------------------------------------------------------------------------------------------------------------

NOT_LENT: dict[str, tuple[dict[str, Any], str]] = {
    "a time without lending": (
        {"orchestration": {"lend": False, "give_way": 3.0}},
        "give_way is about an engine on devices that the trainer lends; set",
    ),
    "turns": (
        {"orchestration": {"placement": "shared"}},
        "and so does orchestration.lend = true; remove one of the two",
    ),
    "a bus": ({"orchestration": {"bus": "jsonl:there"}}, "and with orchestration.bus it has none; remove one"),
    "a server": ({"engine": {"kind": "vllm"}}, 'is a server, which computes otherwise; use engine.kind = "native"'),
    "a broadcast": ({"weight_sync": {"kind": "broadcast"}}, 'waits for all; leave it out, or take "tcp"'),
    "a trainer elsewhere": (
        {"orchestration": {"kind": "join", "trainer": "elsewhere", "token_file": "x"}},
        "is for a trainer of this machine",
    ),
    "ranks": ({"train": {"parallel": {"shard": 2}}}, "and train.parallel makes 2; remove one of the two"),
    "a teacher": (
        {"teachers": [{"name": "math", "path": "there"}]},
        "teachers may need its older weights then; remove",
    ),
    "adapters": ({"lora": {"rank": 2}, "adapters": [{"name": "a"}, {"name": "b"}]}, "lend is for one policy; remove"),
}


@pytest.mark.parametrize("case", sorted(NOT_LENT))
def test_lending_is_refused_with_its_remedy(case: str, tmp_path: Path) -> None:
    tables, words = NOT_LENT[case]
    place = {"lend": True, **tables.get("orchestration", {})}
    config = read_config(tiny_config(tmp_path, tmp_path, **{**tables, "orchestration": place}))
    assert [problem for problem in check(config) if words in problem], check(config)


def lending_config(tmp_path: Path, **tables: Any) -> RunConfig:
    return read_config(tiny_config(tmp_path, tmp_path, **{"orchestration": {"lend": True}, **tables}))


def _not_lent(config: RunConfig, engine: str, trainer: str) -> list[str]:
    return [*nothing_to_lend(config.orchestration, config.engine.cores, config.train.cores, engine, trainer)]


def test_only_devices_of_its_own_can_be_lent(tmp_path: Path) -> None:
    cores = {"engine": {"cores": [0]}, "train": {"cores": [1]}}
    assert (
        check(lending_config(tmp_path)) == []
        and OrchestrationConfig(lend=True, give_way=3.0).at_home == OrchestrationConfig()
    )
    (said,) = _not_lent(lending_config(tmp_path), "cpu", "cpu")
    assert "remove it, or set both" in said
    (said,) = _not_lent(lending_config(tmp_path, **cores), "cuda", "cuda")
    assert 'kind = "join" or "ray"' in said
    joined = {"orchestration": {"lend": True, "kind": "join", "token_file": "x"}}
    assert not _not_lent(lending_config(tmp_path, **cores), "cpu", "cpu")
    assert not _not_lent(lending_config(tmp_path, **joined), "cuda", "cuda")
    assert not _not_lent(lending_config(tmp_path), "cuda", "cpu")


def test_the_engine_on_lent_devices_has_those_of_the_trainer(tmp_path: Path) -> None:
    train = {"cores": [1, 2], "device": "cpu"}
    config = lending_config(tmp_path, engine={"replicas": 2, "cores": [0, 3], "threads": 1}, train=train)
    one = settings_of_lent(config.engine, config.train)
    assert (one.replicas, one.cores, one.threads, one.device) == (1, (1, 2), 2, "cpu")


def test_an_engine_more_needs_memory_in_turns_with_the_trainer(tiny_llama: Path) -> None:
    shape: ModelShape = read_shape(tiny_llama)
    without, found = needs(shape, plan(False, "cpu")), needs(shape, plan(False, "cpu")._replace(lent=True))
    more = [one for one in found if one.who == "lent engine"]
    assert len(found) == len(without) + len(more) and sum(one.bytes for one in more) > GIB
    both = sum(one.bytes for one in found)
    step = sum(one.bytes for one in found if one.what == "gradients" or one.what.startswith("activations"))
    assert said(found, True, both - min(step, GIB) + 1) == [] and said(found, False, both - 1)
