"""Whatever setting a resume changes, nothing is trained as what it is not: over the whole schema, with runs that check it (`meant_run.py`)."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import re
import shutil
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from headrace.algo import training_rows
from headrace.core.errors import ConfigError, TrainingError
from headrace.core.types import RolloutKey
from headrace.durable.journal import read_steps
from headrace.facts.facts import GroupEnded, RunEnded, Warned
from headrace.loop.checkpoints import load_controller
from headrace.run import resume_rules
from headrace.run.config import RunConfig, dump_config, load_config, read_config
from headrace.run.resume_rules import CONTENTS, RULES, rule_of
from support.few import few
from support.meant_run import Life, live
from support.tiny_run import of

REWARD = """
import zlib

def first(prompts, completions, **columns):
    return [zlib.crc32((text + columns["answer"]).encode()) % 97 / 97 for text in completions]

def second(prompts, completions, **columns):
    return [5 + zlib.crc32(text.encode()) % 89 / 89 for text in completions]
"""
TALK = """
def marks(number):
    return [{mark}, 8 + number]

def reward(tokens):
    return {reward} + sum(tokens) % 11 / 11

async def play(agent, prompt, **columns):
    raise AssertionError("the functions above are called")
"""
OWN: dict[str, list[Any]] = {
    "rollout.temperature": [1.0, 0.6, 1.7],
    "rollout.top_p": [1.0, 0.8],
    "rollout.top_k": [0, 5],
    "rollout.min_p": [0.0, 0.05],
    "rollout.max_tokens": [12, 5, 20],
    "rollout.stop": [[], ["a"], ["1", "e"]],
    "rollout.group_size": [3, 2, 5],
    "environment.function": ["", "near.py:play", "far.py:play"],
    "environment.max_turns": [8, 2],
    "environment.max_tokens": [0, 60],
    "reward.function": ["reward.py:first", "reward.py:second"],
    "reward.extract": ["", "last_number"],
    "task.system": ["", "add"],
    "task.answer": ["answer", "other"],
    "task.prompt": ["prompt", "question"],
    "task.template": [{}, {"enable_thinking": True}],
    "task.path": ["rows.jsonl", "others.jsonl"],
    "task.held_out": [8, 16],
    "staleness.max_lag": [4, 3, 6],
    "staleness.groups_per_step": [2, 3],
    "train.steps": [9, 12],
    "seed": [0, 1],
    "model.path": ["model", "model2"],
    "engine.context_length": [96, 128],
    "algo.name": ["grpo", "rloo", "dr_grpo", "reinforce", "gspo", "dapo"],
    "algo.advantage": ["grpo", "rloo", "centred"],
    f"{CONTENTS}reward.function": [0, 1],
    f"{CONTENTS}environment.function": [0, 1],
    f"{CONTENTS}task.path": [0, 1],
}
"""Values that are tried. Those of other settings follow from their types."""

ELSEWHERE = (
    "orchestration.* engine.kind observe.tensorboard observe.trackio observe.wandb observe.mlflow chosen.* name out adapters teachers "
    "reward.services reward.judges reward.functions task.kind task.name task.options task.rows curriculum.largest_group "
    "environment.kind environment.command environment.directory environment.python environment.name environment.options "
    "environment.host environment.port environment.processes environment.episode_seconds environment.seconds algo.kl.place "
    "algo.distill.* algo.loss rollout.forks.* rollout.keep_routing sandbox.allow checkpoint.flush_journal"
)
"""Patterns of settings that need a service, another machine, a library or a model with experts. Their rules are looked at below."""

BASES: tuple[dict[str, Any], ...] = (
    {},
    {"rollout.top_p": 0.8},
    {"rollout.top_k": 6, "rollout.temperature": 0.7},
    {"environment.function": "near.py:play"},
    {"environment.function": "near.py:play", "rollout.min_p": 0.05, "environment.resumes": "replayed"},
    {"rollout.top_p": 0.7, "rollout.keep_mask": False},
    {"reward.soft_overlong_punishment.cache": 4},
    {"algo.overlong": "mask", "staleness.overdue": "trim"},
)
"""Settings beside the one that changes."""

NEEDS: dict[str, dict[str, Any]] = {
    "*environment.*": {"environment.function": "near.py:play"},
    "reward.extract_truncated": {"reward.extract": "last_number"},
}
"""Settings without which those of the pattern do nothing."""


class Setting(NamedTuple):
    name: str
    values: list[Any]


def schema(kind: type = RunConfig, before: str = "") -> Iterator[Setting]:
    """Every setting with values to try. One without any is not tried."""
    hints = typing.get_type_hints(kind)
    for name, field in kind.__pydantic_fields__.items():  # type: ignore[attr-defined]
        here, hint = f"{before}{name}", hints[name]
        options = [one for one in (hint, *typing.get_args(hint)) if one is not type(None)]
        if dataclasses.is_dataclass(options[0]):
            yield from schema(options[0], f"{here}.")  # type: ignore[arg-type]
        else:
            yield Setting(here, OWN.get(here) or list(_values(options, field)))


def _values(options: list[Any], field: Any) -> Iterator[Any]:
    for option in options:
        if typing.get_origin(option) is Literal:
            yield from typing.get_args(option)
        elif option is bool:
            yield from (False, True)
        elif option in (int, float):
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            now = default if isinstance(default, int | float) else None  # not where it is chosen ("auto")
            yield from (option(value) for value in ((now or 0), (now or 0) * 2 + 1, (now or 1) / 2, 0.5, 1, 3))


SETTINGS = [
    one for one in schema() if len(one.values) > 1 and not any(fnmatchcase(one.name, p) for p in ELSEWHERE.split())
]
SETTINGS += [Setting(name, values) for name, values in OWN.items() if name.startswith(CONTENTS)]
MEANT = [setting for setting in SETTINGS if not rule_of(setting.name).is_free]


class Place:
    """The files of a run."""

    def __init__(self, directory: Path, tokenizer: Path) -> None:
        self.directory = directory
        for name in ("model", "model2"):
            shutil.copytree(tokenizer, directory / name)
            with (directory / name / "chat_template.jinja").open("a") as file:
                file.write("{% if enable_thinking %}<s>{% endif %}")
        for name, mark, reward in (("near", 11, 1), ("far", 12, 30)):
            (directory / f"{name}.py").write_text(TALK.format(mark=mark, reward=reward))
        (directory / "reward.py").write_text(REWARD)
        self.write_rows("rows.jsonl", 2)
        self.write_rows("others.jsonl", 3)

    def write_rows(self, name: str, times: int) -> None:
        rows = [
            {"prompt": f"{i} + {i}?", "question": f"{i} - {i}?", "answer": str(times * i), "other": "x"}
            for i in range(120)
        ]
        (self.directory / name).write_text("\n".join(map(json.dumps, rows)))

    def config(self, settings: dict[str, Any]) -> RunConfig:
        """Raises ConfigError."""
        at = lambda name: str(self.directory / name)  # noqa: E731
        base: dict[str, Any] = {
            "name": "run", "out": at("runs"), "model.path": "model", "task.kind": "jsonl", "task.path": "rows.jsonl",
            "task.held_out": 8, "reward.function": "reward.py:first", "rollout.group_size": 3, "rollout.max_tokens": 12,
            "train.steps": 9, "train.dtype": "float32", "engine.dtype": "float32", "engine.context_length": 96,
            "staleness.groups_per_step": 2, "staleness.max_lag": 4, "checkpoint.every": 0, "eval.prompts": 0,
            "watch.trial": False, "watch.identity_every": 0, "observe.terminal": "off",
        }  # fmt: skip
        tree: dict[str, Any] = {}
        for name, value in (base | settings).items():
            *sections, last = name.split(".")
            table = tree
            for section in sections:
                table = table.setdefault(section, {})
            named = name in ("model.path", "task.path", "reward.function", "environment.function") and value
            table[last] = at(value) if named else value
        return load_config(tree)

    def change_contents(self, name: str) -> None:
        if name == "reward.function":
            (self.directory / "reward.py").write_text(REWARD.replace("% 97", "% 83").replace("5 +", "7 +"))
        elif name == "environment.function":
            (self.directory / "near.py").write_text(TALK.format(mark=13, reward=60))
        elif name == "task.path":
            self.write_rows("rows.jsonl", 5)


@dataclasses.dataclass
class Tried:
    said: str
    """What is tried."""
    first: Life
    second: Life | None = None
    refused: str = ""
    last: Life | None = None


def attempt(place: Place, chance: random.Random, setting: Setting) -> Tried | None:
    """Stops a run, resumes it with another value, stops it again, and resumes it as it is. None where no two values go together with the
    rest."""
    base = dict(chance.choice(BASES))
    for pattern, needed in NEEDS.items():
        base |= needed if fnmatchcase(setting.name, pattern) else {}
    contents = setting.name.startswith(CONTENTS)
    values = [value for place, value in enumerate(setting.values) if value not in setting.values[:place]]
    fine = [
        (value, one) for value in values if (one := _fine(place, base if contents else base | {setting.name: value}))
    ]
    if len(fine) < 2:
        return None
    (before, config), (after, changed) = chance.sample(fine, 2)
    if config.lora.rank:  # this engine serves none: another rank is refused before
        return None
    run = place.directory / "runs" / "run"
    how = chance.choice(["set", "set", "set", "edited", "of an earlier version"])
    older = how == "of an earlier version" and not contents
    tried = Tried(
        f"{setting.name}: {before!r} -> {after!r} with {base}, {how}",
        live(config, run, resume=False, stop_after=3, older=older),
    )
    if contents:
        place.change_contents(setting.name.removeprefix(CONTENTS))
    elif how == "edited":
        (run / "config.toml").write_text(dump_config(changed))
    try:
        tried.second = live(changed, run, resume=True, stop_after=3, kills=chance.random() < 0.4)
    except ConfigError as error:
        tried.refused = str(error)
        if how == "edited":
            (run / "config.toml").write_text(dump_config(config))
    tried.last = live(read_config(run / "config.toml"), run, resume=True)
    return tried


def _fine(place: Place, settings: dict[str, Any]) -> RunConfig | None:
    """The config, if it can be run here: without a reference, which is an engine, and with an adapter only to be refused."""
    try:
        config = place.config(settings)
    except ConfigError:
        return None
    return None if config.algo.reference_in_reward else config


def check(tried: Tried, run: Path) -> None:
    for life in (tried.first, tried.second, tried.last):
        assert life is None or not life.problems, f"{tried.said}: {life.problems[:5]}"
    assert tried.second or tried.refused, tried.said
    if tried.last:
        ended = of(run, RunEnded)[-1]
        assert ended.reason == "finished" and ended.accounting.balance() == 0, f"{tried.said}: {ended.reason}"
    failed = {reason for fact in of(run, GroupEnded) for reason in fact.failures}
    assert not failed - {"prompt_too_long", "reward_none"}, f"{tried.said}: {failed}"


def drawn(chance: random.Random) -> Setting:
    """A setting of a section that is drawn first: there are so many of the trainer, whose tokens mean the same."""
    settings = MEANT if chance.random() < 0.85 else SETTINGS
    section = chance.choice(sorted({setting.name.split(".")[0] for setting in settings}))
    return chance.choice([setting for setting in settings if setting.name.split(".")[0] == section])


def try_some(count: int, seed: int, directory: Path, tokenizer: Path) -> list[Tried]:
    chance, found, barren = random.Random(seed), [], 0
    while len(found) < count:
        setting = drawn(chance)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            tried = attempt(Place(directory, tokenizer), chance, setting)
        except TrainingError as error:  # as where completions of one token are all cut off, and masked for that
            if "groups in a row could not be trained" not in str(error):
                raise
            barren += 1
            assert barren <= 1 + count / 20, f"{setting.name}: {error}"
            continue
        if tried:
            check(tried, directory / "runs" / "run")
            found.append(tried)
    return found


@pytest.mark.whole
@pytest.mark.parametrize("seed", few(range(6), keep=1))
def test_no_changed_setting_makes_anything_be_trained_as_what_it_is_not(
    seed: int, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    found = try_some(4, seed, tmp_path / "place", tiny_tokenizer)
    assert any(one.first.ready and one.first.tokens for one in found), "nothing was finished, or under way"


@pytest.mark.slow
def test_two_hundred_pairs_of_values(tmp_path: Path, tiny_tokenizer: Path) -> None:
    found = try_some(200, 36, tmp_path / "place", tiny_tokenizer)
    whole = sum(bool(one.first.ready and one.first.tokens) for one in found)
    assert whole > 150, f"in {whole} of 200 runs something was finished and something under way"


def test_finished_groups_are_trained_at_their_own_temperature(tmp_path: Path, tiny_tokenizer: Path) -> None:
    place, run = Place(tmp_path, tiny_tokenizer), tmp_path / "runs" / "run"
    first = live(place.config({"rollout.temperature": 0.6}), run, resume=False, stop_after=3)
    second = live(place.config({"rollout.temperature": 1.7}), run, resume=True)
    assert first.ready and second.reason == "finished" and not second.problems
    assert {row.temperature for batch in second.trainer.batches for row in batch.rows} == {0.6, 1.7}
    assert "settings_changed" not in of(run, RunEnded)[-1].accounting.dropped


def test_a_lower_max_tokens_cuts_what_is_under_way(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """At the limit, with the tokens that it has: to sample only the long ones again would favour short answers."""
    place, run = Place(tmp_path, tiny_tokenizer), tmp_path / "runs" / "run"
    live(place.config({"rollout.max_tokens": 20}), run, resume=False, stop_after=3)
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = load_controller(checkpoint)
    long = {name: one.tokens for name, one in state.begun.items() if len(one.tokens) > 4}
    assert long, "nothing was under way for long"
    second = live(place.config({"rollout.max_tokens": 4}), run, resume=True)
    assert second.reason == "finished" and not second.problems
    finished = {group.ticket for group in state.buffer.ready}
    groups = [group for step in read_steps(run) if step.step >= state.step for group in step.groups]
    later = {group.ticket: group for group in groups if group.ticket not in finished}
    assert all(len(rollout.episode.last.tokens) <= 4 for group in later.values() for rollout in group.scored)
    seen = 0
    for name, tokens in long.items():
        if (key := RolloutKey.read(name)) and key.ticket in later:
            of_group = [rollout.episode.last for rollout in later[key.ticket].scored]
            assert any(one.tokens == tokens[:4] and one.stop == "length" for one in of_group)
            seen += 1
    assert seen and any(
        "rollout.max_tokens = 4: they are cut off there" in warning.message for warning in of(run, Warned)
    )


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    few(
        starmap(
            pytest.param,
            [
                (
                    "reward.function",
                    "reward.py:second",
                    ["finished groups of the checkpoint are dropped (settings_changed)"],
                ),
                ("rollout.stop", ["a"], ["rollouts under way begin anew, because of changes in rollout.stop"]),
                (
                    "task.system",
                    "add",
                    ["groups under way are dropped (settings_changed), because of changes in task.system"],
                ),
                ("train.learning_rate", 1e-3, ["settings of training have changed"]),
            ],
        ),
        keep=2,
    ),
)
def test_what_becomes_of_it_is_said(
    setting: str, value: Any, said: list[str], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    place, run = Place(tmp_path, tiny_tokenizer), tmp_path / "runs" / "run"
    first = live(place.config({}), run, resume=False, stop_after=3)
    assert first.ready and first.tokens
    live(place.config({setting: value}), run, resume=True, stop_after=2)
    told = [warning.message for warning in of(run, Warned)]
    for sentence in said:
        assert any(sentence in one for one in told), told


def test_every_setting_has_a_rule_and_no_rule_is_idle() -> None:
    """A setting that is new is given a row of the table by whoever adds it: there is none for all the rest."""
    names = [one.name for one in schema()]
    assert all(rule_of(name) for name in names)
    for rule in RULES:
        for pattern in rule.settings.split():
            assert any(fnmatchcase(name, pattern) for name in names), f"{pattern} fits no setting"


def test_whatever_makes_rows_drops_finished_groups_when_it_changes() -> None:
    """Every attribute of the algorithm that the making of rows reads is among the values that are compared."""
    made, compared = inspect.getsource(training_rows), inspect.getsource(resume_rules._rows)
    read = set(re.findall(r"self\._(?:algo|recipe)\.((?:loss\.)?\w+)", made))
    assert {"gamma", "lam", "credit", "overlong", "kl", "loss.whole"} <= read
    assert {name for name in read if not re.search(rf"\.{re.escape(name)}\b", compared)} == set()


def test_what_is_not_kept_is_never_behind_a_checkpoint() -> None:
    """Only what is in the checkpoint is dropped or begun anew: what came after it has to be set aside."""
    for rule in RULES:
        assert rule.steps != "repeated" or (rule.groups, rule.rollouts) == ("kept", "kept"), rule.settings
