"""The config that `headrace init` writes, and the reward function beside it.

Lengths, columns and the part of a completion that is compared are read off the data, so that the config passes the rehearsal as it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.scoring.config import BUILTIN, IN_SANDBOX
from headrace.episodes.scoring.extract import last_number
from headrace.episodes.tasks.read import kind_of, read_rows
from headrace.models.resolve import KNOWN_MODELS

PROMPTS = ("prompt", "question", "problem", "instruction", "messages", "conversations", "input", "query")
ANSWERS = ("answer", "solution", "target", "output", "label", "response")
"""Names of columns that are looked for, the likeliest first."""
HELD_OUT = 64
LOOKED_AT = 64
"""Rows whose answers are looked at."""
CONTEXT, TOKENS = 1024, 128
"""Tokens of prompt and completion together, and of a completion, unless the model reads fewer."""
LABELS, LABEL = 20, 40
"""Most different answers of a classification, and most characters of one."""
SHOWN = 4
"""Solved rows before questions whose answer is a label, or a number for a small model."""
NUMBER = 16
"""Tokens of a small model's answer that is a number: room for `7 + 4 = 11.`, which one of 135 million parameters finds by itself. Longer answers are seldom
right, and a step takes five times as long."""
SMALL = 1e-5
"""A learning rate for models of about 100 million parameters; the default, 1e-6, is for billions (docs/results.md)."""


@dataclass(frozen=True, kw_only=True)
class StarterData:
    """The prompts, as they were found."""

    kind: str
    name: str
    prompt: str = ""
    answer: str = ""
    rows: int = 0
    numeric: bool = True
    """Whether every answer that was looked at is a number."""
    labels: tuple[str, ...] = ()
    """The answers of a classification: a few texts, each of several rows."""
    asked: bool = False
    """Whether the prompts are plain questions, before which a system message and solved rows can stand."""
    tests: bool = False
    """Whether rows have tests for programs."""

    @property
    def of_gym(self) -> bool:
        return self.kind == "reasoning_gym"


def default_reward(data: str) -> str:
    """Returns what usually gives the reward of such data."""
    return "reasoning_gym" if kind_of(data) == "reasoning_gym" else "rewards.py:exact"


def write_starter(config: Path, *, model: str, data: str, reward: str) -> list[Path]:
    """Writes the config, and the file of the reward function if there is none yet. Returns the paths written.

    Raises ConfigError if the answers do not fit together, before anything is written."""
    from headrace.run.config import checked, read_config

    if config.suffix != ".toml":
        raise ConfigError(f"{config}: a config is a TOML file; name it {config.stem or 'mine'}.toml")
    found = look_at(data)
    written: dict[Path, str] = {}
    if reward in BUILTIN:
        _refuse_other_rewards(reward, found)
    else:
        written |= _function_file(config.parent, reward, found)
    text = starter_text(config, model=model, data=found, reward=reward)
    config.parent.mkdir(parents=True, exist_ok=True)
    try:
        for path, content in {**written, config: text}.items():
            path.write_text(content, encoding="utf-8")
        checked(read_config(config))
    except BaseException:
        for path in (*written, config):
            path.unlink(missing_ok=True)
        raise
    return [config, *written]


def look_at(data: str) -> StarterData:
    """Reads the prompts' source. Raises ConfigError if there is none, or if it has no column of prompts."""
    kind = kind_of(data)
    if kind == "reasoning_gym":
        return _gym(data.removeprefix("reasoning_gym:"))
    rows = read_rows(kind, data)
    if not rows:
        raise ConfigError(
            f"{data} has no rows; each line is one JSON object, such as " + '{"prompt": "2 + 2?", "answer": "4"}'
        )
    columns = list(rows[0])
    prompt = _column(PROMPTS, columns)
    if not prompt:
        raise ConfigError(
            f"none of the columns of {data} ({', '.join(columns)}) is called {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}; rename the one with "
            "the prompts"
        )
    answer = _column(ANSWERS, columns)
    asked = bool(answer) and all(isinstance(row.get(prompt), str) for row in rows)
    return StarterData(
        kind=kind,
        name=data,
        prompt=prompt,
        answer=answer,
        rows=len(rows),
        numeric=bool(answer) and all(_is_number(row.get(answer)) for row in rows[:LOOKED_AT]),
        labels=_labels([row.get(answer) for row in rows]) if asked else (),
        asked=asked,
        tests="tests" in columns,
    )


def _gym(name: str) -> StarterData:
    from headrace.settings.extras import install, is_installed

    if not is_installed("reasoning_gym"):
        raise ConfigError(
            f"{name} is not a file here; a family of problems needs the package reasoning-gym: {install('tasks')}"
        )
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"{name} is neither a file nor a directory here, nor one of reasoning-gym's families, such as chain_sum"
        )
    return StarterData(kind="reasoning_gym", name=name, numeric=name == "chain_sum")


def _column(names: Sequence[str], columns: Sequence[str]) -> str:
    return next((name for name in names if name in columns), "")


def _is_number(value: Any) -> bool:
    text = str(value).strip()
    return bool(text) and last_number(text) == text.replace(",", "")


def _labels(answers: Sequence[Any]) -> tuple[str, ...]:
    """Returns the texts that rows are sorted into; none if they are numbers, long, many, or few of a kind."""
    counts = Counter(answers) if all(isinstance(answer, str) for answer in answers) else Counter()
    usual = 2 <= len(counts) <= LABELS and min(counts.values()) >= 3 and len(answers) >= 4 * SHOWN
    short = all(0 < len(label) <= LABEL and "\n" not in label and not _is_number(label) for label in counts)
    return tuple(sorted(counts)) if usual and short else ()


def _refuse_other_rewards(reward: str, data: StarterData) -> None:
    if reward == "reasoning_gym" and not data.of_gym:
        raise ConfigError(
            f"{reward} judges answers to its own problems only, not to {data.name}; name a function: rewards.py:exact"
        )
    if reward in IN_SANDBOX and not data.tests:
        raise ConfigError(f"{reward} needs a column tests with assertions (docs/sandbox.md), and {data.name} has none")


_STARTER = '''"""Rewards of {config}. Each function is called for all completions of one prompt, and returns a number for each."""
{imports}

def {name}(prompts, completions{given}, **columns):
    """1 for {what}. Other columns of the data arrive as lists too, by their names."""
    return [{each}]
'''
_DECIMAL = """
from decimal import Decimal
"""


def _function_file(folder: Path, reward: str, data: StarterData) -> Mapping[Path, str]:
    """Returns the file to be written, unless there is one."""
    file, colon, name = reward.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"the reward {reward} is neither {', '.join(BUILTIN)} nor of the form FILE.py:FUNCTION; write it so"
        )
    path = folder / Path(file).expanduser()
    if path.exists():
        return {}
    if data.answer.isidentifier():
        same, imports = "text.strip() == str(right).strip()", ""
        if data.numeric:  # 1,200 and 1200.0 are the same number
            same, imports = 'text != "" and Decimal(text) == Decimal(str(right).replace(",", ""))', _DECIMAL
        text = _STARTER.format(
            config="{config}",
            imports=imports,
            name=name,
            given=f", {data.answer}",
            what="the right answer, else 0",
            each=f"float({same}) for text, right in zip(completions, {data.answer})",
        )
    else:
        each = "float(bool(text.strip())) for text in completions"
        what = "any text: the data has no column of answers, so write here what makes a completion good"
        text = _STARTER.format(config="{config}", imports="", name=name, given="", what=what, each=each)
    return {path: text.replace("{config}", "this folder's config")}


def starter_text(config: Path, *, model: str, data: StarterData, reward: str) -> str:
    """Returns the TOML with comments. Every setting that it leaves out has a default."""
    source = [f"kind = {json.dumps(data.kind)}"]
    if data.of_gym:
        source += [f"name = {json.dumps(data.name)}"]
    else:
        source += [f"path = {json.dumps(_seen_from(config.parent, data.name))}"]
        source += [f"prompt = {json.dumps(data.prompt)}"] * (data.prompt != "prompt")
        source += [f"answer = {json.dumps(data.answer)}"] * (data.answer not in ("answer", ""))
    if data.labels:
        source += [
            f"system = {json.dumps('Answer with one of these alone: ' + ', '.join(data.labels) + '.', ensure_ascii=False)}"
        ]
    held_out = HELD_OUT if data.of_gym else min(HELD_OUT, data.rows // 5)
    extract = "code_block" if reward in IN_SANDBOX else "last_number" if data.numeric else ""
    named = "extract = " + json.dumps(extract) + "   # " if extract else '# extract = "last_number"   # '
    context = min(CONTEXT, _positions(model) or CONTEXT)
    small = model in KNOWN_MODELS and "135m" in model
    brief = bool(data.labels) or (small and data.asked and data.numeric)
    longest = NUMBER if brief else TOKENS
    if data.labels:
        longest = max(len(label.encode()) for label in data.labels) + 8  # a token is a byte at least
    return _TEXT.format(
        name=config.name,
        context=f"{context:<6}",
        tokens=f"{min(TOKENS, context // 2, longest):<10}",
        model=json.dumps(_seen_from(config.parent, model) if Path(model).expanduser().is_dir() else model),
        source="\n".join(source),
        held_out=held_out,
        examples=_EXAMPLES[brief] if data.asked else "",
        reward=json.dumps(reward),
        extract=named,
        rate=f"{SMALL:<7g}" if small else "1e-6   ",
        prompts=held_out,
    )


def _positions(model: str) -> int:
    """Returns the most tokens that a model in a directory can read, or 0 if it does not say so."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return int(config.get("max_position_embeddings") or 0)


def _seen_from(folder: Path, path: str) -> str:
    """Returns the path relative to the config's folder if it lies in it; paths of a config are relative to that."""
    whole = Path(path).expanduser().absolute()
    inside = whole.is_relative_to(folder.absolute())
    return str(whole.relative_to(folder.absolute()) if inside else whole)


_EXAMPLES = {
    True: f"examples = {SHOWN}            # solved rows that stand before each question, so that a model knows the form of an answer\n",
    False: f"# examples = {SHOWN}          # solved rows before each question: for a model that does not find the form of an answer by itself\n",
}
_TEXT = """# {name}: a first run. Every other setting has a default: docs/settings.md lists them.
#   headrace train {name} --dry-run      checks everything and calls the reward once, without loading the model
#   headrace train {name} --board        trains, and shows the run in the browser

[model]
path = {model}

[task]
{source}
held_out = {held_out}           # prompts that are kept for evaluation and never trained
{examples}
[reward]
function = {reward}
{extract}the part of a completion that the function receives; left out: all of it

[rollout]
group_size = 8          # completions of one prompt, which are compared with each other
max_tokens = {tokens} # of a completion; many that are cut off: raise it

[algo]
name = "grpo"           # docs/algorithms.md: dr_grpo, dapo, gspo, rloo, ...

[train]
minutes = 10            # steps, groups and held-out prompts are fitted into it on this machine (docs/auto.md); 0: no limit
steps = 100             # optimizer steps, at most
learning_rate = {rate} # 1e-5 suits models of 100 million parameters, 1e-6 those of billions

[staleness]
groups_per_step = 8     # prompts of an optimizer step: 8 x 8 rollouts
max_lag = 1             # optimizer steps by which a trained token may be old; 0 is synchronous training

[engine]
context_length = {context} # tokens of prompt and completion together

[eval]
prompts = {prompts}
every = 20              # steps between evaluations on held-out prompts
"""
