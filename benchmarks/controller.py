"""How many hosts can one controller serve? A thousand of them over real sockets, in a few processes that hold many each.

    python benchmarks/controller.py [--hosts 1000] [--processes 2] [--rows 8] [--passes 2] [--seconds 30] [--bus] [--profile FILE]

The controller is that of a run: pipeline, buffer, journal, passes, and either listener, greeting, frames, keepers and fleet (hosts dial in as engines) or,
with `--bus`, desk and Redis (hosts take tickets). Trainer, task, scorer and hosts are fakes: a host answers at once, and its `--rows`
sequences get `--passes` tokens a second. Printed are

- the CPU time of the controller per second, and what it receives per second of CPU time;
- the lag of its event loop. By CPU time: for its own turns alone, which other processes do not change. By the clock: on a machine whose cores the
  hosts share, that is more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import secrets
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from controller_hosts import GROUP, TOKENS, bus_hosts, hosts, more_files
from controller_load import BareWorld, Counts, MeasuredLoop, measure, profiled

from headrace.core.protocols import Engine, Job
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.rotation import FleetPatience
from headrace.episodes.rollout import RolloutConfig
from headrace.facts.facts import EngineSample, Fact
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import Suspects
from headrace.loop.staleness import StalenessConfig
from headrace.processes.joining.greeting import Terms
from headrace.processes.joining.joined import JoinLauncher
from headrace.processes.joining.listener import Listener
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.hosts.bus.bus_port import Bus
from headrace.run.hosts.bus.redis_streams import RedisBus
from headrace.run.hosts.bus_messages import GroupSizes, RunNotice
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_task import FakeTask
from headrace.testing.fake_trainer import FakeTrainer
from headrace.version import __version__


class Counted:
    """Counts the calls of some methods of an object, by name or by what they bring."""

    def __init__(self, inner: Any, frames: Counter[str], *names: str) -> None:
        self._inner, self._frames, self._names = inner, frames, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._brought(name, found) if name in self._names else found

    def _brought(self, name: str, method: Callable[..., Any]) -> Any:
        async def counted(*given: Any, **named: Any) -> Any:
            brought = await method(*given, **named)
            self._frames[name] += len(brought)
            return brought

        return counted


class CountedLauncher:
    """A launcher whose pushes are counted."""

    def __init__(self, inner: JoinLauncher, frames: Counter[str]) -> None:
        self._inner, self._frames = inner, frames

    def worker(self, job: Job, heard: Any) -> Any:
        def counted(method: str, payload: Any) -> None:
            self._frames[method] += 1
            heard(method, payload)

        return self._inner.worker(job, counted)


class Bench:
    def __init__(self, given: argparse.Namespace, directory: Path) -> None:
        self.given, self._directory = given, directory
        self.counts, self.frames = Counts(), Counter[str]()
        clock = time.monotonic
        self.telemetry = Telemetry(self.counts.record, clock, Waits(self.counts.record, clock, 1e5, 1e6))
        self._children: list[Any] = []

    def start(self, target: Callable[..., None], *before: Any, after: tuple[Any, ...]) -> None:
        """Starts the processes of hosts: `target(*before, numbers, *after)`."""
        given, spawn = self.given, multiprocessing.get_context("spawn")
        each = -(-given.hosts // given.processes)
        for at in range(0, given.hosts, each):
            numbers = range(at, min(given.hosts, at + each))
            child = spawn.Process(target=target, args=(*before, numbers, *after), daemon=True)
            child.start()
            self._children.append(child)

    async def run(self, engine: Engine, **more: Any) -> None:
        given, loop = self.given, asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        in_flight = max(2, given.hosts * given.rows // GROUP)
        world = BareWorld(
            self._directory,
            StalenessConfig(groups_per_step=in_flight // 2, max_lag=1),
            engine=engine,
            trainer=FakeTrainer(0.2),
            task=FakeTask(),
            scorer=FakeScorer(),
            observer=self.counts,  # type: ignore[arg-type]
            steps=1_000_000,
            rollout=RolloutConfig(group_size=GROUP, max_tokens=TOKENS[1] + 1, patience=10_000),
            identity_every=10,
            **more,
        )
        running = asyncio.ensure_future(world.run())
        await asyncio.wait([running], timeout=given.warm)
        if running.done():
            running.result()
        with profiled(given.profile):
            await measure(
                loop,
                given.seconds,
                facts=self.counts.facts,
                frames=self.frames,
                step=lambda: world.pipeline.step,
            )
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def end(self) -> None:
        for child in self._children:
            child.terminate()
            child.join()


async def serve_joined(bench: Bench) -> None:
    given, token = bench.given, secrets.token_hex(16)
    listener = Listener(token, terms=Terms("model", {}), say=print)
    await listener.open()
    launcher = CountedLauncher(JoinLauncher(listener, bench.telemetry, away=given.reconnect), bench.frames)
    bench.start(hosts, listener.address, token, after=(given.passes,))
    member = dataclasses.replace(bench.telemetry, record=_without_samples(bench.counts.record))
    parts = {str(i): ProcessEngine(launcher, Job("engine", f"engine {i}"), 3, member) for i in range(given.hosts)}

    async def up(part: ProcessEngine) -> None:
        await part.launch()
        await part.open(EngineStart("", {}, {}))

    began = time.process_time()
    await asyncio.gather(*map(up, parts.values()))
    turned_away = dict(listener.turned_away)
    print(f"{given.hosts} engines joined: {time.process_time() - began:.1f} s of CPU time; turned away: {turned_away}")
    fleet = Fleet(parts, FleetPatience(every=max(1.0, given.hosts / 100)), bench.telemetry)
    began = time.process_time()
    await fleet.open()
    print(f"all serve: {time.process_time() - began:.1f} s of CPU time", flush=True)
    await bench.run(fleet)


def _without_samples(record: Callable[[Fact], None]) -> Callable[[Fact], None]:
    """As in a run: the fleet records its own."""
    return lambda fact: None if isinstance(fact, EngineSample) else record(fact)


async def serve_bus(bench: Bench, url: str) -> None:
    given = bench.given
    bus: Any = Counted(RedisBus(url, "bench"), bench.frames, "signed", "claim")

    async def opened() -> tuple[Bus, str]:
        await bus.register()
        return bus, "redis"

    sizes, suspects = GroupSizes(GROUP, 1), Suspects(3)
    engine = BusEngine("the bus", opened, "", bench.telemetry, sizes=sizes, suspects=suspects)
    await engine.launch()
    bench.start(bus_hosts, url, after=(given.rows, given.passes))
    await engine.open(RunNotice("", __version__))
    await bench.run(engine, elsewhere=engine.groups)


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", ""]
        process = subprocess.Popen([*words, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
        time.sleep(1.0)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a host")
    parser.add_argument("--passes", type=float, default=2.0, help="tokens of a sequence a second")
    parser.add_argument("--warm", type=float, default=30.0, help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--reconnect", type=float, default=0.0, help="orchestration.reconnect; hosts here never come back"
    )
    parser.add_argument("--bus", action="store_true")
    parser.add_argument("--profile", default="", help="writes a profile there")
    given = parser.parse_args()
    more_files()
    with contextlib.ExitStack() as stack:
        bench = Bench(given, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run")
        stack.callback(bench.end)
        runner = stack.enter_context(asyncio.Runner(loop_factory=MeasuredLoop))
        if given.bus:
            runner.run(serve_bus(bench, stack.enter_context(redis_server())))
        else:
            runner.run(serve_joined(bench))


if __name__ == "__main__":
    main()
