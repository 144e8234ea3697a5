"""The sizes of engine and trainer on a GPU: never more than is free, one sequence at least, and remedies that work. The GPU is pretended."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.sizes import (
    CONTEXT,
    MOST_RUNNING,
    ON_CPU,
    RESERVED,
    Demand,
    OpenSizes,
    cost,
    fitting,
    longest,
    usable,
)
from headrace.facts.kept_settings import CONFIG
from headrace.native.resources import gib
from headrace.run.auto.gpu_sizes import MICROBATCHES, SLACK, asking_of, gpu_notes, gpu_sizes
from headrace.run.choosing import resumed_settings, settle_sizes
from headrace.run.config import RunConfig, load_config
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import ACTIVATIONS, KV, ModelShape, memory_plan, needs
from headrace.settings.toml import dump
from headrace.trainer.config import TrainConfig
from support.tiny_run import tiny_config

GIB = 2**30


def shape_of(parameters: float, layers: int, hidden: int, inner: int, cached: int) -> ModelShape:
    return ModelShape(
        parameters=int(parameters),
        matrices=(),
        layers=layers,
        hidden=hidden,
        inner=inner,
        experts=0,
        cached=cached,
        positions=32768,
        vocabulary=151_936,
    )


SMALL = shape_of(135e6, 30, 576, 1536, 2 * 30 * 3 * 64)
MIDDLE = shape_of(1.54e9, 28, 1536, 8960, 2 * 28 * 2 * 128)
LARGE = shape_of(7.6e9, 28, 3584, 18944, 2 * 28 * 4 * 128)


def gpu(total: float, free: float | None = None, host: float = 256) -> Machine:
    facts = {"bfloat16": True, "built_for": "13.0", "free": int((total if free is None else free) * GIB)}
    return Machine(16, int(host * GIB), int(host * GIB), ("H100", int(total * GIB)), facts)


def run_of(tmp_path: Path, **tables: Any) -> RunConfig:
    """A run that leaves all sizes open, 64 groups of 16 under way."""
    tree = tiny_config(tmp_path, tmp_path, **tables)
    for name in ("kv_gib", "max_running"):
        if name not in tables.get("engine", {}):
            del tree["engine"][name]
    if "microbatch_tokens" not in tables.get("train", {}):
        tree["train"].pop("microbatch_tokens", None)
    return load_config(tree)


def busy(tmp_path: Path, **tables: Any) -> RunConfig:
    work: dict[str, Any] = {
        "staleness": {"groups_per_step": 64},
        "rollout": {"max_tokens": 2048, "group_size": 16},
        "engine": {"dtype": "bfloat16", "context_length": 4096},
        "train": {"dtype": "bfloat16", "steps": 5},
    }
    return run_of(tmp_path, **{**work, **{k: {**work.get(k, {}), **v} for k, v in tables.items()}})


def on_gpu(config: RunConfig, shape: ModelShape, machine: Machine, *whose: str) -> float:
    """Bytes that the run, or only `whose` processes hold of a GPU at once, by the list that it prints, activations with their slack."""
    found = [need for need in needs(shape, memory_plan(config, machine)) if need.where == "cuda"]
    found = [need for need in found if not whose or need.who in whose]
    held = {
        who: sum(one.bytes * (SLACK if one.what == ACTIVATIONS else 1) for one in found if one.who == who)
        for who in {one.who for one in found}
    }
    apart = min(held.get("trainer", 0), held.get("engine", 0)) if config.orchestration.placement == "shared" else 0
    return sum(held.values()) - apart


# --- the arithmetic ----------------------------------------------------------------------------------------------------

ASKED = st.builds(
    OpenSizes,
    kv_gib=st.none(),
    max_running=st.none() | st.integers(1, 2000),
    prefill_chunk=st.none() | st.integers(1, 20_000),
)
COSTS = st.builds(
    cost,
    st.floats(100, 1e6),
    st.integers(32, 16_384),
    st.integers(32, 65_536),
    st.integers(100, 300_000),
    st.sampled_from([2, 4]),
)


@given(ASKED, st.floats(0, 200), COSTS, st.integers(32, 131_072), st.floats(1, 131_072), st.integers(1, 100_000))
def test_no_more_is_taken_than_there_is(asked: OpenSizes, room: float, one: Any, context: int, usual: float, most: int):
    sizes = fitting(asked, room * GIB, one, Demand(context, min(usual, context), most))
    taken = sizes.kv_gib * GIB + sizes.prefill_chunk * one.passing + sizes.max_running * one.row
    if sizes.kv_gib:
        assert taken <= room * GIB * (1 + 1e-9)
    assert sizes.max_running == (asked.max_running or min(sizes.max_running, most, MOST_RUNNING)) >= 1
    assert sizes.prefill_chunk == (asked.prefill_chunk or sizes.prefill_chunk)
    if longest(sizes, one) >= context and asked.max_running is None:  # what runs is expected to fit
        assert sizes.max_running == 1 or sizes.max_running * min(usual, context) * one.token <= room * GIB


@given(st.floats(0, 200), st.floats(1, 200), st.integers(1, 9))
def test_some_of_a_gpu_is_never_planned_with(free: float, total: float, processes: int):
    left = usable(free * GIB, total * GIB, processes)
    assert 0 <= left <= max(0.0, free * GIB - processes * CONTEXT - RESERVED * total * GIB) + 1


def test_what_nobody_needs_is_not_taken(tmp_path: Path):
    """16 sequences of 4,096 tokens fill 1.3 GiB of the small model's cache."""
    config = busy(tmp_path, staleness={"groups_per_step": 1}, rollout={"group_size": 8})
    found = settle_sizes(config, SMALL, gpu(80))
    assert found.engine.kv_gib == ON_CPU.kv_gib and found.engine.max_running == 16
    (note,) = gpu_notes(needs(SMALL, memory_plan(found, gpu(80))), gpu(80), found)
    assert "of 80 GiB of the GPU are unused: more rollouts at once would use them" in note


REMEDIES: dict[str, tuple[str, str, Any]] = {
    "set train.microbatch_tokens = 2048": ("train", "microbatch_tokens", 2048),
    'set orchestration.placement = "shared"': ("orchestration", "placement", "shared"),
    "train an adapter (lora.rank = 16)": ("lora", "rank", 16),
    "set engine.context_length = ": ("engine", "context_length", None),
    "take a smaller model, or a GPU with more memory": ("", "", None),
}


# --- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, MIDDLE], ids=["small", "middle"])
@pytest.mark.parametrize("placement", ["apart", "shared"])
@pytest.mark.parametrize("total", [70, 80, 141])
def test_a_gpu_is_filled_and_not_overfilled(shape: ModelShape, placement: str, total: int, tmp_path: Path):
    config, machine = busy(tmp_path, orchestration={"placement": placement}), gpu(total, total - 1.5)
    found = settle_sizes(config, shape, machine, 300)
    engine, train = found.engine, found.train
    assert engine.prefill_chunk in (4096, 8192) and train.microbatch_tokens in (*MICROBATCHES, 2048)
    assert 64 < engine.sizes.max_running <= MOST_RUNNING and engine.sizes.kv_gib > ON_CPU.kv_gib
    assert on_gpu(found, shape, machine) < machine.gpu_free - RESERVED * machine.gpu[1]  # type: ignore[index]
    names = ("engine.kv_gib", "engine.max_running", "engine.prefill_chunk", "train.microbatch_tokens")
    assert found.chosen.wishes == dict.fromkeys(names, "auto")
    assert (
        all(name in found.chosen.why["sizes"] for name in names)
        and f"of {gib(total * GIB)}" in found.chosen.why["sizes"]
    )
    assert settle_sizes(found, shape, machine, 300) == found


@given(
    total=st.floats(4, 200),
    share=st.floats(0.1, 1),
    shape=st.sampled_from([SMALL, MIDDLE, LARGE]),
    placement=st.sampled_from(["apart", "shared"]),
)
def test_whatever_is_free_it_fits_with_one_sequence_or_is_refused(
    total: float, share: float, shape: ModelShape, placement: str, tmp_path_factory: Any
):
    machine = gpu(total, share * total)
    config = busy(tmp_path_factory.getbasetemp(), orchestration={"placement": placement})
    try:
        found = settle_sizes(config, shape, machine, 300)
    except ConfigError:
        return
    if placement == "apart" or on_gpu(found, shape, machine, "engine", "between") > machine.gpu_free:
        assert on_gpu(found, shape, machine) <= machine.gpu_free
    assert found.engine.sizes.kv_gib * GIB >= 4096 * 2 * shape.cached


def test_a_refusal_names_a_remedy_that_works(tmp_path: Path):
    """On GPUs of 4 to 42 GiB with contexts of up to 128k, each remedy is named for some, and the run that follows it fits."""
    named = set()
    for total, shape, power, microbatch in itertools.product(
        (4, 16, 32, 42), (SMALL, MIDDLE, LARGE), (9, 13, 15, 17), ("auto", 65_536)
    ):
        shape = dataclasses.replace(shape, positions=1 << 20)
        tables: dict[str, Any] = {
            "engine": {"context_length": 1 << power},
            "rollout": {"max_tokens": 64},
            "train": {"microbatch_tokens": microbatch} if microbatch != "auto" else {},
        }
        try:
            settle_sizes(busy(tmp_path, **tables), shape, gpu(total))
            continue
        except ConfigError as error:
            said = str(error)
        assert "GiB of the GPU are left for the KV cache" in said
        remedy = next(one for one in REMEDIES if one in said)
        named.add(remedy)
        section, name, value = REMEDIES[remedy]
        if section:
            value = value or int(said.rpartition("= ")[2])
            followed = busy(tmp_path, **{**tables, section: {**tables.get(section, {}), name: value}})
            assert settle_sizes(followed, shape, gpu(total)).engine.sizes.kv_gib > 0
    assert named == set(REMEDIES)


def test_on_a_cpu_nothing_is_chosen_and_sizes_are_what_they_were(tmp_path: Path):
    config = run_of(tmp_path)
    assert settle_sizes(config, SMALL, Machine(2, 64 * GIB, 64 * GIB, None, None)) == config
    assert EngineConfig().sizes == (2.0, 64, 512) and TrainConfig().microbatch == 2048
    forced = run_of(tmp_path, engine={"device": "cpu"}, train={"device": "cpu"})
    assert settle_sizes(forced, SMALL, gpu(80)) == forced


def test_what_is_set_is_left_alone_and_the_note_says_what_keeps_a_gpu_empty(tmp_path: Path):
    config = busy(tmp_path, engine={"kv_gib": 2.0, "max_running": 64})
    found = settle_sizes(config, SMALL, gpu(80))
    assert (found.engine.kv_gib, found.engine.max_running) == (2.0, 64) and found.engine.prefill_chunk == 8192
    (note,) = gpu_notes(needs(SMALL, memory_plan(found, gpu(80))), gpu(80), found)
    assert 'engine.kv_gib = 2, engine.max_running = 64 keep it so; "auto" takes what is free' in note
    assert not [
        *gpu_notes(needs(SMALL, memory_plan(settle_sizes(busy(tmp_path), SMALL, gpu(40)), gpu(40))), gpu(40), config)
    ]


def test_a_gpu_that_others_use_is_noted(tmp_path: Path):
    found = settle_sizes(busy(tmp_path), MIDDLE, gpu(80))
    (note,) = gpu_notes(needs(MIDDLE, memory_plan(found, gpu(80, 62))), gpu(80, 62), found)
    assert "62.0 GiB of 80.0 GiB are free now" in note and "lower engine.kv_gib or train.microbatch_tokens" in note
    again = settle_sizes(busy(tmp_path), MIDDLE, gpu(80, 62))
    assert not [*gpu_notes(needs(MIDDLE, memory_plan(again, gpu(80, 62))), gpu(80, 62), again)]


def test_engines_elsewhere_and_servers_on_other_gpus_decide_themselves(tmp_path: Path):
    server = {"kind": "vllm", "gpus": [1], "max_adapters": 0}
    found = settle_sizes(busy(tmp_path, engine=server), SMALL, gpu(80))
    assert found.engine.kv_gib == "auto" and found.train.microbatch_tokens == 32768
    beside = settle_sizes(busy(tmp_path, engine={**server, "gpus": [0]}), SMALL, gpu(80))
    assert beside.engine.kv_gib != "auto" and beside.engine.max_running != "auto"
    assert beside.engine.prefill_chunk == "auto"  # a setting that vLLM does not have


def test_other_engines_on_the_gpu_keep_a_small_cache_of_their_own(tmp_path: Path):
    found = settle_sizes(busy(tmp_path), SMALL, gpu(80))
    assert found.engine.sizes.kv_gib > 10
    assert found.engine_beside.kv_gib == "auto" and found.engine_beside.for_worker.kv_gib == ON_CPU.kv_gib
    taken = settle_sizes(busy(tmp_path), MIDDLE, gpu(80), 0, (8e9, 8e9))
    alone = settle_sizes(busy(tmp_path), MIDDLE, gpu(80))
    assert taken.engine.sizes.kv_gib < alone.engine.sizes.kv_gib - 10


def test_a_cache_that_sleeps_on_the_host_fits_there(tmp_path: Path):
    shared = {"orchestration": {"placement": "shared", "kv": "host"}}
    assert settle_sizes(busy(tmp_path, **shared), MIDDLE, gpu(80, host=20)).engine.sizes.kv_gib < 10
    dropped = {"orchestration": {"placement": "shared", "kv": "drop"}}
    assert settle_sizes(busy(tmp_path, **dropped), MIDDLE, gpu(80, host=20)).engine.sizes.kv_gib > 30


def test_a_server_that_takes_turns_drops_its_cache_and_keeps_its_graphs(tmp_path: Path):
    shared = {"orchestration": {"placement": "shared"}}
    own = settle_sizes(busy(tmp_path, **shared), MIDDLE, gpu(32))
    server = settle_sizes(busy(tmp_path, **shared, engine={"kind": "vllm"}), MIDDLE, gpu(32, host=20))
    assert server.engine.sizes.kv_gib > 10 and server.train.microbatch <= own.train.microbatch
    adapted = busy(tmp_path, **shared, engine={"kind": "vllm"}, lora={"rank": 8})
    needed = {need.what: need for need in needs(MIDDLE, memory_plan(adapted, gpu(80)))}
    assert needed["the base while the trainer has the GPU"].bytes == 2 * MIDDLE.parameters


# --- resumed -----------------------------------------------------------------------------------------------------------


def written(config: RunConfig, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / CONFIG).write_text(dump(config))
    return directory


def test_a_resumed_run_keeps_the_sizes_that_it_has(tmp_path: Path):
    asked = busy(tmp_path)
    found = settle_sizes(asked, MIDDLE, gpu(80))
    again = load_config(resumed_settings(asked, written(found, tmp_path / "run")))
    assert (again.engine, again.train) == (found.engine, found.train) and again.chosen == found.chosen
    assert settle_sizes(again, MIDDLE, gpu(40)) == again
    smaller = dataclasses.replace(asked, engine=dataclasses.replace(asked.engine, kv_gib=4.0))
    assert load_config(resumed_settings(smaller, tmp_path / "run")).engine.kv_gib == 4.0
    older = written(busy(tmp_path, engine={"kv_gib": 2.0, "max_running": 64}), tmp_path / "older")
    kept = load_config(resumed_settings(asked, older))
    assert (kept.engine.kv_gib, kept.engine.max_running, kept.train.microbatch_tokens) == (2.0, 64, "auto")


def test_the_same_arithmetic_serves_the_list_of_memory(tmp_path: Path):
    """A kind of memory that the list gains is planned with: the sum of the list is what the sizes left."""
    config, machine = busy(tmp_path), gpu(80)
    plan = memory_plan(config, machine)
    sizes = gpu_sizes(plan, MIDDLE, machine, asking_of(config, MIDDLE, 300), engine=True)
    fixed = sum(one.bytes for one in needs(MIDDLE, plan) if one.where == "cuda" and one.what not in (KV, ACTIVATIONS))
    reserve = RESERVED * machine.gpu[1] + 2 * CONTEXT  # type: ignore[index]
    token = SLACK * 2 * 28 * (10 * 1536 + 3 * 8960)
    assert sizes.room == pytest.approx(machine.gpu_free - reserve - fixed - token * max(sizes.microbatch, 4096))


def test_a_trainer_on_other_machines_is_named_with_what_it_takes(tmp_path: Path):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    place = {"kind": "join", "listen": "127.0.0.1:7400", "token_file": str(tmp_path / "token"), "trainer": "elsewhere"}
    plain, machine = Machine(2, 64 * GIB, 64 * GIB, None, None), gpu(80)
    config = run_of(tmp_path, orchestration=place)
    for here in (plain, machine):  # that GPU is nobody's
        (note,) = gpu_notes([], here, config)
        assert "train.microbatch_tokens is 2048" in note and "set it for those" in note
    chosen = run_of(tmp_path, orchestration=place, train={"microbatch_tokens": 4096})
    assert not [*gpu_notes(needs(SMALL, memory_plan(chosen, machine)), machine, chosen)]
