"""What a newcomer gets wrong: each input is refused in one sentence that names the remedy, with exit code 2, before a model is
loaded, and nothing is left behind. A row is a folder, a command, and words of the sentence."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import cli
from headrace.run.rehearsal.machine import may_have_gpu
from support.few import few
from support.runs import preloaded_python
from support.start_lines import without_progress

CPU_SECONDS = 30.0
"""Of a refusal, with the processes that it starts: about 1 on the machine where this was written."""

CONFIG = """
[model]
path = "model"
[task]
kind = "jsonl"
path = "rows.jsonl"
held_out = 4
[reward]
function = "rewards.py:exact"
[rollout]
group_size = 2
max_tokens = 8
[engine]
context_length = 128
kv_gib = 0.01
[eval]
prompts = 4
"""

REWARDS = """
import os, time
def exact(prompts, completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
def none(completions, **columns): pass
def short(completions, **columns): return [1.0]
def nan(completions, **columns): return [float("nan")] * len(completions)
def text(completions, **columns): return ["good"] * len(completions)
def one(completions, **columns): return 1.0
def key(completions, answer, **columns): return [{"a": 1}[right] for right in answer]
def column(completions, solution): return [0.0] * len(completions)
def positional(prompts, completions, /): return [0.0] * len(completions)
def slow(completions, **columns): time.sleep(600)
def dies(completions, **columns): os._exit(3)
constant = 3
"""


class Bad(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: dict[str, Any] = {}
    """Written into the folder; bytes as they are."""
    change: Callable[[Path], Any] = lambda folder: None
    """Done to the folder."""


def sets(name: str, words: str | tuple[str, ...], *given: str, **files: Any) -> Bad:
    """`headrace train mine.toml --set ...`."""
    flags = tuple(word for one in given for word in ("--set", one))
    return Bad(name, ("train", "mine.toml", *flags), (words,) if isinstance(words, str) else words, **files)


def model(name: str, words: str | tuple[str, ...], change: Callable[[Path], Any]) -> Bad:
    """Something is wrong with the directory of the model."""
    return sets(name, words, change=lambda folder: change(folder / "model"))


def rows(name: str, words: str, *lines: Any, given: tuple[str, ...] = ()) -> Bad:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return sets(name, words, *given, files={"rows.jsonl": text})


def reward(function: str, *words: str, given: tuple[str, ...] = ()) -> Bad:
    return sets(f"reward {function}", words, f"reward.function={function}", *given)


def config_json(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def huge(directory: Path) -> None:
    """A file that says it holds 100 billion numbers, all of them holes."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**11], "data_offsets": [0, 4 * 10**11]}}).encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 4 * 10**11)


def chat(*messages: Any) -> dict[str, Any]:
    return {"prompt": list(messages)}


TEACHER = '\n[[teachers]]\nname = "a"\npath = "{path}"\n'

COMMANDS = [
    Bad("no config", ("train",), ("name a config: headrace train CONFIG.toml",)),
    Bad("absent config", ("train", "absent.toml"), ("there is no file absent.toml",)),
    Bad("nearly its name", ("train", "mine.tml"), ("did you mean mine.toml?",)),
    Bad("a directory", ("train", "model"), ("model is a directory; name a TOML file in it",)),
    Bad("a run for a config", ("train", "old"), ("resume it with: headrace train --resume old",), {"old/config.toml": ""}),
    Bad("YAML", ("train", "a.yaml"), ("a.yaml is YAML, and a config is TOML", "steps = 200"), {"a.yaml": "train:\n  steps: 3\n"}),
    Bad("JSON", ("train", "a.json"), ("a.json is JSON", "headrace.train({...})"), {"a.json": '{"train": {"steps": 3}}'}),
    Bad("YAML by another name", ("train", "a.toml"), ("a.toml is YAML",), {"a.toml": "# mine\nmodel:\n  path: x\n"}),
    Bad("broken TOML", ("train", "a.toml"), ("a.toml is not valid TOML", "line 2"), {"a.toml": "a = [1,\nb"}),
    Bad("no text", ("train", "a.toml"), ("is not valid TOML", "save it as UTF-8"), {"a.toml": b"\xff\xfe\x00"}),
    Bad("nothing in it", ("train", "a.toml"), ("model is missing: add a [model] table", "task is missing"), {"a.toml": ""}),
    Bad("resume a config", ("train", "--resume", "mine.toml"), ("mine.toml is a config, but the directory of a run",)),
    Bad("resume a config's run", ("train", "--resume", "mine.toml"), ("such as runs/mine",), {"runs/mine/note": ""}),
    Bad("resume a file", ("train", "--resume", "rows.jsonl"), ("rows.jsonl is a file, but a run is a directory",)),
    Bad("resume nothing", ("train", "--resume", "absent"), ("there is no run absent",)),
    Bad("resume nearly its name", ("train", "--resume", "frist"), ("did you mean runs/first?",), {"runs/first/note": ""}),
    Bad("resume no run", ("train", "--resume", "model"), ("is not the directory of a run: it has no config.toml",)),
    Bad("eval nothing", ("eval", "absent"), ("there is no run absent",)),
    Bad("eval YAML", ("eval", "a.yaml"), ("a.yaml is YAML",), {"a.yaml": "train:\n  steps: 3\n"}),
    Bad("eval too many", ("eval", "mine.toml", "--prompts", "9"), ("9 held-out prompts were requested; there are 4",)),
    Bad("report nothing", ("report", "absent"), ("there is no run absent",)),
    Bad("status of no run", ("status", "model"), ("it has no config.toml",)),
    Bad("replay nothing", ("replay", "absent", "--step", "1"), ("there is no run absent",)),
    Bad("inspect a config", ("inspect", "mine.toml"), ("mine.toml is a config",)),
    Bad("diff nothing", ("diff", "absent", "other"), ("there is no run absent",)),
    Bad("export nothing", ("export", "absent", "--to", "x"), ("there is no run absent",)),
    Bad("plan without a size", ("plan", "mine.toml", "--hardware", "h100"), ("name it with --model",)),
    Bad("plan for a chip unheard of", ("plan", "mine.toml", "--hardware", "tpu", "--model", "7b"), ("choose one of h100",)),
    Bad("plan on too few", ("plan", "mine.toml", "--hardware", "h100", "--model", "7b", "--gpus", "1"), ("at least 3 GPUs",)),
    Bad("plan without a network", ("plan", "mine.toml", "--hardware", "h100", "--model", "7b", "--network", "0"), ("--network 0 must be above 0",)),
    Bad("a dtype for nothing", ("doctor", "--dtype", "float32"), ("name the model",)),
]  # fmt: skip

SPELLING = [
    sets("no value", "write it as section.setting=value", "train.steps"),
    sets("no name", "write it as section.setting=value", "=3"),
    sets("half a list", ("engine.cores=[0,1: [0,1 cannot be read", "Write a list as [0, 1]"), "engine.cores=[0,1"),
    sets("half a text", "cannot be read", 'task.system="be brief'),
    sets("True", 'observe.tensorboard = "True" does not fit: expected a boolean: true or false', "observe.tensorboard=True"),
    sets("yes", "expected a boolean: true or false, in small letters", "task.chat=yes"),
    sets("a list without brackets", "engine.cores = 0 does not fit: expected a list: write it as [0]", "engine.cores=0"),
    sets("texts without brackets", 'write it as ["a", "b"]', "rollout.stop=a,b"),
    sets("one of a union", "lora.targets = \"q_proj\" does not fit: expected 'all-linear' or a list", "lora.targets=q_proj"),
    sets("half a step", "train.steps = 2.5 does not fit: expected an integer", "train.steps=2.5"),
    sets("many steps", 'train.steps = "many" does not fit', "train.steps=many"),
    sets("no steps", "train.steps = 0 does not fit: expected greater than 0", "train.steps=0"),
    sets("a negative rate", "expected greater than 0", "train.learning_rate=-1"),
    sets("a word unheard of", "expected 'constant', 'cosine' or 'linear'", "train.schedule=quadratic"),
    sets("a number for a table", "rollout = 3 does not fit: expected a table", "rollout=3"),
    sets("a letter wrong", "train.stesp is not a setting; did you mean train.steps?", "train.stesp=1"),
    sets("a section wrong", "did you mean staleness?", "stalenes.max_lag=1"),
    sets("in another section", "did you mean rollout.temperature?", "train.temperature=1.0"),
    sets("a name with a space", 'name = "my run" names a directory', 'name="my run"'),
    sets("a name with a slash", 'use "a-b"', "name=a/b"),
    sets("no name for the run", 'use "run"', 'name=""'),
]  # fmt: skip

ELSEWHERE = [
    sets(f"{name} of another library", (f"{name} is not a setting: ", ours), f"{name}=1")
    for name, ours in [
        ("beta", "it is what TRL calls algo.kl.coef"),
        ("epsilon", "it is what TRL calls algo.clip_low and algo.clip_high"),
        ("algo.epsilon_high", "it is what TRL calls algo.clip_high"),
        ("num_generations", "it is what TRL calls rollout.group_size"),
        ("train.lr", "train.learning_rate"),
        ("rollout.max_completion_length", "it is what TRL calls rollout.max_tokens"),
        ("per_device_train_batch_size", "staleness.groups_per_step (which counts prompts"),
        ("num_iterations", "it is what TRL calls train.epochs"),
        ("algorithm.kl_ctrl.kl_coef", "algo.kl.coef"),
        ("actor_rollout_ref.actor.clip_ratio", "it is what verl calls algo.clip_low and algo.clip_high"),
        ("actor_rollout_ref.rollout.n", "it is what verl calls rollout.group_size"),
        ("data.max_response_length", "it is what verl calls rollout.max_tokens"),
        ("n_samples_per_prompt", "it is what OpenRLHF calls rollout.group_size"),
        ("max_async_level", "it is what prime-rl calls staleness.max_lag"),
    ]
] + [
    Bad(
        "a whole table of verl's",
        ("train", "a.toml"),
        (
            "trainer.total_epochs is not a setting: it is what verl calls train.steps",
            "trainer.save_freq is not a setting",
        ),
        {"a.toml": CONFIG + "[trainer]\ntotal_epochs = 3\nsave_freq = 5\n"},
    )
]

PAIRS = [
    sets("the same completion always", "use 1.0 for training", "rollout.temperature=0"),
    sets("a setting of another curriculum", 'means nothing to curriculum.kind = "uniform"', "curriculum.candidates=4"),
    sets(
        "a curriculum without contrast",
        'set curriculum.kind = "uniform"',
        "curriculum.kind=pools",
        "algo.name=reinforce",
    ),
    sets("nothing to compare", "use at least 2 (8 is usual)", "rollout.group_size=1"),
    sets("no room for a prompt", "leaves no room for a prompt", "rollout.max_tokens=128"),
    sets("more held out than there is", "raise task.held_out or lower eval.prompts", "eval.prompts=5"),
    sets("cores that are not there", "which this process may not use", "engine.cores=[4096]"),
    sets("an algorithm unheard of", "algo.name = grop does not exist; did you mean grpo?", "algo.name=grop"),
    sets("counted twice", "use algo.old = trainer, or remove the correction", "algo.correction.mode=mask"),
    sets("experts adapted in kernels", "use engine.path = auto", "lora={rank=4,experts=true}", "engine.path=kernels"),
    sets("an adapter without a rank", "set lora.rank, 16 say", "lora.alpha=8.0"),
    sets("a window too wide", "use a window of at most", "staleness.window=99"),
    sets("a warning after the end", "must be below watch.stop_after", "watch.warn_after=9999"),
    sets("a teacher is needed", "add a [[teachers]] table", "algo.name=opd"),
    sets("one rank that frees", "train.parallel.reshard has no meaning for one rank", "train.parallel.reshard=false"),
    sets("copies of a whole", "set train.parallel.shard = 2 instead", "train.parallel.replicate=2"),
    sets("experts of one rank", "no meaning for one rank", "train.parallel.expert=2"),
    sets("copies of experts", "set it to 4, or remove it", "train.parallel={shard=4,expert=2}"),
    sets("experts of half a context", "context = 4 ranks; set it to 4", "train.parallel={shard=2,context=2,expert=2}"),
    sets("copies beside experts", "remove replicate", "train.parallel={shard=2,expert=2,replicate=2}"),
    sets("an order of one rank", "no meaning for one rank", "train.parallel.schedule=gpipe"),
    sets("an order of no pipeline", "set train.parallel.pipeline", "train.parallel={shard=2,schedule='gpipe'}"),
    sets("a pipeline of layers in parts", "gives several pipelines", "train.parallel={tensor=2,pipeline=2}"),
    sets("sums too early", 'use "1f1b" or "inter', "train.parallel={shard=2,pipeline=2,schedule='zero_bubble'}"),
    sets("a pipeline that gathers", "weights that are never gathered", "train.parallel={pipeline=2,reshard=false}"),
    sets(
        "a pipeline that computes twice",
        'use "1f1b" or "interleaved"',
        "train.parallel={pipeline=2,schedule='zero_bubble'}",
        "train.gradient_checkpointing=true",
    ),
    sets("copies of layers", "set train.parallel.shard = 2 instead", "train.parallel={tensor=2,replicate=2}"),
    sets(
        "nothing is gathered",
        "no meaning for weights that are never gathered",
        "train.parallel={tensor=2,reshard=false}",
    ),
    sets("heads split twice", "set one of them to 4 and remove the other", "train.parallel={context=2,tensor=2}"),
    sets("experts of some ranks", "set it to 4, or remove it", "train.parallel={shard=2,tensor=2,expert=2}"),
    sets("ranks with proven bits", 'set train.parity = "off"', "train.parallel.shard=2", "train.parity=bitwise"),
    sets("ranks with kernels", 'use "auto" or "torch"', "train.parallel.shard=2", "train.path=kernels"),
    sets("ranks with a host", "raise train.parallel.shard", "train.parallel.shard=2", "train.offload_optimizer=true"),
    sets(
        "lowered for float32",
        "would round weights",
        "train.parallel={shard=2,gather='bfloat16'}",
        "train.dtype=float32",
    ),
    sets(
        "lowered twice", "gathered in train.dtype anyway", "train.parallel={shard=2,gather='bfloat16'}", "lora.rank=4"
    ),
    sets(
        "ranks of packed weights", "remove one of the two", "train.parallel.shard=2", "lora.rank=4", "lora.quantise=nf4"
    ),
    sets(
        "ranks of adapted experts", "set lora.experts = false", "train.parallel.shard=2", "lora={rank=4,experts=true}"
    ),
    sets(
        "ranks of an older self",
        "give the teacher a model",
        "train.parallel.shard=2",
        "algo.name=opd",
        'teachers=[{name="old",student="average"}]',
    ),
    sets("more ranks than cores", "give each rank at least one core", "train.parallel.shard=2", "train.cores=[0]"),
    sets("two adapters of one name", "two adapters are called a", "lora.rank=4", 'adapters=[{name="a"},{name="a"}]'),
]

MODELS = [
    sets("no model of that name", "is not a directory; name a directory with a model, a known model", "model.path=./absent"),
    sets("a file for a model", "name the directory that holds config.json", "model.path=./rows.jsonl"),
    model("no config.json", "no config.json; save the model with save_pretrained", lambda m: (m / "config.json").unlink()),
    model("a broken config.json", "is not valid JSON", lambda m: cut(m / "config.json")),
    model("no weights", "no weights (*.safetensors", lambda m: (m / "model.safetensors").unlink()),
    model("weights cut off", ("model.safetensors is cut off: ", "download or copy it again"), lambda m: cut(m / "model.safetensors")),
    model("a page for weights", "is not a safetensors file", lambda m: (m / "model.safetensors").write_text("<html>" * 9)),
    model("no tokenizer", "no tokenizer (tokenizer.json", lambda m: (m / "tokenizer.json").unlink()),
    model("a broken tokenizer", "no tokenizer that can be loaded", lambda m: cut(m / "tokenizer.json")),
    model("no template", "set task.chat = false", lambda m: (m / "chat_template.jinja").unlink()),
    model("an encoder", "it is an encoder (BertForMaskedLM)", lambda m: config_json(m, model_type="bert", architectures=["BertForMaskedLM"])),
    model("an encoder-decoder", "it is an encoder-decoder (t5)", lambda m: config_json(m, model_type="t5", is_encoder_decoder=True)),
    model("an adapter alone", "holds only an adapter; merge it", lambda m: (m / "config.json").rename(m / "adapter_config.json")),
    model("too large for any machine", ("training 100 billion parameters takes", "lora.rank = 16"), huge),
    Bad("no such teacher", ("train", "a.toml"), ("the teacher a: path = ",), {"a.toml": CONFIG.replace("[eval]", '[algo]\nname = "opd"\n[eval]') + TEACHER.format(path="./absent")}),
]  # fmt: skip

TASKS = [
    sets("no such file", "task.path must name the file with the rows", "task.path=absent.jsonl"),
    sets("nearly such a file", "did you mean", "task.path=row.jsonl"),
    sets("no such held-out file", "there is no", "task.held_out_path=absent.jsonl"),
    sets("a column unheard of", "there is no column question (task.prompt)", "task.prompt=question"),
    sets("another format", "set task.kind to what it is", "task.kind=parquet"),
    sets("a directory of rows", "needs a file with one JSON object a line", "task.path=model"),
    sets("no dataset", "is not a dataset written by save_to_disk", "task.kind=datasets", "task.path=model"),
    sets("no family", "is not a reasoning_gym dataset", files={"mine.toml": CONFIG.replace('kind = "jsonl"\npath = "rows.jsonl"', 'kind = "reasoning_gym"\nname = "chain_sun"')}),
    sets("turns without a chat", "task.system and task.examples are turns of a chat", "task.chat=false", "task.system=brief"),
    sets("all too long", ("all prompts that were looked at are too long", "raise engine.context_length to"), "engine.context_length=16"),
    sets("longer than the model", "this model has 256 positions", files={"rows.jsonl": "".join(json.dumps({"prompt": f"{i} " * 400, "answer": ""}) + "\n" for i in range(9))}),
    rows("no JSON", "rows.jsonl:2: not valid JSON", {"prompt": "a"}, "{"),
    rows("a list", "row 1: a JSON int where an object with columns is needed", [1]),
    rows("a list a line", "begins as an array, which must hold one object for each row", [1], [2]),
    rows("a number a line", "rows.jsonl:1: a JSON int where an object with columns is needed", "1", "2"),
    rows("no rows", "holds no rows"),
    rows("a null", "is empty (null)", {"prompt": None}),
    rows("no prompt", "is empty", {"prompt": ""}),
    rows("a number", "is of type int; a prompt is a string or a list", {"prompt": 3}),
    rows("no messages", "something else than messages", chat("hello")),
    rows("a column that is taken", "rename it", {"prompt": "a", "completions": "b"}),
    rows("forty of one kind", "they ask only 1 different question(s) in the column prompt", *[{"prompt": "a"}] * 40),
    rows("too few", "none is left to train on after task.held_out = 4", {"prompt": "a"}, {"prompt": "b"}, given=("eval.prompts=1",)),
]  # fmt: skip

ENVIRONMENTS = [
    sets("no such environment", 'environment.kind = "chess" is not one of the environments', "environment.kind=chess"),
    sets("no such game", "is not a game of textarena; did you mean GuessTheNumber-v0", "environment.kind=textarena", "environment.name=GuesTheNumber-v0"),
    sets("no such class", "environment.name: there is no file", "environment.kind=gym", "environment.name=absent.py:Game"),
    sets("no such server", "no session could be opened there", "environment.kind=openenv", "environment.name=http://127.0.0.1:9"),
    sets("rows for a game", 'needs prompts with a column seed: set task.kind = "seeds"', "environment.kind=textarena", "environment.name=TowerOfHanoi-v0"),
    sets("rows for atropos", 'so a task would not be used: set task.kind = "seeds"', "environment.kind=atropos", "eval.prompts=0"),
    sets("held out from atropos", "is held out: set eval.prompts = 0", "environment.kind=atropos", "eval.prompts=2"),
    sets("atropos for ever", "would wait for ever for an agent that has vanished", "environment.kind=atropos", "environment.seconds=0"),
]  # fmt: skip

REWARD = [
    reward("absent.py:exact", "there is no file"),
    reward("rewards.py:exakt", "rewards.py defines no exakt; did you mean exact?"),
    reward("rewards.exact", "of the form path/to/file.py:name"),
    reward("rewards.py:constant", "is a int, which cannot be called"),
    reward("rewards.py:positional", "takes prompts by position only"),
    reward("rewards.py:key", "the reward fails on row train/0/", "KeyError: '", "rewards.py:10", "correct the function"),
    reward("rewards.py:column", "it needs solution, which is not a column of the task", "answer"),
    reward("rewards.py:none", "returned None instead of a list"),
    reward("rewards.py:short", "1 rewards came back for 2 completions"),
    reward("rewards.py:nan", "the reward is nan"),
    reward("rewards.py:text", "is not a number"),
    reward("rewards.py:one", "where a list of 2 numbers is needed"),
    reward("rewards.py:slow", "no answer within 1 s (reward.timeout)", given=("reward.timeout=1",)),
    reward("rewards.py:dies", "ended with exit code 3"),
    sets("no reward", "nothing gives rewards: set reward.function", "reward.function="),
    sets("two ways", "reward.function and reward.functions are both set", 'reward.functions=[{function="rewards.py:exact"}]'),
    sets("a file that does not parse", "(", files={"rewards.py": "def exact(:\n"}),
    sets("a file that raises", "running the file failed: ZeroDivisionError", files={"rewards.py": "1 / 0\n"}),
    sets("a loss of no file", "algo.loss = ", "algo.loss=absent.py:loss"),
    sets("a loss by another name", "defines no exakt; did you mean exact?", "algo.loss=rewards.py:exakt"),
    sets("an advantage that does not parse", "is not valid Python", "algo.advantage=a.py:f", files={"a.py": "def f(:\n"}),
]  # fmt: skip

MACHINE = [
    sets("a cache of 500,000 GiB", "engine.kv_gib = 500000 is more than the", "engine.kv_gib=500000"),
    sets("a cache for nobody", "raise engine.kv_gib or lower engine.context_length", "engine.kv_gib=0.00001"),
    sets("a file for a place", "is a file; set out", "out=rows.jsonl"),
    sets("a place below a file", "is a file; set out", "out=rows.jsonl/runs"),
    sets("a place that cannot be written", "is not writable", "out=/proc/runs"),
    sets("a run that is there", "already holds a run: resume it", files={"runs/mine/journal/0.segment": "0"}),
]
GPU = [
    sets("no vLLM here", ("has no vllm: install it", "name its interpreter in engine.python"), "engine.kind=vllm"),
    sets("a GPU to serve on", 'engine.device = "cuda", but torch finds no GPU', "engine.device=cuda"),
    sets("a GPU to train on", 'train.device = "cuda", but torch finds no GPU', "train.device=cuda"),
]

TABLE = [*COMMANDS, *SPELLING, *ELSEWHERE, *PAIRS, *MODELS, *TASKS, *ENVIRONMENTS, *REWARD, *MACHINE]


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything in it is as it should be."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "mine.toml").write_text(CONFIG)
    (tmp_path / "rewards.py").write_text(REWARDS)
    lines = (json.dumps({"prompt": f"{i} + {i}?", "answer": str(2 * i)}) for i in range(40))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def prepared(bad: Bad, folder: Path) -> list[str]:
    for name, content in bad.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    bad.change(folder)
    return list(bad.arguments)


def left_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def used() -> float:
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)


def refused(code: int, out: str, err: str, bad: Bad) -> None:
    assert code == 2, err
    assert out == ""
    for word in bad.words:
        assert word in err
    assert all(line.startswith("headrace: ") for line in err.splitlines()), err
    assert "most recent call last" not in err and "dataclass" not in err and "pydantic" not in err


def test_there_are_many_and_their_names_differ():
    names = [bad.name for bad in [*TABLE, *GPU]]
    assert len(names) == len(set(names)) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_it_is_refused_with_a_sentence_and_nothing_is_left(bad: Bad, folder: Path, capsys):
    arguments = prepared(bad, folder)
    before, started = left_in(folder), used()
    code = cli.main(arguments)
    refused(code, *capsys.readouterr(), bad)
    assert left_in(folder) == before, "a refused start leaves no directory"
    assert used() - started < CPU_SECONDS


@pytest.mark.skipif(may_have_gpu(), reason="this machine may have a GPU")
@pytest.mark.parametrize("bad", few(GPU, keep=1), ids=lambda bad: bad.name)
def test_a_gpu_that_is_not_there(bad: Bad, folder: Path, capsys):
    test_it_is_refused_with_a_sentence_and_nothing_is_left(bad, folder, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [bad for bad in TABLE if bad.name in ("half a list", "weights cut off", "reward rewards.py:key", "all too long")],
    ids=lambda bad: bad.name,
)
def test_a_rehearsal_and_a_real_start_say_the_same(bad: Bad, folder: Path):
    arguments = prepared(bad, folder)
    before, said = left_in(folder), set()
    for flags in ([], ["--dry-run"]):
        command = [sys.executable, "-m", "headrace", *arguments, *flags]
        pipe = subprocess.PIPE
        with preloaded_python.Program(command, cwd=folder, stdout=pipe, stderr=pipe, text=True) as done:
            out, err = done.communicate()
        refused(done.returncode, out, err, bad)
        said.add(without_progress(err))
    assert len(said) == 1 and left_in(folder) == before


def test_what_was_broken_above_is_whole_before(folder: Path, capsys):
    assert cli.main(["train", "mine.toml", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert without_progress(err) == "" and "exact = 1" in out and not (folder / "runs").exists()
