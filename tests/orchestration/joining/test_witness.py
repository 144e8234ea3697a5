"""What a worker elsewhere prints: it is in the run's directory, once and in order, and its end is known at once, whatever it died of."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.protocols import Job
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.processes.joining import worker_log
from headrace.processes.joining.greeting import Arrived, Hello, Terms, WordsSaid
from headrace.processes.joining.joined import JoinLauncher
from headrace.processes.joining.listener import Listener
from headrace.processes.joining.same_model import differing, digests, own_packages
from headrace.processes.joining.worker_log import WorkerLog
from headrace.processes.wire import WorkerEnd
from headrace.version import __version__
from support.bus.cutting import Cut, CuttingProxy

TOKEN = "a token of many characters"


# --- the log ---------------------------------------------------------------------------------------------------------------------


def test_words_are_written_once_and_in_order_and_missing_ones_are_counted(tmp_path: Path) -> None:
    async def go() -> None:
        log = WorkerLog()
        log.take(WordsSaid(0, b"one\n"))
        log.begin(tmp_path / "log", "far, process 7")
        log.take(WordsSaid(0, b"one\n"))
        log.take(WordsSaid(2, b"e\ntwo\n"))
        log.take(WordsSaid(18, b"five\n"))
        assert not log.ended.is_set()
        log.take(WordsSaid(23, b"", over=True))
        assert log.ended.is_set()
        assert (tmp_path / "log").read_text() == (
            "--- far, process 7 ---\none\ntwo\n\n--- 10 bytes were cut here: the run did not take them in time ---\nfive\n"
        )

    asyncio.run(go())


def test_a_log_that_is_too_long_keeps_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_log, "KEPT", 10)
    monkeypatch.setattr(worker_log, "TAIL", 6)

    async def go() -> None:
        log = WorkerLog()
        log.begin(tmp_path / "log", "far")
        for place in range(26):
            log.take(WordsSaid(place, bytes([97 + place])))
        log.take(WordsSaid(26, b"", over=True))

    asyncio.run(go())
    written = (tmp_path / "log").read_text().splitlines()
    assert written[1] == "abcdefghij" and "--- 10 bytes were left out here" in written[2] and written[3] == "uvwxyz"


def test_the_last_lines_are_the_worker_s_own(tmp_path: Path) -> None:
    async def go() -> None:
        log = WorkerLog()
        log.take(WordsSaid(0, b"a\nheadrace: engine of the run at x\nb\n\nc\nd: \xff\n"))
        assert log.last_lines == "b | c | d: \ufffd"

    asyncio.run(go())


def test_what_a_worker_said_before_its_last_answer_is_not_what_it_ended_of(tmp_path: Path) -> None:
    """A killed rank: torch's warning of its start was the last that it ever said."""

    async def go() -> None:
        log = WorkerLog()
        log.begin(tmp_path / "log", "a worker")
        warning = b"[W1128 socket.cpp:764] Warning: the hostname cannot be resolved\n"
        log.take(WordsSaid(0, warning))
        assert "hostname" in log.last_lines
        log.lives()
        assert log.last_lines == ""
        log.take(WordsSaid(len(warning), b"RuntimeError: no memory\n"))
        assert log.last_lines == "RuntimeError: no memory"
        assert "hostname" in (tmp_path / "log").read_text()

    asyncio.run(go())


def test_a_worker_that_was_killed_between_two_answers_is_not_given_a_reason(tmp_path: Path) -> None:
    """Its answer to a call, or what it pushes, is a sign of life."""

    class Words:
        ended = asyncio.Event()
        last_lines = ""
        lived = 0

        def begin(self, file: Path, title: str) -> None: ...

        def lives(self) -> None:
            self.lived += 1

    async def go() -> None:
        ours, theirs = socket.socketpair()
        words = Words()
        words.ended.set()
        hello = Hello(__version__, "", "trainer", "there", 7)
        arrived = Arrived(*await asyncio.open_connection(sock=ours), hello, "there:1", "", words)

        class Arriving:
            address = token = ""

            def expect(self, kind: str, seat: str = "") -> asyncio.Future[Arrived]:
                found: asyncio.Future[Arrived] = asyncio.get_running_loop().create_future()
                found.set_result(arrived)
                return found

        worker = JoinLauncher(Arriving(), telemetry(), logs=tmp_path).worker(  # type: ignore[arg-type]
            Job("trainer", "trainer rank 1"), lambda method, payload: None
        )
        await worker.start()
        end = WorkerEnd(theirs)

        def answer() -> None:
            frame = end.receive()
            assert frame is not None
            end.reply(frame, 1)

        called = asyncio.ensure_future(worker.call("score", None, int))
        await asyncio.to_thread(answer)
        await called
        assert words.lived == 1
        theirs.shutdown(socket.SHUT_RDWR)
        how = await worker.watch()
        assert how.endswith(
            "its connection has ended; it said nothing of it (its output is in logs/trainer-rank-1.log)"
        )

    asyncio.run(go())


# --- the process beside a worker ---------------------------------------------------------------------------------------------------

WORKER = """
import os, signal, sys, time
from headrace.processes.joining.dial import offer
from headrace.processes.joining.same_model import agree
from headrace.processes.joining.dial import witnessed

address, deed = sys.argv[1:]
seated = witnessed(address)
print("before the seat", flush=True)
end = offer(address, "engine", seated, agree=agree)
for number in range(2000):
    print("line", number)
os.write(2, b"Fatal: no more memory\\n")
if deed == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(3)
"""


RAW = """
import os
from headrace.processes.joining.dial import witnessed

witnessed("127.0.0.1:1")
os.write(1, "é\\x1b[2J\\u202e".encode()[:1])
os.write(2, "é\\x1b[2J\\u202e".encode()[1:])
"""


def test_what_a_worker_prints_steers_no_terminal_that_it_was_started_in() -> None:
    done = subprocess.run([sys.executable, "-c", RAW], capture_output=True, check=True)
    assert done.stderr.decode() == "é␛[2J�"


def telemetry() -> Telemetry:
    clock = asyncio.get_running_loop().time
    return Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e5, 1e6))


@pytest.mark.parametrize("deed", ["kill", "exit"])
def test_the_last_words_and_the_end_of_a_worker_arrive_though_it_may_have_come_back(deed: str, tmp_path: Path) -> None:
    """Over a connection that is cut: the run waits for nobody who has ended (`reconnect` is an hour)."""

    async def go() -> str:
        (tmp_path / "config.json").write_text("{}")
        listener = Listener(TOKEN, terms=Terms("", digests(tmp_path)), reconnect=3600.0)
        await listener.open()
        proxy = CuttingProxy(listener.address, [Cut(True, 1 << 20), Cut(True, 9000), Cut(True, 3000, rude=False)])
        await proxy.open()
        launcher = JoinLauncher(listener, telemetry(), away=3600.0, logs=tmp_path)
        worker = launcher.worker(Job("engine", "engine 2"), lambda method, payload: None)
        words = [sys.executable, "-c", WORKER, proxy.address, deed]
        given = {"HEADRACE_TOKEN": TOKEN, "HEADRACE_MODEL": str(tmp_path), "HEADRACE_PATIENCE": "60"}
        process = subprocess.Popen(words, env={**os.environ, **given}, stderr=subprocess.PIPE, text=True)
        try:
            async with asyncio.timeout(600):
                await worker.start()
                how = await worker.watch()
                said = (await asyncio.to_thread(process.communicate))[1]
        finally:
            process.kill()
            await worker.end()
            await listener.close()
        assert process.returncode == (-signal.SIGKILL if deed == "kill" else 3)
        assert "line 1999" in said, "whoever started it sees it too"
        assert f"(process {process.pid}) is lost: its connection has ended; the end of logs/engine-2.log: " in how
        assert "Fatal: no more memory" in how
        return (tmp_path / "engine-2.log").read_text()

    lines = asyncio.run(go()).splitlines()
    assert "before the seat" in lines
    assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(2000)]


# --- a mixed fleet -----------------------------------------------------------------------------------------------------------------


def test_other_versions_are_named_and_other_builds_of_one_version_are_the_same() -> None:
    ours = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    assert differing({"torch": "2.13.0+cu130", "transformers": "5.23.0"}, ours) == ""
    assert (
        differing({"torch": "2.12.1+cpu", "transformers": "5.23.0"}, ours)
        == "torch 2.12.1+cpu (the run has 2.13.0+cpu)"
    )
    assert differing({}, ours) == "torch none (the run has 2.13.0+cpu), transformers none (the run has 5.23.0)"
    assert set(own_packages()) == {"torch", "transformers"} and all(own_packages().values())
