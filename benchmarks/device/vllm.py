"""vLLM on the trainer's GPU: one server through turns, then whole runs in turns, over `cuda_ipc` and under a kill. It needs vLLM, which no wheel of 64 MiB holds.

On a CPU the server is headrace's fake of it, which has no memory, and the whole runs are left out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.device import runs
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import always
from benchmarks.device.runs import Case
from headrace.core.types import Completion, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.sleeping_server import SleepingServer
from headrace.facts.facts import WeightsLive
from headrace.facts.records import read_metrics
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.chat import ChatEncoder
from headrace.run.config import load_config
from headrace.run.starting import start_engine, transport_of
from headrace.run.worker.build import open_launcher
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.servers.fake_vllm import FakeVllm
from headrace.web.limits import ServerLimits
from headrace.web.server import bind, make_server
from headrace.weight_sync.packed import lay_out

KV = 16
"""GiB of the cache of the server that is measured alone."""
TURNS = 3
LENGTH, CONTEXT = 150, 200
"""Tokens of the requests that turns interrupt, and the room for them."""
AT_ONCE = 5
LIMIT = 120.0
"""Seconds of a whole run: vLLM alone takes half of it to start."""

VLLM = ("engine.kind=vllm", "engine.kv_gib=4", 'engine.server_args=["--enforce-eager"]')
TURN, IPC = "orchestration.placement=shared", "weight_sync.kind=cuda_ipc"
NAMES = {
    "beside": "vLLM beside the trainer",
    "turns": "in turns",
    "killed": "in turns, vLLM killed",
    "adapter": "in turns, LoRA 16",
    "ipc": "cuda_ipc into vLLM",
    "both": "in turns, cuda_ipc",
}


def _case(name: str, *sets: str, formula: str = "six steps", kills: str = "", package: str = "vllm") -> Case:
    return Case(
        name=NAMES[name],
        sets=(*VLLM, *sets),
        formula=formula,
        gpu=True,
        kills=kills,
        package=package,
        limit=LIMIT,
    )


CASES = (
    _case("beside"),
    _case("turns", TURN),
    _case("killed", TURN, formula="six steps, the server killed at the third", kills="engine"),
    _case("adapter", TURN, "lora.rank=16"),
    _case("ipc", IPC),
    _case("both", TURN, IPC),
)


def measure(bench: Bench) -> Iterator[Figure]:
    missing = bench.device == "cuda" and importlib.util.find_spec("vllm") is None
    if missing:
        yield from (Figure(line.name, None, "vllm is not here") for line in ENTRY.lines)
        return
    yield from asyncio.run(_alone(bench))
    recipe, _ = runs.recipe(bench)
    with ThreadPoolExecutor(bench.size(AT_ONCE, 1)) as pool:
        waiting = {case: pool.submit(runs.checked, bench, recipe, case) for case in CASES}
        for case, checked in waiting.items():
            passed, note = checked.result()
            yield Figure(case.name, passed, note)
    for name, line in (("beside", FILES_LIVE), ("ipc", IPC_LIVE)):
        yield _seconds_live(bench, NAMES[name], line)


def _seconds_live(bench: Bench, case: str, line: str) -> Figure:
    directory = bench.folder / "runs" / next(one.run_name for one in CASES if one.name == case)
    facts = read_metrics(directory) if directory.is_dir() else []
    found = [fact.load.swap_seconds for fact in facts if isinstance(fact, WeightsLive)]
    return Figure(line, statistics.median(found) if found else None, "" if found else "the run did not come so far")


# --- one server ----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _server(bench: Bench, model: Path) -> AsyncIterator[list[str]]:
    """Yields the settings by which a run gets its server: vLLM, which it starts, or on a CPU the fake one, which it joins."""
    if bench.device == "cuda":
        yield [*VLLM, f"engine.kv_gib={KV}"]
        return
    engine = FakeEngine(trusts=True, seconds_per_token=0.001, length=lambda rng: LENGTH)
    serving = Serving(engine=engine, encoder=ChatEncoder(model), name="tiny", limits=ServerLimits())
    await serving.load(WeightUpdate(version=0, kind="full", fingerprint="its own", nbytes=0, seconds=0.0))
    sock, server = bind("127.0.0.1", 0), make_server(FakeVllm(serving, dtype="bfloat16", sleep_mode=True).app())
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield [
            "engine.kind=vllm",
            "engine.kv_gib=auto",
            "engine.max_running=auto",
            f'engine.urls=["http://127.0.0.1:{sock.getsockname()[1]}"]',
        ]
    finally:
        server.should_exit = server.force_exit = True
        await running
        sock.close()


async def _alone(bench: Bench) -> list[Figure]:
    facts, clock = FactList(), asyncio.get_running_loop().time
    telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0))
    own, logs = runs.own_config(bench), bench.folder / "logs"
    logs.mkdir()
    model = own.parent / "model"
    async with _server(bench, model) as sets:
        config = load_config(own, [f"engine.context_length={CONTEXT}", "engine.dtype=bfloat16", TURN, *sets])
        transport = transport_of(config, logs)
        began = time.perf_counter()
        starting = start_engine(
            config, model_dir=model, launcher=open_launcher(logs), transport=transport, logs=logs, telemetry=telemetry
        )
        engine = starting.engine
        assert isinstance(engine, SleepingServer)
        try:
            await starting.launch()
            started = Figure(STARTED, time.perf_counter() - began)
            trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            sender = transport.sender({"": lay_out(trained.named_parameters(), torch.bfloat16)})
            return [started, *await _turns(bench, engine, lambda v: sender.send(v, trained.named_parameters()))]
        finally:
            await engine.close()
            transport.close()


async def _turns(bench: Bench, engine: SleepingServer, publish: Callable[[int], WeightUpdate]) -> list[Figure]:
    """Requests go on through all turns, each of which brings a version."""
    slept, woke, given = list[float](), list[float](), list[float]()
    drawn = Sampling(max_tokens=LENGTH, ignore_eos=True)
    asked, heard = list[asyncio.Future[Completion]](), asyncio.Event()
    engine.listen(lambda output: heard.set() if output.tokens else None)
    for version in range(TURNS + 1):
        update = publish(version)
        began = time.perf_counter()
        await engine.wake(True)
        await engine.load(update)
        woke.append(time.perf_counter() - began)
        if version == TURNS:
            break
        asked.append(asyncio.ensure_future(engine.generate(Request(f"{version}", (1, 7, 8), drawn))))
        heard.clear()
        await heard.wait()
        free = _free(bench)
        slept.append((await engine.sleep(False)).seconds)
        given.append((_free(bench) - free) / 1e9)
    done = await asyncio.gather(*asked)
    whole = all(len(one.tokens) == LENGTH and one.spans[-1].version > one.spans[0].version for one in done)
    memory = Figure(GIVEN, statistics.median(given)) if bench.device == "cuda" else Figure(GIVEN, None, "needs a GPU")
    return [
        Figure(THROUGH, whole),
        memory,
        Figure(ASLEEP, statistics.median(slept)),
        Figure(SERVES, statistics.median(woke[1:])),
    ]


def _free(bench: Bench) -> float:
    return float(torch.cuda.mem_get_info()[0]) if bench.device == "cuda" else 0.0


STARTED, THROUGH = "vLLM: started and asleep", "requests go on through three turns"
GIVEN, ASLEEP, SERVES = "memory that sleep gives back", "asleep", "from awake to a new version that serves, files"
FILES_LIVE, IPC_LIVE = "a version goes live beside the trainer, files", "the same, cuda_ipc"
ENTRY = Entry(
    name="vllm",
    about="a vLLM server on the trainer's GPU, by its sleep mode and by handles of the trainer's memory; it needs vLLM in the same Python, and for `cuda_ipc` "
    "headrace installed beside it",
    limit=180,
    lines=(
        Line(name=STARTED, unit="s", predicted=always(40.0), formula="with `--enforce-eager` (assumed)"),
        Line(name=THROUGH, unit="check", formula="all their tokens, of more than one version"),
        Line(
            name=GIVEN,
            unit="GB",
            predicted=always(KV * 1.0737 + 0.2),
            formula=f"a cache of {KV} GiB, and the weights",
        ),
        Line(name=ASLEEP, unit="s", predicted=always(0.5), formula="memory is unmapped, nothing is copied (assumed)"),
        Line(
            name=SERVES,
            unit="s",
            predicted=always(0.8),
            formula="0.25 s for the reload, as on a CPU, and as much each for files and for mapping memory (assumed)",
        ),
        *(Line(name=case.name, unit="check", formula=case.formula) for case in CASES),
        Line(
            name=FILES_LIVE,
            unit="s",
            predicted=always(0.5),
            formula="0.25 s for the reload, as on a CPU, and for files",
        ),
        Line(
            name=IPC_LIVE,
            unit="s",
            predicted=always(0.34),
            formula="0.25 s for the reload, as on a CPU, and 85 ms for the fingerprint of 273 MB in November",
        ),
    ),
    measure=measure,
)
