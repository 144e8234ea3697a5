"""Deadlines count the seconds in which a process could run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.loop.world.virtual_time import run
from headrace.processes.health import patience
from headrace.processes.health.patience import Patience, waited_for_a_core, within


def kept_waiting(share: float, loop: asyncio.AbstractEventLoop):
    """A thread 7 that has no core for `share` of the time; the others have one always."""
    return lambda thread: share * loop.time() if thread == 7 else 0.0


async def answer_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "here"


def test_an_answer_in_time_is_returned_and_one_that_is_late_is_not():
    async def both() -> None:
        assert await within(7, 10.0, answer_after(9.9), lambda _: 0.0) == "here"
        with pytest.raises(TimeoutError):
            await within(7, 10.0, answer_after(10.1), lambda _: 0.0)
        assert asyncio.get_running_loop().time() == pytest.approx(19.9)

    run(both())


def test_who_waits_for_a_core_gets_that_time_again():
    """One tenth of a core: ten times as long."""

    async def both() -> None:
        waited = kept_waiting(0.9, asyncio.get_running_loop())
        assert await within(7, 10.0, answer_after(99.0), waited) == "here"
        with pytest.raises(TimeoutError):
            await within(7, 10.0, answer_after(101.0), waited)

    run(both())


def test_an_answer_that_raises_raises_and_one_that_is_late_is_cancelled():
    ended = []

    async def fails() -> None:
        raise KeyError("mine")

    async def forever() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(asyncio.get_running_loop().time())

    async def all_of_it() -> None:
        with pytest.raises(KeyError, match="mine"):
            await within(7, 1.0, fails(), lambda _: 0.0)
        with pytest.raises(TimeoutError):
            await within(7, 1.0, forever(), lambda _: 0.0)
        await asyncio.sleep(0)
        assert ended == [pytest.approx(1.0)]

    run(all_of_it())


def test_a_thread_that_is_gone_takes_nothing_back():
    """Its number is read as 0 then."""
    numbers = iter([5.0, 0.0, 0.0])
    left = Patience(7, 10.0, lambda: 100.0, lambda thread: next(numbers) if thread == 7 else 0.0)
    assert left.left == 10.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count it")
def test_the_kernel_says_how_long_a_thread_had_to_wait():
    """Two threads that share a core cannot both run: what one has, the other waits for."""
    code = (
        "import os, time\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "pid = os.fork()\n"
        "while time.process_time() < 0.2: pass\n"
        "print(int(open('/proc/self/schedstat').read().split()[1]) / 1e9, flush=True)\n"
        "if pid: os.wait()\n"
    )
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[0]
    assert float(first) > 0.05
    assert waited_for_a_core(threading.get_native_id()) >= 0.0
    assert waited_for_a_core(2**22 + 1) == 0.0


def test_processes_are_waited_for():
    quick = [sys.executable, "-c", "print('said')"]
    process = subprocess.Popen(quick, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert patience.communicate(process, 300.0) == (b"said\n", b"") and process.returncode == 0
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"], stdout=subprocess.PIPE)
    try:
        for wait in (patience.wait, patience.communicate):
            with pytest.raises(subprocess.TimeoutExpired):
                wait(process, 0.05)
    finally:
        process.kill()
        process.communicate()
    assert patience.wait(process, 300.0) == -9
