"""Configs of other libraries become ours: what is translated, what is said to have no counterpart, and that the result starts."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.commands.importing import verl
from headrace.commands.importing.given import UNKNOWN, read_given
from headrace.commands.importing.import_command import config_text, libraries, translated
from headrace.commands.importing.translation import Library, Translation
from headrace.core.errors import ConfigError
from headrace.run.config import RunConfig, read_config
from headrace.run.contents import contents_of
from headrace.settings.other_names import MEANINGS
from headrace.settings.toml import setting_names

SCRIPT = """
set -x
DATA=${DATA:-/data/sums}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_files=$DATA/train.parquet \\
    data.train_batch_size=64 data.max_prompt_length=100 data.max_response_length=28 \\
    actor_rollout_ref.model.path=org/name \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.02 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.n=5 +actor_rollout_ref.rollout.seen=$UNSET/x \\
    trainer.logger="['console','wandb']" \\
    trainer.total_training_steps=10 trainer.save_freq=2 trainer.strange=1 $@
"""
YAML = """
data:
  train_files: {data}
  prompt_key: question
  max_prompt_length: 40
  max_response_length: ${{oc.select:data.absent,12}}
  train_batch_size: 6
actor_rollout_ref:
  model: {{path: {model}}}
  actor:
    ppo_mini_batch_size: ${{data.train_batch_size}}
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-mean
    optim: {{lr: 1e-6, lr_warmup_steps_ratio: 0.5}}
  rollout: {{n: 4, prompt_length: "${{data.max_prompt_length}}"}}
algorithm: {{adv_estimator: grpo, norm_adv_by_std_in_grpo: false}}
custom_reward_function: {{path: {reward}, name: judge}}
critic: {{optim: {{lr: 1e-5}}}}
trainer: {{total_epochs: 3, experiment_name: "my first run!"}}
"""
PRIME = """
max_steps = 200
seq_len = 4096
[model]
name = "org/name"
[wandb]
name = "words"
[trainer.optim]
lr = 1e-5
weight_decay = 0.0
[trainer.model.lora]
rank = 8
dropout = 0.1
[trainer.loss]
type = "ipo"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.env]]
taskset = { id = "words", count = 80 }
[deployment]
num_train_gpus = 1
"""


def imported(directory: Path, name: str, text: str) -> tuple[dict[str, Any], str]:
    """The config that was written, as a tree and as text."""
    (directory / name).write_text(text)
    assert main(["import", str(directory / name), "--to", str(directory / "mine.toml")]) == 0
    written = (directory / "mine.toml").read_text()
    return tomllib.loads(written), written


def test_a_script_of_verl_is_translated_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, written = imported(tmp_path, "run.sh", SCRIPT)
    said = " ".join(capsys.readouterr().out.split())
    assert tree["model"] == {"path": "org/name"}
    assert tree["task"] == {"kind": "parquet", "path": "/data/sums/train.parquet"}
    assert tree["rollout"] == {"max_tokens": 28, "group_size": 5} and tree["engine"]["context_length"] == 128
    assert tree["staleness"] == {"groups_per_step": 16, "max_lag": 3}, "a batch is four optimizer steps there"
    assert tree["train"]["steps"] == 40 and tree["checkpoint"]["every"] == 8 and tree["train"]["learning_rate"] == 3e-6
    assert tree["algo"] == {
        "name": "rloo", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0,
        "kl": {"coef": 0.02, "place": "loss", "estimator": "k3"},
    }  # fmt: skip
    assert (tree["train"]["weight_decay"], tree["train"]["beta2"]) == (0.01, 0.999), "defaults there, and others here"
    assert tree["observe"] == {"wandb": True}
    assert "to do: reward.function: verl chose one by the row's data_source" in said and "# TO DO function" in written
    assert (
        "fits to the machine (docs/auto.md, docs/scale.md): actor_rollout_ref.actor.fsdp_config.param_offload" in said
    )
    assert (
        "not known to this translation, so look whether they matter: actor_rollout_ref.rollout.seen, trainer.strange"
        in said
    )


def test_ppo_of_verl_has_its_critic_here_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = YAML.format(data=tmp_path / "rows.jsonl", model=tmp_path, reward=tmp_path / "theirs.py")
    text = text.replace("adv_estimator: grpo, norm_adv_by_std_in_grpo: false", "adv_estimator: gae, lam: 0.95")
    tree, _ = imported(tmp_path, "ppo.yaml", text.replace("total_epochs: 3", "total_epochs: 3, critic_warmup: 5"))
    assert (tree["algo"]["name"], tree["algo"]["lam"]) == ("ppo", 0.95)
    assert tree["algo"]["critic"] == {"alone_steps": 4}, "verl trains the policy in its fifth batch"
    said = " ".join(capsys.readouterr().out.split())
    (cold := tmp_path / "cold").mkdir()
    assert "critic" not in imported(cold, "ppo.yaml", text)[0]["algo"]
    assert "a critic has few settings (algo.critic): critic.optim.lr" in said and "algorithm.lam" not in said
    (own := tmp_path / "own").mkdir()
    tree, _ = imported(own, "ppo.yaml", text.replace("critic: {optim", f"critic: {{model: {{path: {tmp_path}}}, optim"))
    assert tree["algo"]["critic"] == {"model": str(tmp_path), "model_learning_rate": 1e-5}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("loss_mode: dppo_tv", {"name": "dppo_tv", "delta": 0.28, "cap": 3.0, "aggregation": "seq_mean_token_mean"}),
        ("loss_mode: dro, dro_beta: 0.3", {"name": "kimi", "advantage": "group_norm", "tau": 0.3, "aggregation": "seq_mean_token_mean"}),
        ("loss_mode: gspo", {"name": "gspo_token", "aggregation": "seq_mean_token_mean"}),
        ("loss_mode: sapo", {"name": "sapo"}),
    ],
)  # fmt: skip
def test_losses_of_verl_have_its_constants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, expected: dict[str, Any]
) -> None:
    """`clip_ratio_c`, 3 unless set, is the cap of dppo's weights too."""
    text = YAML.format(data=tmp_path / "rows.jsonl", model=tmp_path, reward=tmp_path / "theirs.py")
    text = text.replace(", norm_adv_by_std_in_grpo: false", "")
    text = text.replace("    clip_ratio_high", f"    policy_loss: {{{given}}}\n    clip_ratio_high")
    assert imported(tmp_path, "ppo.yaml", text)[0]["algo"] == expected
    assert ("verl's bound for bad tokens is another" in (tmp_path / "mine.toml").read_text()) == ("dppo" in given)
    assert "if yours was the former" not in capsys.readouterr().out
    (open_ := tmp_path / "open").mkdir()
    imported(open_, "ppo.yaml", text.replace("    loss_agg_mode: seq-mean-token-mean\n", ""))
    assert ("if yours was the former" in " ".join(capsys.readouterr().out.split())) == ("gspo" in given)


def test_a_config_of_verl_starts_with_its_own_reward_function(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": f"{i} + {i}?", "data_source": "sums", "reward_model": {"ground_truth": str(2 * i)}}
        for i in range(80)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "theirs.py").write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and extra_info == {} and ground_truth.isdigit()\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': 1}\n"
    )
    text = YAML.format(data=tmp_path / "rows.jsonl", model=tiny_llama, reward=tmp_path / "theirs.py")
    tree, _ = imported(tmp_path, "ppo.yaml", text)
    assert tree["name"] == "my-first-run" and tree["rollout"]["max_tokens"] == 12
    assert tree["algo"]["advantage"] == "centred" and tree["algo"]["aggregation"] == "seq_mean_token_mean"
    assert (tree["algo"]["clip_low"], tree["algo"]["clip_high"]) == (0.2, 0.28)
    assert tree["train"]["steps"] == 39 and tree["train"]["warmup_steps"] == 20, "three epochs of thirteen steps"
    assert "this estimator has no critic: critic.optim.lr" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "mine.toml"), "--dry-run"]) == 0
    assert "Ready: start it with" in capsys.readouterr().out


def test_verls_reward_function_is_known_to_a_run_that_is_resumed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text("def judge(**row):\n    return 1.0\n")
    text = YAML.format(data=tmp_path / "rows.jsonl", model=tmp_path, reward="theirs.py")
    with contextlib.chdir(tmp_path):
        imported(tmp_path, "ppo.yaml", text)
    config = read_config(
        {
            "model": {"path": "org/name"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "reward": {"function": f"{tmp_path / 'verl_reward.py'}:reward"},
        }
    )
    before = contents_of(config)["reward.function"]
    theirs.write_text("def judge(**row):\n    return 2.0\n")
    assert contents_of(config)["reward.function"] != before


def test_modules_beside_a_reward_function_are_known_to_a_run_that_is_resumed(tmp_path: Path) -> None:
    """Those that it imports, and that these import; and no others."""
    code = {
        "mine.py": "import json\nfrom scales import by\nimport parts.deep.last\ndef r(completions):\n    from late import more\n    return []",
        "scales.py": "import mine, twice\nby = 1",
        "twice.py": "",
        "late.py": "more = 1",
        "parts/__init__.py": "from .near import x",
        "parts/near.py": "x = 1",
        "parts/deep/last.py": "from .. import far",
        "parts/far.py": "",
        "json.py": "no = python(",
        "unread.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    task = {"kind": "reasoning_gym", "name": "chain_sum"}
    config = read_config(
        {"model": {"path": "org/name"}, "task": task, "reward": {"function": f"{tmp_path / 'mine.py'}:r"}}
    )
    for name, text in code.items():
        before = contents_of(config)["reward.function"]
        (tmp_path / name).write_text(text + "\nchanged = True")
        assert (contents_of(config)["reward.function"] != before) == (name != "unread.py"), name


@pytest.mark.parametrize(("most", "measured"), [("", 5), ("val_max_samples: 3", 3), ("val_max_samples: -1", 5)])
def test_as_many_rows_are_measured_as_verl_measures(tmp_path: Path, most: str, measured: int) -> None:
    (tmp_path / "val.jsonl").write_text('{"question": "a"}\n' * 5)
    text = (
        f"algorithm: {{adv_estimator: grpo}}\ndata: {{train_batch_size: 8, val_files: {tmp_path}/val.jsonl, {most}}}\n"
    )
    tree, _ = imported(tmp_path, "ppo.yaml", text)
    assert tree["eval"]["prompts"] == tree["task"]["held_out"] == measured
    (elsewhere := tmp_path / "elsewhere").mkdir()
    tree, written = imported(elsewhere, "ppo.yaml", text.replace("val.jsonl", "absent.jsonl"))
    assert tree["eval"].get("prompts") == (3 if measured == 3 else None)
    assert ("# TO DO prompts" in written) == (measured != 3)


def test_a_config_of_prime_rl_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, written = imported(tmp_path, "rl.toml", PRIME)
    said = " ".join(capsys.readouterr().out.split())
    assert tree["name"] == "words" and tree["observe"] == {"wandb": True} and tree["model"] == {"path": "org/name"}
    assert tree["train"] == {"steps": 200, "learning_rate": 1e-5, "weight_decay": 0.0} and tree["lora"] == {"rank": 8}
    assert tree["rollout"] == {"group_size": 16, "max_tokens": 512} and tree["staleness"] == {"groups_per_step": 8}
    assert tree["algo"] == {"name": "ipo"} and tree["engine"] == {"context_length": 4096}
    assert tree["environment"] == {"kind": "verifiers", "name": "words", "options": {"taskset": {"count": 80}}}
    assert "left out: adapters are trained without dropout: trainer.model.lora.dropout" in said
    assert "to do: environment.python:" in said and "# TO DO python" in written and "not known" not in said


@pytest.mark.parametrize(("name", "text"), [("run.sh", SCRIPT), ("rl.toml", PRIME)])
def test_what_is_written_is_a_config_of_ours(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    _, found = translated(tmp_path / name)
    known = set(setting_names(RunConfig))
    assert set(found.settings) <= known and set(found.to_do) <= known
    tree, _ = imported(tmp_path, name, text)
    read_config({**tree, "task": {"kind": "reasoning_gym", "name": "chain_sum"}})


def test_what_a_config_names_becomes_values_and_nothing_else(tmp_path: Path) -> None:
    """Neither settings of their own nor Python."""
    hostile = "x.py\n[environment]\nfunction = 'evil.py:play'\n\x7f\"; import os #"
    text = f"algorithm: {{adv_estimator: grpo}}\ncustom_reward_function: {{path: {json.dumps(hostile)}}}\ndata: {{train_batch_size: 8}}\n"
    tree, _ = imported(tmp_path, "ppo.yaml", text)
    assert "environment" not in tree
    wrapper = ast.parse((tmp_path / "verl_reward.py").read_text())
    (given,) = [one.value for one in wrapper.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Tuple)]
    assert ast.literal_eval(given) == (hostile, "compute_score", {}, "data_source")


def test_a_script_is_not_run(tmp_path: Path) -> None:
    imported(tmp_path, "run.sh", SCRIPT.replace("org/name", f"$(touch {tmp_path}/pwned)"))
    assert not (tmp_path / "pwned").exists()


BEFORE = (
    "",
    "data.",
    "trainer.",
    "algorithm.",
    "algorithm.kl_ctrl.",
    f"{verl.ACTOR}",
    f"{verl.ACTOR}optim.",
    f"{verl.ROLLOUT}",
    f"{verl.MODEL}",
)
"""Tables of verl in which a name of the page of names may stand."""


@pytest.mark.parametrize("name", [name for name, one in MEANINGS.items() if one.whose.startswith("verl")])
def test_a_name_that_the_page_says_is_verls_is_known_to_the_translation(tmp_path: Path, name: str) -> None:
    """Two tables know verl's names, one with a sentence for each and one with its values: a name of the first is read by the second, or left out
    with a reason."""
    every = [f"{table}{name}" for table in BEFORE]
    (tmp_path / "all.yaml").write_text(
        "\n".join(
            ["algorithm.adv_estimator: grpo", *(f"{one}: 1" for one in every if one != "algorithm.adv_estimator")]
        )
    )
    _, found = translated(tmp_path / "all.yaml")
    assert set(every) - set(found.unread)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=1; B=2\npython x a.b=$A c.d=$B", {"a.b": 1, "c.d": 2}),
        ("if [ $# -eq 0 ]; then A=1; else A=2; fi\nB=3\npython x a.b=$A c.d=$B", {"a.b": UNKNOWN, "c.d": 3}),
        ("A=1\n[ -z $1 ] && A=2\npython x a.b=$A", {"a.b": UNKNOWN}),
        ("for A in 1 2; do python x a.b=$A c.d=3; done", {"a.b": UNKNOWN, "c.d": 3}),
        ("if $1; then\npython x a.b=1 c.d=3\nelse\npython x a.b=2 c.d=3\nfi", {"a.b": UNKNOWN, "c.d": 3}),
        ("python first \\\n a.b=1 c.d=3\npython second a.b=2 c.d=3", {"a.b": UNKNOWN, "c.d": 3}),
        ("D=(a.b=1\n # note\n c.d=2)\nE=(\n e.f=3\n)\npython x ${D[@]} ${E[@]} e.f=3", {"a.b": 1, "c.d": 2, "e.f": 3}),
        ('A=$HOME/x\nB=${B:-"[\'$A\']"}\npython x a.b="$B"', {"a.b": [str(Path.home() / "x")]}),
        ("A=$(nproc)\npython x a.b=$A c.d=$((A*2)) e.f=$(( 2*3 ))", {"a.b": UNKNOWN, "c.d": UNKNOWN, "e.f": 6}),
        ("python x a.b=some#name c.d=1 # e.f=2", {"a.b": "some#name", "c.d": 1}),
        ("E='a.b=1 c.d=2'\npython x e.f=3 $E", {"a.b": 1, "c.d": 2, "e.f": 3}),
        ("A=1\nA+=2\npython x a.b=$A", {"a.b": 12}),
        ("A=${X:-}\nA=${A:-3}\nB=${X-}\nB=${B-3}\npython x a.b=$A c.d=$B", {"a.b": 3, "c.d": ""}),
        ("D='a.b=1'\nD=\"$D c.d=$X\"\nE='\n e.f=3'\npython x $D $E", {"a.b": 1, "c.d": UNKNOWN, "e.f": 3}),
        ("if [ $1 ]; then D=a.b=1; fi\npython x c.d=2 $D", {"c.d": 2, "$D": UNKNOWN}),
        ("python x a.b={c:1,d:{e:2}} f.g='{h: \"u,v:w\"}'", {"a.b.c": 1, "a.b.d.e": 2, "f.g.h": "u,v:w"}),
        ("python x a.b=010 c.d=off e.f= g.h=null i.j=1:30 k.l=-7", {"a.b": "010", "c.d": "off", "e.f": "", "g.h": None, "i.j": "1:30", "k.l": -7}),
        ("python x a.b=1 ~c.d lr=3 +group@c.d=other", {"a.b": 1, "~c.d": UNKNOWN, "lr": UNKNOWN, "+group@c.d": UNKNOWN}),
        ("export lr=3\nlr=4 python x a.b=$lr", {"a.b": 4}),
        ("python x a.b.c-d=1", {"a.b.c-d": 1}),
        ("python x a.b=1 $MORE\necho $OTHER", {"a.b": 1, "$MORE": UNKNOWN}),
        ("python x -cn mine --config-path=/there a.b=1", {"--config-name": "mine", "--config-path": "/there", "a.b": 1}),
    ],
)  # fmt: skip
def test_a_script_is_read_as_a_shell_runs_it_and_what_only_a_shell_knows_is_not_known(
    tmp_path: Path, text: str, found: dict[str, Any]
) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert read_given(tmp_path / "run.sh") == found


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_response_length=100 {more}\n"


@pytest.mark.parametrize(
    ("more", "setting", "value"),
    [
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True +reward_model.reward_kwargs.overlong_buffer_cfg.len=20", "reward.soft_overlong_punishment.cache", 20),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=20", "reward.soft_overlong_punishment.cache", 20),
        ("actor_rollout_ref.model.lora.rank=8", "lora.rank", 8),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "rollout.keep_routing", True),
        ("actor_rollout_ref.rollout.max_model_len=300", "engine.context_length", 300),
        ("algorithm.gamma=0.9", "algo.gamma", None),
        ("algorithm.norm_adv_by_std_in_grpo=0", "algo.advantage", "centred"),
        ("actor_rollout_ref.model.lora={rank:8}", "lora.rank", 8),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl={type:fixed,kl_coef:0.5}", "algo.kl.coef", 0.5),
        ("actor_rollout_ref.rollout.response_length=700", "rollout.max_tokens", 700),
        ("actor_rollout_ref.ref.model.path=org/other", "algo.kl.coef", None),
        ("trainer.total_training_steps=100 actor_rollout_ref.actor.optim.lr_warmup_steps=0 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "train.warmup_steps", 40),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=constant actor_rollout_ref.actor.optim.warmup_style=cosine", "train.schedule", "cosine"),
    ],
)  # fmt: skip
def test_what_changes_verls_learning_is_translated(tmp_path: Path, more: str, setting: str, value: object) -> None:
    (tmp_path / "run.sh").write_text(VERL.format(more=more))
    _, found = translated(tmp_path / "run.sh")
    assert found.settings.get(setting) == value and not found.unread


@pytest.mark.parametrize(
    "more",
    [
        "--config-name=gsm8k_multiturn_grpo",
        "-cn gsm8k_multiturn_grpo",
        "--config-path=/mine",
        "~algorithm.kl_ctrl",
        "actor@actor_rollout_ref.actor=mine",
        "actor_rollout_ref.model.lora={rank:8,dropout:0.5}",
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        "algorithm.use_pf_ppo=True",
        "data.train_max_samples=100",
        "actor_rollout_ref.model.lora_adapter_path=/adapter",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.do_sample=False",
        "actor_rollout_ref.model.custom_chat_template=x",
        "actor_rollout_ref.model.override_config.rope_theta=3",
        "data.custom_cls.path=mine.py",
        "data.sampler.class_path=mine.py",
        "reward_model.reward_manager=batch",
        "reward_model.sandbox_fusion.url=http://x",
        "trainer.val_only=True",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
        "data.train_batch_size=0",
        "trainer.save_freq=after_each_epoch",
        "actor_rollout_ref.actor.clip_ratio=0.3",
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.model.path=org/other",
        "actor_rollout_ref.ref.strange=1",
        "actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.optim.clip_grad=2",
    ],
)
def test_what_changes_verls_learning_and_has_no_counterpart_is_never_said_to_be_without_effect(
    tmp_path: Path, more: str
) -> None:
    (tmp_path / "run.sh").write_text(VERL.format(more=""))
    _, plain = translated(tmp_path / "run.sh")
    (tmp_path / "run.sh").write_text(VERL.format(more=more))
    _, found = translated(tmp_path / "run.sh")
    told = lambda one: (one.also, one.to_do, one.unknown, one.unread)  # noqa: E731
    assert told(found) != told(plain), "it is to be done, or to be looked at"


def test_what_goes_over_another_file_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, written = imported(tmp_path, "run.sh", VERL.format(more="--config-name tools trainer.save_freq=0"))
    assert "to do: the script's settings go over those of tools.yaml" in capsys.readouterr().out
    assert "# TO DO: the script's settings go over those of tools.yaml" in written


@pytest.mark.parametrize(
    ("more", "setting", "value"),
    [
        ("[trainer.model.lora]\nalpha = 4", "lora.rank", 16),
        ("[trainer.model.lora]", "lora.rank", 16),
        ("[trainer.scheduler]\ntype = 'linear'", "train.schedule", "constant"),
        ("[trainer.scheduler]\ntype = 'linear'\nwarmup_steps = 20\ndecay_steps = 180", "train.schedule", "linear"),
        ("[trainer.scheduler]\ntype = 'linear'", "train.warmup_steps", 10),
        ("[orchestrator.algo]\ntype = 'opd'", "algo.name", None),
        ("[trainer]\nenable_router_replay = true", "rollout.keep_routing", True),
    ],
)
def test_what_changes_the_learning_of_prime_rl_is_translated(
    tmp_path: Path, more: str, setting: str, value: object
) -> None:
    (tmp_path / "rl.toml").write_text(f"max_steps = 200\nmodel.name = 'org/name'\n{more}\n[trainer.optim]\nlr = 1e-5\n")
    _, found = translated(tmp_path / "rl.toml")
    assert found.settings.get(setting) == value and (value is not None or setting in found.to_do) and not found.unread


def test_groups_that_the_batch_of_prime_rl_does_not_fill_are_told(tmp_path: Path) -> None:
    _, written = imported(tmp_path, "rl.toml", PRIME.replace("batch_size = 128", "batch_size = 100"))
    assert "groups_per_step = 6  # 96 rollouts a step, of 100 there, which are no whole groups" in written


@pytest.mark.parametrize(
    "more",
    [
        "trainer.model.freeze_moe_router = true",
        "orchestrator.filters = [{ type = 'gibberish' }]",
        "orchestrator.advantage.type = 'x'",
        "[orchestrator.algo.length_penalty]",
    ],
)
def test_what_changes_prime_rls_learning_is_never_said_to_be_without_effect(tmp_path: Path, more: str) -> None:
    (tmp_path / "rl.toml").write_text(f"max_steps = 200\ntrainer.optim.lr = 1e-5\n{more}\n")
    _, found = translated(tmp_path / "rl.toml")
    assert found.also or found.unread


STRANGE = (math.inf, "\ud800", [1], [None], {"id": "x"}, [{"taskset": "x"}], UNKNOWN)


class Asked(dict[str, Any]):
    """The names of a config that were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.name)
def test_any_value_of_any_name_is_written_or_told(library: Library) -> None:
    plain = Asked({"trainer.scheduler.type": "linear", "algorithm.adv_estimator": "grpo"})
    library.translate(Translation(given=plain))
    assert len(plain.names) > 60
    for name in plain.names:
        for value in STRANGE:
            found = Translation(given=plain | {name: value})
            library.translate(found)
            tomllib.loads(config_text(found, library.name, Path("theirs"), "mine.toml").encode().decode())
            assert value is not UNKNOWN or found.unknown or found.left_out or found.unread, f"{name} is told"


ON: dict[str, Any] = {
    "actor_rollout_ref.actor.use_kl_loss": True,
    "algorithm.use_kl_in_reward": True,
    "algorithm.filter_groups.enable": True,
    "actor_rollout_ref.model.lora_rank": 8,
    "custom_reward_function.path": "mine.py",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov",
    "actor_rollout_ref.actor.optim.warmup_style": "cosine",
    "reward_model.enable": True,
    "trainer.scheduler.type": "cosine",
}
"""Settings of both libraries that switch something on."""


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.name)
@pytest.mark.parametrize("on", ["", *ON])
def test_no_value_of_any_name_that_is_read_is_dropped_without_a_word(library: Library, on: str) -> None:
    def made(given: dict[str, Any]) -> object:
        t = Translation(given=given)
        library.translate(t)
        left = {reason: names for reason, names in t.left_out.items() if names}
        return t.settings, t.notes, t.to_do, t.also, t.unknown, left, t.unread, t.files

    plain = Asked(
        {"trainer.scheduler.type": "linear", "algorithm.adv_estimator": "grpo"} | ({on: ON[on]} if on else {})
    )
    without = made(plain)
    silent = {
        name
        for name in plain.names - plain.keys()
        if all(made(plain | {name: value}) == without for value in (7, 0.25, False, "odd", [3.0, 4.0]))
    }
    assert not silent


def test_verls_reward_function_has_the_column_that_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "def compute_score(**given):\n    return len(given['data_source'] + str(given['extra_info']))\n"
    )
    more = f"custom_reward_function.path={tmp_path / 'theirs.py'} data.reward_fn_key=origin"
    imported(tmp_path, "run.sh", VERL.format(more=more))
    made: dict[str, Any] = {}
    exec(compile((tmp_path / "verl_reward.py").read_text(), "verl_reward.py", "exec"), made)
    assert made["reward"](["p"], ["c"], origin=["four"], data_source=["another"]) == [len("four{}")]


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a:\n  b: {c: 1, c: 2}\n", "a: {b: 1}\na.b: 2\n"])
def test_a_name_that_is_given_twice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match="twice"):
        read_given(tmp_path / "a.yaml")


def test_anchors_are_no_repetition(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: &k {a: 1}\ny: {<<: *k, b: 2}\nz: *k\n")
    assert read_given(tmp_path / "a.yaml") == {"x.a": 1, "y.a": 1, "y.b": 2, "z.a": 1}


def test_references_are_followed_and_circles_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "a: {b: 3, c: '${.b}', d: '${a.b}/${a.c}', e: '${a.f}', f: '${a.e}', g: '${oc.env:HOME}', h: '${oc.select:z,1e-3}'}"
    )
    found = read_given(path)
    assert (found["a.c"], found["a.d"], found["a.h"]) == (3, "3/3", 1e-3)
    assert found["a.e"] is UNKNOWN is found["a.f"] and found["a.g"] is UNKNOWN
    path.write_text("a: {b: '${oc.select:q.r,${a.c}}', c: 5, d: ['${a.c}', 'x/${a.c}', 2], e: ['${oc.env:X}']}")
    assert read_given(path) == {"a.b": 5, "a.c": 5, "a.d": [5, "x/5", 2], "a.e": UNKNOWN}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{}", "name a .yaml or .toml config"),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.yaml", "- a", "has no settings"),
        ("a.yaml", "a: " + "[" * 600 + "]" * 600, "lie in one another without end"),
        ("a.toml", "a = " + "[" * 3000 + "]" * 3000, "lie in one another without end"),
        (
            "a.yaml",
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{n}: &a{n} {{{', '.join(f'{x}: *a{n - 1}' for x in 'bcdefghij')}}}\n" for n in range(1, 9)),
            "more than 100000 settings",
        ),
        ("a.yaml", "beta: !!python/object/apply:os.system ['touch pwned']", "is no YAML"),
        ("a.toml", "a = ", "is no TOML"),
        ("a.sh", "echo hello", "has no settings such as"),
        ("a.sh", "echo 'open", "cannot be read as a shell script"),
        ("a.yaml", "beta: 1", "neither verl nor prime-rl"),
        ("a.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x", "neither verl nor prime-rl"),
    ],
)
def test_what_is_no_config_of_theirs_is_refused(
    tmp_path: Path, name: str, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name), "--to", str(tmp_path / "mine.toml")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "mine.toml").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(tmp_path, "rl.toml", PRIME)
    before = (tmp_path / "mine.toml").read_text()
    assert main(["import", str(tmp_path / "rl.toml"), "--to", str(tmp_path / "mine.toml")]) == 2
    assert "exists already" in capsys.readouterr().err and (tmp_path / "mine.toml").read_text() == before
