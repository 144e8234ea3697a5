"""The warm start: training on demonstrations, or on pairs of answers, before a run has a version 0.

It has a trainer of its own, which ends with it. What it leaves is a model in the run's directory, and the run begins with that as with any other model that
`model.path` names: engine, trainer and the reference of a KL term load the same files, and the optimizer of the run is new.

    runs/<name>/warm_start/warm_start.json   the fact, written last
    runs/<name>/warm_start/<model>/          the weights, an adapter merged in, with tokenizer and template

The directory gets its name when all of it is written. A warm start that was killed begins again, from the same weights and in the same order of rows; one that is finished is
never repeated.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.algo.config import AlgoConfig
from headrace.algo.policy.pairs import PairLoss, Side
from headrace.core.batches import Demonstration
from headrace.core.errors import ConfigError, TrainingError
from headrace.core.printing import say
from headrace.durable.atomic_files import replace_file, sync_to_disk
from headrace.episodes.tasks.demonstrations import AnswerCourse, Demonstrations, Preference, WarmStartConfig, sides_of
from headrace.episodes.tasks.prompts import digest_of
from headrace.facts.facts import WarmStarted, Warned
from headrace.facts.texts import plural
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import ModelConfig, short_name
from headrace.run.build import LoadedFiles, open_telemetry
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.run.config import RunConfig, dump_config
from headrace.run.hosting import complete
from headrace.run.pools import trainer_start
from headrace.run.rehearsal.words import Lines
from headrace.run.resume_rules import contents_of, written
from headrace.run.run_directory import RunDirectory
from headrace.run.session import run_clock
from headrace.run.worker.build import open_launcher
from headrace.trainer.config import TrainConfig
from headrace.weight_sync.shared_memory import SharedMemory

FOLDER, FACT = "warm_start", "warm_start.json"

USUAL_RATE = {"all weights": 1e-5, "an adapter": 1e-4}
"""Learning rates of supervised fine-tuning, where none is set. Pairs have a tenth of it: a margin of log-likelihoods grows with the length."""

LINES = 10
"""Number of steps at which the loss is printed."""


def train_config(own: WarmStartConfig, train: TrainConfig, steps: int, *, adapted: bool) -> TrainConfig:
    """Returns the settings of the trainer for a warm start of `steps`. `train`: the run's; `adapted`: whether it trains an adapter."""
    usual = USUAL_RATE["an adapter" if adapted else "all weights"]
    rate = own.learning_rate or (usual / 10 if own.paired else usual)
    return dataclasses.replace(
        train,
        steps=steps,
        learning_rate=rate,
        schedule=own.schedule,
        warmup_steps=own.warmup_steps,
        epochs=1,  # of a step: those of the warm start go through its rows
        minibatches=1,
        parity="off",  # it compares with a sampler, and there is none
    )


def _algorithm(own: WarmStartConfig) -> AlgoConfig:
    """Returns the recipe of a warm start's loss. It needs no sampler: neither cross-entropy nor a loss of pairs compares with one."""
    constants: dict[str, Any] = own.constants
    return AlgoConfig(own.loss, **constants)


def warm_started(run_dir: Path) -> WarmStarted | None:
    """Returns what a finished warm start of this run has recorded; None if there is none."""
    try:
        return msgspec.json.decode((run_dir / FOLDER / FACT).read_bytes(), type=WarmStarted)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{run_dir / FOLDER / FACT} cannot be read ({error}); begin the run again under another name"
        ) from None


def begins_with(config: RunConfig, run_dir: Path) -> RunConfig:
    """Returns the settings of a run in this directory after its warm start: they name its weights as the model. Those of a run without one, and
    those that name them already, are returned as they are."""
    done = warm_started(run_dir) if config.warm_start.path else None
    if done is None or done.model != config.model.path:
        return config
    return dataclasses.replace(config, model=ModelConfig(path=str(_weights(run_dir, config.model.path).absolute())))


def _weights(run_dir: Path, model: str) -> Path:
    """The directory has the name of the model that it was made from, because people read it in headlines."""
    return run_dir / FOLDER / (short_name(model) or "model")


def warmed(
    config: RunConfig, given: Demonstrations, tried: dict[str, LoadedFiles], directory: RunDirectory
) -> RunConfig:
    """Trains on the demonstrations of a new run, and returns the settings with the model that the run then begins with. They are written: from now
    on a resume finds the weights, whatever becomes of this process. `tried`: what the rehearsal has loaded, which is brought up to date."""
    files = tried[""]
    try:
        complete(warm_start(config, files.encoder.directory, given, directory.logs))
    except KeyboardInterrupt:
        say("the warm start was interrupted, and nothing of it is kept: the same command begins it again")
        raise
    config = begins_with(config, directory.path)
    tried[""] = dataclasses.replace(files, encoder=files.encoder.of_same(Path(config.model.path)))
    directory.begin(dump_config(config) + written(contents_of(config)))
    return config


async def warm_start(config: RunConfig, model_dir: Path, given: Demonstrations, logs: Path) -> WarmStarted:
    """Trains on the demonstrations and leaves the weights in the run's directory, unless that was done before with the same settings. `config`: of the
    run, with the model that it begins with; `model_dir`: of that model.

    Raises TrainingError for a step without a finite gradient, and OSError for a full disk."""
    run_dir, adapted = config.run_dir, bool(config.lora.rank)
    train = train_config(config.warm_start, config.train, given.steps, adapted=adapted)
    mark = _mark(config, train, given)
    before = await asyncio.to_thread(warm_started, run_dir)
    if before and before.mark == mark:
        say(
            f"the warm start in {run_dir / FOLDER} is finished and has the same settings: the run begins with its weights"
        )
        return before
    tell: Callable[[object], None] = say if config.observe.terminal != "off" else lambda message: None
    part = run_dir / f"{FOLDER}.part"
    for left in (part, run_dir / FOLDER):
        await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
    part.mkdir()
    began = time.monotonic()
    async with _trainer(config, train, model_dir, logs) as trainer:
        loss = _algorithm(config.warm_start).recipe.loss
        pairs = _HeldOutPairs(loss) if isinstance(loss, PairLoss) else None
        course = _Course(trainer=trainer, adapter=config.lora.served_name, given=given, tell=tell, pairs=pairs)
        await course.run()
        exact = train.weights == "float32" and not train.offload_optimizer
        dtype: Literal["float32", "bfloat16"] = "float32" if exact else "bfloat16"
        await trainer.export(part / _weights(run_dir, config.model.path).name, dtype, config.lora.served_name)
    done = WarmStarted(
        t=0.0,
        model=config.model.path,
        path=config.warm_start.path,
        rows=len(given.trained),
        held_out_rows=len(given.held_out),
        epochs=given.epochs,
        tokens=course.tokens,
        seconds=time.monotonic() - began,
        learning_rate=train.learning_rate,
        losses=tuple(course.losses),
        held_out=tuple(course.held_out),
        mark=mark,
        loss=config.warm_start.loss,
        agreed=tuple(pairs.agreed) if pairs else (),
    )
    await asyncio.to_thread(_finish, part, run_dir / FOLDER, done)
    tell(f"warm start: {done.words}, in {done.seconds:.0f} s")
    return done


def described(config: RunConfig, given: Demonstrations, encoder: ChatEncoder) -> Lines:
    """Returns what a warm start would do, and its first row as tokens."""
    train = train_config(config.warm_start, config.train, given.steps, adapted=bool(config.lora.rank))
    first = given.trained[0]
    tokens = sum(len(side.answer) for one in given.trained for side in sides_of(one))
    steps = f"{given.steps}, of {given.rows_per_step} rows; {given.epochs} x {len(given.trained):,} rows with {tokens:,} tokens in their answers"
    held = f"{len(given.held_out)} rows, before the first epoch and after each" if given.held_out else "not measured"
    longest = max(len(side.tokens) for one in (*given.trained, *given.held_out) for side in sides_of(one))
    loss = _algorithm(config.warm_start).recipe.loss
    pairs: Lines = [("loss", f"{loss}, of pairs ({', '.join(loss.words())})")] if config.warm_start.paired else []
    rejected = [("rejected", encoder.written(first.rejected))] if isinstance(first, Preference) else []
    return [
        *pairs,
        ("steps", steps),
        ("rate", f"{train.learning_rate:g} at most, {train.schedule} (warm_start.learning_rate)"),
        ("held-out loss", held),
        ("longest row", f"{longest:,} tokens; there is room for {config.engine.context_length:,}"),
        ("context", encoder.written(first.prompt)),
        ("trained", encoder.written(first.answer)),
        *rejected,
        (
            "as tokens",
            f"{len(first.prompt)} masked, then {' '.join(map(str, first.answer[:24]))}{' ...' * (len(first.answer) > 24)}",
        ),
    ]


def course_lines(algo: AlgoConfig, steps: int, course: AnswerCourse, encoder: ChatEncoder) -> Lines:
    """Returns what is trained beside the rollouts of `steps`, and its first row as tokens."""
    rule, first = algo.recipe.demonstrations, course.of_step(0)[0]
    times = steps * course.rows_per_step / len(course.rows)
    ends = "" if rule.last_weight is None else f", {rule.last_weight:g} at last"
    of_rows = f"{course.rows_per_step} of them in each step: each comes {times:.3g} times"
    of_loss = f"{rule.kind}, whose share of the loss is {rule.weight:g}{ends} (algo.demonstrations)"
    if rule.kind == "compared":
        of_rows = f"of {len({row.prompt for row in course.rows}):,} questions; each is trained in the steps that have rollouts of its question"
        of_loss = f"compared with the rollouts of its question, with a reward of {rule.reward:g} (algo.demonstrations)"
    return [
        ("rows", f"{len(course.rows):,}, {of_rows}"),
        ("loss", of_loss),
        ("context", encoder.written(first.prompt)),
        ("trained", encoder.written(first.answer)),
    ]


def _mark(config: RunConfig, train: TrainConfig, given: Demonstrations) -> str:
    settings = {"train": dataclasses.asdict(train), "lora": dataclasses.asdict(config.lora), "seed": config.seed}
    order = {"rows_per_step": given.rows_per_step, "epochs": given.epochs, "model": config.model.path}
    own = config.warm_start
    pairs = {"loss": own.loss, "pair_beta": own.pair_beta, **own.constants} if own.paired else {}
    return digest_of([json.dumps(settings | order | pairs, sort_keys=True), given.digest])


def _finish(part: Path, final: Path, done: WarmStarted) -> None:
    for path in part.rglob("*"):
        if path.is_file():
            sync_to_disk(path)
    replace_file(part / FACT, msgspec.json.encode(done))
    part.rename(final)
    sync_to_disk(final.parent)


@dataclasses.dataclass
class _HeldOutPairs:
    """The held-out pairs of a warm start, of which the first measurement is the reference: the model before the first step."""

    loss: PairLoss
    agreed: list[float] = dataclasses.field(default_factory=list)
    before: list[Any] = dataclasses.field(default_factory=list)
    """[K] the log-likelihoods of the preferred answers, and of the rejected ones, in nats."""

    def measure(self, sides: Sequence[Sequence[Sequence[float]]]) -> float:
        """Returns the mean loss of a pair, and notes the share that agrees. `sides`: the preferred and the rejected answers, as [K] lists of the log-probs
        of their tokens."""
        likelihoods: list[Any] = [np.array([sum(one) for one in side]) for side in sides]
        counts: list[Any] = [np.array([float(len(one)) for one in side]) for side in sides]
        self.before = self.before or likelihoods
        better, worse = (Side(*side) for side in zip(likelihoods, self.before, counts, strict=True))
        losses: Any = self.loss.of_pairs(better, worse)
        margins: Any = self.loss.margin(better, worse)
        self.agreed.append(float(np.mean((np.sign(margins) + 1) / 2)))
        return float(np.mean(losses))


@dataclasses.dataclass(kw_only=True)
class _Course:
    """The steps of a warm start, with the losses so far."""

    trainer: ProcessTrainer
    adapter: str
    given: Demonstrations
    tell: Callable[[object], None]
    pairs: _HeldOutPairs | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0

    @property
    def unit(self) -> str:
        return "a pair" if self.pairs else "nats a token"

    async def run(self) -> None:
        given, steps = self.given, self.given.steps
        await self._measure()
        for batch in given.batches(self.adapter):
            report = await self.trainer.step(batch)
            if report.skipped:
                raise TrainingError(
                    f"step {report.step + 1} of the warm start has no gradient to learn from ({report.skipped}); lower warm_start.learning_rate or "
                    "train.max_grad_norm"
                )
            self.losses.append(report.loss)
            self.tokens += report.loss_tokens
            done = len(self.losses)
            if done * LINES // steps > (done - 1) * LINES // steps:
                self.tell(f"warm start: step {done} of {steps}, loss {report.loss:.3f} {self.unit}")
            if done % given.steps_of_epoch == 0:
                await self._measure()

    async def _measure(self) -> None:
        """Measures the loss of the held-out rows, as the mean over the tokens of their answers, or over pairs."""
        if not self.given.held_out:
            return
        found = [[await self._logprobs(side) for side in sides_of(one)] for one in self.given.held_out]
        if self.pairs:
            self.held_out.append(self.pairs.measure(list(zip(*found, strict=True))))
            agreed = f", {self.pairs.agreed[-1]:.0%} agree,"
        else:
            said = [logprob for (answer,) in found for logprob in answer]
            self.held_out.append(-sum(said) / len(said))
            agreed = ""
        self.tell(
            f"warm start: held-out loss {self.held_out[-1]:.3f} {self.unit}{agreed} after {plural(len(self.losses), 'step')}"
        )

    async def _logprobs(self, one: Demonstration) -> Sequence[float]:
        return (await self.trainer.score(one.tokens, self.adapter))[-len(one.answer) :]


@asynccontextmanager
async def _trainer(config: RunConfig, train: TrainConfig, model_dir: Path, logs: Path) -> AsyncIterator[ProcessTrainer]:
    """Starts a trainer whose loss is that of the warm start."""
    rollout = dataclasses.replace(config.rollout, keep_routing=False)
    own = dataclasses.replace(config, train=train, algo=_algorithm(config.warm_start), rollout=rollout, teachers=())
    telemetry = open_telemetry(config.watch, _Told(), run_clock(0.0))
    transport = SharedMemory.open()  # nothing is published
    start = trainer_start(own, model_dir, {}, transport)
    trainer = ProcessTrainer(open_launcher(logs), start, train.cores, waits=telemetry.waits)
    try:
        async with telemetry.waits.named("start", "the trainer of the warm start to load the model"):
            await trainer.open()
        yield trainer
    finally:
        await trainer.close()
        transport.close()


class _Told:
    """Tells warnings at once: the run has no files yet that could take them."""

    def record(self, fact: Any) -> None:
        if isinstance(fact, Warned):
            say(fact.message)
