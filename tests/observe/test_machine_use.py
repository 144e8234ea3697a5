"""What a run's processes use of the machine: read beside the event loop, kept as facts, drawn and told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.facts.facts import GpuUse, ProcessesUsed, ProcessUse, StepTrained
from headrace.facts.number_tables import Numbers, title_of
from headrace.facts.records import summarise
from headrace.facts.run_state import RunState
from headrace.facts.texts import number
from headrace.loop.world import virtual_time
from headrace.processes.health import usage
from headrace.processes.health.family import Child, Family, family
from headrace.processes.health.live_status import Status
from headrace.processes.health.usage import EVERY, FIRST, Meter, watch_use
from headrace.views.report.gantt import USES, machine_use
from headrace.views.screen.status_view import lines_of
from support.fact_stream import FactStream

BUSY = "import time; block = bytearray(64 << 20); end = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nprint(flush=True); time.sleep(60)"


def test_a_process_that_computed_for_a_while_is_seen_with_its_memory() -> None:
    """0.4 s of a core over 4 s of the meter's clock are 0.1 cores, whatever the machine does beside."""
    now = 100.0
    meter = Meter(lambda: now)
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout and child.stdout.readline()
            now += 4.0
            found, _ = meter.read({child.pid: "scorer 1", os.getpid(): "controller", 2**22 + 1: "trainer"})
            assert set(found) == {"scorer", "controller"}, "a process that is gone is left out"
            assert 0.1 <= found["scorer"].cores < 0.2 and 64 << 20 < found["scorer"].memory < 256 << 20
            now += 4.0
            assert meter.read({child.pid: "scorer 1"})[0]["scorer"].cores < 0.05, "it has slept since"
        finally:
            child.kill()


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in answers as the tool does: a second GPU whose driver does not say how busy it is."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, 87, 1024'\necho '1, [N/A], 512'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Meter().read({})[1] == (GpuUse(0, 0.87, 1 << 30), GpuUse(1, -1.0, 1 << 29))
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert Meter().read({})[1] == ()


def test_a_run_does_not_wait_at_its_end_for_an_nvidia_smi_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho > {tmp_path}/asked\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def case() -> float:
        task = asyncio.create_task(watch_use(lambda used: None, asyncio.get_running_loop().time))
        while not (tmp_path / "asked").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        return time.monotonic()

    cancelled = asyncio.run(case())  # waits for the threads of the loop, as a run does
    assert time.monotonic() - cancelled < usage.GPU_SECONDS / 2


def used(t: float, cores: float) -> ProcessesUsed:
    return ProcessesUsed(t, {"engine": ProcessUse(1, cores, 2 << 30)}, (GpuUse(0, 0.5, 1 << 30),))


def test_readings_become_curves_and_a_line() -> None:
    state, numbers = RunState(), Numbers()
    for fact in FactStream(steps=6, troubles=False).facts():
        for told in (summarise(fact) if isinstance(fact, StepTrained) else fact, used(fact.t, fact.t / 10)):
            state.fold(told)  # type: ignore[arg-type]
            numbers.take(told, state)  # type: ignore[arg-type]
    steps, cores = numbers.columns.series("use/engine_cores")
    assert steps.tolist() == list(range(7)) and cores[-1] == pytest.approx(state.now / 10)
    assert title_of("use/engine_gib") == "Memory that engine holds, GiB"
    assert title_of("use/gpu0_busy") == "Time in which gpu0 computes, share"
    html = machine_use(numbers.columns)
    assert all(title in html for title, _ in USES.values()) and "gpu0 50 %" in html and "engine 2 GiB" in html
    assert machine_use(Numbers().columns) == ""
    (line,) = [
        parts for label, parts in lines_of("run", Status("alive", "training", None), state) if label == "machine"
    ]
    assert [part.plain for part in line] == [
        f"engine {number(state.now / 10, 2)} cores, 2.15 GB",
        "gpu 0 50 %, 1.07 GB",
    ]


def test_a_run_reads_its_own_processes_until_it_ends() -> None:
    told: list[ProcessesUsed] = []

    async def case() -> None:
        mine = Family()
        mine.started(Child("trainer 2", os.getppid(), None))
        with family(mine):
            task = asyncio.create_task(watch_use(told.append, asyncio.get_running_loop().time))
        await asyncio.sleep(FIRST + 2 * EVERY + 1)
        task.cancel()

    virtual_time.run(case())
    assert [fact.t for fact in told] == [FIRST, FIRST + EVERY, FIRST + 2 * EVERY]
    assert set(told[0].processes) == {"controller", "trainer"}
    assert told[0].processes["controller"].cores < 20, "seconds before the run's first reading belong to no interval"
