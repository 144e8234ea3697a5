"""What does HTTP cost? The same engine in a process of this machine, and behind `headrace serve`.

    python benchmarks/serving.py [--model smollm2-135m-instruct] [--rounds 5] [--tokens 64] [--json figures.json]

Both are alive throughout, each with its own engine process on the same cores; only one works at a time, and rounds are interleaved. In
process: `ProcessEngine`, as a run uses it. HTTP: `RemoteEngine` and the dialect of `headrace serve`, streams included, as a run with
`engine.kind = "headrace"` uses it. Three loads: one request of one token at a time, 64 at once of one token, and 64 at once of `--tokens`.

Seconds are wall time; CPU is that of all processes of the way (this one, the engine, the server), in user and system time. On a busy machine
read the CPU columns and the ratios, which are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from headrace.core.types import Completion, Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.headrace import HeadraceDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.models.resolve import resolve_model
from headrace.serve.config import ServeConfig
from headrace.serve.start import opened
from headrace.weight_sync.directory import offer

AT_ONCE = 64
PROMPT = 32
"""Tokens of a prompt."""
ALONE = 30
"""Requests of the load that sends one at a time."""
Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True)
class Figures:
    seconds: float
    cpu: float
    tokens: int
    latency: float
    """Median seconds of one request."""


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of some processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def requests(count: int, tokens: int, seed: int) -> list[Request]:
    drawn = random.Random(seed)
    return [
        Request(
            f"{seed}.{number}",
            tuple(drawn.randrange(100, 20_000) for _ in range(PROMPT)),
            Sampling(max_tokens=tokens, ignore_eos=True, seed=number),
        )
        for number in range(count)
    ]


async def measured(generate: Generate, pids: Sequence[int], asked: Sequence[Request], at_once: int) -> Figures:
    room, latencies = asyncio.Semaphore(at_once), []

    async def one(request: Request) -> int:
        async with room:
            begun = time.perf_counter()
            completion = await generate(request)
            latencies.append(time.perf_counter() - begun)
            return len(completion.tokens)

    cpu, begun = cpu_seconds(pids), time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, asked)))
    seconds = time.perf_counter() - begun
    if tokens != sum(request.sampling.max_tokens for request in asked):
        raise RuntimeError(f"{tokens} tokens came")
    return Figures(seconds, cpu_seconds(pids) - cpu, tokens, median(latencies))


async def compare(model: str, rounds: int, tokens: int) -> dict[str, dict[str, list[Figures]]]:
    loads = {
        "one request of 1 token at a time": (ALONE, 1, 1),
        f"{AT_ONCE} at once, 1 token": (4 * AT_ONCE, 1, AT_ONCE),
        f"{AT_ONCE} at once, {tokens} tokens": (AT_ONCE, tokens, AT_ONCE),
    }
    directory = resolve_model(model)
    settings = EngineConfig(dtype="bfloat16", kv_gib=1.0, context_length=512, max_running=AT_ONCE)
    figures: dict[str, dict[str, list[Figures]]] = {name: {"in process": [], "HTTP": []} for name in loads}
    with tempfile.TemporaryDirectory() as logs:
        own = set(children(os.getpid()))
        async with opened(ServeConfig(model=model, engine=settings), directory, Path(logs)) as serving:
            inside = [os.getpid(), *(set(children(os.getpid())) - own)]
            server, url = start_server(model, settings)
            remote = engine_at(url)
            try:
                await remote.open()
                own_weights = msgspec.structs.replace(offer(directory), where={"path": str(directory)})
                await remote.load(own_weights)  # the server has them already: they are not loaded again
                outside = [os.getpid(), server.pid, *children(server.pid)]
                ways: dict[str, tuple[Generate, list[int]]] = {
                    "in process": (serving.engine.generate, inside),
                    "HTTP": (remote.generate, outside),
                }
                for number in range(rounds + 1):  # the first warms up
                    for name, (count, length, at_once) in loads.items():
                        for way, (generate, pids) in ways.items():
                            asked = requests(count, length, seed=hash((number, name, way)) % 1_000_003)
                            found = await measured(generate, pids, asked, at_once)
                            if number:
                                figures[name][way].append(found)
            finally:
                await remote.close()
                server.terminate()
                server.wait()
    return figures


def start_server(model: str, settings: EngineConfig) -> tuple[subprocess.Popen[str], str]:
    names = ("dtype", "kv_gib", "context_length", "max_running")
    sets = [word for name in names for word in ("--set", f"engine.{name}={json.dumps(getattr(settings, name))}")]
    command = [sys.executable, "-m", "headrace", "serve", model, "--port", "0", *sets]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    if not (found := re.search(r"at (http://\S+)$", line.strip())):
        raise RuntimeError(f"the server said {line!r}")
    return server, found[1]


def engine_at(url: str) -> RemoteEngine:
    clock = asyncio.get_running_loop().time
    telemetry = Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e9, 2e9))
    return RemoteEngine(Connection(url), HeadraceDialect(), patience=600.0, max_deaths=1, telemetry=telemetry)


def table(figures: dict[str, dict[str, list[Figures]]]) -> str:
    rows = [
        "| load | in process | HTTP | ratio | CPU in process | CPU HTTP | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ways in figures.items():
        inside, outside = ways["in process"], ways["HTTP"]
        if name.startswith("one"):
            shown = [f"{1e3 * median(one.latency for one in way):.1f} ms" for way in (inside, outside)]
            ratio = median(b.latency / a.latency for a, b in zip(inside, outside, strict=True))
        elif "1 token" in name.split(", ")[1]:
            shown = [f"{median(one.tokens / one.seconds for one in way):,.0f} requests/s" for way in (inside, outside)]
            ratio = median(a.seconds / b.seconds for a, b in zip(inside, outside, strict=True))
        else:
            shown = [f"{median(one.tokens / one.seconds for one in way):,.0f} tokens/s" for way in (inside, outside)]
            ratio = median(a.seconds / b.seconds for a, b in zip(inside, outside, strict=True))
        cpu = [f"{1e3 * median(one.cpu / one.tokens for one in way):.2f} ms a token" for way in (inside, outside)]
        cost = median(b.cpu / a.cpu for a, b in zip(inside, outside, strict=True))
        rows.append(f"| {name} | {shown[0]} | {shown[1]} | {ratio:.2f} | {cpu[0]} | {cpu[1]} | {cost:.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = asyncio.run(compare(given.model, given.rounds, given.tokens))
    if given.json:
        raw: Any = {
            name: {way: [vars(one) for one in every] for way, every in ways.items()} for name, ways in figures.items()
        }
        given.json.write_text(json.dumps(raw))
    print(
        f"{given.model}, {os.cpu_count()} CPUs ({platform.processor() or platform.machine()}), load {os.getloadavg()[0]:.1f}"
    )
    print(table(figures))


if __name__ == "__main__":
    main()
