"""Reading settings: names, types, `--set`, paths, bad pairs; every message names the remedy."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.loop.checkpoints import ChangedSettings
from headrace.native.resources import available_cores
from headrace.run.config import RunConfig, adapter_runs, check, dump_config, load_config
from headrace.run.resume_rules import changes, check_bound, meaning
from headrace.settings import toml
from headrace.trainer.config import TrainConfig

STRICT = ConfigDict(extra="forbid")
PROMPT = Prompt("p", "", (1, 2))

MINIMAL: dict[str, Any] = {
    "model": {"path": "smollm2-135m-instruct"},
    "task": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"function": "reasoning_gym"},
}

MINIMAL_TOML = """
model.path = "smollm2-135m-instruct"
task = { kind = "reasoning_gym", name = "chain_sum" }
reward.function = "reasoning_gym"
"""


def refusal(source: Any = MINIMAL, sets: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, sets)
    return str(caught.value)


def write(path: Path, text: str = MINIMAL_TOML) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


TWO: dict[str, Any] = {
    **MINIMAL,
    "lora": {"rank": 4},
    "adapters": [{"name": "a", "train": {"steps": 9}, "task": MINIMAL["task"]}, {"name": "b", "lora": {"rank": 2}}],
}


def test_a_set_changes_one_adapter_by_its_name() -> None:
    sets = ["adapters.a.train.steps=3", "adapters.b.train.learning_rate=1e-4", "adapters.a.task.held_out=70"]
    a, b = adapter_runs(load_config(TWO, sets))
    assert (a.train.steps, a.task.held_out, a.task.name) == (3, 70, "chain_sum")
    assert b.train.learning_rate == 1e-4 and b.lora.rank == 2 and b.train.steps == TrainConfig.steps
    again = load_config(load_config(TWO, sets), ["adapters.a.train.steps=4"])  # a finished config, as Python passes one
    assert [run.train.steps for run in adapter_runs(again)] == [4, b.train.steps]


def test_the_path_of_one_adapter_is_seen_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = {**TWO, "adapters": [{"name": "a", "task": {"kind": "jsonl", "path": "/data"}}, {"name": "b"}]}
    (a, _) = adapter_runs(load_config(two, ["adapters.a.task.path=mine.jsonl"]))
    assert a.task.path == str(tmp_path / "mine.jsonl")


def test_a_set_that_does_not_reach_every_adapter_names_those_and_a_remedy_that_works() -> None:
    message = refusal(TWO, ("train.steps=2", "lora.rank=8", "task.held_out=70", "seed=3"))
    assert message.splitlines() == [
        "--set train.steps=2 does not reach a: what [[adapters]] sets for one adapter is its own; use --set adapters.a.train.steps=2",
        "--set lora.rank=8 does not reach b: what [[adapters]] sets for one adapter is its own; use --set adapters.b.lora.rank=8",
        "--set task.held_out=70 does not reach a: what [[adapters]] sets for one adapter is its own; use --set adapters.a.task.held_out=70",
    ]
    remedies = [line.split("use --set ")[1] for line in message.splitlines()]
    a, b = adapter_runs(load_config(TWO, ["train.steps=2", "lora.rank=8", "task.held_out=70", *remedies]))
    assert [(one.train.steps, one.lora.rank, one.task.held_out) for one in (a, b)] == [(2, 8, 70), (2, 8, 70)]
    assert "adapters.c: none of adapters is called c; there are a, b" in refusal(TWO, ("adapters.c.train.steps=2",))


# --- settings: any tree of dataclasses ---------------------------------------------------------------------------------


@dataclass(frozen=True, config=STRICT)
class Leaf:
    path: str
    rate: float = 1.0


@dataclass(frozen=True, config=STRICT)
class Tree:
    leaf: Leaf
    count: int = Field(default=1, gt=0)
    mode: Literal["fast", "slow"] = "fast"
    flag: bool = False
    cores: tuple[int, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    maybe: float | None = None


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"leaf": {"path": "x", "rat": 2.0}}, "leaf.rat is not a setting; did you mean leaf.rate?"),
        ({"leaf": {"path": "x"}, "rate": 2.0}, "rate is not a setting; did you mean leaf.rate?"),
        ({"leaf": {"path": "x"}, "coutn": 1}, "coutn is not a setting; did you mean count?"),
        ({"leaf": {"path": "x"}, "zzz": 1}, "zzz is not a setting"),
        ({"leaf": {"path": "x", "by": 1}}, "leaf.by is not a setting; leaf has path, "),
        (
            {"leaf": {"path": "x"}, "leaves": [{"path": "y", "by": 1}]},
            "leaves[0].by is not a setting; leaves has path, ",
        ),
        (
            {"leaf": {"path": "x"}, "leaves": [{"path": "y", "rat": 1}]},
            "leaves[0].rat is not a setting; did you mean leaves.rate?",
        ),
        ({"leaf": {"path": "x"}, "count": "5"}, 'count = "5" does not fit: expected an integer'),
        ({"leaf": {"path": "x"}, "count": 0}, "count = 0 does not fit: expected greater than 0"),
        ({"leaf": {"path": "x"}, "count": True}, "count = true does not fit: expected an integer"),
        ({"leaf": {"path": "x"}, "flag": 1}, "flag = 1 does not fit: expected a boolean"),
        ({"leaf": {"path": "x"}, "mode": "quick"}, "mode = \"quick\" does not fit: expected 'fast' or 'slow'"),
        ({"leaf": {"path": "x"}, "cores": [0, "1"]}, 'cores[1] = "1" does not fit: expected an integer'),
        ({"leaf": 3}, "leaf = 3 does not fit: expected a table"),
        ({"leaf": {}}, "leaf.path is missing: add it"),
        ({}, "leaf is missing: add a [leaf] table"),
    ],
)
def test_a_sentence_for_everything_that_does_not_fit(tree, words):
    with pytest.raises(ConfigError) as caught:
        toml.build(Tree, tree)
    assert words in str(caught.value)


def test_all_complaints_at_once():
    with pytest.raises(ConfigError) as caught:
        toml.build(Tree, {"leaf": {"path": 1}, "count": 0, "x": 1})
    assert len(str(caught.value).splitlines()) == 3


def test_numbers_and_arrays_fit_where_toml_has_no_other_word():
    tree = toml.build(Tree, {"leaf": {"path": "x", "rate": 2}, "cores": [0, 1], "maybe": 3})
    assert (tree.leaf.rate, tree.cores, tree.maybe) == (2.0, (0, 1), 3.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=3.5", 3.5),
        ("a.b=1e-5", 1e-5),
        ("a.b=true", True),
        ("a.b=True", "True"),
        ("a.b=rloo", "rloo"),
        ('a.b="3"', "3"),
        ("a.b=[0, 1]", [0, 1]),
        ("a.b={ c = 1 }", {"c": 1}),
        ("a.b=", ""),
        ("a.b=x=y", "x=y"),
        ("a.b = 3", 3),
        ("a.b=1\nc = 2", "1\nc = 2"),
    ],
)
def test_set_is_typed_as_toml_and_bare_words_are_strings(text, value):
    assert toml.parse_sets([text]) == {"a": {"b": value}}


def test_later_sets_win_and_neighbours_stay():
    assert toml.parse_sets(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}
    assert toml.merge({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}}) == {"a": {"b": 1, "c": [2]}}


@pytest.mark.parametrize("text", ["train.steps", "=3", "a..b=1", "a b=1"])
def test_a_set_of_the_wrong_form(text):
    with pytest.raises(ConfigError, match=r"write it as section\.setting=value"):
        toml.parse_sets([text])


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
options = st.dictionaries(
    st.text(), st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3))
)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value if v is not None] if isinstance(value, list) else value


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(options=options, rate=st.floats(-3.4e38, 3.4e38), path=st.text(), cores=st.lists(st.integers(0, 9)))
def test_what_is_dumped_is_read_back(options, rate, path, cores):
    tree = Tree(Leaf(path, rate), cores=tuple(cores), leaves=(Leaf("a"), Leaf("b")), options=without_none(options))
    assert toml.build(Tree, tomllib.loads(toml.dump(tree))) == tree


def test_not_a_number_survives_too():
    tree = Tree(Leaf("x", math.nan))
    assert math.isnan(toml.build(Tree, tomllib.loads(toml.dump(tree))).leaf.rate)


# --- files -------------------------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "demo.toml")
    assert f"did you mean {tmp_path / 'demo.toml'}?" in refusal(tmp_path / "dmo.toml")
    assert "did you mean" not in refusal(tmp_path / "zzz.toml")


def test_a_directory_and_broken_toml(tmp_path):
    assert "is a directory" in refusal(tmp_path)
    broken = write(tmp_path / "broken.toml", "a = [1,\nb")
    assert f"{broken} is not valid TOML" in refusal(broken) and "line 2" in refusal(broken)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in refusal(tmp_path / "binary.toml")


def test_a_file_lends_its_name_and_may_have_another(tmp_path):
    assert load_config(write(tmp_path / "mine.toml")).name == "mine"
    assert load_config(write(tmp_path / "mine.toml", 'name = "yours"' + MINIMAL_TOML)).name == "yours"
    assert load_config(tmp_path / "mine.toml", ["name=theirs"]).name == "theirs"
    assert "name = " in refusal(tmp_path / "mine.toml", ("name=../up",))


def test_unknown_settings_of_a_run():
    assert "task.nmae is not a setting; did you mean task.name?" in refusal(sets=("task.nmae=x",))
    assert "train.temperature is not a setting; did you mean rollout.temperature?" in refusal(
        sets=("train.temperature=1.0",)
    )
    assert "stalenes is not a setting; did you mean staleness?" in refusal(sets=("stalenes.max_lag=1",))


def test_missing_sections_of_a_run():
    assert "model is missing" in refusal({k: v for k, v in MINIMAL.items() if k != "model"})
    assert "task is missing" in refusal({k: v for k, v in MINIMAL.items() if k != "task"})


def test_wrong_types_of_a_run():
    assert 'train.steps = "many" does not fit: expected an integer' in refusal(sets=("train.steps=many",))
    assert "rollout = 3 does not fit: expected a table" in refusal(sets=("rollout=3",))


def test_an_owner_s_refusal_comes_through_as_it_is():
    message = refusal(sets=("staleness.window=99",))
    assert message.startswith("staleness.window = 99 leaves") and "Value error" not in message


# --- paths -------------------------------------------------------------------------------------------------------------


def test_paths_in_a_file_are_seen_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    text = """
    model.path = "model"
    algo = { name = "ppo", critic.model = "model", distill = { kind = "jsd", over = "vocabulary", model = "model" } }
    task = { kind = "jsonl", path = "../data/a.jsonl" }
    reward.functions = [{ function = "rewards/r.py:exact" }, { function = "reasoning_gym" }]
    """
    config = load_config(write(tmp_path / "conf" / "run.toml", text))
    models = (config.model.path, config.algo.critic.model, config.algo.distill.model)
    assert set(models) == {str(tmp_path / "conf" / "model")}
    assert config.task.path == str(tmp_path / "data" / "a.jsonl")
    functions = [spec.function for spec in config.reward.functions]
    assert functions == [f"{tmp_path / 'conf' / 'rewards' / 'r.py'}:exact", "reasoning_gym"]


def test_paths_in_sets_are_seen_from_the_working_directory(tmp_path, monkeypatch):
    file = write(tmp_path / "conf" / "run.toml", MINIMAL_TOML)
    monkeypatch.chdir(tmp_path)
    config = load_config(file, ["reward.function=r.py:f", "model.path=./m"])
    assert config.model.path == str(tmp_path / "m")
    assert f"{tmp_path / 'r.py'}:f" in dump_config(config)


def test_known_names_and_hub_ids_are_no_paths(tmp_path):
    file = write(tmp_path / "run.toml")
    assert load_config(file).model.path == "smollm2-135m-instruct"
    assert load_config(file, ["model.path=org/name"]).model.path == "org/name"


# --- round trip --------------------------------------------------------------------------------------------------------


def test_a_dumped_run_loads_to_the_same_run(tmp_path):
    sets = ["seed=3", "task.options={ max_terms = 3 }", "rollout.stop=['\\n', 'Q:']", "train.learning_rate=3e-6"]
    config = load_config(MINIMAL, sets)
    assert load_config(write(tmp_path / "resolved.toml", dump_config(config))) == config
    assert load_config(config) == config
    assert load_config(config, ["seed=4"]) == dataclasses.replace(config, seed=4)


def test_a_dump_spells_out_every_setting():
    dumped = tomllib.loads(dump_config(load_config(MINIMAL)))
    assert {field.name for field in dataclasses.fields(RunConfig)} == set(dumped)
    assert dumped["staleness"] == {
        "groups_per_step": 8, "max_lag": 1, "window": 1, "order": "stalest", "overdue": "wait", "in_flight": 0, "stored": 0,
    }  # fmt: skip


# --- bad pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["rollout.temperature=0"], "use 1.0 for training"),
        (["rollout.group_size=1"], "use at least 2"),
        (["rollout.group_size=1", "algo.name=rloo"], "gives rloo nothing to compare"),
        (["rollout.group_size=4", "algo.name=pass@k_training"], "all sets would be one"),
        (["rollout.group_size=2", "algo.name=gfpo"], "algo.subset trains half of the 2 rollouts"),
        (["rollout.group_size=8", "algo.name=gfpo", "algo.subset.keep=8"], "with 2 to 7 it means something"),
        (["algo.name=gfpo", "rollout.forks.alternatives=2"], "rollout.forks compares their branches"),
        (["rollout.max_tokens=512", "engine.context_length=512"], "leaves no room for a prompt"),
        (["reward.soft_overlong_punishment.cache=99"], "begins before the first of rollout.max_tokens"),
        (["eval.prompts=100", "task.held_out=32"], "raise task.held_out or lower eval.prompts"),
        (["engine.cores=[0]", "train.cores=[0]"], "leave both empty"),
        (["engine.cores=[4096]"], "engine.cores names [4096]"),
        (["lora.rank=4", "partial.mode=stream"], "an adapter is small and is replaced at once"),
        (["train.minibatches=3", "staleness.groups_per_step=8"], "use one of 1, 2, 4, 8, or change groups_per_step"),
        (["train.minibatches=2", "train.parity=bitwise"], "remove one of the two (train.epochs goes with it)"),
        (["algo.name=tis", "algo.clip_high=0.3"], "set train.epochs or train.minibatches"),
    ],
)
def test_bad_pairs_are_refused_with_the_remedy(sets, words):
    assert words in refusal(sets=tuple(sets))


def test_bad_pairs_are_reported_together():
    message = refusal(sets=("rollout.temperature=0", "rollout.group_size=1"))
    assert len(message.splitlines()) == 2


def test_what_truncates_is_recorded_unless_one_says_otherwise():
    for setting in ("rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1"):
        rollout = load_config(MINIMAL, [setting]).rollout
        assert rollout.request("r", PROMPT.tokens, 0, 0).return_mask and not rollout.caveats
        assert not rollout.evaluation("r", PROMPT.tokens, 0, 1.0).return_mask
        unkept = load_config(MINIMAL, [setting, "rollout.keep_mask=false"]).rollout
        assert not unkept.request("r", PROMPT.tokens, 0, 0).return_mask and "keep_mask" in unkept.caveats[0]
    assert not load_config(MINIMAL).rollout.request("r", PROMPT.tokens, 0, 0).return_mask


def test_good_pairs_pass():
    first = min(available_cores())
    others = sorted(available_cores() - {first})
    sets = [f"engine.cores=[{first}]", *([f"train.cores=[{others[0]}]"] if others else [])]
    assert check(load_config(MINIMAL, sets)) == []
    assert check(load_config(MINIMAL, ["rollout.group_size=1", "algo.name=reinforce"])) == []


def test_available_cores_are_those_of_this_process():
    assert available_cores() <= set(range(os.cpu_count() or 1)) and available_cores()


# --- going on with a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "same"),
    [
        (["checkpoint.every=3", "engine.kv_gib=1", "watch.identity_every=0", "train.cores=[0]"], True),
        (["train.steps=500"], True),
        (["train.steps=500", "train.schedule=cosine"], False),
        (["train.learning_rate=1e-3"], False),
        (["rollout.temperature=0.7"], False),
        (["algo.name=rloo"], False),
        (["staleness.max_lag=0"], False),
    ],
)
def test_steps_can_be_done_again_only_with_the_settings_that_they_depend_on(sets, same):
    assert (not changed([], sets).steps) is same


def changed(before: list[str], after: list[str]) -> ChangedSettings:
    return changes(meaning(load_config(MINIMAL, before)), meaning(load_config(MINIMAL, after)))


@pytest.mark.parametrize(
    ("sets", "fine"),
    [
        ([], True),
        (["staleness.max_lag=4"], True),
        (["staleness.window=2"], False),
        (["staleness.window=2", "staleness.max_lag=3"], True),
        (["staleness.max_lag=1"], False),
        (["staleness.max_lag=0", "staleness.overdue=trim"], True),
    ],
)
def test_a_resumed_run_keeps_its_bound_for_what_was_admitted_before(sets: list[str], fine: bool):
    old = load_config(MINIMAL, ["staleness.max_lag=2"]).staleness
    if fine:
        check_bound(old, load_config(MINIMAL, ["staleness.max_lag=2", *sets]).staleness)
        return
    with pytest.raises(ConfigError, match=r"admitted with staleness.max_lag = 2, window = 1.*raise max_lag, or set"):
        check_bound(old, load_config(MINIMAL, ["staleness.max_lag=2", *sets]).staleness)
    with pytest.raises(ConfigError, match='overdue = "drop"'):
        check_bound(load_config(MINIMAL, ["staleness.overdue=drop"]).staleness, load_config(MINIMAL).staleness)


def test_groups_are_dropped_where_what_their_rows_are_made_of_has_changed():
    fine = ["train.learning_rate=1e-3", "reward.workers=3", "algo.clip_high=0.28", "rollout.max_tokens=32"]
    assert not changed([], fine).groups
    assert changed([], ["algo.name=rloo"]).groups
    assert changed([], ["reward.function=mine.py:f"]).groups
    for one in ("reward.soft_overlong_punishment.cache=4", "algo.length_penalty=0.1"):
        assert changed([], [one]).groups and changed([one], [one, "rollout.max_tokens=32"]).groups
