"""The bus for rollouts: letters a second, time from a post to a claim, and trained tokens a second of a run over it against a local one.

    python benchmarks/bus.py letters [--letters 500] [--bytes 50000]
    python benchmarks/bus.py runs MODEL [--rounds 3]     MODEL: a directory; a run of 12 steps each, local, over files and over Redis in turn

Needs redis-server for its rows. Seconds are by the clock: compare the rows of one output with each other, and no outputs of two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import headrace
from headrace.facts.records import read_metrics
from headrace.run.hosts.bus.bus_port import Bus, Posting
from headrace.run.hosts.bus.directory_bus import JsonlBus
from headrace.run.hosts.bus.redis_streams import RedisBus
from headrace.testing.memory_bus import MemoryBus, MemoryServer

REWARD = """
def share_of_e(prompts, completions, **columns):
    return [text.count("e") / max(len(text), 1) for text in completions]
"""


@contextmanager
def redis_server(fsync: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", ""]
        words += ["--appendonly", "yes", "--appendfsync", fsync]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        time.sleep(1.0)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


# --- letters -------------------------------------------------------------------------------------------------------------


async def letters(run: Bus, host: Bus, count: int, size: int) -> str:
    """One letter there and back at a time, and then as many as the bus takes."""
    body, delays = os.urandom(size), []

    async def take() -> None:
        taken = 0
        while taken < count // 5:
            for letter in await host.claim("tickets", "host", most=1, wait=5.0):
                delays[taken] = time.perf_counter() - delays[taken]
                taken += 1
                await host.settle("tickets", [letter.id])

    taking = asyncio.ensure_future(take())
    for number in range(count // 5):
        delays.append(time.perf_counter())
        await run.post(Posting("tickets", str(number), body))
        await asyncio.sleep(0.01)
    await taking
    began = time.perf_counter()

    async def through() -> None:
        taken = 0
        while taken < count:
            found = await host.claim("tickets", "host", most=64, wait=5.0)
            taken += len(found)
            await host.settle("tickets", [letter.id for letter in found])

    passing = asyncio.ensure_future(through())
    for begin in range(0, count, 16):
        await asyncio.gather(
            *(run.post(Posting("tickets", str(n), body)) for n in range(begin, min(count, begin + 16)))
        )
    await passing
    rate, sorted_delays = count / (time.perf_counter() - began), sorted(delays)
    p50, p99 = statistics.median(sorted_delays), sorted_delays[int(0.99 * len(sorted_delays))]
    return f"{rate:.0f} letters/s   post to claim: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms"


async def letters_of_all(count: int, size: int) -> None:
    server = MemoryServer()
    print(f"memory           {await letters(MemoryBus(server), MemoryBus(server), count, size)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        print(f"files            {await letters(JsonlBus(place), JsonlBus(place), count, size)}", flush=True)
    for fsync in ("everysec", "always"):
        with redis_server(fsync) as url:
            run, host = RedisBus(url, "bench"), RedisBus(url, "bench")
            print(f"Redis {fsync:<10} {await letters(run, host, count, size)}", flush=True)
            await run.close()
            await host.close()


# --- runs ----------------------------------------------------------------------------------------------------------------


def a_run(directory: Path, model: str, name: str, bus: str) -> float:
    """Returns trained tokens a second, from the first step to the last."""
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(200)]
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "reward.py").write_text(REWARD)
    config: dict[str, Any] = {
        "name": name,
        "out": str(directory / "runs"),
        "model": {"path": model},
        "task": {"kind": "jsonl", "path": str(directory / "rows.jsonl"), "held_out": 16},
        "reward": {"function": f"{directory / 'reward.py'}:share_of_e"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "train": {"steps": 30, "learning_rate": 1e-3, "dtype": "float32", "threads": 1},
        "engine": {"dtype": "float32", "kv_gib": 0.05, "context_length": 64, "max_running": 16, "threads": 1},
        "staleness": {"groups_per_step": 4, "max_lag": 1},
        "checkpoint": {"every": 0},
        "eval": {"prompts": 0},
        "observe": {"terminal": "off"},
        **({"orchestration": {"bus": bus}} if bus else {}),
    }
    words = [sys.executable, "-m", "headrace", "rollouts", "--bus", bus, "--set", "engine.threads=1"]
    host = subprocess.Popen(words, stderr=subprocess.DEVNULL) if bus else None
    try:
        headrace.train(config)
    finally:
        if host:
            host.wait(60)
    steps = [fact for fact in read_metrics(directory / "runs" / name) if type(fact).__name__ == "StepRow"]
    tokens = sum(step.report.loss_tokens for step in steps[1:])
    return tokens / (steps[-1].t - steps[0].t)


def runs(model: str, rounds: int) -> None:
    found: dict[str, list[float]] = {"local": [], "files": [], "Redis": []}
    with tempfile.TemporaryDirectory() as place, redis_server("everysec") as url:
        for number in range(rounds):
            buses = {"local": "", "files": f"jsonl:{place}/bus", "Redis": url}
            for name, bus in buses.items():
                found[name].append(a_run(Path(place), model, f"{name}{number}", bus))
                print(name, f"{found[name][-1]:.0f} trained tokens/s", flush=True)
    for name, rates in found.items():
        ratios = [rate / local for rate, local in zip(rates, found["local"], strict=True)]
        print(f"{name:<6} {statistics.median(rates):.0f} trained tokens/s, {statistics.median(ratios):.2f} of local")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("letters", "runs"))
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--letters", type=int, default=500)
    parser.add_argument("--bytes", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "letters":
        asyncio.run(letters_of_all(given.letters, given.bytes))
    else:
        runs(given.model, given.rounds)


if __name__ == "__main__":
    main()
