"""Workers that are forked from a process with their libraries loaded: what they are, and what happens when that process fails."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from test_engine_process import PROMPT, opened, worker_of

from headrace.core.errors import WorkerDied
from headrace.core.protocols import Job, Launcher
from headrace.core.types import Completion
from headrace.processes.launch import forking
from headrace.processes.launch.forking import (
    CannotFork,
    ForkLauncher,
    ForkReply,
    ForkRequest,
    can_fork_for_parent,
    fork,
)
from headrace.processes.launch.local import ForkedProcess, LocalLauncher, environment
from headrace.run.worker.fork_server import _unfit, serve
from headrace.testing.makers import request
from support.runs import preloaded_python
from support.runs.processes import gone, stat

pytestmark = pytest.mark.skipif(not can_fork_for_parent(), reason="this system forks for nobody else")


def servers() -> list[forking.ForkServer]:
    return list(forking._servers.running.values())


# --- a worker ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forked_engine_is_our_child_and_answers_as_one_that_was_started_anew(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async def answer(launcher: Launcher, look: Callable[[int], None]) -> Completion:
        async with opened(tiny_llama, launcher, context_length=256) as (engine, publish):
            look(worker_of(engine).pid)
            assert (await engine.load(publish(1))).version == 1, "the shared memory has the same number there"
            return await engine.generate(request("r", PROMPT, 100, seed=1))

    def look(pid: int) -> None:
        assert stat(pid)[1:4] == [str(os.getpid()), str(pid), str(pid)], "our child, with a session of its own"
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert words[1:5] == [b"-m", b"headrace.run.worker.worker", b"engine", b"--socket"]
        assert Path(f"/proc/{pid}/fd/1").readlink() == Path(f"/proc/{pid}/fd/2").readlink() == tmp_path / "engine.log"
        own = [
            str(server.pid) for server in servers() if str(server.pid) == stat(server.pid)[3]
        ]  # fixtures may have one too
        bare = [
            pid for pid in own if os.listdir(f"/proc/{pid}/task") == [pid] and len(os.listdir(f"/proc/{pid}/fd")) == 4
        ]
        assert any(stat(int(pid))[1] == str(os.getpid()) for pid in bare), "it has kept nothing of its workers"

    forked = asyncio.run(answer(ForkLauncher(tmp_path), look))
    anew = asyncio.run(answer(LocalLauncher(tmp_path), lambda pid: None))
    assert (forked.tokens, forked.logprobs) == (anew.tokens, anew.logprobs) and len(forked.tokens) > 1


def test_what_is_forked_has_a_group_of_its_own_as_soon_as_it_is_known() -> None:
    """Whoever asked at once, to signal the group later, got that of the server, and killed it (Jupyter's client did)."""
    for _ in range(8):
        program = preloaded_python.start(["-c", "pass"])
        group = os.getpgid(program.pid)
        assert program.wait(300) == 0 and group == program.pid


def test_the_death_of_a_forked_engine_is_noticed_and_it_is_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(tiny_llama, ForkLauncher(tmp_path), context_length=256) as (engine, _):
            alone = await engine.generate(request("alone", PROMPT, 200, seed=1))
            running = asyncio.ensure_future(engine.generate(request("r", PROMPT, 200, seed=1)))
            worker = worker_of(engine)
            os.kill(worker.pid, signal.SIGKILL)
            assert "was killed by SIGKILL" in await worker.watch()
            assert (await running).tokens == alone.tokens and worker_of(engine) is not worker
            last = worker_of(engine).pid
        with pytest.raises(ProcessLookupError):  # it was waited for
            os.kill(last, 0)

    asyncio.run(go())


BECOME = """
import json, msgspec, os, sys
from headrace.run.worker.fork_server import become
from headrace.processes.launch.forking import ForkReply, ForkRequest
place, log, data = os.open(sys.argv[1], os.O_RDONLY), os.open("log", os.O_WRONLY | os.O_CREAT), os.open("data", os.O_RDONLY)
os.environ |= {"HEADRACE_STACKS": "the server's", "HEADRACE_CORES": "5"}
core = min(os.sched_getaffinity(0))
words = ["-m", "headrace.run.worker.worker", "trainer"]
answer, reply = os.pipe()
become(ForkRequest(words, {"HEADRACE_CORES": "3"}, [core], [data, 1, 2]), [reply, place, data, log, os.dup(log)])
assert os.read(answer, 99) == msgspec.msgpack.encode(ForkReply(os.getpid()))
os.close(answer)
print(json.dumps({
    "where": os.getcwd(), "found": sys.path[0], "argv": sys.argv[1:], "session": os.getsid(0) == os.getpid(),
    "cores": [len(os.sched_getaffinity(0)), os.environ.get("HEADRACE_CORES"), os.environ.get("HEADRACE_STACKS")],
    "data": os.read(data, 9).decode(), "open": len(os.listdir("/proc/self/fd")),
    "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:]}))
"""


@pytest.mark.parametrize("gap", [0, 3])
def test_a_copy_of_the_server_becomes_the_worker(tmp_path: Path, gap: int) -> None:
    """`gap`: the file is wanted under a number that another of the request's files arrived with."""
    (tmp_path / "data").write_text("weights")
    (tmp_path / "work").mkdir()
    code = BECOME.replace("[data, 1, 2]", f"[data + {gap}, 1, 2]").replace("os.read(data,", f"os.read(data + {gap},")
    words = [sys.executable, "-c", code, str(tmp_path / "work")]
    subprocess.run(words, cwd=tmp_path, check=True, start_new_session=False)
    assert msgspec.json.decode((tmp_path / "log").read_text()) == {
        "where": str(tmp_path / "work"),
        "found": str(tmp_path / "work"),
        "argv": ["trainer"],
        "session": True,
        "cores": [1, "3", None],
        "data": "weights",
        "open": 5,  # with that of the listing
        "shown": ["-m", "headrace.run.worker.worker", "trainer"],
    }


# --- the server fails ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_server_ends_no_worker_and_is_replaced(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def go() -> None:
        async with opened(tiny_llama, ForkLauncher(tmp_path), context_length=256) as (engine, _):
            first = worker_of(engine)
            for server in servers():
                os.kill(server.pid, signal.SIGKILL)
                server._process.wait()
            assert len((await engine.generate(request("r", PROMPT, 100, seed=1))).tokens) > 1
            assert worker_of(engine) is first
            for _ in range(2):  # the first is started anew, the second is forked by a new server
                before = worker_of(engine)
                os.kill(before.pid, signal.SIGKILL)
                await before.watch()
                await engine.generate(request(f"r{before.pid}", PROMPT, 20, seed=1))
            output = capfd.readouterr().err
            assert output.count("the process that forks workers was killed by SIGKILL") == 1, output
            assert "headrace: the engine is started anew and loads its libraries itself" in output
            assert any(server.has_forked for server in servers())

    asyncio.run(go())


def test_libraries_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    """The worker is then started anew and fails with the same error, in its own log."""
    (tmp_path / "torch.py").write_text("raise ImportError('no such luck')")
    variables = {**environment(()), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    async def go() -> None:
        for _ in range(2):
            with pytest.raises(CannotFork, match=r"ended with exit code 1 \(ImportError: no such luck\)"):
                await fork(variables, ForkRequest([], {}, [], []), [])

    asyncio.run(go())


def test_a_server_that_could_not_fork_says_why() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert "threads, which a fork would not have" in _unfit()
    done.set()
    thread.join()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked, answer = msgspec.msgpack.encode(ForkRequest([], {}, [], [])), os.pipe()
    abandoned = os.pipe()
    os.close(abandoned[0])
    socket.send_fds(ours, [asked], [abandoned[1]])  # nobody waits for this one: it is passed over
    socket.send_fds(ours, [asked], [answer[1]])
    ours.close()
    assert serve(theirs, "two threads") is None
    assert msgspec.msgpack.decode(os.read(answer[0], 999), type=ForkReply) == ForkReply(refused="two threads")
    for file in (answer[0], answer[1], abandoned[1]):
        os.close(file)
    theirs.close()


CONTROLLER = """
import asyncio, os, sys, time
from headrace.processes.launch.local import environment
from headrace.processes.launch.forking import ForkServer
server = ForkServer(environment(()))
print(server.pid, flush=True)
time.sleep(1000)
"""


def test_a_server_ends_with_its_controller_though_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True) as controller:
        try:
            assert controller.stdout is not None
            pid = int(controller.stdout.readline())
            deadline = time.monotonic() + 300  # until it has asked for the signal, which it does before it loads torch
            while "torch" not in Path(f"/proc/{pid}/maps").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
        finally:
            controller.kill()
    assert gone(pid)


# --- a worker that is given up before it began -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_worker_that_is_given_up_at_once_leaves_nothing(tmp_path: Path, how: str) -> None:
    async def go() -> None:
        worker = ForkLauncher(tmp_path).worker(Job("engine", "engine"), lambda method, payload: None)
        with stopped(servers()):  # one that is ready might fork the worker before it is given up
            await worker.start()
            calling = asyncio.ensure_future(worker.call("stats", None, type(None)))
            await asyncio.sleep(0)
            if how == "kill":
                worker.kill()
            else:
                await worker.end()
        if (
            how == "kill"
        ):  # the server has the other end of the connection until it reads that nobody waits for this worker
            with pytest.raises(WorkerDied, match="could not be started: it was killed before it began"):
                await calling
            await worker.end()
        calling.cancel()
        assert not worker._process.has_started

    asyncio.run(go())


@contextmanager
def stopped(processes: list[forking.ForkServer]) -> Iterator[None]:
    running = [process._process for process in processes if process._process.poll() is None]
    for process in running:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in running:
            os.kill(process.pid, signal.SIGCONT)


# --- a process that somebody else forked -----------------------------------------------------------------------------------


def test_a_forked_process_is_waited_for_like_any_other() -> None:
    def forked(code: int) -> ForkedProcess:
        pid = os.fork()
        if not pid:
            while not code:
                time.sleep(100)
            os._exit(code)
        return ForkedProcess(pid)

    done, endless = forked(7), forked(0)
    assert done.wait(300) == done.wait() == done.poll() == 7
    with pytest.raises(subprocess.TimeoutExpired):
        endless.wait(0.01)
    assert endless.poll() is None
    endless.kill()
    assert endless.wait() == -signal.SIGKILL
    endless.kill()  # does nothing: the number may be another process's by now
