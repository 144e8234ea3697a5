"""How many engines can one controller serve? A thousand of them over real sockets, in a few processes that hold many connections each.

    python benchmarks/controller.py [--hosts 1000] [--processes 4] [--rows 8] [--passes 2] [--seconds 30] [--profile FILE]

The controller is that of a run: listener, greeting, frames, keepers, fleet, pipeline, journal, passes. Trainer, task, scorer and engines are fakes:
an engine answers at once, and sends the tokens of its `--rows` sequences `--passes` times a second. Printed are

- the CPU time of the controller per second, and the frames that it handles per second of CPU time;
- the CPU time of single turns of its event loop: their p99 and the longest. That is how late anything in the loop can be for its own
  sake; on a machine that others use, a clock would measure them. The lag by the clock is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import multiprocessing
import pstats
import random
import resource
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.rotation import FleetPatience
from headrace.observe.facts import Fact, StepTrained
from headrace.observe.health.waits import Waits
from headrace.observe.telemetry import Telemetry
from headrace.orchestration.clients.process_engine import ProcessEngine
from headrace.orchestration.workers.joining.greeting import SILENCE, Agreed, Hello, Terms, Welcome, packed
from headrace.orchestration.workers.joining.joined import JoinLauncher
from headrace.orchestration.workers.joining.listener import Listener
from headrace.orchestration.workers.joining.packages import own_packages
from headrace.orchestration.workers.wire import BEAT, BEATS, HEAD, Frame, decode, length_of, pack, pack_payload, unpack
from headrace.orchestration.workers.worker_messages import EngineStart
from headrace.protocols import Job
from headrace.reports import EngineStats, LoadReport, capable
from headrace.rollouts.rollout import RolloutConfig
from headrace.rollouts.staleness import StalenessConfig
from headrace.scoring.fake import FakeScorer
from headrace.simulate.world import World
from headrace.steps import Finished, PromptScores, StepOutput
from headrace.tasks.fake import FakeTask
from headrace.trainer.fake import FakeTrainer
from headrace.types import Request
from headrace.version import __version__
from headrace.weights import WeightUpdate

GROUP, TOKENS = 8, (20, 60)
"""Rollouts of a group, and the fewest and most tokens of a completion."""


# --- the hosts -----------------------------------------------------------------------------------------------------------


class Host:
    """One connection that behaves like a worker with an engine."""

    def __init__(self, number: int, token: str, passes: float) -> None:
        self._number, self._token, self._passes = number, token, passes
        self._rows: dict[str, int] = {}
        """Tokens that are missing, by request."""
        self._version, self._sampled, self._frames = -1, 0, 0
        self._rng = random.Random(number)

    async def run(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        place = {"host": f"node-{self._number // 8}", "pid": self._number + 1}
        hello = Hello(__version__, self._token, "engine", packages=own_packages(), **place)
        self._writer.write(packed(hello))
        while (welcome := await self._greeting()).terms or welcome.waiting:
            if welcome.terms:
                self._writer.write(packed(Agreed("/model")))
        assert not welcome.refused, welcome.refused
        beats = [asyncio.ensure_future(one) for one in (self._beat(), self._generate())]
        try:
            while True:
                head = await self._reader.readexactly(HEAD)
                self._obey(decode(await self._reader.readexactly(length_of(head))))
        except (EOFError, ConnectionError):
            pass
        finally:
            for one in beats:
                one.cancel()

    async def _greeting(self) -> Welcome:
        head = await self._reader.readexactly(HEAD)
        return msgspec.msgpack.decode(await self._reader.readexactly(length_of(head)), type=Welcome)

    def _send(self, frame: Frame) -> None:
        self._writer.write(pack(msgspec.structs.replace(frame, number=self._frames)))
        self._frames += 1

    def _push(self, method: str, payload: Any) -> None:
        self._send(Frame(0, method, pack_payload(payload)))

    async def _beat(self) -> None:
        await asyncio.sleep(self._rng.random())
        while True:
            await asyncio.sleep(SILENCE / BEATS)
            self._push(BEAT, None)
            self._push("stats", self._stats())

    async def _generate(self) -> None:
        await asyncio.sleep(self._rng.random() / self._passes)
        while True:
            await asyncio.sleep(1 / self._passes)
            if self._rows and self._version >= 0:
                self._pass()

    def _pass(self) -> None:
        names, ended = tuple(self._rows), list[Finished]()
        for name in names:
            self._rows[name] -= 1
            if not self._rows[name]:
                del self._rows[name]
                ended.append(Finished(name, "stop"))
        self._sampled += len(names)
        columns = (7,) * len(names), (-1.0,) * len(names), (self._version,) * len(names)
        self._push("output", StepOutput(self._version, names, *columns, finished=tuple(ended)))

    def _stats(self) -> EngineStats:
        return EngineStats(len(self._rows), 0, sampled_tokens=self._sampled, version=self._version)

    def _obey(self, frame: Frame) -> None:
        answer: Any = None
        match frame.method:
            case "start":
                answer = capable(1 << 20, "benchmark")
            case "stats":
                answer = self._stats()
            case "load":
                update, _ = unpack(frame.payload, tuple[WeightUpdate, int])
                self._version = update.version
                answer = LoadReport(update.version, 0.0, 0.0)
            case "add":
                self._add(unpack(frame.payload, Request))
            case "cancel":
                self._rows.pop(unpack(frame.payload, str), None)
        if frame.id:
            self._send(Frame(frame.id, frame.method, pack_payload(answer)))

    def _add(self, request: Request) -> None:
        if request.prompt_logprobs:
            scores = PromptScores(request.id, self._version, (-1.0,) * (len(request.prompt) - 1))
            self._push(
                "output", StepOutput(self._version, finished=(Finished(request.id, "length"),), scores=(scores,))
            )
        else:
            self._rows[request.id] = max(1, random.Random(request.sampling.seed).randint(*TOKENS) - len(request.prefix))


def hosts(address: str, token: str, numbers: range, passes: float) -> None:
    """One process of hosts."""

    async def run() -> None:
        await asyncio.gather(*(Host(number, token, passes).run(address) for number in numbers))

    _more_files()
    asyncio.run(run())


# --- the controller ------------------------------------------------------------------------------------------------------


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Keeps the CPU time of every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns.append(time.thread_time() - began)


class Counts:
    """An observer that writes every fact down, as a run's metrics do."""

    def __init__(self) -> None:
        self.facts: Counter[str] = Counter()
        self._encode = msgspec.json.Encoder().encode
        self.steps = 0

    def record(self, fact: Fact) -> None:
        self.facts[type(fact).__name__] += 1
        self.steps += isinstance(fact, StepTrained)
        self._encode(fact)


class _Counting:
    """A launcher whose frames are counted."""

    def __init__(self, inner: JoinLauncher, frames: Counter[str]) -> None:
        self._inner, self._frames = inner, frames

    def worker(self, job: Job, heard: Any) -> Any:
        def counted(method: str, payload: Any) -> None:
            self._frames[method] += 1
            heard(method, payload)

        return self._inner.worker(job, counted)


async def serve(given: argparse.Namespace, directory: Path) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MeasuredLoop)
    counts, frames, token = Counts(), Counter[str](), secrets.token_hex(16)
    telemetry = Telemetry(counts.record, time.monotonic, Waits(counts.record, time.monotonic, 1e5, 1e6))
    listener = Listener(token, terms=Terms("model", {}), say=print)
    await listener.open()
    launcher = _Counting(JoinLauncher(listener, telemetry), frames)
    each = -(-given.hosts // given.processes)
    spawn = multiprocessing.get_context("spawn")
    children = [
        spawn.Process(
            target=hosts,
            args=(listener.address, token, range(at, min(given.hosts, at + each)), given.passes),
            daemon=True,
        )
        for at in range(0, given.hosts, each)
    ]
    for child in children:
        child.start()
    parts = {str(i): ProcessEngine(launcher, Job("engine", f"engine {i}"), 3, telemetry) for i in range(given.hosts)}

    async def up(part: ProcessEngine) -> None:
        await part.launch()
        await part.open(EngineStart("", {}, {}))

    began = time.process_time()
    await asyncio.gather(*map(up, parts.values()))
    print(
        f"{given.hosts} engines joined after {time.process_time() - began:.1f} s of CPU time; turned away: {dict(listener.turned_away)}"
    )
    fleet = Fleet(parts, FleetPatience(every=max(1.0, given.hosts / 100)), telemetry)
    await fleet.open()
    in_flight = max(2, given.hosts * given.rows // GROUP)
    world = World(
        directory,
        StalenessConfig(groups_per_step=in_flight // 2, max_lag=1),
        engine=fleet,
        trainer=FakeTrainer(0.2),
        task=FakeTask(),
        scorer=FakeScorer(),
        observer=counts,  # type: ignore[arg-type]
        steps=1_000_000,
        rollout=RolloutConfig(group_size=GROUP, max_tokens=TOKENS[1] + 1, patience=10_000),
        identity_every=10,
    )
    running = asyncio.ensure_future(world.run())
    await asyncio.sleep(given.warm)
    await _measure(loop, given, counts, frames, lambda: world.pipeline.step)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for child in children:
        child.terminate()


async def _measure(
    loop: MeasuredLoop, given: argparse.Namespace, counts: Counts, frames: Counter[str], step: Any
) -> None:
    loop.turns.clear()
    frames.clear()
    late: list[float] = []
    cpu, clock, before = time.process_time(), time.monotonic(), step()
    while time.monotonic() - clock < given.seconds:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - due)
    seconds, spent = time.monotonic() - clock, time.process_time() - cpu
    turns, late = sorted(loop.turns), sorted(late)
    heard = frames.total()
    print(
        f"in {seconds:.0f} s: {step() - before} steps; pushes a second: "
        + ", ".join(f"{name} {count / seconds:.0f}" for name, count in frames.items())
    )
    print(f"CPU          {spent / seconds:.0%} of a core, {heard / spent:.0f} pushes per second of CPU time")
    print(
        f"loop turns   CPU time: p50 {statistics.median(turns) * 1e3:.1f} ms, p99 {turns[int(0.99 * len(turns))] * 1e3:.1f} ms, longest {turns[-1] * 1e3:.0f} ms ({len(turns) / seconds:.0f} a second)"
    )
    print(
        f"loop lag     by the clock: p50 {statistics.median(late) * 1e3:.1f} ms, p99 {late[int(0.99 * len(late))] * 1e3:.1f} ms, longest {late[-1] * 1e3:.0f} ms"
    )
    print(f"facts a second: {dict(counts.facts)}")


@contextlib.contextmanager
def profiled(file: str) -> Iterator[None]:
    if not file:
        yield
        return
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        profile.dump_stats(file)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def _more_files() -> None:
    """A connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a host")
    parser.add_argument("--passes", type=float, default=2.0, help="outputs of a host a second")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--profile", default="", help="writes a profile there")
    given = parser.parse_args()
    _more_files()
    with (
        tempfile.TemporaryDirectory() as name,
        asyncio.Runner(loop_factory=MeasuredLoop) as runner,
        profiled(given.profile),
    ):
        runner.run(serve(given, Path(name) / "run"))


if __name__ == "__main__":
    main()
