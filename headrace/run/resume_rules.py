"""One table (`RULES`) says which settings a resumed run may change, and what becomes then of what it has. docs/journal.md shows it.

A run that was stopped has steps behind its newest checkpoint, finished groups in it, and rollouts under way. Whatever decides what
one of their tokens or rewards means has a row here, so that nothing is trained as what it is not: it is kept with its own meaning
(a row of a group carries its temperature and its sampling mask), made again, or dropped by name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.scoring.config import ENDPOINTS, OverlongConfig, RewardConfig
from headrace.episodes.tasks.rows import images_in
from headrace.loop.checkpoints import ChangedSettings
from headrace.loop.staleness import StalenessConfig, still_bounded
from headrace.run.config import RunConfig, set_runs
from headrace.settings.user_code import code_behind, packages_behind

Steps = Literal["refused", "set aside", "repeated"]
Groups = Literal["kept", "dropped"]
Rollouts = Literal["kept", "cut", "begun anew", "dropped"]

CONTENTS = "the contents of "
"""Put before a setting that names a file, to name what is in the file."""


class CarryRule(NamedTuple):
    settings: str
    """Patterns of the settings, of which the first rule that fits counts."""
    steps: Steps = "repeated"
    """The steps since the newest checkpoint."""
    groups: Groups = "kept"
    """The finished groups in it."""
    rollouts: Rollouts = "kept"
    """The rollouts under way."""
    why: str = ""
    value: Callable[[RunConfig], Any] | None = None
    """The value that counts, if not each setting as it is."""

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.settings.split())

    @property
    def is_free(self) -> bool:
        return self.steps == "repeated"


def _rows(algo: AlgoConfig, longest_rollout: int) -> Any:
    """The settings that turn scored rollouts into rows."""
    recipe = algo.recipe
    return {
        "advantage": recipe.advantage,
        "cross-entropy": recipe.loss.weighs_rollouts,
        "agents together": recipe.loss.whole,
        "overlong": algo.overlong,
        "length": (algo.length_penalty, longest_rollout) if algo.length_penalty else None,
        "reference": dataclasses.asdict(recipe.kl) if algo.reference_in_reward else None,
        "top": algo.teacher_top,
        "teacher in the trainer": bool(recipe.distill.model),
        "credit": (recipe.credit, algo.state_weight) if recipe.credit == "state" else recipe.credit,
        "discount": (recipe.gamma, algo.lam),
        "attempts": algo.attempts,
        "subset": dataclasses.asdict(recipe.subset) if recipe.subset.kind != "none" else None,
        "answers": recipe.demonstrations.reward if algo.given_answers == "compared" else None,
    }


def _functions(reward: RewardConfig) -> Any:
    """A single function from Python with weight 1 and whole completions counts as nothing: earlier versions recorded nothing of it."""
    plain = [spec.from_python and spec.weight == 1.0 and not spec.extract for spec in reward.specs]
    only = plain == [True]
    specs = [] if only else [dataclasses.asdict(spec) for spec in reward.specs]
    return {"functions": specs, "extract_truncated": reward.extract_truncated}


def _marks(endpoints: str, config: RunConfig) -> Any:
    return [endpoint.mark for endpoint in getattr(config.reward, endpoints)]


def _punishment(overlong: OverlongConfig, max_tokens: int) -> Any:
    return (dataclasses.asdict(overlong), max_tokens) if overlong.cache else None


def _unmasked(rollout: RolloutConfig) -> Any:
    constraint = rollout.constraint.constraint
    return (
        None
        if rollout.keep_mask or not rollout.truncates
        else (rollout.top_p, rollout.top_k, rollout.min_p, constraint)
    )


def _forks(rollout: RolloutConfig) -> Any:
    return (dataclasses.asdict(rollout.forks), rollout.group_size) if rollout.forks.alternatives else None


RULES = (
    CarryRule("model.* seed staleness.groups_per_step lora.* task.rows task.images warm_start.*", "refused"),
    CarryRule("demonstrations.*", "refused", why="which rows a step has follows from its number"),
    CarryRule(
        "adapters",
        "refused",
        why="their names; the settings of each are a run's",
        value=lambda c: [adapter.name for adapter in c.adapters],
    ),
    CarryRule(
        "task.*", "set aside", "dropped", "dropped", "a prompt is text, tokens and columns; other questions are refused"
    ),
    CarryRule("curriculum.*", "set aside"),
    CarryRule("environment.processes environment.host environment.port environment.workers environment.memory_gib"),
    CarryRule(
        "environment.max_turns environment.max_tokens environment.seconds environment.episode_seconds environment.tool_seconds "
        "environment.tool_characters environment.resumes",
        "set aside",
        "kept",
        "begun anew",
        "limits: what was played under the old ones is over",
    ),
    CarryRule("environment.*", "set aside", "dropped", "begun anew", "it makes contexts and rewards"),
    CarryRule("reward.timeout reward.workers sandbox.allow sandbox.parallel"),
    CarryRule("sandbox.*", "set aside", "dropped", why="a test that runs into a limit has failed"),
    CarryRule(
        "reward.special_tokens", "set aside", "dropped", "begun anew", "rewards and environments read other text"
    ),
    CarryRule(
        "reward.function reward.functions reward.extract reward.extract_truncated",
        "set aside",
        "dropped",
        value=lambda c: _functions(c.reward),
    ),
    *(
        CarryRule(
            f"reward.{name}",
            "set aside",
            "dropped",
            why="without how they are reached",
            value=functools.partial(_marks, name),
        )
        for name in ENDPOINTS
    ),
    CarryRule(
        "reward.soft_overlong_punishment.*",
        "set aside",
        "dropped",
        why="with rollout.max_tokens",
        value=lambda c: _punishment(c.reward.soft_overlong_punishment, c.rollout.max_tokens),
    ),
    CarryRule(
        "teachers",
        "set aside",
        "dropped",
        why="without their engines",
        value=lambda c: [dataclasses.asdict(dataclasses.replace(teacher, engine={})) for teacher in c.teachers],
    ),
    CarryRule("rollout.temperature", "set aside", "kept", "begun anew", "a row carries its temperature"),
    CarryRule(
        "rollout.top_p rollout.top_k rollout.min_p",
        "set aside",
        why="every token carries the vocabulary that it was drawn from",
    ),
    CarryRule(
        "rollout.keep_mask",
        "set aside",
        "dropped",
        "begun anew",
        "if tokens were cut out and not recorded",
        value=lambda c: _unmasked(c.rollout),
    ),
    CarryRule(
        "rollout.max_tokens", "set aside", "kept", "cut", "they end at the new limit, as if they had begun with it"
    ),
    CarryRule("rollout.stop rollout.keep_routing", "set aside", "kept", "begun anew"),
    CarryRule("rollout.constraint.*", "set aside", "kept", "begun anew", "a row carries its sampling mask"),
    CarryRule("rollout.group_size", "set aside", why="groups that are finished keep their size"),
    CarryRule(
        "rollout.forks.*",
        "set aside",
        "kept",
        "begun anew",
        "with rollout.group_size",
        value=lambda c: _forks(c.rollout),
    ),
    CarryRule("algo.advantage", "set aside", "dropped"),
    CarryRule("algo.*", "set aside"),
    CarryRule(
        "algo.name algo.credit algo.state_weight algo.gamma algo.lam algo.attempts algo.overlong algo.length_penalty algo.subset.* algo.kl.* algo.distill.k algo.distill.model algo.demonstrations.*",
        "set aside",
        "dropped",
        why="where rows are made of them",
        value=lambda c: _rows(c.algo, c.longest_rollout),
    ),
    CarryRule("train.cores train.threads train.minutes train.max_skipped_steps train.max_deaths"),
    CarryRule(
        "train.steps",
        "set aside",
        why="unless the learning rate is constant",
        value=lambda c: None if c.train.schedule == "constant" else c.train.steps,
    ),
    CarryRule("train.*", "set aside"),
    CarryRule("rollout.patience"),
    CarryRule("staleness.*", "set aside", why="refused where groups of the checkpoint would be too old"),
    CarryRule(
        "name out engine.* weight_sync.* orchestration.* partial.* checkpoint.* eval.* watch.* observe.* chosen.*"
    ),
)


_VALUED = {rule.settings: rule for rule in RULES if rule.value}


@functools.cache
def rule_of(name: str) -> CarryRule:
    """The rule of a setting, of its contents, or of what counts for several settings."""
    plain = name.removeprefix(CONTENTS)
    return _VALUED.get(plain) or next(rule for rule in RULES if rule.fits(plain))


def meaning(config: RunConfig, contents: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings by name, as JSON has them, without those that may change freely. `contents`: of the files that settings name."""
    leaves = dict(settings_of(config))
    found = {name: value for name, value in leaves.items() if not (rule := rule_of(name)).is_free and not rule.value}
    found |= {rule.settings: rule.value(config) for rule in RULES if rule.value}
    found |= {f"{CONTENTS}{name}": digest for name, digest in (contents or {}).items()}
    return json.loads(json.dumps(found, default=str))


def settings_of(section: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting by its dotted name. A list of tables is one setting."""
    for field in dataclasses.fields(section):
        name, value = f"{before}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{name}.")
        elif isinstance(value, tuple):
            yield name, [dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part for part in value]  # type: ignore[arg-type]
        else:
            yield name, value


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> ChangedSettings:
    """Compares what `meaning` returned. What only one of them has is no change: another version of headrace wrote it."""
    names = [name for name in old if name in new and old[name] != new[name]]
    rules = {name: rule_of(name) for name in names}

    def those(is_so: Callable[[CarryRule], bool]) -> tuple[str, ...]:
        return tuple(_spoken(name) for name, rule in rules.items() if is_so(rule))

    return ChangedSettings(
        refused=those(lambda rule: rule.steps == "refused"),
        steps=those(lambda rule: rule.steps == "set aside"),
        groups=those(lambda rule: rule.groups == "dropped"),
        anew=those(lambda rule: rule.rollouts == "begun anew"),
        prompts=those(lambda rule: rule.rollouts == "dropped"),
    )


def mark_of(meant: Mapping[str, Any]) -> str:
    """A hash of what decides which groups may be trained, whoever sampled and scored them: another one means that they are not kept."""
    kept = ("kept", "kept")
    those = {name: value for name, value in meant.items() if (rule_of(name).groups, rule_of(name).rollouts) != kept}
    return hashlib.sha256(json.dumps(those, sort_keys=True).encode()).hexdigest()[:16]


def _spoken(name: str) -> str:
    return name.replace(" ", ", ") if not name.startswith(CONTENTS) else name


def check_resumable(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ConfigError for changed settings on which the buffer or the weights depend. Most settings may change."""
    called = {"task.rows": "the rows (dataset=)", "adapters": "the names of adapters"}
    changed = [
        f"{name} have changed"
        if name.startswith(CONTENTS)
        else f"{called.get(name, name)} was {old[name]}, not {new[name]}"
        for name in changes(old, new).refused
    ]
    if changed:
        raise ConfigError(
            f"a run cannot be resumed with other values here: {'; '.join(changed)}. Start a new run for that"
        )


def check_steps(run_dir: Path, done: int, wanted: int) -> None:
    """Raises ConfigError if the run has done more steps than `wanted`."""
    if wanted < done:
        raise ConfigError(
            f"{run_dir} has done {done} steps, and train.steps = {wanted} asks for fewer: set train.steps to {done} (the run then "
            "ends at once) or more, or start a new run"
        )


def check_bound(was: StalenessConfig, now: StalenessConfig) -> None:
    """Raises ConfigError if groups that wait in the checkpoint may be older than the new settings promise."""
    if not still_bounded(was, now):
        raise ConfigError(
            f"groups in the checkpoint were admitted with staleness.max_lag = {was.max_lag}, window = {was.window}, overdue "
            f'= "{was.overdue}" and may be older than max_lag = {now.max_lag}, window = {now.window} promises by pacing alone; keep '
            'these settings, raise max_lag, or set staleness.overdue = "trim" (or drop) with window = 1, which looks at every token\'s age'
        )


# --- Digests of the files that settings name: rows, code of rewards and environments, tokenizers
# They stand in `config.toml`, as comments below the settings, so that a resumed run finds out what has changed. Code that such a file names by its absolute
# path counts too, as in what `headrace import` writes around a reward function of verl, and so do the modules beside it that it imports, and the
# versions of the installed packages that these import.

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Files of which the size and some pieces count: to read them takes as long as to load a model."""
_PIECES, _PIECE = 64, 1 << 14
"""The number of pieces that are read of a file, and their bytes. Other weights differ nearly everywhere."""
_READ = (".json", ".jinja", ".model", ".arrow", ".parquet", "merges.txt", "vocab.txt")
USED_BY_HOSTS = ("reward.", "environment.")
"""The begins of the names of settings whose files a rollout host reads."""
NONE_RECORDED: Mapping[str, str] = {}


def contents_of(
    config: RunConfig, recorded: Mapping[str, str] = NONE_RECORDED, *, of_sets: bool = False
) -> dict[str, str]:
    """A digest for each setting that names files which are there, unless it may change freely. `recorded`: the digests of a run that goes on; one of
    the form before 2026-12-01, which knew of weights their size alone and no packages, stays where it still holds. `of_sets`: whether the code that evaluation sets
    have of their own counts."""
    found = _digests(settings_of(config), recorded)
    if (
        config.task.images and not config.task.facts.passed
    ):  # rows that are passed hold theirs, or are refused when they are read
        images = "\n".join(image.digest for image in images_in(config.task))
        found["task.images"] = xxhash.xxh3_128(images).hexdigest()
    for named, run in set_runs(config).items() if of_sets else ():
        code = [(name, value) for name, value in settings_of(run) if name.startswith(USED_BY_HOSTS)]
        before = f"eval.sets.{named}."
        theirs = {name.removeprefix(before): digest for name, digest in recorded.items() if name.startswith(before)}
        found |= {f"{before}{name}": digest for name, digest in _digests(code, theirs).items()}
    return found


def _digests(settings: Iterable[tuple[str, Any]], recorded: Mapping[str, str] = NONE_RECORDED) -> dict[str, str]:
    found = {}
    for name, value in settings:
        paths = [] if rule_of(name).is_free or name.removeprefix("reward.") in ENDPOINTS else sorted(_paths(value))
        if paths:
            found[name] = _digest(paths, parts=name.endswith("path") and name != "model.path")
            if recorded.get(name) not in (None, found[name]) and recorded[name] == _digest(paths, earlier=True):
                found[name] = recorded[name]
    return found


def written(contents: Mapping[str, str]) -> str:
    """The lines of `config.toml` that say it."""
    return "".join(f"# contents of {name}: {digest}\n" for name, digest in contents.items())


def _paths(value: Any) -> Iterator[Path]:
    """The absolute paths in a value that exist, those of `file.py:name` included."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for element in value:
            yield from _paths(element)
    elif isinstance(value, str) and value.startswith("/"):
        file, colon, _ = value.rpartition(":")
        path = Path(file if colon and file.endswith(".py") else value)
        if path.exists():
            yield path


def _digest(paths: Iterable[Path], *, parts: bool = False, earlier: bool = False) -> str:
    """`parts`: whether a directory may hold rows in further ones, as `lang=de/0.parquet`."""
    digest = xxhash.xxh3_128()
    for path in paths:
        _add(digest, path, parts=parts, earlier=earlier)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, path: Path, *, parts: bool, earlier: bool) -> None:
    if not path.is_dir():
        code = code_behind(path) if path.suffix == ".py" else []
        for file in (path, *code):
            _read(digest, file)
        if path.suffix == ".py" and not earlier and (packages := packages_behind((path, *code))):
            digest.update(json.dumps(packages, sort_keys=True))
        return
    for file in sorted(path.rglob("*") if parts else path.iterdir()):
        name = file.relative_to(path).as_posix()
        if name.endswith(_WEIGHTS):
            digest.update(f"{name} {file.stat().st_size}")
            if not earlier:
                _read_pieces(digest, file)
        elif name.endswith(_READ):
            digest.update(name)
            _read(digest, file)


def _read(digest: xxhash.xxh3_128, path: Path) -> None:
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)


def _read_pieces(digest: xxhash.xxh3_128, path: Path) -> None:
    last = max(0, path.stat().st_size - _PIECE)
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek(last * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
