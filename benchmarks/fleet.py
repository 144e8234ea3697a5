"""A fleet of two replicas with one core each against one engine with two cores, and the fleet after one of its processes was killed.

    python benchmarks/fleet.py MODEL [--rounds 5]

Both are loaded at once, and are measured in turns. Printed are medians: tokens per second of each, their ratio in the same round; then the
seconds from SIGKILL of one replica until its requests have their next token elsewhere and until a new process of it serves, and the tokens
that were sampled twice. Run it on a machine with two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

from headrace.core.protocols import Engine, Job
from headrace.core.steps import StepOutput
from headrace.core.types import Request, RolloutKey, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import Fact, MemberMoved
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.models.resolve import resolve_model
from headrace.native.resources import usable_cores
from headrace.processes.launch.local import LocalLauncher
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.fleets.core_shares import members_of
from headrace.run.worker.worker_messages import EngineStart
from headrace.weight_sync.directory import offer

GROUPS, SIZE, PROMPT, NEW = 16, 8, 128, 96


def requests_of(round_number: int) -> list[Request]:
    """Prompts that no cache holds yet."""
    made = []
    for group in range(GROUPS):
        ticket = round_number * GROUPS + group
        prompt = tuple(100 + (ticket * 7 + place * 13) % 9000 for place in range(PROMPT))
        for index in range(SIZE):
            sampling = Sampling(max_tokens=NEW, seed=ticket * SIZE + index, ignore_eos=True)
            made.append(Request(str(RolloutKey(ticket, index)), prompt, sampling))
    return made


async def rate(engine: Engine, round_number: int) -> float:
    """Tokens per second."""
    requests, began = requests_of(round_number), time.perf_counter()
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(one.tokens) for one in done) / (time.perf_counter() - began)


class Bench:
    def __init__(self, model: Path, logs: Path, cores: tuple[int, ...]) -> None:
        self._model, self._launcher = model, LocalLauncher(logs)
        self._config = EngineConfig(context_length=PROMPT + NEW, max_running=GROUPS * SIZE, kv_gib=1.0, cores=cores)
        self.facts: list[Fact] = []
        clock = time.perf_counter
        self._telemetry = Telemetry(self.facts.append, clock, Waits(self.facts.append, clock, 1e6, 1e6))

    async def engine(self, config: EngineConfig, who: str) -> ProcessEngine:
        engine = ProcessEngine(self._launcher, Job("engine", who, config.cores), 3, self._telemetry)
        await engine.launch()
        await engine.open(EngineStart(str(self._model), dataclasses.asdict(config), {}))
        return engine

    async def one(self) -> Engine:
        one = await self.engine(dataclasses.replace(self._config, threads=len(self._config.cores)), "one")
        await one.load(offer(self._model))
        return one

    async def fleet(self) -> Fleet:
        members = members_of(dataclasses.replace(self._config, replicas=2))
        parts = {name: await self.engine(config, f"engine {name}") for name, config in members.items()}
        fleet = Fleet(parts, FleetPatience(), self._telemetry)
        await fleet.open()
        await fleet.load(offer(self._model))
        return fleet

    async def recovery(self, fleet: Fleet, round_number: int) -> None:
        requests, told = requests_of(round_number), Counter[str]()
        quarter, next_token = asyncio.Event(), asyncio.Event()
        moved: set[str] = set()

        def heard(output: StepOutput) -> None:
            told.update(name for name, *_ in output.sampled())
            if told.total() >= len(requests) * NEW // 4:
                quarter.set()
            if moved & set(output.requests):
                next_token.set()

        fleet.listen(heard)
        tasks = [asyncio.ensure_future(fleet.generate(request)) for request in requests]
        await quarter.wait()
        first = fleet.members[0]
        moved |= set(first.attempts)
        pid = first.engine._keeper._worker.pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        await next_token.wait()
        elsewhere = time.perf_counter() - killed
        done = await asyncio.gather(*tasks)
        while not first.serves:
            await fleet._rotation.change()
        back = next(fact.t for fact in self.facts if isinstance(fact, MemberMoved) and fact.state == "serving") - killed
        again = told.total() - sum(len(one.tokens) for one in done)
        short = sum(len(one.tokens) != NEW for one in done)
        print(
            f"killed with {len(moved)} requests: next token elsewhere after {elsewhere:.2f} s, serves again after {back:.1f} s"
        )
        print(f"tokens sampled twice: {again}; completions that are too short: {short}")


async def measure(model: Path, rounds: int, logs: Path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    bench = Bench(model, logs, cores)
    one, fleet = await bench.one(), await bench.fleet()
    try:
        rates: list[tuple[float, float]] = []
        for number in range(rounds + 1):  # the first one warms up
            order: list[Engine] = [one, fleet] if number % 2 else [fleet, one]
            found = {engine: await rate(engine, number) for engine in order}
            rates.append((found[one], found[fleet]))
        kept = rates[1:]
        ratio = statistics.median(fleet_rate / one_rate for one_rate, fleet_rate in kept)
        print(f"one engine, two cores: {statistics.median(a for a, _ in kept):.0f} tokens/s")
        print(
            f"two replicas, a core each: {statistics.median(b for _, b in kept):.0f} tokens/s, {ratio:.2f} times the one"
        )
        await bench.recovery(fleet, rounds + 1)
    finally:
        await asyncio.gather(one.close(), fleet.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    assert usable_cores() >= 2, "two cores are needed"
    with tempfile.TemporaryDirectory() as logs:
        asyncio.run(measure(resolve_model(given.model), given.rounds, Path(logs)))


if __name__ == "__main__":
    main()
