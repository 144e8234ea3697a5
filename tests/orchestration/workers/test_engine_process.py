"""The engine behind its process: control, forks, scoring, priorities, and what a death does to them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.protocols import Engine, Job, Launcher, Transport
from headrace.core.steps import StepOutput
from headrace.core.types import Fork, Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.processes.launch.local import LocalWorker
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.worker.build import open_launcher
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.shared_memory import SharedMemory

PROMPT = (1, 3, 10, 11, 12, 13, 4)


class Silent:
    def record(self, fact: Any) -> None:
        pass


Publish = Callable[[int], WeightUpdate]


def worker_of(engine: ProcessEngine) -> LocalWorker:
    worker = engine._keeper._worker
    assert isinstance(worker, LocalWorker)
    return worker


@asynccontextmanager
async def opened(
    model_dir: Path,
    launcher: Launcher,
    transport: Transport | None = None,
    *,
    asleep: bool = False,
    kind: type[ProcessEngine] = ProcessEngine,
    **config: Any,
) -> AsyncIterator[tuple[ProcessEngine, Publish]]:
    """An engine that serves version 0, and what publishes others for it. `asleep`: whether its processes begin asleep."""
    parameters = parameters_from_dir(model_dir, torch.float32)
    manifests, transport = {"": lay_out(parameters.items(), torch.float32)}, transport or SharedMemory.open()
    sender = transport.sender(manifests)

    def publish(version: int) -> WeightUpdate:
        return sender.send(version, ((name, tensor * (1 + 0.1 * version)) for name, tensor in parameters.items()))

    settings = {"dtype": "float32", "device": "cpu", "kv_gib": 0.01, "context_length": 128, "max_running": 4, **config}
    record, clock = Silent().record, asyncio.get_running_loop().time
    telemetry = Telemetry(record, clock, Waits(record, clock, 1e6, 2e6))
    engine = kind(launcher, Job("engine", "engine", (), transport.inherited), 2, telemetry)
    try:
        await engine.launch()
        await engine.open(EngineStart(str(model_dir), settings, manifests, transport, asleep))
        if asleep:
            await engine.wake(replaced=False)
        await engine.load(publish(0))
        yield engine, publish
    finally:
        await engine.close()
        transport.close()


LONG = 200
"""Tokens of a request that may end at any time."""

ENDLESS = 10_000
"""Tokens of a request that must not end before something happens to it: this process may not run for seconds on a busy machine."""


@pytest.fixture
def long_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """The same weights with room for them."""
    directory = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 2 * ENDLESS}))
    return directory


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(300):
        while not await true():
            await asyncio.sleep(0.01)


async def sampled(engine: Engine) -> int:
    return (await engine.stats()).sampled_tokens


def test_it_is_controlled_forked_and_asked_for_scores(long_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(long_llama, open_launcher(tmp_path), context_length=ENDLESS + 100, kv_gib=0.1) as (engine, _):
            whole = await engine.generate(request("whole", PROMPT, 20, seed=1, top_logprobs=2, return_mask=True))
            assert len(whole.tokens) == 20 and whole.top is not None and len(whole.top.tokens) == 20 * 2 * 4
            assert whole.mask is not None and len(whole.mask.offsets) == 21 * 8, "nothing was cut, at any position"
            fork = await engine.generate(Request("fork", (), Sampling(max_tokens=5, seed=2), fork=Fork("whole", 8)))
            assert fork.stop in ("length", "stop") and fork.tokens
            text = (*PROMPT, *whole.tokens)
            scores = await engine.score(text)
            assert scores.prompt_logprobs is not None and scores.spans[0].version == 0
            assert scores.prompt_logprobs[len(PROMPT) - 1 :] == pytest.approx(whole.logprobs, abs=1e-4)
            with pytest.raises(ValueError, match="request nobody is not known"):
                await engine.generate(Request("f", (), Sampling(max_tokens=5), fork=Fork("nobody", 0)))
            with pytest.raises(ValueError, match="no adapter north is loaded"):
                await engine.generate(request("a", PROMPT, 100, seed=1, adapter="north"))
            await controlled(engine)

    asyncio.run(go())


async def controlled(engine: Engine) -> None:
    """Drain, resume, abort: the same for the process and for the fake."""
    before = await sampled(engine)
    running = [asyncio.ensure_future(engine.generate(request(f"c{i}", PROMPT, LONG, seed=1))) for i in range(2)]

    async def begun() -> bool:
        return await sampled(engine) > before + 4

    await until(begun)
    drained = asyncio.ensure_future(engine.drain())
    await asyncio.sleep(0)
    late = asyncio.ensure_future(engine.generate(request("late", PROMPT, 3, seed=1)))
    await drained
    assert {(await task).stop for task in running} == {"length"} and not late.done()
    await engine.resume()
    assert (await late).stop == "length"
    aborted = [asyncio.ensure_future(engine.generate(request(f"x{i}", PROMPT, ENDLESS, seed=1))) for i in range(6)]
    before = await sampled(engine)
    await until(begun)
    await engine.abort()
    ends = await asyncio.gather(*aborted)
    assert {end.stop for end in ends} == {"interrupted"} and any(end.tokens for end in ends)
    assert (await engine.generate(request("after", PROMPT, 3, seed=1))).stop == "length"


def test_the_fake_is_controlled_alike() -> None:
    async def go() -> None:
        engine = FakeEngine(seconds_per_token=0.001, length=lambda rng: ENDLESS)
        await engine.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
        await controlled(engine)
        with pytest.raises(ValueError, match="nobody is not known"):
            await engine.generate(Request("f", (), Sampling(), fork=Fork("nobody", 0)))
        await engine.load(
            WeightUpdate(
                version=4,
                kind="adapter",
                fingerprint="fake-4",
                nbytes=0,
                seconds=0.0,
                adapter=AdapterSpec("north", 8, 16.0),
            )
        )
        answer = await engine.generate(request("a", PROMPT, 2, seed=1, adapter="north"))
        assert set(answer.versions()) == {4}

    asyncio.run(go())


def test_a_death_interrupts_forks_and_nothing_else_and_a_drain_outlives_it(long_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(long_llama, open_launcher(tmp_path), context_length=ENDLESS + 100, kv_gib=0.1) as (engine, _):
            alone = await engine.generate(request("alone", PROMPT, LONG, seed=1))
            plain = asyncio.ensure_future(engine.generate(request("plain", PROMPT, LONG, seed=1, prompt_logprobs=True)))
            fork = asyncio.ensure_future(engine.generate(Request("fork", (), Sampling(max_tokens=ENDLESS, ignore_eos=True), fork=Fork("alone", 3))))  # fmt: skip
            before = await sampled(engine)

            async def begun() -> bool:
                return bool(engine.unfinished()["fork"].tokens) and await sampled(engine) > before

            await until(begun)
            draining = asyncio.ensure_future(engine.drain())
            await asyncio.sleep(0)
            engine.kill()
            late = asyncio.ensure_future(engine.generate(request("late", PROMPT, 3, seed=1)))
            assert (await fork).stop == "interrupted" and (await fork).tokens
            stats = await engine.stats()
            assert stats.sampled_tokens > before and stats.version == 0
            answer = await plain
            await draining
            assert not late.done(), "the process that replaced it admits nobody new either"
            await engine.resume()
            assert (await late).stop == "length"
            assert answer.tokens == alone.tokens and answer.stop == "length"
            assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(PROMPT) - 1

    asyncio.run(go())


def test_updates_are_streamed_and_a_death_in_their_middle_leaves_nothing_half(long_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(long_llama, open_launcher(tmp_path), context_length=ENDLESS + 100, kv_gib=0.1) as (
            engine,
            publish,
        ):
            outputs: list[StepOutput] = []
            engine.listen(outputs.append)
            running = [
                asyncio.ensure_future(engine.generate(request(f"r{i}", PROMPT, ENDLESS, seed=1))) for i in range(10)
            ]  # most wait

            async def begun() -> bool:
                return sum(bool(told.tokens) for told in engine.unfinished().values()) == 4

            async def new_ones() -> bool:
                return outputs[-1].version == 1 and outputs[-1].token_count > 0

            await until(begun)
            report = await engine.load(publish(1), parts=6)
            await until(new_ones)
            await engine.abort()
            answers = await asyncio.gather(*running)
            assert {answer.stop for answer in answers[-4:]} == {"interrupted"} and not answers[-1].tokens
            assert report.version == 1 and report.mixed_tokens > 0
            mixed = [span for answer in answers for span in answer.spans if span.mixed]
            assert mixed and {span.version for span in mixed} == {0}
            assert {span.version for answer in answers for span in answer.spans} == {0, 1}
            assert sum(told.token_count for told in outputs) == sum(len(answer.tokens) for answer in answers)
            assert sum(told.token_count for told in outputs if told.mixed) == report.mixed_tokens

            loading = asyncio.ensure_future(engine.load(publish(2), parts=6))
            await asyncio.sleep(0.002)
            engine.kill()
            assert (await loading).version == 2
            answer = await engine.generate(request("after", PROMPT, 5, seed=1))
            assert {(span.version, span.mixed) for span in answer.spans} == {(2, False)}

    asyncio.run(go())


def test_a_worker_shows_where_it_stands_when_it_is_asked(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = tmp_path / "engine.stacks"
    monkeypatch.setenv("HEADRACE_STACKS", str(stacks))

    async def go() -> None:
        async with opened(tiny_llama, open_launcher(tmp_path)) as (engine, _):
            os.kill(worker_of(engine).pid, signal.SIGUSR1)

            async def shown() -> bool:
                return "most recent call first" in stacks.read_text() and "engine_loop.py" in stacks.read_text()

            await until(shown)
            assert (await engine.generate(request("r", PROMPT, 3, seed=1))).stop == "length", "and goes on"

    asyncio.run(go())


def test_the_log_of_a_worker_that_native_code_ends_says_where_it_was(tiny_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(tiny_llama, open_launcher(tmp_path)) as (engine, _):
            os.kill(worker_of(engine).pid, signal.SIGFPE)
            assert (await engine.generate(request("r", PROMPT, 3, seed=1))).stop == "length", "it was replaced"

    asyncio.run(go())
    (log,) = tmp_path.rglob("engine.log")
    assert "Floating point exception" in log.read_text() and "engine_loop.py" in log.read_text()
