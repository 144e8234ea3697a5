"""`headrace plan`: a config (or a run) and rates become a prediction and a recommendation."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from headrace.commands.plan.alternation import Alternation, Lending, alternating, lending
from headrace.commands.plan.measure import Scenario
from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.hardware import NETWORK, Gpu
from headrace.commands.plan.rates.own_runs import how_far, known, with_own_runs
from headrace.commands.plan.rates.rates import Rates, Travel, load_rates, save_rates, travel_of
from headrace.commands.plan.rates.shapes import Architecture, shape_of
from headrace.commands.plan.sweep import BUSY, Option, Split, recommended, sweep, try_out
from headrace.core.errors import ConfigError
from headrace.engine.native.served_how import served_how
from headrace.engine.sizes import GIB
from headrace.facts.records import read_metrics
from headrace.facts.run_state import RunState
from headrace.loop.world.surroundings import Distribution, TurnShape, fixed, parse
from headrace.models.resolve import cache_dir, short_name
from headrace.run.auto.gpu_sizes import MICROBATCHES, SLACK, Asking, asking_of, gpu_sizes, values_of
from headrace.run.config import RunConfig, load_config
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import MemoryPlan, ModelShape, memory_plan, needs, step_activations
from headrace.trainer.config import ON_CPU

Say = Callable[[str], None]

EXPECTED = (
    "rates are from data sheets: steps that others published took 18 to 30 % longer than planned with dense models, and 2.2 times as long "
    "with a mixture of experts (docs/plan.md)"
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command line."""

    config: RunConfig
    run: Path | None = None
    """A run whose rates and lengths are used."""
    calibrate: bool = False
    """Whether to measure the rates of this machine."""
    rates: Path | None = None
    """The file with measured rates; None for one in the cache, by the model's name."""
    hardware: str = ""
    """A GPU whose rates are computed; empty for measured rates."""
    model: str = ""
    gpus: int = 0
    trainer_gpus: int = 0
    """0 for the share of `gpus` that a sweep finds, or half of them."""
    steps: int = 20
    lengths: str = ""
    """Distribution of completion lengths in tokens; empty for the measured one."""
    prompts: str = ""
    latency: str = ""
    """Distribution of the seconds that the reward of one rollout takes."""
    turns: str = ""
    """Distribution of the turns of a rollout, if it may have several; empty for the measured one. So are the next two."""
    tools: str = ""
    """Distribution of the seconds between two turns."""
    results: str = ""
    """Distribution of the tokens between two turns."""
    workers: int = 0
    solved: float | None = None
    sweep: bool = False
    kv_gib: float | None = None
    """The engine.kv_gib that the settings give, infinite if they leave it open; None until `with_sizes` has looked."""
    network: float = NETWORK
    """Bytes per second between trainer and engines."""

    @cached_property
    def shape(self) -> Architecture:
        """The model that is named, with what its trainer holds beside it. Raises ConfigError for a name that says no size."""
        adapted = self.config.runs[0].lora.rank > 0
        return hardware.with_beside(shape_of(self.model), self.config.algo, adapted=adapted)

    @property
    def passes(self) -> float:
        """Forward passes that a trained token costs."""
        model = self.shape if self.model else None
        return hardware.passes_of(self.config.train, self.config.algo, model)

    def travel(self, engines: int = 1, trainer: int = 1) -> Travel | None:
        """The way of new weights to all engines, if the size of the model is given. `trainer`: its GPUs."""
        if not self.model:
            return None
        settings, rate = self.config.weight_sync, self.config.train.learning_rate
        shape, senders = self.shape, 1
        if self.hardware and trainer > 1:
            train = self.config.train
            chip, context = hardware.gpu(self.hardware), train.parallel.context
            senders = hardware.trainer_mesh(chip, shape, trainer, train.microbatch, context=context).split
        return travel_of(settings, rate, shape.parameters, self.network, engines=engines, senders=senders)


@dataclass(frozen=True)
class Answer:
    """The result of a plan."""

    choices: tuple[Option, ...]
    """All options that were tried, that of the config first."""
    recommended: Option | None
    """None if nothing else was tried."""
    notes: tuple[str, ...]
    """The assumptions, as sentences."""
    turns: Alternation | None
    """The plan with engine and trainer in turns; None for an engine that cannot sleep."""
    lending: Lending | None = None
    """The plan with a trainer that lends its GPUs; None if it has none of its own, or hardly waits."""

    @property
    def asked(self) -> Option:
        return self.choices[0]


def answer(request: PlanRequest, say: Say) -> Answer:
    """Simulates the request. Raises ConfigError with the remedy if something is missing or cannot be simulated."""
    if not 0 < request.network < math.inf:
        raise ConfigError(f"--network {request.network / 1e9:g} must be above 0 (gigabytes a second)")
    request = with_sizes(request)
    notes: list[str] = []
    if how := served_how(Path(request.model or request.config.model.path), request.config.engine):
        notes.append(f"the engine serves this model by {how}")
    rates, contrast = _rates(request, say, notes)
    scenario = _scenario(request, rates, contrast, notes)
    if request.config.curriculum.chooses:
        notes.append(
            f"curriculum.kind = {request.config.curriculum.kind} is not simulated: the share of groups without contrast is that of the run "
            "that gave the rates, or 0"
        )
    split = _split_of(request, scenario) if request.hardware and request.gpus > 1 else None
    if split:
        notes.append(
            "a trainer's ranks (train.parallel) were never run on GPUs so far, and the native engine takes one GPU: this predicts what such a run "
            "would do (docs/scale.md)"
        )
        first = split(request.trainer_gpus or request.gpus // 2)
        scenario = first if first else _nearest(split, request)
    if not request.sweep:
        asked = try_out(scenario, request.steps)
        return Answer((asked,), None, tuple(notes), _turns(request, asked), _lending(request, asked))
    choices = sweep(scenario, None if request.trainer_gpus else split, say)
    best = recommended(choices)
    return Answer(tuple(choices), best, tuple(notes), _turns(request, choices[0]), _lending(request, choices[0]))


def with_sizes(request: PlanRequest) -> PlanRequest:
    """Returns the request with numbers for the sizes that its config leaves open on the GPUs that it names."""
    if not (request.hardware and request.model):
        return request
    chip, shape = hardware.gpu(request.hardware), request.shape
    if request.gpus < 2 and not hardware.fits_one(chip, shape):
        return request
    config = sized(
        request.config, chip, shape, gpus=_own_gpus(request), trainer=request.trainer_gpus or max(1, request.gpus // 2)
    )
    given = request.config.engine.kv_gib
    held = (math.inf if given == "auto" else given) if request.kv_gib is None else request.kv_gib
    return dataclasses.replace(request, config=config, kv_gib=held)


def unused_memory(request: PlanRequest) -> str:
    """Returns a sentence on memory that the planned engines leave unused; an empty string if it is little, or unknown."""
    if not (request.hardware and request.model):
        return ""
    return unused(request.config, hardware.gpu(request.hardware), request.shape, _own_gpus(request))


def _own_gpus(request: PlanRequest) -> int:
    """The GPUs that one engine has to itself; 0 where it shares one with the trainer."""
    return hardware.replica_gpus(hardware.gpu(request.hardware), request.shape) if request.gpus > 1 else 0


def _lending(request: PlanRequest, asked: Option) -> Lending | None:
    if request.config.engine.is_server or asked.prediction.trainer_idle < BUSY:
        return None
    return lending(
        asked.scenario,
        asked.prediction,
        chip=hardware.gpu(request.hardware) if request.hardware else None,
        model=request.shape if request.model else None,
        steps=request.steps,
    )


def _turns(request: PlanRequest, asked: Option) -> Alternation | None:
    if request.config.engine.is_server:
        return None
    return alternating(
        asked.scenario,
        asked.prediction,
        request.config.train,
        request.config.algo,
        chip=hardware.gpu(request.hardware) if request.hardware else None,
        model=request.shape if request.model else None,
        change=seconds_of_turns(request.run) if request.run else None,
        steps=request.steps,
    )


def seconds_of_turns(run: Path) -> float | None:
    """The mean seconds of a step in which devices changed hands in a run; None if it did not share any."""
    state = RunState()
    for fact in read_metrics(run):
        state.fold(fact)
    return state.naps.seconds / len(state.rows) if state.naps.turns and state.rows else None


def _rates(request: PlanRequest, say: Say, notes: list[str]) -> tuple[Rates, float]:
    """Returns the rates, and the share of groups that have contrast."""
    if request.hardware:
        rates = _computed(request)
        notes += _of_data_sheets(request)
        return rates, 1.0
    if request.run and not request.calibrate:
        from headrace.commands.plan.rates.from_run import rates_of_run

        return rates_of_run(request.run, request.config)
    path = request.rates or rates_file(request.config.model.path)
    if request.calibrate:
        from headrace.commands.plan.rates.calibrate import calibrate

        measured = calibrate(request.config, say)
        save_rates(measured, path)
        say(f"the measured rates are in {path}")
        return measured, 1.0
    rates = load_rates(path)
    if (model := short_name(request.config.model.path)) != rates.model:
        notes.append(f"the rates in {path} were measured with {rates.model}, not with {model}")
    return rates, 1.0


def _of_data_sheets(request: PlanRequest) -> list[str]:
    """Returns what is known of rates that headrace has not measured itself; nothing if it has measured all of them."""
    chip, shape = hardware.gpu(request.hardware), request.shape
    if known(chip, shape).all:
        return []
    return [EXPECTED, *filter(None, [how_far(chip, shape)])]


def rates_file(model: str) -> Path:
    """Returns where the measured rates of a model are. Directories of one name may hold different models, so a directory's place counts."""
    place = f"-{hashlib.sha256(model.encode()).hexdigest()[:8]}" if Path(model).is_absolute() else ""
    return cache_dir() / "rates" / f"{short_name(model)}{place}.json"


def _computed(request: PlanRequest) -> Rates:
    if not request.model:
        raise ConfigError(
            "--hardware computes rates from the size of the model; name it with --model, for example --model 7b"
        )
    chip, shape = hardware.gpu(request.hardware), request.shape
    context = request.config.train.parallel.context
    if request.gpus == 1 and context == 1 and hardware.fits_one(chip, shape):
        shared = hardware.shared_rates(
            chip, shape, request.config.engine.sizes.max_running, request.model, passes=request.passes
        )
        return _as_given(shared, request)
    replica, trainer = hardware.replica_gpus(chip, shape), -(-hardware.trainer_gpus(chip, shape) // context) * context
    if request.gpus < replica + trainer:
        beside = f", with {shape.beside.split / 1e9:.3g} GB of other models beside it," if shape.beside.split else ""
        raise ConfigError(
            f"a {request.model} model whose weights are all trained{beside} needs at least {replica + trainer} GPUs of {request.hardware} "
            f"({replica} to generate, {trainer} to train); raise --gpus, or choose a model that fits on one GPU"
        )
    return _split_rates(request, replica=replica, trainer=trainer, replicas=request.config.engine.replicas)


def _split_rates(request: PlanRequest, *, replica: int, trainer: int, replicas: int) -> Rates:
    """The rates on `replica` GPUs for each of `replicas` engines, and on those of the trainer."""
    chip, shape, config = hardware.gpu(request.hardware), request.shape, request.config
    computed = hardware.rates(
        chip,
        shape,
        replica=replica,
        trainer=trainer,
        max_running=config.engine.sizes.max_running,
        name=request.model,
        travel=request.travel(replicas, trainer),
        microbatch=config.train.microbatch,
        context=config.train.parallel.context,
        passes=request.passes,
    )
    return _as_given(computed, request)


def _as_given(computed: Rates, request: PlanRequest) -> Rates:
    """Returns the rates with what headrace has measured itself, and with the cache that the settings give."""
    chip, shape = hardware.gpu(request.hardware), request.shape
    rates = with_own_runs(computed, chip, shape, request.passes)
    tokens = (math.inf if request.kv_gib is None else request.kv_gib) * GIB / shape.cache_bytes
    return msgspec.structs.replace(
        rates, engine=msgspec.structs.replace(rates.engine, kv_tokens=min(rates.engine.kv_tokens, tokens))
    )


def _scenario(request: PlanRequest, rates: Rates, contrast: float, notes: list[str]) -> Scenario:
    config, completions = request.config, _completions(request, rates, notes)
    prompts = parse(request.prompts) if request.prompts else rates.prompts or _assumed_prompts(notes)
    if config.warm_start.path:
        notes.append(f"the warm start on {config.warm_start.path}, before the first rollout, is in none of these times")
    return Scenario(
        rates=rates,
        completions=completions,
        given=_given(request, prompts.mean + completions.mean, notes) + _again(request, completions.mean, notes),
        shape=_shape(request, rates, notes),
        staleness=config.staleness,
        rollout=config.rollout,
        algo=config.algo,
        partial=config.partial,
        steps=request.steps,
        epochs=config.train.epochs,
        minibatches=config.train.minibatches,
        prompts=prompts,
        latency=parse(request.latency) if request.latency else fixed(0),
        workers=request.workers or config.reward.workers,
        contrast=contrast,
        solved=request.solved,
        recompute=config.engine.swap == "recompute",
        identity_every=config.watch.identity_every,
        seed=config.seed,
    )


def _shape(request: PlanRequest, rates: Rates, notes: list[str]) -> TurnShape:
    """Returns the turns of a rollout: those of the command line, those of the run, or a guess that is noted."""
    config = request.config.environment
    given = {"--turns": request.turns, "--tool-seconds": request.tools, "--result-tokens": request.results}
    if config.turns == 1:
        if asked := [name for name, text in given.items() if text]:
            raise ConfigError(
                f"{asked[0]} is for rollouts of several turns, and environment.kind = {config.kind} has one"
            )
        return TurnShape()
    assumed = {"--turns": fixed((config.turns + 1) // 2), "--tool-seconds": fixed(1.0), "--result-tokens": fixed(100)}
    known = {"--turns": rates.turns, "--tool-seconds": rates.tools, "--result-tokens": rates.results}
    found = {name: parse(text) if text else known[name] or assumed[name] for name, text in given.items()}
    if guessed := [name for name in given if not given[name] and known[name] is None]:
        words = {
            "--turns": f"{found['--turns'].mean:g} turns, half of environment.max_turns",
            "--tool-seconds": "1 s between two turns",
            "--result-tokens": "100 tokens between two turns",
        }
        notes.append(
            f"rollouts are assumed to have {', '.join(words[name] for name in guessed)}; set {', '.join(guessed)} if you know better, "
            "or plan from a run"
        )
    return TurnShape(
        turns=found["--turns"],
        tools=found["--tool-seconds"],
        results=found["--result-tokens"],
        most=config.turns,
        seconds=config.episode_seconds,
    )


def _completions(request: PlanRequest, rates: Rates, notes: list[str]) -> Distribution:
    if request.lengths:
        return parse(request.lengths)
    if rates.completions:
        return rates.completions
    mean = request.config.rollout.max_tokens / 3
    notes.append(
        f"completions are assumed to be log-normal with a mean of a third of rollout.max_tokens ({mean:.0f}) and sigma 0.8; set "
        "--lengths lognormal:mean=...,sigma=... if you know better"
    )
    return Distribution("lognormal", mean=mean, sigma=0.8)


def _given(request: PlanRequest, length: float, notes: list[str]) -> float:
    """Returns the tokens of the demonstrations of a step. `length`: of a prompt with a completion. The prompts of a run, which are what it forwarded beside its
    completions, count them already."""
    own = request.config.demonstrations
    compared = request.config.algo.given_answers == "compared"  # at least one for each question, if all have any
    rows = (request.config.staleness.groups_per_step if compared else own.rows_per_step) if own.path else 0
    if not rows or (request.run and not request.calibrate):
        return 0.0
    notes.append(
        f"the {rows} demonstrations of a step are assumed to be as long as a prompt and a completion, {length:.0f} tokens each"
    )
    return rows * length


def _again(request: PlanRequest, length: float, notes: list[str]) -> float:
    """Returns the tokens of good earlier rollouts of a step, whose prompts their groups forward. `length`: of a completion."""
    rollouts = request.config.algo.recipe.experience.rollouts * request.config.staleness.groups_per_step
    if not rollouts or (request.run and not request.calibrate):
        return 0.0
    notes.append(
        f"{rollouts} good earlier rollouts (algo.experience) are counted in each step, as if every prompt had come before"
    )
    return rollouts * length


def _assumed_prompts(notes: list[str]) -> Distribution:
    notes.append("prompts are assumed to have 200 tokens; set --prompts if you know better")
    return fixed(200)


def _split_of(request: PlanRequest, scenario: Scenario) -> Split:
    """Returns a function that splits `request.gpus` into the trainer's GPUs and as many replicas as fit on the rest."""
    chip, shape = hardware.gpu(request.hardware), request.shape
    replica = hardware.replica_gpus(chip, shape)
    context = request.config.train.parallel.context

    def split(trainer: int) -> Scenario | None:
        replicas = (request.gpus - trainer) // replica
        if replicas < 1 or trainer < hardware.trainer_gpus(chip, shape):
            return None
        trainer = request.gpus - replicas * replica  # the trainer gets the GPUs that are left over
        if trainer % context:
            return None
        rates = _split_rates(request, replica=replica, trainer=trainer, replicas=replicas)
        return dataclasses.replace(scenario, rates=rates, replicas=replicas)

    return split


def _nearest(split: Split, request: PlanRequest) -> Scenario:
    if request.trainer_gpus:
        raise ConfigError(
            f"--trainer-gpus {request.trainer_gpus} of --gpus {request.gpus} leaves one of the pools too small for a "
            f"{request.model} model; choose another, or leave it out"
        )
    found = [scenario for trainer in range(1, request.gpus) if (scenario := split(trainer))]
    if not found:
        raise ConfigError(
            f"train.parallel.context = {request.config.train.parallel.context} divides no number of GPUs that --gpus {request.gpus} leaves "
            "to the trainer; choose another of the two"
        )
    return min(found, key=lambda candidate: abs(candidate.rates.trainer.gpus - request.gpus / 2))


def config_for(source: str, run: Path | None, sets: list[str]) -> RunConfig:
    from headrace.run.config import config_of_run, read_config

    if run:
        return read_config(config_of_run(run), sets)
    return load_config(source, sets)


# --- The memory of GPUs that are planned for: the sizes that settings leave open, as a run on such GPUs would choose them


PROMPT = 200
"""Tokens of a usual prompt, where nothing says otherwise: as in the simulation."""


def sized(config: RunConfig, chip: Gpu, model: Architecture, *, gpus: int, trainer: int) -> RunConfig:
    """Returns the config with numbers for what it leaves open. `gpus`: of one engine, 0 if it shares one with the trainer; `trainer`: of the
    trainer, if it has its own."""
    plan, shape, asking, machine = _parts(config, chip, model, gpus)
    found = gpu_sizes(plan, shape, machine, asking, engine=True)
    values = values_of(plan.engine, found)
    config = replace(config, engine=replace(config.engine, **values))
    if config.train.microbatch_tokens != "auto":
        return config
    microbatch = found.microbatch
    if gpus:
        mesh = hardware.trainer_mesh(chip, model, trainer, context=config.train.parallel.context)
        memory = hardware.trainer_memory(model, mesh)
        left = hardware.TRAINING_USABLE * chip.memory - memory.held - memory.gathered
        kept = step_activations(model, model.beside.critic, config.train.gradient_checkpointing)
        token = SLACK * hardware.BFLOAT16 * kept / mesh.tensor
        microbatch = next((size for size in MICROBATCHES if size * token <= left), ON_CPU)
    return replace(config, train=replace(config.train, microbatch_tokens=microbatch))


def unused(config: RunConfig, chip: Gpu, model: Architecture, gpus: int) -> str:
    """Returns a sentence on what a run leaves of its engine's memory, if that is more than half; else an empty string. `gpus`: see `sized`."""
    plan, shape, _, machine = _parts(config, chip, model, gpus)
    held = sum(need.bytes for need in needs(shape, plan) if need.where == "cuda")
    assert machine.gpu is not None
    total = machine.gpu[1]
    if total - held < total / 2:
        return ""
    where = "the GPU" if gpus < 2 else f"the {gpus} GPUs of an engine"
    return (
        f"{(total - held) / 1e9:.0f} of {total / 1e9:.0f} GB of {where} are unused: engine.kv_gib is {config.engine.sizes.kv_gib:g}, for "
        f"{config.engine.sizes.max_running} sequences"
    )


def _parts(
    config: RunConfig, chip: Gpu, model: Architecture, gpus: int
) -> tuple[MemoryPlan, ModelShape, Asking, Machine]:
    """The inputs of the run's own arithmetic. `gpus` of an engine count as one large one."""
    shape = ModelShape(
        parameters=int(model.parameters),
        matrices=(),
        layers=model.layers,
        hidden=model.hidden,
        inner=model.inner,
        experts=0,
        cached=model.cache_bytes // hardware.BFLOAT16,
        positions=0,
        vocabulary=int(model.outer / model.hidden),
    )
    memory = int(chip.memory * max(1, gpus))
    machine = Machine(1, 1 << 62, 1 << 62, (chip.name, memory), {"bfloat16": True, "built_for": "", "free": memory})
    one = replace(
        config, engine=replace(config.engine, device="cuda", replicas=1), train=replace(config.train, device="cuda")
    )
    plan = memory_plan(one, machine)
    return plan._replace(trains=not gpus), shape, asking_of(config, shape, PROMPT), machine
