"""Measures this machine's rates: the real engine and trainer, each alone and both at once, for a minute or so.

Everything is timed in the controller, where the pipeline runs, so that the cost of messages between processes is included.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

from headrace.algo.training_rows import algorithm_of
from headrace.commands.plan.rates.from_run import alike, line, newly_computed, rotated
from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates
from headrace.core.batches import Batch, Failure, Group
from headrace.core.errors import ConfigError
from headrace.core.protocols import Engine, Scorer, Task, Trainer
from headrace.core.types import Completion, Episode, Prompt, Request, Sampling, Scored
from headrace.engine.config import EngineConfig
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout import seed_of
from headrace.episodes.rollout_session import Played, TurnAsked
from headrace.loop.world.surroundings import empirical
from headrace.models.chat import open_model
from headrace.models.resolve import short_name
from headrace.run.build import build_scorer, build_task, open_telemetry
from headrace.run.choosing import settle_here
from headrace.run.config import RunConfig
from headrace.run.pools import Pools, open_pools
from headrace.run.run_directory import temporary_logs

# --- Measures new weights on their way
# The parts of a publish, alone and beside what a run does at the same time.


class Publishing(NamedTuple):
    """Seconds of a version on its way."""

    copy: float
    send: float
    """The rest of the trainer's part."""
    send_slows: float
    """Factor by which that and a step slow each other down."""
    verify: float
    """Seconds until the swap, once the update is there."""
    verify_slows: float
    swap: float


async def time_publishing(
    engine: Engine,
    trainer: Trainer,
    *,
    step: Callable[[], Awaitable[Any]],
    generating: Callable[[], AbstractAsyncContextManager[None]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Publishing:
    """`step`: does an optimizer step, which makes a new version. `generating`: keeps the engine busy."""
    copies: list[float] = []
    sends: list[float] = []
    steps: list[float] = []
    steps_beside: list[float] = []
    swaps: list[float] = []
    loads: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for loaded in (False, True):
            steps.append(await timed(step, clock))
            copies.append(await timed(trainer.copy, clock))
            started = clock()
            if loaded:
                update, seconds = await asyncio.gather(trainer.publish(), timed(step, clock))
                steps_beside.append(seconds)
            else:
                update = await trainer.publish()
                sends.append(clock() - started)
            async with generating() if loaded else contextlib.nullcontext():
                started = clock()
                report = await engine.load(update)
                loads[loaded].append(clock() - started - report.swap_seconds)
            swaps.append(report.swap_seconds)
    alone, beside, send = (statistics.median(times) for times in (loads[False], loads[True], sends))
    longer = statistics.median(steps_beside) - statistics.median(steps)
    return Publishing(
        copy=statistics.median(copies),
        send=send,
        send_slows=max(1.0, 1 + longer / send) if send else 1.0,
        verify=alone,
        verify_slows=max(1.0, beside / alone) if alone else 1.0,
        swap=statistics.median(swaps),
    )


async def timed(work: Callable[[], Awaitable[Any]], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds that it takes."""
    started = clock()
    await work()
    return clock() - started


# --- calibrate ------------------------------------------------------------


Say = Callable[[str], None]
Reward = Callable[..., Any]

SHORT, LONG = 8, 40
"""Tokens of a short and a long completion; the difference of their times gives the time of a pass."""
ROUNDS = 2
GROUPS = 24
"""Prompts whose completions are sampled for the distribution of lengths."""
SETTLES, WINDOW = 0.5, 3.0
"""Seconds before the measurement of the engine's pace, and of the measurement."""


class _Silent:
    def record(self, fact: Any) -> None:
        pass


def calibrate(config: RunConfig, say: Say, reward: Reward | None = None, window: float = WINDOW) -> Rates:
    """Starts engine and trainer of a run, measures them, and ends them. The weights do not change. `window`: seconds over which the
    engine's pace is measured."""
    if config.lora.served_name or config.adapters:
        raise ConfigError(
            "--calibrate measures full weights only; for a run that trains adapters, plan from a finished run with --run"
        )
    still = dataclasses.replace(config.train, learning_rate=1e-12)
    return asyncio.run(
        _calibrate(
            dataclasses.replace(config, train=still, orchestration=config.orchestration.at_home), say, reward, window
        )
    )


async def _calibrate(config: RunConfig, say: Say, reward: Reward | None, window: float) -> Rates:
    with temporary_logs() as logs:
        model_dir, encoder = await open_model(config.model.path, config.reward.special_tokens)
        config = await asyncio.to_thread(
            settle_here, config, model_dir
        )  # what a run would use is what has to be measured
        for what, why in config.chosen.why.items():
            say(f"{what}: {why}")
        telemetry = open_telemetry(config.watch, _Silent(), time.monotonic)
        task = build_task(config.task, encoder, config.seed)
        scorer = build_scorer(config, [reward] if reward else [], decode=encoder.decode)
        say("starting engine and trainer")
        try:
            async with open_pools(config, model_dir, logs, telemetry, {}) as pools:
                await pools.engine.load(await pools.trainer.publish())
                bench = Bench(
                    config=config, pools=pools, task=task, scorer=scorer, decode=encoder.decode, say=say, window=window
                )
                return await bench.rates(short_name(config.model.path), kv_tokens(model_dir, config.engine))
        finally:
            await scorer.close()


def kv_tokens(model_dir: Path, engine: EngineConfig) -> float:
    """Returns the tokens that engine.sizes.kv_gib holds; infinite if the model's config does not give its shape."""
    try:
        shape = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        width = 4 if engine.serving_dtype == "float32" else 2
        return float(int(engine.sizes.kv_gib * 2**30 / (2 * shape["num_hidden_layers"] * heads * head * width)))
    except (KeyError, TypeError):
        return math.inf


class Bench:
    """The measurements, one after the other."""

    def __init__(
        self,
        *,
        config: RunConfig,
        pools: Pools,
        task: Task,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        say: Say,
        window: float,
    ) -> None:
        self._config, self._engine, self._trainer = config, pools.engine, pools.trainer
        self._task, self._scorer, self._decode, self._say = task, scorer, decode, say
        self._names, self._version, self._window = itertools.count(), 0, window
        self._algorithm = algorithm_of(config.algo, config.rollout.max_tokens)

    async def rates(self, model: str, kv_tokens: float) -> Rates:
        self._say("sampling completions of the task")
        before = await self._engine.stats()
        groups, overhead = await self._groups()
        computed = (await self._engine.stats()).prompt_tokens - before.prompt_tokens
        prompts = [group.prompt for group in groups]
        self._say("the engine's batch curve")
        curve = [(float(n), *await self._pass_seconds(n, prompts)) for n in self._sizes()]
        decode = [(n, seconds) for n, seconds, _ in curve]
        new = newly_computed(
            computed, [len(prompt.tokens) for prompt in prompts], self._config.staleness.groups_per_step
        )
        prefill = new * await self._prefill(prompts)
        context = await self._context(decode, prompts)
        self._say("the trainer's steps")
        step, token = await self._steps(groups)
        self._say("publishing, swapping, and both at once")
        publish = await self._publish(groups)
        engine_slowed, trainer_slowed = await self._together(groups)
        probe = min([await timed(lambda: self._trainer.score(prompts[0].tokens)) for _ in range(2)])
        engine = EngineRates(
            tuple(decode),
            prefill,
            request=line([(n, rest) for n, _, rest in curve])[1],
            context=context,
            max_running=self._config.engine.sizes.max_running,
            kv_tokens=kv_tokens,
            verify=publish.verify,
            verify_slows=publish.verify_slows,
            swap=publish.swap,
        )
        trainer = TrainerRates(token, step, publish.copy, send=publish.send, send_slows=publish.send_slows, score=probe)
        lengths = [[len(row.tokens) for row in group.rows] for group in groups]
        return Rates(
            engine=engine,
            trainer=trainer,
            engine_slowed=engine_slowed,
            trainer_slowed=trainer_slowed,
            overhead=overhead,
            completions=empirical([n for group in lengths for n in group], alike(lengths)),
            prompts=empirical([len(prompt.tokens) for prompt in prompts]),
            source=f"measured on this machine, {time.strftime('%Y-%m-%d')}",
            model=model,
        )

    # -- completions ----------------------------------------------------------------------------------------------------

    async def _groups(self) -> tuple[list[Group], float]:
        """Returns groups of the task's own prompts, and the seconds that scoring the groups of a step takes."""
        prompts = [self._task.draw() for _ in range(GROUPS)]
        rolled = await asyncio.gather(*(self._roll(prompt) for prompt in prompts))
        groups = [self._group(i, prompt, found) for i, (prompt, found) in enumerate(zip(prompts, rolled, strict=True))]
        batch = groups[
            : self._config.staleness.groups_per_step
        ]  # the groups of a synchronous step come at the same time
        seconds = [await timed(lambda: self._score(batch)) for _ in range(4)]
        return groups, statistics.median(seconds)

    async def _score(self, groups: Sequence[Group]) -> None:
        episodes = [[rollout.episode for rollout in group.scored] for group in groups]
        await asyncio.gather(
            *(self._scorer.score(group.prompt, two) for group, two in zip(groups, episodes, strict=True))
        )

    async def _roll(self, prompt: Prompt) -> list[Episode]:
        rollout = self._config.rollout
        numbers = [next(self._names) for _ in range(rollout.group_size)]

        async def ask(asked: TurnAsked) -> Completion:
            n = numbers[asked.rollout]
            return await self._engine.generate(
                rollout.request(f"calibrate/{n}", asked.context, seed_of("calibrate", n), 0)
            )

        results = await roll_out(SINGLE_TURN, prompt, numbers, ask=ask, decode=self._decode)
        episodes = [result.episode for result in results if isinstance(result, Played)]
        if failures := [result for result in results if isinstance(result, Failure)]:
            failed = failures[0]
            raise ConfigError(
                f"a rollout of the task failed ({failed.reason}: {failed.detail}); train a few steps first"
            )
        return episodes

    def _group(self, ticket: int, prompt: Prompt, episodes: Sequence[Episode]) -> Group:
        """Makes a group with artificial rewards, so that every row has an advantage."""
        scored = tuple(Scored(episode, float(i % 2), {"calibrate": float(i % 2)}) for i, episode in enumerate(episodes))
        return Group(ticket, prompt, scored, self._algorithm.rows(prompt, scored))

    # -- the engine -----------------------------------------------------------------------------------------------------

    def _sizes(self) -> list[int]:
        most = self._config.engine.sizes.max_running
        return sorted({most} | {1 << k for k in range(10) if 1 << k < most})

    async def _pass_seconds(self, running: int, prompts: Sequence[Prompt]) -> tuple[float, float]:
        """Returns the seconds of a pass, from two lengths, so that all else cancels; and the seconds of all else, with prompts that are
        cached."""
        long = self._long(prompts)
        tokens = [prompt.tokens for prompt in prompts]
        await self._generate(running, tokens, 1)
        times = [[await self._generate(running, tokens, length) for length in (SHORT, long)] for _ in range(ROUNDS)]
        a_pass = max(1e-6, statistics.median((last - first) / (long - SHORT) for first, last in times))
        return a_pass, min(first for first, _ in times) - SHORT * a_pass

    def _long(self, prompts: Sequence[Prompt]) -> int:
        longest = max(len(prompt.tokens) for prompt in prompts)
        long = min(LONG, self._config.engine.context_length - longest - 1)
        if long < SHORT + 4:
            raise ConfigError("engine.context_length leaves no room to measure passes; raise it")
        return long

    async def _generate(self, count: int, prompts: Sequence[tuple[int, ...]], length: int) -> float:
        return await timed(lambda: self._all(count, prompts, length))

    async def _all(self, count: int, prompts: Sequence[tuple[int, ...]], length: int) -> None:
        requests = [self._request(prompts[i % len(prompts)], length) for i in range(count)]
        await asyncio.gather(*(self._engine.generate(request) for request in requests))

    def _request(self, prompt: tuple[int, ...], length: int) -> Request:
        number = next(self._names)
        sampling = Sampling(max_tokens=length, temperature=1.0, seed=number, ignore_eos=True)
        return Request(f"calibrate/{number}", prompt, sampling)

    async def _prefill(self, prompts: Sequence[Prompt]) -> float:
        """Returns the seconds per prompt token, from short and long prompts that are not cached."""
        room = self._config.engine.context_length - 2
        short, long, count = min(8, room // 2), min(room, 256), 16
        times = []
        for _ in range(ROUNDS):
            spent = [await self._generate(count, self._new(prompts, size, count), 1) for size in (short, long)]
            times.append((spent[1] - spent[0]) / (count * (long - short)))
        return max(0.0, statistics.median(times))

    def _new(self, prompts: Sequence[Prompt], size: int, count: int) -> list[tuple[int, ...]]:
        """Returns prompts made of the task's tokens, each with its own beginning."""
        pool = [token for prompt in prompts for token in prompt.tokens]
        made = []
        for _ in range(count):
            start = next(self._names) * 7919
            made.append(tuple(pool[(start + i * (1 + start % 5)) % len(pool)] for i in range(size)))
        return made

    async def _context(self, decode: Sequence[tuple[float, float]], prompts: Sequence[Prompt]) -> float:
        """Returns the seconds per pass for every token in the caches; 0 if contexts are short, because the batch curve includes them."""
        room, longest = self._config.engine.context_length, max(len(prompt.tokens) for prompt in prompts)
        size = min(1024, room - LONG - 2)
        if size < longest + 200:
            return 0.0
        count = min(16, self._config.engine.sizes.max_running)
        base = dict(decode).get(float(count)) or decode[-1][1]
        new = self._new(prompts, size, count)
        await self._generate(count, new, 1)
        spent = [await self._generate(count, new, length) for length in (SHORT, LONG)]
        mean = statistics.mean(len(prompt.tokens) for prompt in prompts)
        return max(0.0, ((spent[1] - spent[0]) / (LONG - SHORT) - base) / (count * (size - mean)))

    # -- the trainer ----------------------------------------------------------------------------------------------------

    async def _steps(self, groups: Sequence[Group]) -> tuple[float, float]:
        """Returns the fixed seconds of a step, and the seconds per token, from a line through steps of up to three sizes. Every step has other
        groups, as in a run: the memory and the plans of one batch do not fit the next."""
        whole = min(self._config.staleness.groups_per_step, len(groups))
        for batch in rotated(groups, [whole] * 2):  # the first steps allocate memory
            await self._step(batch)
        sizes = sorted({max(1, whole // 4), max(1, whole // 2), whole})
        return line([await self._step(batch) for batch in rotated(groups, sizes * ROUNDS)])

    async def _step(self, groups: Sequence[Group]) -> tuple[float, float]:
        """Returns the tokens as the simulated trainer counts them, and the seconds. The real trainer forwards fewer tokens, because shared
        prefixes are forwarded once."""
        started = time.perf_counter()
        report = await self._trainer.step(
            Batch(self._version, self._algorithm.assemble(tuple(groups)), self._config.rollout.temperature)
        )
        self._version = report.version
        tokens = sum(len(group.prompt.tokens) + sum(len(row.tokens) for row in group.rows) for group in groups)
        return float(tokens), time.perf_counter() - started

    async def _publish(self, groups: Sequence[Group]) -> Publishing:
        batch = groups[: min(self._config.staleness.groups_per_step, len(groups))]
        return await time_publishing(
            self._engine,
            self._trainer,
            step=lambda: self._step(batch),
            generating=lambda: self._generating(groups),
            rounds=ROUNDS + 1,
        )

    # -- both -----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _generating(self, groups: Sequence[Group]) -> AsyncIterator[None]:
        """Keeps as many requests in the engine as a step has rollouts, within this context."""
        room = self._config.engine.sizes.max_running
        count = min(room, self._config.staleness.groups_per_step * self._config.rollout.group_size)
        length = self._long([group.prompt for group in groups])

        async def without_end(prompt: Prompt) -> None:
            while True:
                await self._engine.generate(self._request(prompt.tokens, length))

        loops = [asyncio.ensure_future(without_end(groups[i % len(groups)].prompt)) for i in range(count)]
        await asyncio.sleep(SETTLES)
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    async def _together(self, groups: Sequence[Group]) -> tuple[float, float]:
        """Returns the factors by which a pass takes longer while the trainer works, and a step while the engine works."""
        batch = groups[: min(self._config.staleness.groups_per_step, len(groups))]
        steps_alone = [(await self._step(batch))[1] for _ in range(2)]
        async with self._generating(groups):
            alone = await self._pace(lambda: asyncio.sleep(self._window))
            steps_beside: list[float] = []

            async def steps() -> None:
                steps_beside.extend([(await self._step(batch))[1] for _ in range(2)])

            beside = await self._pace(steps)
        return max(1.0, alone / beside), max(1.0, statistics.mean(steps_beside) / statistics.mean(steps_alone))

    async def _pace(self, meanwhile: Callable[[], Awaitable[None]]) -> float:
        """Returns sampled tokens per second."""
        before, started = await self._engine.stats(), time.perf_counter()
        await meanwhile()
        after = await self._engine.stats()
        return (after.sampled_tokens - before.sampled_tokens) / (time.perf_counter() - started)
