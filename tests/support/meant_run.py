"""Runs in this process whose tokens and rewards can be checked: nothing that they train may mean something else than it says.

The engine is the native one over a policy that never changes (`logits_of` of the context), as at a learning rate of 0. So each log-prob that
is trained must be the policy's, whatever was resumed; and each reward, prompt and advantage what the settings of the day make of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Failure, Row
from headrace.core.protocols import KEPT, Agent, Environment, EnvironmentKind
from headrace.core.reports import EngineStats, LoadReport, TrainReport
from headrace.core.rewards import usable
from headrace.core.steps import SoFar, StepOutput
from headrace.core.types import Completion, Episode, Prompt, Request, Scored, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import Core
from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.model_loading import GIB, ServableModel
from headrace.engine.request_book import RequestBook
from headrace.episodes.environments.kinds import environment_kind
from headrace.episodes.scoring.extract import Extractor
from headrace.loop import pipeline
from headrace.models.chat import ChatEncoder
from headrace.run import build as build_module
from headrace.run import open_parts as opening
from headrace.run.build import build_task, open_telemetry
from headrace.run.config import RunConfig
from headrace.run.lane import Lane, open_lane
from headrace.run.pools import Pools
from headrace.run.run_directory import RunDirectory
from headrace.run.session import BuiltRun, run_clock
from headrace.settings.user_code import load_function
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_engine_model import FakeRunner

END = 2
"""The token that ends a completion."""

NEAR = 1e-4
"""The most that a log-prob may be off, which float32 rounds."""


def logits_of(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """[V] what the policy says after `tokens`."""
    seed = hash(tuple(tokens)) & 0xFFFFFFFF
    logits = np.random.default_rng(seed).normal(0, 1.5, vocabulary)
    logits[END] += 2.0
    return logits.astype(np.float32)


def logprobs_of(row: Row, temperature: float, vocabulary: int) -> list[float]:
    """[T] those of the policy, NaN outside the loss: at this temperature, and among the tokens that the row says were left."""
    tokens, found = (*row.prompt, *row.tokens), []
    mask = row.sampling_mask
    offsets = np.frombuffer(mask.offsets, np.int64) if mask else np.zeros(len(row.tokens) + 1, np.int64)
    ids = np.frombuffer(mask.token_ids, np.int32) if mask else np.zeros(0, np.int32)
    for place, (token, trained) in enumerate(zip(row.tokens, row.mask, strict=True)):
        if not trained:
            found.append(np.nan)
            continue
        logits = logits_of(tokens[: len(row.prompt) + place], vocabulary).astype(np.float64) / temperature
        left = ids[offsets[place] : offsets[place + 1]]
        among = logits[left] if len(left) else logits
        found.append(float(logits[token] - among.max() - np.log(np.exp(among - among.max()).sum())))
    return found


class _Policy(FakeRunner):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def _logits(self, batch: ForwardInput, row: int, segments: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return logits_of(seen["token"].tolist(), self.vocabulary)


class OwnEngine:
    """Protocol `Engine`: the native engine, which makes a pass whenever the run gives it time."""

    def __init__(self, config: EngineConfig, encoder: ChatEncoder, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        model = ServableModel(
            runner=_Policy(vocabulary),
            context_length=config.context_length,
            vocabulary=vocabulary,
            ends=frozenset([END]),
            decode=encoder.decode,
            shapes={"version": (), "poisoned": (), "part": ()},
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        settings = {"max_running": min(config.sizes.max_running, 6), "kv_gib": 256.5 * 1024 / GIB, "routing": True}
        self._core, self._book = Core(model, EngineConfig(**settings)), RequestBook()
        self.capabilities = msgspec.structs.replace(self._core.capabilities, streamed=True)
        self._version, self._works = -1, asyncio.ensure_future(self._work())
        self.stands = False
        """Whether it makes no more passes: what is under way stays so until the run has ended."""

    async def _work(self) -> None:
        while True:
            if self._core.has_work() and not self.stands:
                output = self._core.step()
                self._book.publish(output)
                self._book.enter_output(output)
            await asyncio.sleep(0)

    async def generate(self, request: Request) -> Completion:
        pending = self._book.enter(request)
        try:
            self._core.add(request)
            await pending.done
            return pending.so_far()
        except asyncio.CancelledError:
            self._core.cancel(request.id)
            raise
        finally:
            self._book.leave(request.id)

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        self._version = update.version
        values = {"version": float(update.version), "poisoned": 0.0, "part": 0.0}
        self._core.swap(self._core.prepare(update, {name: torch.tensor(value) for name, value in values.items()}))
        return LoadReport(update.version, 0.0, 0.0)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        spans = (VersionSpan(0, self._version, self._version),)
        return Completion((), (), spans, "length", prompt_logprobs=(-1.0,) * (len(tokens) - 1))

    async def drain(self) -> None:
        self._core.drain()
        while not self._core.drained:
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self._core.resume()

    async def abort(self) -> None:
        self._book.abort()
        self._core.abort()

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        return self._book.unfinished(among)

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._book.listen(listener)

    async def stats(self) -> EngineStats:
        return self._core.stats()

    async def watch(self) -> None:
        await self._works

    def kill(self) -> None:
        self._works.cancel()

    async def close(self) -> None:
        self._works.cancel()


@dataclass
class CheckingTrainer(FakeTrainer):
    """Compares the log-probs of what it is given with the policy's, and keeps the groups."""

    vocabulary: int = 0
    before: Callable[[], Any] | None = None
    """Awaited before each step."""
    worst: float = 0.0

    async def step(self, batch: Batch) -> TrainReport:
        if self.before:
            await self.before()
        for row in batch.rows:
            expected = logprobs_of(row, row.temperature or batch.temperature, self.vocabulary)
            apart = [abs(a - b) for a, b, on in zip(expected, row.logprobs, row.mask, strict=True) if on]
            self.worst = max(self.worst, *apart, 0.0)
        return await super().step(batch)


class OwnScorer:
    """Protocol `Scorer`: the functions of the settings, called here."""

    def __init__(self, config: RunConfig) -> None:
        self._parts = [
            (
                spec.name,
                spec.weight,
                load_function(spec.function, "reward"),
                Extractor(spec.extract, config.reward.extract_truncated),
            )
            for spec in config.reward.specs
        ]

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        return [self._scored(prompt, episode) for episode in episodes]

    def _scored(self, prompt: Prompt, episode: Episode) -> Scored | Failure:
        rewards = {
            name: float(function([prompt.text], [extract(episode.last)], **prompt.columns)[0])
            for name, _, function, extract in self._parts
        }
        return usable(Scored(episode, sum(weight * rewards[name] for name, weight, *_ in self._parts), rewards))

    async def close(self) -> None:
        pass


@dataclass
class Talk:
    """Protocol `Environment`: some turns, with marks and rewards of the user's file between them. It keeps what it said."""

    prompt: Prompt
    seed: int
    marks: Callable[[int], Sequence[int]]
    reward: Callable[[Sequence[int]], float]
    keeps: bool

    async def play(self, agent: Agent) -> Mapping[str, float]:
        said = [msgspec.msgpack.decode(note) for note in agent.kept]
        done = await agent.turn(self.prompt.tokens)
        for number in range(2):
            if number == len(said):
                said.append([*self.marks(number), len(done.tokens) % 7 + 6])
                if self.keeps:
                    agent.keep(msgspec.msgpack.encode(said[number]))
            if agent.cut_off(len(said[number])):
                break
            done = await agent.turn(said[number])
        return {"talk": self.reward(done.tokens)}


def _environment(config: RunConfig, *others: Any, **more: Any) -> EnvironmentKind:
    if not config.environment.function:
        return environment_kind(config.environment.kind)
    marks, reward = (
        load_function(f"{config.environment.function.rpartition(':')[0]}:{one}", "") for one in ("marks", "reward")
    )
    resumes: Any = "exported" if config.environment.resumes == "auto" else config.environment.resumes

    def make(prompt: Prompt, seed: int) -> Environment:
        return Talk(prompt, seed, marks, reward, keeps=resumes in KEPT)

    return EnvironmentKind(make, config.environment.limits, resumes)


@dataclass
class Life:
    """What one process of a run did."""

    config: RunConfig
    trainer: CheckingTrainer
    problems: list[str] = field(default_factory=list)
    reason: str = ""
    ready: int = 0
    tokens: int = 0
    """Finished groups, and tokens of rollouts under way, when it stopped."""


@dataclass
class _Host:
    config: RunConfig
    directory: RunDirectory
    lane: Lane
    patch: pytest.MonkeyPatch
    stop_after: int
    """Steps of this process; 0: to the end."""
    kills: bool
    """Whether it then leaves without a checkpoint."""
    life: Life = field(init=False)
    built: BuiltRun | None = None

    async def run(self) -> Life:
        storage = self.lane.storage
        restored = storage.checkpoint
        encoder = ChatEncoder(self.config.model.path)
        vocabulary = len(encoder.vocabulary())
        self.life = Life(self.config, CheckingTrainer(0.0, vocabulary=vocabulary, before=self._hold))
        if restored:
            self.life.trainer.versions[""] = int((restored / "fake_trainer.txt").read_text())

        @contextlib.asynccontextmanager
        async def pools(config: RunConfig, *others: Any, **more: Any) -> AsyncIterator[Pools]:
            yield Pools(
                trainer=self.life.trainer,
                engine=OwnEngine(config.engine, encoder, vocabulary),
                launcher=None,  # type: ignore[arg-type]
                trainer_dtype="float32",
                same_arithmetic=False,
                shadow=None,
            )

        self.patch.setattr(opening, "loaded_model", lambda config, rows: Path(config.model.path))
        self.patch.setattr(opening, "ChatEncoder", lambda path: encoder)
        self.patch.setattr(opening, "open_pools", pools)
        self.patch.setattr(build_module, "build_scorer", lambda config, *others, **more: OwnScorer(config))
        self.patch.setattr(build_module, "build_environment", _environment)
        telemetry = open_telemetry(self.config.watch, storage.recorder, run_clock(storage.seconds))
        async with opening.open_parts(self.config, {"": self.lane}, {"": telemetry}, logs=self.directory.logs) as begin:
            self.built = begin[""]()
            await self.lane.session.start(self.built)
        self.life.reason = self.lane.session.reason
        return self.life

    async def _hold(self) -> None:
        """Before its last step, the trainer waits until groups have finished behind it, and others are under way."""
        assert self.built
        if not self.stop_after or len(self.life.trainer.batches) != self.stop_after - 1:
            return
        parts = self.built.parts
        for _ in range(3000):
            self.life.ready = len(parts.buffer.finished)
            self.life.tokens = sum(len(one.tokens) for one in parts.interrupts.tokens.so_far().values())
            noted = parts.notebook.state(parts.buffer.in_flight) or not self.config.environment.function
            if self.life.ready >= 2 and self.life.tokens >= 20 and noted:
                break
            await asyncio.sleep(0)
        self.built.pools.engine.stands = True  # type: ignore[attr-defined]
        self.lane.session.interrupt("test", "")
        if self.kills:
            self.lane.session.interrupt("test", "")
            await asyncio.sleep(1e6)


def live(
    config: RunConfig, path: Path, resume: bool, stop_after: int = 0, *, kills: bool = False, older: bool = False
) -> Life:
    """One process of a run. `kills`: it leaves without a checkpoint when it stops; `older`: it is one of an earlier version of headrace, which
    noted less. Raises ConfigError where it is refused."""
    with RunDirectory.of(path, resume) as directory, pytest.MonkeyPatch.context() as patch:
        lane = open_lane(config, directory, resume)
        try:
            if older:
                lane.storage.made_by = {}
                patch.setattr(pipeline, "replace", lambda row, **more: row)
            host = _Host(config, directory, lane, patch, stop_after, kills)
            life = asyncio.run(host.run())
        finally:
            lane.storage.close()
        asyncio.run(_check(life, host))
    return life


async def _check(life: Life, host: _Host) -> None:
    """Compares what was trained with what the settings of the day make of it."""
    config, built = life.config, host.built
    assert built
    say = life.problems.append
    if life.trainer.worst > NEAR and (config.rollout.keep_mask or not config.rollout.truncates):
        say(f"a log-prob is {life.trainer.worst} off")
    encoder = ChatEncoder(Path(config.model.path)).with_special_tokens(config.reward.special_tokens)
    task = build_task(config.task, encoder, config.seed)
    prompts = {one.id: one for one in (task.draw() for _ in range(100))}
    algorithm = algorithm_of(config.algo, config.longest_rollout, config.reward.weights)
    for batch in life.trainer.batches:
        for group in batch.groups:
            if group.prompt != prompts[group.prompt.id]:
                say(f"ticket {group.ticket} has an old prompt: {group.prompt.text}")
            episodes = [rollout.episode for rollout in group.scored]
            for rollout, again in zip(
                group.scored, await built.parts.scorer.score(group.prompt, episodes), strict=True
            ):
                expected = _expected(config, rollout.episode, again)
                if abs(rollout.reward - expected) > 1e-9:
                    say(f"ticket {group.ticket} has the reward {rollout.reward} instead of {expected}")
            made = algorithm.rows(group.prompt, group.scored)
            if [row.advantages for row in made] != [row.advantages for row in group.rows]:
                say(f"ticket {group.ticket} has advantages of another algorithm")
            for now, then in zip(made, group.rows, strict=True):
                if config.staleness.overdue != "trim" and now.mask != then.mask:
                    say(f"ticket {group.ticket} has another mask")
            _check_marks(config, episodes, say)


def _expected(config: RunConfig, episode: Episode, scored: Scored | Failure) -> float:
    assert isinstance(scored, Scored)
    if not config.environment.function:
        return scored.reward
    reward = load_function(f"{config.environment.function.rpartition(':')[0]}:reward", "")
    return float(scored.reward + reward(episode.last.tokens))


def _check_marks(config: RunConfig, episodes: Sequence[Episode], say: Callable[[str], None]) -> None:
    """The contexts between turns are those of the present environment, for the turns that they follow."""
    turns = [len(episode.turns) for episode in episodes]
    if not config.environment.function:
        if set(turns) != {1}:
            say(f"rollouts of {turns} turns of an environment that is gone")
        return
    marks = load_function(f"{config.environment.function.rpartition(':')[0]}:marks", "")
    for episode in episodes:
        for number, (before, turn) in enumerate(zip(episode.turns, episode.turns[1:], strict=False)):
            wanted = (*marks(number), len(before.completion.tokens) % 7 + 6)
            if turn.context != wanted:
                say(f"turn {number + 1} came after {turn.context} instead of {wanted}")
