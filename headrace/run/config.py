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

from headrace.algo.config import AlgoConfig, group_problems, step_problems
from headrace.algo.earlier import as_it_was
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.engine_problems import engine_problems
from headrace.engine.remote.server_kind import server_kind
from headrace.engine.sizes import Sizes
from headrace.episodes.environments.config import EnvironmentConfig, chat_problems, turn_problems
from headrace.episodes.rollout import RolloutConfig, fork_problems
from headrace.episodes.sandbox.config import SandboxConfig
from headrace.episodes.scoring.config import RewardConfig, sandbox_problems, waiting_problems
from headrace.episodes.scoring.teacher.config import TeacherConfig, prompt_problems, teacher_problems
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import AnswersConfig, WarmStartConfig, answer_problems, warm_start_problems
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.partial import PartialConfig, partial_problems
from headrace.loop.staleness import StalenessConfig, time_limit_problems
from headrace.models.lora import AdapterConfig, LoraConfig, lora_problems
from headrace.models.resolve import ModelConfig
from headrace.native.resources import core_problems
from headrace.processes.orchestration_config import OrchestrationConfig, elsewhere_problems, trainer_problems
from headrace.run.learning_problems import (
    beside_problems,
    curriculum_problems,
    learning_problems,
    length_problems,
    parity_problems,
    process_problems,
    quantised_problems,
    teacher_engine,
    teacher_engine_problems,
)
from headrace.run.place_problems import (
    bus_problems,
    lending_problems,
    one_place_problems,
    opening_problems,
    sharing_problems,
    user_code_problems,
)
from headrace.run.seeing import images_problems
from headrace.settings.other_names import meaning
from headrace.settings.paths import resolve_paths
from headrace.settings.process_config import (
    CheckpointConfig,
    ChosenConfig,
    EvalConfig,
    WatchConfig,
)
from headrace.settings.strict import LONGEST_NAME, STRICT
from headrace.settings.toml import Tree, build, dump, merge, parse_sets, read_toml
from headrace.trainer.config import TrainConfig, train_problems
from headrace.views.config import ObserveConfig, check_installed
from headrace.weight_sync.config import Way, WeightEnds, WeightSyncConfig, reached_at, way_of, weight_sync_problems


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run, with all settings resolved. Each section belongs to the part that it configures."""

    model: ModelConfig
    task: TaskConfig
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    demonstrations: AnswersConfig = Field(default_factory=AnswersConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    name: str = "run"
    """The run's directory is `out/name`. Without a name, the config file's own name is used."""
    seed: int = Field(default=0, ge=0)
    """Seeds everything random."""
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

    def value_of(self, name: str) -> Any:
        """The value of a setting by its dotted name, such as `train.steps`."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def with_chosen(self, values: Mapping[str, Any], why: Mapping[str, str]) -> RunConfig:
        """These settings with other values, and a note of the original ones. `values`: by the setting's dotted name."""
        wishes = {name: wish for name, value in values.items() if (wish := self.value_of(name)) != value}
        config = self
        for name in wishes:
            section, _, leaf = name.partition(".")
            changed = dataclasses.replace(getattr(config, section), **{leaf: values[name]})
            config = dataclasses.replace(config, **{section: changed})
        known = self.chosen
        chosen = dataclasses.replace(known, wishes={**wishes, **known.wishes}, why={**known.why, **why})
        return dataclasses.replace(config, chosen=chosen)

    @property
    def model_paths(self) -> dict[str, str]:
        """The models that the run loads: what names each, by the setting that does."""
        teachers = {f"the teacher {teacher.name}: path": teacher.path for teacher in self.teachers}
        beside = {name: self.value_of(name) or "" for name in ("algo.critic.model", "algo.distill.model")}
        found = {"model.path": self.model.path, **beside, **teachers}
        return {setting: path for setting, path in found.items() if path}

    def with_commits(self, commits: Mapping[str, str]) -> RunConfig:
        """Returns these settings with the commits of the hub that the run begins with in the place of the names that stand for them. `commits`: by
        those names, as `chosen.models` keeps them."""
        replace = dataclasses.replace
        teachers = tuple(replace(teacher, path=commits.get(teacher.path, teacher.path)) for teacher in self.teachers)
        model = replace(self.model, path=commits.get(self.model.path, self.model.path))
        parts = {name: getattr(self.algo, name) for name in ("critic", "distill")}
        beside = {name: replace(part, model=commits.get(part.model or "", part.model)) for name, part in parts.items()}
        chosen = replace(self.chosen, models={**self.chosen.models, **commits})
        return replace(self, model=model, teachers=teachers, algo=replace(self.algo, **beside), chosen=chosen)

    @property
    def taught(self) -> bool:
        """Whether a teacher of any kind has something to say, so that no reward is needed."""
        return bool(self.teachers or self.algo.recipe.distill.model)

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.name

    @property
    def engine_beside(self) -> EngineConfig:
        """The settings that an engine beside the run's own begins with: a teacher's, or the reference's. What was chosen by the memory that
        is left for the run's own is open again."""
        wishes: dict[str, Any] = {name.removeprefix("engine."): wish for name, wish in self.chosen.wishes.items()}
        return dataclasses.replace(self.engine, **{name: wishes[name] for name in Sizes._fields if name in wishes})

    def engine_of(self, teacher: TeacherConfig) -> EngineConfig:
        """The settings of a teacher's engine. Raises ConfigError naming the teacher."""
        return teacher_engine(self.engine_beside, teacher)

    @property
    def ends(self) -> WeightEnds:
        """The ends of the way of weights."""
        server = self.engine.kind if self.engine.is_server else ""
        joined = self.orchestration.host if self.orchestration.elsewhere else ""
        adapters, encrypted = bool(self.adapters or self.lora.served_name), bool(self.orchestration.cert)
        return WeightEnds(
            server=server,
            fetches=bool(server) and server_kind(server).fetches,
            opens=bool(server) and server_kind(server).cannot_open is not None,
            adapters=adapters,
            joined=joined,
            encrypted=encrypted,
            bus=bool(self.orchestration.bus),
        )

    @property
    def way(self) -> Way:
        """How weights travel."""
        return way_of(self.weight_sync, self.ends)

    @property
    def runs(self) -> tuple[RunConfig, ...]:
        """This run; or the runs of its adapters, if it trains several. Raises ConfigError naming the adapter."""
        return adapter_runs(self) or (self,)

    @property
    def code_files(self) -> dict[str, list[str]]:
        """The files of the user's code that are named, those of evaluation sets too, by what runs them: a scorer, an environment."""
        runs = [*self.runs, *set_runs(self).values()]
        named = {
            "scorer": [spec.function for run in runs for spec in run.reward.specs],
            "environment": [run.environment.function or run.environment.name for run in runs],
        }
        return {kind: [*filter(None, map(_file_of, names))] for kind, names in named.items()}

    @property
    def trained(self) -> dict[str, RunConfig]:
        """All that is trained, by its name in trainer and engine. Full weights have the empty name."""
        return {run.name: run for run in adapter_runs(self)} or {self.lora.served_name: self}

    @property
    def adapters_served(self) -> int:
        """The number of adapters that the engine must serve at once."""
        return len(self.adapters) or bool(self.lora.served_name)

    @property
    def algorithm(self) -> AlgoConfig:
        """The algorithm, for rollouts of this run's length."""
        return self.algo.with_length(self.rollout.max_tokens)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of every named reward: those of functions, and those of teachers that score text."""
        return {
            **self.reward.weights,
            **{teacher.name: teacher.weight for teacher in self.teachers if teacher.mode == "text"},
        }

    @property
    def longest_rollout(self) -> int:
        """The most tokens that can be sampled for one rollout, all its turns together."""
        return self.rollout.max_tokens * self.environment.turns


Source = RunConfig | Mapping[str, Any] | str | Path
"""The source of settings: a finished config, a dict of the shape of a TOML file, or the path of one."""


def load_config(source: Source, sets: Sequence[str] = ()) -> RunConfig:
    """Reads a TOML file, a dict of the same shape or a finished config, with `--set` texts on top, and checks it.

    Relative paths in a TOML file are relative to its folder, those of a dict or of `sets` to the working directory.
    Raises ConfigError with all complaints at once, one per line.
    """
    return checked(read_config(source, sets))


def checked(config: RunConfig) -> RunConfig:
    """Returns the config. Raises ConfigError with all complaints of `check`."""
    if problems := check(config):
        raise ConfigError("\n".join(problems))
    return config


def read_config(source: Source, sets: Sequence[str] = ()) -> RunConfig:
    """Reads like `load_config`, but without `check`: for a run of another machine, whose cores this one need not have."""
    return build(RunConfig, read_tree(source, sets), meaning)


def read_tree(source: Source, sets: Sequence[str] = ()) -> Tree:
    """Reads like `read_config`, but without validation. Paths are absolute."""
    tree, base = _tree_of(source)
    if lost := list(_unreached(sets, tree.get("adapters"))):
        raise ConfigError("\n".join(lost))
    return merge(resolve_paths(tree, base), resolve_paths(parse_sets(sets), Path.cwd()))


def _unreached(sets: Sequence[str], tables: Any) -> Iterator[str]:
    """Yields a sentence for each `--set` of a setting of which adapters have their own values: it would change the other adapters alone."""
    own = {
        entry["name"]: entry
        for entry in tables or ()
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
    }
    named = parse_sets(sets).get("adapters")
    for text in sets:
        ((section, table),) = parse_sets([text]).items()
        if section == "adapters" or not isinstance(table, Mapping):
            continue
        theirs = [name for name, own_table in own.items() if _has_own(own_table, section, table)]
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
        *curriculum_problems(config.curriculum, config.algo, config.environment, config.rollout.group_size),
        *core_problems(config.engine.cores, config.train.cores),
        *engine_problems(config.engine, config.orchestration.means),
        *weight_sync_problems(config.weight_sync, config.ends),
        *elsewhere_problems(
            config.orchestration,
            urls=config.engine.urls,
            gpus=config.engine.gpus,
            cores=config.engine.cores,
            reached_at=reached_at(config.weight_sync, config.ends),
        ),
        *trainer_problems(config.orchestration, config.train.cores, config.weight_sync.host, itself=itself),
        *_problems_of_places(config),
        *_teacher_problems(config),
        *partial_problems(config.partial, bool(config.lora.served_name), several=False),
        *parity_problems(config.train, config.engine, config.rollout, config.lora),
        *quantised_problems(config.engine, config.algo, config.train, config.watch),
        *process_problems(config.algo, config.lora, config.train),
        *beside_problems(config.algo, config.train.parallel.pipeline, bool(config.task.images)),
        *train_problems(config.train, config.lora, config.staleness.groups_per_step, itself, config.algo.has_critic),
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
        *_problems_of_learning(config),
        *answer_problems(
            config.demonstrations, config.algo.given_answers, config.train.minibatches, config.task.examples
        ),
        *_warm_start_problems(config, itself),
    ]
    try:
        check_installed(config.observe)
    except ConfigError as error:
        problems.append(str(error))
    return [*problems, *_set_problems(config, problems)]


# --- pairs -----------------------------------------------------------------------------------------------------------


def _warm_start_problems(config: RunConfig, itself: bool) -> Iterator[str]:
    """`itself`: whether the student is its own teacher."""
    return warm_start_problems(
        config.warm_start,
        elsewhere=not config.orchestration.is_here,
        served=bool(config.engine.urls),
        beside=config.algo.reference_in_reward or itself,
        quantised=bool(config.lora.quantise),
        examples=config.task.examples,
        timed=bool(config.train.minutes),
    )


def _fork_problems(config: RunConfig) -> Iterator[str]:
    algo = config.algo
    return fork_problems(
        config.rollout.forks,
        turns=config.environment.turns,
        credit=algo.recipe.credit,
        kl_in_reward=algo.reference_in_reward,
        per_rollout=algo.name if algo.of_whole_rollouts else "",
    )


def _teacher_problems(config: RunConfig) -> Iterator[str]:
    algo, rollout = config.algo, config.rollout
    yield from teacher_problems(
        config.teachers,
        f"algo.name = {algo.name}",
        distill=algo.recipe.distill,
        reference=algo.reference_in_reward,
        shown=algo.recipe.shown,
        temperature=rollout.temperature,
        truncates=rollout.truncates,
    )
    played = config.environment.setting if config.environment.in_processes else ""
    yield from prompt_problems(config.teachers, config.task, rollout.forks, played=played, group=rollout.group_size)
    yield from teacher_engine_problems(
        config.teachers, config.engine_beside, config.engine.context_length, frozenset(config.reward.weights)
    )


def _problems_of_places(config: RunConfig) -> Iterator[str]:
    place, engine, train, algo = config.orchestration, config.engine, config.train, config.algo
    if place.bus:
        yield from bus_problems(place.bus, engine, config.weight_sync.host)
        yield from one_place_problems(
            config.partial,
            config.staleness,
            config.environment,
            taught=bool(config.teachers),
            reference_in_reward=algo.reference_in_reward,
            parity=train.parity != "off",
        )
    adapters_score = any(adapter.reward for adapter in config.adapters)
    yield from user_code_problems(place, config.reward, config.environment, adapters_score=adapters_score)
    reference = "algo.kl.place = reward has" if algo.reference_in_reward else ""
    beside = "teachers have" if config.teachers else reference
    yield from sharing_problems(place, engine, train, config.way, kinds=config.ends.kinds, beside=beside)
    yield from opening_problems(engine, config.way)
    yield from lending_problems(place, engine, train, config.way, bool(config.teachers))


def _problems_of_learning(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for each such pair: of images, lengths, rewards, groups and the learning rate."""
    algo, train, rollout, environment = config.algo, config.train, config.rollout, config.environment
    other = (config.lora.rank, config.warm_start.path, config.demonstrations.path, config.teachers)
    parts = (config.task, config.engine, train, config.orchestration, environment)
    yield from images_problems(*parts, judges=config.reward.judges, other=(*other, algo.reference_in_reward))
    yield from length_problems(rollout, config.reward, algo, config.engine.context_length)
    if config.eval.prompts > config.task.held_out:
        yield (
            f"eval.prompts = {config.eval.prompts} asks for more than task.held_out = {config.task.held_out} prompts; "
            "raise task.held_out or lower eval.prompts"
        )
    yield from learning_problems(algo, rollout, config.reward, config.lora, config.staleness)
    plays = environment.kind != "single_turn" or environment.function  # it may give rewards of its own
    names, forks = () if plays else config.reward_weights, rollout.forks.alternatives > 0
    yield from group_problems(algo, rollout.group_size, forks, names, environment.turns)
    yield from step_problems(algo, train.steps, train.minutes, train.updates)
    yield from time_limit_problems(config.staleness, train.minutes, train.minibatches)


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


def _file_of(named: str) -> str:
    """Returns the path of the Python file in the name of a function or an environment; empty if that names none."""
    path = named if named.endswith(".py") else named.rpartition(":")[0]
    return path if path.endswith(".py") else ""


def set_runs(config: RunConfig) -> dict[str, RunConfig]:
    """Returns each of `eval.sets` by its name, as a run whose held-out prompts it is. Raises ConfigError naming the set."""
    runs = {}
    for one in config.eval.sets:
        base = dataclasses.asdict(config)
        task: Tree = dict(one.task)
        if one.task.get("kind", config.task.kind) == config.task.kind:
            task = merge(base["task"] | ({"held_out_path": ""} if one.has_own_rows else {}), one.task)
        if one.task:
            task["held_out"] = max(config.eval.of(one).prompts, task.get("held_out", 0))
        own: Tree = {"task": task} if one.task else {}
        own |= {name: getattr(one, name) for name in ("environment", "reward") if getattr(one, name)}
        looks = dataclasses.asdict(config.eval.of(one))
        try:
            runs[one.name] = build(RunConfig, {**base, **own, "eval": looks, "adapters": ()}, meaning)
        except ConfigError as error:
            lines = [f"the evaluation set {one.name}: {line}" for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines)) from None
    return runs


def _set_problems(config: RunConfig, others: Sequence[str]) -> Iterator[str]:
    """`others`: the problems of the run without its sets."""
    if not config.eval.sets:
        return
    try:
        runs = set_runs(config)
    except ConfigError as error:
        yield str(error)
        return
    for one in config.eval.sets:
        run = runs[one.name]
        if strange := [name for name in ("held_out", "held_out_path", "shuffle", "rows") if name in one.task]:
            yield (
                f"the evaluation set {one.name}: task.{strange[0]} divides rows into those that are trained and those that are held out, and a set holds "
                "out all rows of its path; remove it"
            )
        if run.environment != config.environment and run.environment.is_handed_out:
            yield (
                f"the evaluation set {one.name}: {run.environment.setting} hands out the rollouts of a run at one address; give the set an environment "
                "that headrace plays itself"
            )
        if run.task.images != config.task.images:
            yield f"the evaluation set {one.name}: task.images has to be that of the run, which decides what the engine loads"
        yield from (f"the evaluation set {one.name}: {problem}" for problem in check(run) if problem not in others)


def _adapter_problems(config: RunConfig) -> Iterator[str]:
    names = [adapter.name for adapter in config.adapters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"two adapters are called {twice[0]}; give each a name of its own"
    if any(adapter.algo.get("name", config.algo.name) == "prime" for adapter in config.adapters):
        yield 'algo.name = "prime" trains a second adapter beside that of one policy; use another, such as "rloo", or train the adapter in a run of its own'
    if config.algo.critic.model or any((adapter.algo.get("critic") or {}).get("model") for adapter in config.adapters):
        yield "algo.critic.model trains a second model beside that of one policy; remove it, or train the adapter in a run of its own"
    if config.train.minutes or any(adapter.train.get("minutes") for adapter in config.adapters):
        yield "train.minutes is the time of one pipeline, and each of [[adapters]] has one; give them train.steps"
    if config.warm_start.path or config.demonstrations.path:
        yield "warm_start and demonstrations are for one policy; remove them, or name weights that are warm already in model.path"
    if config.orchestration.bus:
        yield "orchestration.bus serves one policy; remove it, or train the adapters in runs of their own"
    if config.orchestration.placement == "shared":
        yield 'orchestration.placement = "shared" is for one policy; remove it, or train the adapters in runs of their own'
    if config.orchestration.lend:
        yield "orchestration.lend is for one policy; remove it, or train the adapters in runs of their own"
    if config.algo.distill.model or any(
        (adapter.algo.get("distill") or {}).get("model") for adapter in config.adapters
    ):
        yield "algo.distill.model is the teacher of one policy; remove it, or train the adapter in a run of its own"
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


def _tree_of(source: Source) -> tuple[Tree, Path]:
    if isinstance(source, RunConfig):
        return dataclasses.asdict(source), Path.cwd()
    if isinstance(source, Mapping):
        return dict(source), Path.cwd()
    path = Path(source).expanduser()
    return {"name": _directory_name(path.stem), **as_it_was(read_toml(path))}, path.absolute().parent


def _directory_name(text: str) -> str:
    """Returns the nearest name that can be a run's: `my run` -> `my-run`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST_NAME] or "run"
