"""`RunConfig` composes the settings that lie beside their owners; `load_config` reads them, and `check` refuses pairs
that cannot work.

Settings come from a TOML file and `--set section.setting=value`. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from headrace.algo.advantages import ADVANTAGES
from headrace.algo.config import AlgoConfig
from headrace.algo.earlier import as_it_was
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.engine_problems import engine_problems
from headrace.engine.remote.server_kind import server_kind
from headrace.episodes.branching import fork_problems
from headrace.episodes.environments.config import EnvironmentConfig, chat_problems, turn_problems
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.sandbox.config import SandboxConfig
from headrace.episodes.scoring.config import RewardConfig, sandbox_problems, waiting_problems
from headrace.episodes.scoring.teacher.config import TeacherConfig, teacher_problems
from headrace.episodes.tasks.config import TaskConfig
from headrace.loop.curriculum.config import CurriculumConfig, curriculum_problems
from headrace.loop.partial import PartialConfig, partial_problems
from headrace.loop.staleness import StalenessConfig
from headrace.models.lora import AdapterConfig, LoraConfig, lora_problems
from headrace.models.resolve import ModelConfig
from headrace.native.cores import available_cores, core_problems
from headrace.processes.orchestration_config import OrchestrationConfig, elsewhere_problems, trainer_problems
from headrace.settings.host_problems import host_problems
from headrace.settings.learning_problems import learning_problems
from headrace.settings.other_names import meaning
from headrace.settings.paths import resolve_paths
from headrace.settings.placement_problems import lending_problems, placement_problems
from headrace.settings.process_config import (
    CheckpointConfig,
    ChosenConfig,
    EvalConfig,
    WatchConfig,
)
from headrace.settings.strict import LONGEST_NAME, STRICT
from headrace.settings.toml import Tree, build, dump, merge, parse_sets, read_toml
from headrace.trainer.config import TrainConfig, parity_problems
from headrace.trainer.parallel import parallel_problems
from headrace.views.config import ObserveConfig, check_installed
from headrace.weight_sync.config import WeightEnds, WeightSyncConfig, reached_at, way_of, weight_sync_problems


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run, with all settings resolved. Each section belongs to the part that it configures."""

    model: ModelConfig
    task: TaskConfig
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    name: str = "run"
    """The run's directory is `out/name`. Without a name, the config file's own name is used."""
    seed: int = Field(default=0, ge=0)
    """Seeds everything random. Each random stream has a name, so that the streams are independent."""
    out: str = "runs"
    """The folder of all runs, relative to the working directory."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """May be empty if a function is passed to `headrace.train`, or if the policy learns from teachers alone."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Models that score what the policy sampled."""
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    adapters: tuple[AdapterConfig, ...] = ()
    """Several adapters trained at once on one base. Each has settings of its own, on top of the run's."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    orchestration: OrchestrationConfig = Field(default_factory=OrchestrationConfig)
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    partial: PartialConfig = Field(default_factory=PartialConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    watch: WatchConfig = Field(default_factory=WatchConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    chosen: ChosenConfig = Field(default_factory=ChosenConfig)

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str) -> str:
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f'name = "{name[:20]}..." has {len(name)} characters, and names a directory and other files; use at most {LONGEST_NAME}'
            )
        if name != (near := _directory_name(name)):
            raise ValueError(
                f'name = "{name}" names a directory and is used in commands: letters, digits, ".", "_" and "-" only, with a letter or '
                f'a digit first; use "{near}"'
            )
        return name

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.name

    @property
    def ends(self) -> WeightEnds:
        """The ends of the way of weights."""
        server = self.engine.kind if self.engine.is_server else ""
        joined = self.orchestration.host if self.orchestration.elsewhere else ""
        adapters, encrypted = bool(self.adapters or self.lora.served_name), bool(self.orchestration.cert)
        return WeightEnds(
            server=server,
            fetches=bool(server) and server_kind(server).fetches,
            adapters=adapters,
            joined=joined,
            encrypted=encrypted,
            bus=bool(self.orchestration.bus),
        )

    @property
    def longest_rollout(self) -> int:
        """The most tokens that can be sampled for one rollout, all its turns together."""
        return self.rollout.max_tokens * self.environment.turns


def load_config(source: RunConfig | Mapping[str, Any] | str | Path, sets: Sequence[str] = ()) -> RunConfig:
    """Reads a TOML file, a dict of the same shape or a finished config, with `--set` texts on top, validates and checks
    it.

    Relative paths in a TOML file are relative to its folder, those of a dict or of `sets` to the working directory.
    Raises ConfigError with all complaints at once, one per line.
    """
    return checked(read_config(source, sets))


def checked(config: RunConfig) -> RunConfig:
    """Returns the config. Raises ConfigError with all complaints of `check`."""
    if problems := check(config):
        raise ConfigError("\n".join(problems))
    return config


def read_config(source: RunConfig | Mapping[str, Any] | str | Path, sets: Sequence[str] = ()) -> RunConfig:
    """Reads like `load_config`, but without `check`: for a run of another machine, whose cores this one need not have."""
    return build(RunConfig, read_tree(source, sets), meaning)


def read_tree(source: RunConfig | Mapping[str, Any] | str | Path, sets: Sequence[str] = ()) -> Tree:
    """Reads like `read_config`, but without validation. Paths are absolute."""
    tree, base = _tree_of(source)
    if lost := list(_unreached(sets, tree.get("adapters"))):
        raise ConfigError("\n".join(lost))
    return merge(resolve_paths(tree, base), resolve_paths(parse_sets(sets), Path.cwd()))


def _unreached(sets: Sequence[str], adapters: Any) -> Iterator[str]:
    """Yields a sentence for each `--set` of a setting of which adapters have their own values: it would change the other adapters alone."""
    own = {one["name"]: one for one in adapters or () if isinstance(one, Mapping) and isinstance(one.get("name"), str)}
    named = parse_sets(sets).get("adapters")
    for text in sets:
        ((section, table),) = parse_sets([text]).items()
        if section == "adapters" or not isinstance(table, Mapping):
            continue
        theirs = [name for name, one in own.items() if _has_own(one, section, table)]
        theirs = [
            name
            for name in theirs
            if not (isinstance(named, Mapping) and _has_own(named.get(name, {}), section, table))
        ]
        if theirs:
            remedy = " ".join(f"--set adapters.{name}.{text}" for name in theirs)
            yield f"--set {text} does not reach {', '.join(theirs)}: what [[adapters]] sets for one adapter is its own; use {remedy}"


def _has_own(adapter: Mapping[str, Any], section: str, table: Mapping[str, Any]) -> bool:
    """Whether an adapter has its own value of a setting in `table`, which is a part of that section."""
    own = adapter.get(section)
    return isinstance(own, Mapping) and bool(own) and (section in _REPLACED or not own.keys().isdisjoint(table))


def config_of_run(run_dir: Path) -> Path:
    """Returns the path of the resolved config that a run keeps in its directory."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not the directory of a run: it has no {path.name}")
    return path


def dump_config(config: RunConfig) -> str:
    """Returns TOML text with every setting, which `load_config` reads back to an equal config."""
    return dump(config)


def check(config: RunConfig) -> list[str]:
    """Returns a sentence with a remedy for each pair of settings that cannot work together."""
    if config.adapters:
        return list(dict.fromkeys(_adapter_problems(config)))
    itself = any(teacher.student for teacher in config.teachers)
    group = config.curriculum.largest(config.rollout.group_size)
    problems = [
        *lora_problems(config.lora, config.train.weights, config.engine.path, itself),
        *curriculum_problems(config),
        *core_problems(config.engine.cores, config.train.cores),
        *engine_problems(config.engine),
        *weight_sync_problems(config.weight_sync, config.ends),
        *elsewhere_problems(
            config.orchestration,
            server=config.ends.server,
            cores=config.engine.cores,
            reached_at=reached_at(config.weight_sync, config.ends),
        ),
        *trainer_problems(config.orchestration, config.train.cores, config.weight_sync.host, itself=itself),
        *host_problems(config),
        *placement_problems(config, way_of(config.weight_sync, config.ends)),
        *lending_problems(config, way_of(config.weight_sync, config.ends)),
        *_teacher_problems(config),
        *partial_problems(config.partial, bool(config.lora.served_name), several=False),
        *parity_problems(config.train, config.engine, config.rollout, config.lora),
        *parallel_problems(config.train, config.lora, itself=itself),
        *_fork_problems(config),
        *sandbox_problems(config.reward, group=group, seconds=config.sandbox.seconds),
        *waiting_problems(config.reward, group=group, stop_after=config.watch.stop_after),
        *chat_problems(
            config.environment,
            chat=config.task.chat,
            examples=config.task.examples,
            seeds=config.task.facts.draws_seeds,
            measured=config.eval.prompts,
        ),
        *turn_problems(
            config.environment.turns, length=config.algo.name if config.algo.with_length(1) != config.algo else ""
        ),
        *learning_problems(config),
    ]
    try:
        check_installed(config.observe)
    except ConfigError as error:
        problems.append(str(error))
    return problems


# --- pairs -----------------------------------------------------------------------------------------------------------


def _fork_problems(config: RunConfig) -> Iterator[str]:
    algo = config.algo
    whole = algo.recipe.loss.weighs_rollouts or algo.recipe.loss.pairs
    one_weight = whole or getattr(ADVANTAGES.get(algo.recipe.advantage), "spread", False)
    return fork_problems(
        config.rollout.forks,
        turns=config.environment.turns,
        credit=algo.credit,
        kl_in_reward=algo.reference_in_reward,
        per_rollout=algo.name if one_weight else "",
    )


def _teacher_problems(config: RunConfig) -> Iterator[str]:
    algo, rollout = config.algo, config.rollout
    yield from teacher_problems(
        config.teachers,
        f"algo.name = {algo.name}",
        distils=algo.recipe.distill.kind != "none",
        reference=algo.reference_in_reward,
        temperature=rollout.temperature,
        truncates=rollout.truncates,
    )
    for teacher in config.teachers:
        try:
            engine = teacher_engine(config, teacher)
        except ConfigError as error:
            yield str(error)
            continue
        if teacher.mode == "tokens" and engine.context_length < config.engine.context_length:
            yield (
                f"the teacher {teacher.name} has engine.context_length = {engine.context_length}, too short for all that the run's "
                f"engine.context_length = {config.engine.context_length} lets the policy write; leave it as the run's"
            )
        if teacher.mode == "text" and teacher.name in config.reward.weights:
            yield f"the teacher {teacher.name} has the name of a reward function; give it another"
        if strange := set(engine.cores) - available_cores():
            yield f"the teacher {teacher.name} has engine.cores {sorted(strange)}, which this process may not use"


def teacher_engine(config: RunConfig, teacher: TeacherConfig) -> EngineConfig:
    """Returns the run's engine settings with the teacher's own on top. Raises ConfigError naming the teacher."""
    base = {**dataclasses.asdict(config.engine.for_worker), "path": "auto", "max_adapters": 0, "routing": False}
    try:
        return build(EngineConfig, merge(base, teacher.engine))
    except ConfigError as error:
        lines = [f"the teacher {teacher.name}, engine.{line}" for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from None


# --- several adapters ------------------------------------------------------------------------------------------------

_REPLACED = ("task", "reward")
"""Sections of an adapter that replace the run's; its others override single settings."""
_SHARED = {
    "train": ("device", "dtype", "cores", "gradient_checkpointing", "weights", "parallel", "max_deaths", "parity"),
    "lora": ("quantise",),
    "rollout": ("keep_routing",),
}
"""Settings that adapters cannot have of their own, because one trainer and one engine work for all of them."""


def adapter_runs(config: RunConfig) -> tuple[RunConfig, ...]:
    """Returns each adapter's part as a run in the run's directory. Raises ConfigError naming the adapter."""
    runs = []
    for adapter in config.adapters:
        own = {field: table for field, table in dataclasses.asdict(adapter).items() if table and field != "name"}
        replaced: Tree = {section: own.pop(section) for section in _REPLACED if section in own}
        base = {**dataclasses.asdict(config), **replaced}
        place: Tree = {"name": adapter.name, "out": str(config.run_dir), "adapters": ()}
        place["observe"] = dataclasses.asdict(config.observe.shared_by(len(config.adapters)))
        try:
            runs.append(build(RunConfig, {**merge(base, own), **place}, meaning))
        except ConfigError as error:
            lines = [f"the adapter {adapter.name}: {line}" for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines)) from None
    return tuple(runs)


def _adapter_problems(config: RunConfig) -> Iterator[str]:
    names = [adapter.name for adapter in config.adapters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"two adapters are called {twice[0]}; give each a name of its own"
    if config.train.minutes or any(one.train.get("minutes") for one in config.adapters):
        yield "train.minutes is the time of one pipeline, and each of [[adapters]] has one; give them train.steps"
    if config.orchestration.bus:
        yield "orchestration.bus serves one policy; remove it, or train the adapters in runs of their own"
    if config.orchestration.placement == "shared":
        yield 'orchestration.placement = "shared" is for one policy; remove it, or train the adapters in runs of their own'
    if config.orchestration.lend:
        yield "orchestration.lend is for one policy; remove it, or train the adapters in runs of their own"
    if config.teachers:
        yield "teachers and [[adapters]] exclude each other; train the adapters that have teachers in runs of their own"
    try:
        runs = adapter_runs(config)
    except ConfigError as error:
        yield str(error)
        return
    for run in runs:
        if not run.lora.rank or run.lora.merged:
            yield (
                f"the adapter {run.name} has lora.rank = {run.lora.rank}, lora.publish = {run.lora.publish}: several are trained "
                "at once only as adapters that the engine serves beside one base; set lora.rank, and no DoRA"
            )
        for section, settings in _SHARED.items():
            for name in settings:
                if getattr(getattr(run, section), name) != getattr(getattr(config, section), name):
                    yield f"the adapter {run.name} sets {section}.{name}, which is one for all adapters; set it for the run"
        held_up = partial_problems(run.partial, adapter=False, several=True)
        yield from (f"the adapter {run.name}: {problem}" for problem in [*check(run), *held_up])


# --- sources -----------------------------------------------------------------------------------------------


def _tree_of(source: RunConfig | Mapping[str, Any] | str | Path) -> tuple[Tree, Path]:
    if isinstance(source, RunConfig):
        return dataclasses.asdict(source), Path.cwd()
    if isinstance(source, Mapping):
        return dict(source), Path.cwd()
    path = Path(source).expanduser()
    return {"name": _directory_name(path.stem), **as_it_was(read_toml(path))}, path.absolute().parent


def _directory_name(text: str) -> str:
    """Returns the nearest name that can be a run's: `my run` -> `my-run`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST_NAME] or "run"
