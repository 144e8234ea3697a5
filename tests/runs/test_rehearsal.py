"""The rehearsal: what it shows when all is well, what it only notes, and its arithmetic. What it refuses is in `test_bad_inputs.py`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace import cli
from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.core.types import Constraint
from headrace.durable.journal import LiveRecord
from headrace.engine.config import EngineConfig
from headrace.engine.native import served_how
from headrace.episodes.tasks.config import TaskConfig
from headrace.models.chat import ChatEncoder
from headrace.models.lora import LoraConfig
from headrace.native.resources import GIB, gib
from headrace.run.build import build_task
from headrace.run.config import RunConfig, dump_config, load_config, read_config
from headrace.run.machine_trial import _step_problems
from headrace.run.python_inputs import with_python_inputs
from headrace.run.rehearsal import memory_needs
from headrace.run.rehearsal.first_rows import first_prompts, length_problem, lengths
from headrace.run.rehearsal.machine import Machine, place_problem
from headrace.run.rehearsal.memory_needs import (
    BYTES,
    MemoryPlan,
    ModelShape,
    needs,
    notes,
    read_shape,
    refusals,
    warm_lines,
    warm_needs,
)
from headrace.run.rehearsal.words import algorithm, page
from headrace.run.rehearse import rehearse, try_files
from headrace.run.rehearsed import Rehearsal
from headrace.settings.other_names import MEANINGS
from headrace.settings.toml import setting_names
from headrace.settings.user_code import defines
from headrace.trainer.config import TrainConfig
from headrace.trainer.parallel import ParallelConfig
from support.fact_stream import write_journal
from support.native_calls import EOS, TOKENIZER
from support.start_lines import without_progress
from support.tiny_run import tiny_config

Config = dict[str, Any]


def done(config: Config, reward: Any = None, resume: Path | None = None) -> Rehearsal:
    resolved, inputs = with_python_inputs(config, (), reward)
    return asyncio.run(rehearse(resolved, inputs, resume))


def test_a_constraint_that_the_model_s_tokenizer_cannot_follow_is_refused_before_anything_is_loaded(
    tmp_path: Path, tiny_llama: Path
) -> None:
    config = tiny_config(tmp_path, tiny_llama, rollout={"constraint": {"choice": ["yes", "no"]}})
    (problem,) = asyncio.run(try_files(load_config(config))).problems
    assert "cannot be used with constraints by llguidance" in problem
    assert problem.endswith("; remove rollout.constraint, or choose another model")
    config["rollout"].pop("constraint")
    assert not asyncio.run(try_files(load_config(config))).problems, "the remedy helps"
    TOKENIZER.save_pretrained(tmp_path / "bytes")
    (tmp_path / "bytes" / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    ChatEncoder(tmp_path / "bytes").try_constraint(Constraint("regex", "a+"))


# --- what is shown -----------------------------------------------------------------------------------------------------


def test_a_high_learning_rate_is_remarked_on(tmp_path, tiny_llama):
    (note,) = done(tiny_config(tmp_path, tiny_llama)).notes
    assert note.startswith(
        "train.learning_rate = 0.01 for all weights: above 0.001 a few steps usually make a model write nonsense"
    )
    assert not done(tiny_config(tmp_path, tiny_llama, train={"learning_rate": 1e-5})).notes


def test_parts_that_never_met_the_real_thing_are_named(tmp_path: Path, tiny_llama: Path):
    shared = {"orchestration": {"bus": f"jsonl:{tmp_path / 'bus'}"}, "train": {"learning_rate": 1e-5}}
    notes = done(tiny_config(tmp_path, tiny_llama, **shared)).notes
    assert "workers elsewhere never met two machines, only several network namespaces of one" in notes


def test_a_rehearsal_shows_the_prompt_the_reward_the_algorithm_and_where_everything_will_be(
    tmp_path, tiny_llama, capsys
):
    tables = {"algo": {"name": "icepop"}, "reward": {"extract": "last_number"}, "train": {"learning_rate": 1e-3}}
    config = load_config(tiny_config(tmp_path, tiny_llama, **tables))
    (tmp_path / "a.toml").write_text(dump_config(config))
    assert cli.main(["train", str(tmp_path / "a.toml"), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert without_progress(err) == "" and not (tmp_path / "runs").exists()
    shown, settings, files = re.split(r"\nSettings .*\n\n|\nFiles\n", out[out.index("\nRun\n") :])
    assert load_config(tomllib.loads(settings)) == config
    assert max(map(len, shown.splitlines())) <= 80
    assert "What the model sees" in files and "→ share_of_e = 0" in files and "weights agree" in files
    assert [line for line in shown.splitlines() if line and line[0] != " "] == [
        "Run", "Prompts", "Reward", "Algorithm", "Where", "Memory",
    ]  # fmt: skip
    assert "<user>" in shown and "<assistant>" in shown and "share_of_e = 0" in shown
    assert "mask token weights to [0.5, 5]" in shown and "all tokens of the optimizer step (token_mean)" in shown
    for who in ("controller", "trainer", "engine", "between", "together"):
        assert f"\n  {who:<13} " in shown


@pytest.mark.slow
def test_the_way_in_which_an_unusual_model_is_served_is_named_and_refused_before_it_is_loaded(
    tmp_path, tiny_llama, monkeypatch
):
    """Its config alone is read: the weights beside it are another model's."""
    monkeypatch.setattr(served_how, "SECONDS", 1200)  # a process that imports torch, on a busy machine
    unusual = shutil.copytree(tiny_llama, tmp_path / "unusual")
    config = json.loads((unusual / "config.json").read_text())
    (unusual / "config.json").write_text(json.dumps({**config, "model_type": "bloom"}))
    asked = {**tiny_config(tmp_path, unusual), "out": str(tmp_path / "run")}
    assert "own cache bloom: slow" in dict(done(asked).sections["Where"])["engine"]
    asked["engine"] = {**asked["engine"], "exact": True}
    with pytest.raises(ConfigError, match="own cache bloom .*set it to false"):
        done(asked)


def test_the_reward_is_given_the_row_s_answer_as_the_run_will_give_completions(tmp_path, tiny_llama):
    seen: list[Any] = []

    def reward(prompts, completions, completion_tokens, answer):
        seen.append((prompts, completions, completion_tokens, answer))
        return [0.5] * len(completions)

    found = done(tiny_config(tmp_path, tiny_llama), reward)
    ((prompts, completions, tokens, answer),) = seen
    assert completions == answer and len(prompts) == len(tokens) == 4 and len(set(completions)) == 1 and tokens[0]
    assert ("returned", "reward = 0.5") in found.sections["Reward"]


def test_a_row_without_an_answer_gets_a_sentence_and_tags_where_they_are_looked_for(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama, reward={"extract": "answer_tag"})
    (tmp_path / "reward.py").write_text(
        "def share_of_e(completions, answer): return [float(t == a) for t, a in zip(completions, answer)]"
    )
    assert ("returned", "share_of_e = 1") in done(config).sections["Reward"]
    rows = (json.dumps({"prompt": f"{i}?"}) for i in range(40))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    said = done({**config, "reward": {}}, lambda completions: [float(len(completions[0]))] * len(completions))
    assert "This sentence stands where a completion will be." in said.sections["Reward"][1][1]


def test_what_a_reward_prints_is_shown(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama)
    (tmp_path / "reward.py").write_text(
        "def share_of_e(completions):\n    print('judging')\n    return [0.0] * len(completions)"
    )
    assert ("it printed", "judging") in done(config).sections["Reward"]


def test_adapters_are_rehearsed_one_by_one(tmp_path, tiny_llama):
    config = tiny_config(
        tmp_path, tiny_llama, lora={"rank": 4}, adapters=[{"name": "a"}, {"name": "b", "algo": {"name": "rloo"}}]
    )
    found = done(config)
    assert {"Prompts, a", "Prompts, b", "Reward, a", "Algorithm, b"} <= found.sections.keys()
    assert dict(found.sections["Algorithm, b"])["advantage"] == "leave_one_out"
    config["adapters"][1]["task"] = {"kind": "jsonl", "path": "absent.jsonl"}
    with pytest.raises(ConfigError, match="there is no .*absent.jsonl"):
        done(config)


# --- what is refused, and when -----------------------------------------------------------------------------------------


def test_complaints_are_told_together(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama, engine={"kv_gib": 1e6}, out=str(tmp_path / "reward.py"))
    (tmp_path / "reward.py").write_text("def other(): pass")
    with pytest.raises(ConfigError) as refused:
        done(config)
    first, second, third = str(refused.value).splitlines()
    assert "is a file; set out" in first and "defines no share_of_e" in second and "engine.kv_gib" in third


def test_training_from_python_is_refused_before_anything_is_written(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama)

    def fails(completions, **columns):
        raise LookupError("no such row")

    with pytest.raises(ConfigError, match=r"LookupError: no such row"):
        headrace.train(config, fails)
    assert not (tmp_path / "runs").exists()


def test_an_async_function_from_python_is_called_in_the_loop_of_the_run_before_the_model_is_loaded(
    tmp_path, tiny_llama
):
    """What such a function keeps open (a client's connections) belongs to one event loop."""
    loops: list[Any] = []

    async def fails(completions, **columns):
        loops.append(asyncio.get_running_loop())
        raise LookupError("no such row")

    config = tiny_config(tmp_path, tiny_llama)
    done(config, fails)
    assert loops == []
    with pytest.raises(ConfigError, match=r"LookupError: no such row"):
        headrace.train(config, fails)
    assert len(loops) == 1 and not list((tmp_path / "runs").rglob("trainer.log"))


def test_some_long_prompts_are_a_note_and_all_of_them_too_where_a_run_goes_on(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama)
    texts = [f"{i}?" if i % 2 else f"{i} " * 60 for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    (note,) = [note for note in done(config).notes if "too long" in note]
    assert " prompts that were looked at are too long" in note and "raise engine.context_length to" in note
    config["engine"]["context_length"] = 12
    with pytest.raises(ConfigError, match="all prompts that were looked at are too long"):
        done(config)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert any("all prompts" in note for note in done(config, resume=tmp_path / "runs" / "tiny").notes)


def test_a_directory_that_holds_a_run_is_only_for_going_on(tmp_path, tiny_llama):
    config, run = tiny_config(tmp_path, tiny_llama), tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    write_journal(run, [LiveRecord(0.0, 0, "f")])
    with pytest.raises(ConfigError, match="already holds a run"):
        done(config)
    assert done(config, resume=run).problems == []


# --- the place ---------------------------------------------------------------------------------------------------------


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    assert place_problem(tmp_path / "a" / "b", "a") == "" and not list(tmp_path.iterdir())
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    assert "is a broken link" in place_problem(tmp_path / "nowhere" / "b", "nowhere")


# --- prompts -----------------------------------------------------------------------------------------------------------


def test_the_prompts_looked_at_are_those_of_the_run_and_the_task_is_as_before(tmp_path, tiny_llama):
    config = TaskConfig(**tiny_config(tmp_path, tiny_llama)["task"])
    task = build_task(config, ChatEncoder(tiny_llama), 0)
    looked_at = first_prompts(task, 4)
    assert [prompt.id for prompt in looked_at[:3]] == [task.draw().id for _ in range(3)]
    assert [prompt.id for prompt in looked_at[-4:]] == [prompt.id for prompt in task.held_out(4)]


def test_lengths_and_what_is_said_of_them(tmp_path, tiny_llama):
    config = TaskConfig(**tiny_config(tmp_path, tiny_llama)["task"])
    prompts = first_prompts(build_task(config, ChatEncoder(tiny_llama), 0), 0)
    counts = [len(prompt.tokens) for prompt in prompts]
    found = lengths(prompts, max(counts) - 1)
    assert found.longest == max(counts) and found.shortest == min(counts)
    assert found.too_long == counts.count(max(counts)) < found.looked_at == len(counts)
    assert f"{found.too_long} of {found.looked_at} prompts" in length_problem(found, 8, 16, 0)
    assert f"engine.context_length to {max(counts) + 8}" in length_problem(found, 8, 16, 0)
    assert "this model has 17 positions" in length_problem(found, 8, 64, 17)
    assert length_problem(lengths(prompts, max(counts)), 8, 16, 0) == ""


# --- the step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "remedy", "sentence"),
    [
        (
            {"rollout": {"max_tokens": 80_000_000}, "engine": {"context_length": 100_000_000}},
            {"engine": {"context_length": 70_000_000}},
            "a rollout of 80000000 tokens can become a row of 1.1 GB",
        ),
        (
            {"staleness": {"groups_per_step": 1 << 20}, "rollout": {"group_size": 16}},
            {"rollout": {"group_size": 15}},
            "a step of 16777216 rollouts has more than the 16777215 that ranks can tell apart",
        ),
    ],
)
def test_what_cannot_be_sent_to_the_trainer_is_refused_before_it_is_sampled(
    tmp_path: Path, tiny_llama: Path, problem: Config, remedy: Config, sentence: str
) -> None:
    bare = tiny_config(tmp_path, tiny_llama)

    def problems(*changes: Config) -> list[str]:
        raw = {section: dict(values) for section, values in bare.items() if isinstance(values, dict)}
        for section, values in (item for change in changes for item in change.items()):
            raw[section] = {**raw.get(section, {}), **values}
        return list(_step_problems(read_config({**bare, **raw}), BILLION))

    (found,) = problems(problem)
    assert found.startswith(sentence) and "; lower " in found
    assert problems(problem, remedy) == []


def test_recorded_experts_count_among_the_bytes_of_a_row(tmp_path: Path, tiny_llama: Path) -> None:
    bare = tiny_config(tmp_path, tiny_llama)
    long = {**bare, "rollout": {**bare["rollout"], "max_tokens": 3_000_000, "keep_routing": True}}
    long["engine"] = {**bare.get("engine", {}), "context_length": 4_000_000}
    mixture = replace(BILLION, layers=48, experts=128, chosen=8)
    (found,) = _step_problems(read_config(long), mixture)
    assert "set rollout.keep_routing = false" in found
    assert not list(_step_problems(read_config(long), BILLION))


ROPES: list[dict[str, Any]] = [
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_a_context_in_which_angles_depend_on_the_longest_text_is_refused(
    tmp_path: Path, tiny_llama: Path, rope: dict[str, Any]
) -> None:
    """A short text beside a long one has other logits; up to the bound that is named it has not."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    written = json.loads((model / "config.json").read_text())
    positions = 256 if "original_max_position_embeddings" in rope else 64
    (model / "config.json").write_text(
        json.dumps({**written, "rope_parameters": rope, "max_position_embeddings": positions})
    )
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logits(last: int) -> torch.Tensor:
        places = torch.tensor([[*range(8), last]])
        with torch.inference_mode():
            return network(input_ids=torch.arange(9)[None], position_ids=places).logits[0, :8]

    assert torch.equal(logits(8), logits(63)) and (logits(8) - logits(200)).abs().max() > 2e-5
    config = tiny_config(tmp_path, model)
    config["engine"]["context_length"] = 65
    with pytest.raises(
        ConfigError, match=r"context_length = 65 goes beyond the 64 positions .* set engine.context_length = 64 or less"
    ):
        asyncio.run(rehearse(read_config(config)))
    config["engine"]["context_length"] = 64
    asyncio.run(rehearse(read_config(config)))


# --- memory ------------------------------------------------------------------------------------------------------------

BILLION = ModelShape(
    parameters=10**9,
    matrices=(("a.q_proj.weight", 100, 50), ("a.up.weight", 200, 50)),
    layers=10,
    hidden=1000,
    inner=4000,
    experts=0,
    cached=2 * 10 * 4 * 64,
    positions=4096,
)


def plan_of(adapters: int = 0, reference: bool = False, **sections: Config) -> MemoryPlan:
    engine, train, lora = (sections.get(name, {}) for name in ("engine", "train", "lora"))
    return MemoryPlan(
        engine=EngineConfig(**engine),
        engine_device="cpu",
        train=TrainConfig(**train),
        train_device="cpu",
        train_dtype="bfloat16",
        lora=LoraConfig(**lora),
        adapters=adapters,
        reference_in_loss=reference,
    )


def machine_of(memory: float, free: float | None = None) -> Machine:
    return Machine(4, int(memory * GIB), int((memory if free is None else free) * GIB), None, None)


@pytest.mark.parametrize(
    ("plan", "billions"),
    [
        (plan_of(), {"trainer": 16, "between": 4}),
        (plan_of(train={"weights": "bfloat16"}), {"trainer": 12, "between": 4}),
        (plan_of(train={"offload_optimizer": True}), {"trainer": 20, "between": 4}),
        (plan_of(engine={"dtype": "float32"}), {"trainer": 16, "between": 8}),
        (plan_of(reference=True), {"trainer": 18, "between": 4}),
        (plan_of(lora={"rank": 16}, adapters=1), {"trainer": 2, "between": 2}),
        (plan_of(lora={"rank": 16, "publish": "merged"}, adapters=1), {"trainer": 2, "between": 4}),
        (plan_of(lora={"rank": 16, "quantise": "nf4"}, adapters=1), {"trainer": 0.5, "between": 2}),
    ],
)
def test_bytes_a_parameter_are_those_of_the_trainer_s_table(plan: MemoryPlan, billions: dict[str, float]):
    found = needs(BILLION, plan)
    for who, bytes in billions.items():
        certain = sum(need.bytes for need in found if need.who == who and need.certain)
        assert certain == pytest.approx(bytes * 1e9, rel=1e-3)


def test_good_earlier_rollouts_that_are_kept_have_memory_of_the_controller():
    (found,) = [need for need in needs(BILLION, plan_of()._replace(kept_tokens=1000)) if "algo.experience" in need.what]
    assert (found.who, found.where, found.bytes) == ("controller", "cpu", 75_000)
    needed = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "r.jsonl"}, "reward": {"function": "a.py:f"}}
    bare = {**needed, "rollout": {"max_tokens": 10}, "algo": {"experience": {"rollouts": 2, "prompts": 7}}}
    assert memory_needs.memory_plan(read_config(bare), machine_of(8)).kept_tokens == 2 * 7 * 10


def test_a_second_adapter_that_gives_rewards_is_counted_with_the_copy_that_a_skipped_step_needs():
    plan = plan_of(lora={"rank": 2}, adapters=1)._replace(rewards=True)
    (found,) = [need for need in needs(BILLION, plan) if "process rewards" in need.what]
    assert (found.where, found.bytes) == ("cpu", 28 * 2 * 400)
    assert memory_needs.checkpoint_bytes(BILLION, plan) == 2 * 12 * 2 * 400


def test_a_critic_s_own_model_is_counted_with_its_gradients_optimizer_and_activations():
    plan, small = plan_of(), replace(BILLION, parameters=1000, layers=1)
    own = plan._replace(critic=small)
    (found,) = [need for need in needs(BILLION, own) if "algo.critic.model" in need.what]
    assert (found.where, found.certain, found.bytes) == ("cpu", True, 16_000)
    size = memory_needs.checkpoint_bytes
    assert size(BILLION, own) - size(BILLION, plan) == 12_000
    kept = [memory_needs.step_activations(BILLION, one.critic, checkpointing=False) for one in (plan, own)]
    assert kept[1] - kept[0] == memory_needs.token_activations(small, checkpointing=False) > 0
    asleep = own._replace(shared=True, train_device="cuda")

    def critic(plan: memory_needs.MemoryPlan) -> dict[str, float]:
        """Its bytes by device."""
        found = [need for need in needs(BILLION, plan) if need.what.startswith("critic")]
        return {place: sum(need.bytes for need in found if need.where == place) for place in ("cuda", "cpu")}

    assert critic(asleep) == {"cuda": 16_000, "cpu": 12_000}
    offloaded = replace(own.train, offload_optimizer=True)
    assert critic(own._replace(train=offloaded, train_device="cuda")) == {"cuda": 8_000, "cpu": 12_000}
    assert critic(asleep._replace(train=offloaded)) == {"cuda": 8_000, "cpu": 16_000}
    split = replace(own.train, parallel=ParallelConfig(shard=4, replicate=2))
    assert critic(own._replace(train=split, train_device="cuda")) == {"cuda": 4_000, "cpu": 0}, "of one rank"
    assert critic(own._replace(train=split)) == {"cuda": 0, "cpu": 32_000}, "of all ranks"


def test_a_teacher_that_the_trainer_holds_is_counted_in_the_dtype_of_the_computation_and_its_head_on_each_rank():
    plan, small = plan_of(), replace(BILLION, parameters=1000, vocabulary=10, hidden=8)
    own = plan._replace(teacher=small, train_dtype="bfloat16")

    def teacher(plan: memory_needs.MemoryPlan) -> list[tuple[float, str, bool]]:
        found = [need for need in needs(BILLION, plan) if need.what.startswith("teacher")]
        return [(need.bytes, need.where, need.certain) for need in found]

    assert teacher(own) == [(2_000, "cpu", True), (4_000, "cpu", False)], "and in float32 while it loads"
    assert teacher(own._replace(shared=True, train_device="cuda"))[::2] == [(2_000, "cuda", True), (2_000, "cpu", True)]
    split = replace(own.train, parallel=ParallelConfig(shard=4, replicate=2))
    assert teacher(own._replace(train=split, train_device="cuda")) == [(2 * (250 + 80), "cuda", True)], "of one rank"
    assert teacher(own._replace(train=split)) == [(8 * 2 * (250 + 80), "cpu", True)], "of all ranks"
    assert memory_needs.checkpoint_bytes(BILLION, own) == memory_needs.checkpoint_bytes(BILLION, plan)


def test_a_reference_that_moves_is_counted_in_a_checkpoint():
    plan, size = plan_of(reference=True), memory_needs.checkpoint_bytes
    moves = plan._replace(reference_moves=True)
    assert size(BILLION, moves) - size(BILLION, plan) == 2 * BILLION.parameters
    large = replace(BILLION, vocabulary=50_000)  # its embeddings stay in float32 (`trainer/step/reference.py`)
    for given, expected in ((plan, 2_000), (moves, 2_100)):
        (held,) = [need.bytes for need in needs(large, given) if need.what == "reference model"]
        assert held == expected * 10**6
    assert size(large, moves) - size(large, plan) == 2_100 * 10**6


def test_gradients_that_are_summed_once_a_step_are_those_of_policy_and_critic():
    once = ParallelConfig(shard=2, reduce="step")
    plan = plan_of()._replace(critic=replace(BILLION, parameters=1000))
    adapter = plan_of(lora={"rank": 2}, adapters=1)
    for given, parameters in ((plan, BILLION.parameters + 1000), (adapter._replace(critic=plan.critic), 1000)):
        given = given._replace(train=replace(given.train, parallel=once))
        (found,) = [need for need in needs(BILLION, given) if "until they are summed" in need.what]
        assert found.bytes == 4 * parameters * 2


def test_an_adapter_has_rank_times_rows_and_columns_of_what_it_adapts():
    assert BILLION.adapter(LoraConfig(rank=2)) == 2 * (150 + 250)
    assert BILLION.adapter(LoraConfig(rank=2, targets=("q_proj",))) == 2 * 150
    assert memory_needs.checkpoint_bytes(BILLION, plan_of(lora={"rank": 2}, adapters=1)) == 12 * 2 * 400


def test_checkpointing_keeps_one_number_in_place_of_all_of_a_layer():
    whole, one = (memory_needs.token_activations(BILLION, on) for on in (False, True))
    assert whole == 10 * (10 * 1000 + 3 * 4000) and one < whole / 5


@pytest.mark.parametrize(
    ("plan", "memory", "words"),
    [
        (plan_of(), 64, ""),
        (plan_of(), 16, "training 1 billion parameters takes 18.6 GiB on this machine, which has 16.0 GiB"),
        (plan_of(), 16, "lora.rank = 16"),
        (plan_of(lora={"rank": 8}, adapters=1), 2, 'lora.quantise = "nf4"'),
        (
            plan_of(engine={"kv_gib": 500}),
            64,
            "engine.kv_gib = 500 is more than the 64.0 GiB of memory that this machine has",
        ),
        (plan_of(engine={"kv_gib": 500}), 64, "0.6 GiB hold all that engine.max_running = 64 sequences can fill"),
        (plan_of(engine={"kv_gib": 0.001}), 64, "takes 0.00977 GiB for this model; raise engine.kv_gib"),
    ],
)
def test_what_cannot_fit_is_refused(plan: MemoryPlan, memory: float, words: str):
    message = "\n".join(refusals(needs(BILLION, plan), BILLION, plan, machine_of(memory)))
    assert words in message and bool(words) == bool(message)


def test_the_reference_of_a_warm_start_is_counted_with_its_trainer_alone():
    """2 or 4 bytes a parameter for the model before; a warm start has no checkpoints, and published weights are not there yet."""
    plan, plain = plan_of()._replace(warm_reference=True), plan_of()
    reference = sum(need.bytes for need in warm_needs(BILLION, plan)) - sum(
        need.bytes for need in needs(BILLION, plain) if need.who == "trainer" and need.what != memory_needs.COPY
    )
    assert reference == BILLION.parameters * BYTES[plan.train_dtype]
    assert not warm_needs(BILLION, plain) and not warm_lines(BILLION, plain)
    ((_, line),) = warm_lines(BILLION, plan)
    assert "its reference included" in line
    assert needs(BILLION, plan) == needs(BILLION, plain), "it ends before the run's processes begin"
    least = sum(need.bytes for need in warm_needs(BILLION, plan) if need.certain) / GIB
    assert not list(refusals(needs(BILLION, plan), BILLION, plan, machine_of(least + 4)))
    found = "\n".join(refusals(needs(BILLION, plan), BILLION, plan, machine_of(least - 0.1)))
    assert 'warm_start.loss = "cpo"' in found
    adapted = plan_of(lora={"rank": 16}, adapters=1)._replace(warm_reference=True)
    assert all("reference" not in need.what for need in warm_needs(BILLION, adapted)), "the model without the adapter"


def test_what_may_not_fit_is_a_note():
    found = needs(BILLION, plan_of())
    assert not list(notes(found, machine_of(64)))
    (note,) = notes(found, machine_of(64, free=20))
    assert "20.0 GiB are free now" in note and "train.microbatch_tokens" in note


def test_no_room_for_a_copy_of_a_checkpoint_is_a_note_of_its_own_and_an_adapter_is_the_remedy():
    (note,) = notes(needs(BILLION, plan_of()), machine_of(64, free=30))
    assert "too little for a copy of a checkpoint (11.2 GiB): training then stands still" in note
    small = {"lora": {"rank": 16}, "adapters": 1}
    assert not list(notes(needs(BILLION, plan_of(**small)), machine_of(64, free=30)))


def test_the_shape_is_that_of_the_weights(tiny_llama):
    shape = read_shape(tiny_llama)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.hidden, shape.inner, shape.positions) == (2, 32, 64, 256)
    assert shape.cached == 2 * 2 * 2 * 8 and len(shape.matrices) == 2 * 7
    assert [gib(size * GIB) for size in (0.004, 0.51, 1.55, 600)] == ["0.00 GiB", "0.5 GiB", "1.6 GiB", "600 GiB"]


# --- the machine -------------------------------------------------------------------------------------------------------


def test_devices_and_dtypes_as_they_will_be():
    facts = {"built_for": "CPU", "bfloat16": False}
    plain, asked = machine_of(8), machine_of(8)._replace(torch=facts)
    gpu = machine_of(8)._replace(gpu=("H", 80 * GIB), torch={"built_for": "12.8", "bfloat16": True})
    assert [machine.device("x", "auto") for machine in (plain, asked, gpu)] == ["cpu", "cpu", "cuda"]
    assert gpu.device("x", "cpu") == "cpu" and gpu.device("x", "cuda") == "cuda"
    assert asked.dtype("auto", "cpu") == "float32" and gpu.dtype("auto", "cuda") == "bfloat16"
    assert asked.dtype("bfloat16", "cpu") == "bfloat16"
    with pytest.raises(ConfigError, match='engine.device = "cuda", but this build of torch is for the CPU'):
        asked.device("engine.device", "cuda")


# --- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "label", "words"),
    [
        ({}, "loss", "ppo_clip: ratio within [0.8, 1.2]"),
        ({"name": "dapo"}, "loss", "ppo_clip: ratio within [0.8, 1.28]"),
        ({"clip_high": 0.3, "dual_clip": 3.0}, "loss", "ppo_clip: ratio within [0.8, 1.3], dual_clip = 3"),
        ({"name": "dcpo"}, "loss", "dcpo: ratio within [0.8, 1.17082] for a token of probability 1"),
        ({"name": "bapo"}, "loss", "lower bound of the ratio 0.6 or 0.9, upper in [1.2, 3], good_share = 0.4"),
        ({"name": "dpo", "pair_flips": 0.1}, "loss", "dpo: pair_beta = 0.1, pair_flips = 0.1"),
        ({"name": "pass@k_training", "attempts": 2}, "advantage", "best_of_k, k = 2"),
        ({"name": "prime"}, "credit", "by what a second adapter rewards from there on (beta = 0.05)"),
        ({"name": "grpo_roc"}, "trained", "half of a group's rollouts: right and wrong ones in their shares"),
        ({"name": "tis"}, "correction", "truncate token weights to [0, 2]"),
        ({"correction": {"veto": 1e-4}}, "correction", "veto = 0.0001"),
        ({"kl": {"coef": 1e-3}}, "KL", "0.001 x k3 in the loss"),
        ({"kl": {"coef": 1e-3, "every": 50}}, "KL", "in the loss, from the policy of the last step that 50 divides"),
        ({"lag": {"kind": "exponential"}}, "lag weight", "exponential, decay = 0.9"),
        ({"name": "second_moment"}, "selection", "second_moment, tau = 0.04"),
        ({"name": "dr_grpo"}, "denominator", "the step's sequences times 64 tokens (token_sum)"),
        ({"name": "opd", "distill": {"model": "m"}}, "distillation", "sampled, coefficient 1, the trainer holds m"),
        (
            {"name": "gkd", "distill": {"model": "m", "temperature": 2.0}},
            "distillation",
            "jsd over the vocabulary at temperature 2, coefficient 1, the trainer holds m",
        ),
        ({"name": "opd_topk"}, "distillation", "reverse over the teacher's top 32, coefficient 1"),
        ({"name": "icepop", "denominator": "kept"}, "denominator", "tokens that a rule masks are not counted"),
        ({"overlong": "mask"}, "cut off", "are left out of the loss and its denominator"),
    ],
)
def test_the_algorithm_is_told_as_it_comes_out(settings: Config, label: str, words: str):
    assert words in dict(algorithm(AlgoConfig(**settings).with_length(64)))[label]


def test_a_page_is_80_columns_wide_and_keeps_the_lines_of_a_prompt():
    text = page({"Prompts": [("the first", "a b " * 40 + "\nsecond\n\nfourth"), ("", "end")]}, ["a note " * 20])
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].startswith("note: a note") and lines[-4:] == ["second", "", "fourth", "end"]


# --- names of other libraries, functions of the user's ------------------------------------------------------------------


def test_every_name_of_another_library_leads_to_a_setting_that_there_is():
    known = set(setting_names(RunConfig))
    for name, meaning in MEANINGS.items():
        named = {word.strip(",") for word in meaning.ours.split() if "." in word or word in ("out", "name")}
        assert named <= known and bool(named) == bool(meaning.ours), name
        assert name not in known, f"{name} is a setting of ours"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def loss(tokens): pass", ""),
        ("from other import loss", ""),
        ("from other import *", ""),
        ("loss = make()", ""),
        ("class Loss:\n    def loss(self): pass", ""),
        ("def lss(tokens): pass", "defines no loss; did you mean lss?"),
        ("def loss(:", "is not valid Python"),
    ],
)
def test_a_function_is_found_without_running_its_file(tmp_path, text, words):
    (tmp_path / "a.py").write_text(text)
    said = defines(f"{tmp_path / 'a.py'}:loss")
    assert words in said and bool(words) == bool(said)
