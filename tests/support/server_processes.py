"""Servers in processes of their own: those that a test starts, and those that runs of this process have started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.engine.servers import server_guard
from headrace.engine.servers.server_process import free_port
from headrace.facts.facts import IdentityChecked, RunEnded, WeightsLive
from headrace.facts.records import StepRow
from support import fake_servers
from support.runs import preloaded_python
from support.tiny_run import of, tiny_config

HEADRACE = {"kv_gib": 0.01, "context_length": 64, "max_running": 16, "dtype": '"float32"'}
VLLM = "--host 127.0.0.1 --dtype float32 --max-model-len 65 --enable-lora --max-loras 2 --enable-scale-out"
VLLM_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@dataclass
class Server:
    """A server on a port of its own, which `start` starts again after `kill`."""

    kind: str
    port: int
    command: Sequence[str]
    """The words behind `python`."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns at once: whoever wants it waits."""
        self.process = preloaded_python.start(self.command, self.variables)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def headrace_server(model: Path, cache: Path, *options: str) -> Server:
    port = free_port()
    sets = [word for name, value in HEADRACE.items() for word in ("--set", f"engine.{name}={value}")]
    command = ["-m", "headrace", "serve", str(model), "--port", str(port), *sets, *options]
    return Server("headrace", port, command, {"HEADRACE_CACHE": str(cache)})


def vllm(model: Path, *faults: str, fetches: bool = False) -> Server:
    """The fake vLLM server over the real engine. `fetches`: with headrace's transfer engine."""
    port = free_port()
    options = ["--logprobs-mode", "processed_logprobs", *VLLM.split()]
    options += ["--weight-transfer-config", '{"backend": "headrace"}'] if fetches else []
    options += [word for fault in faults for word in ("--fault", fault)]
    command = [str(fake_servers.__file__), "vllm", "serve", str(model), "--port", str(port), *options]
    return Server("vllm", port, command, VLLM_VARIABLES)


def sglang(model: Path, *faults: str) -> Server:
    """The fake SGLang server over the real engine."""
    port = free_port()
    return Server("sglang", port, [str(fake_servers.__file__), "sglang", str(model), str(port), *faults])


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def config_for(directory: Path, model: Path, server: Server, **tables: Any) -> dict[str, Any]:
    """The settings of a tiny run with that server as its engine."""
    config = tiny_config(directory, model, **tables)
    engine = {"kind": server.kind, "urls": [server.url], "dtype": "float32", "context_length": 64, "patience": 300.0}
    return {**config, "engine": {**engine, **tables.get("engine", {})}}


def checked_run(directory: Path, steps: int, reason: str = "finished") -> None:
    """Checks what is true of every run with a lag bound of 1 that has ended so. One that was interrupted may have its last two versions
    under way: the last step may have trained on what the version before them sampled."""
    (ended,) = of(directory, RunEnded)
    rows = of(directory, StepRow)
    assert ended.reason == reason and ended.accounting.balance() == 0, ended.accounting
    assert len(rows) == steps and max(lag for row in rows for lag in row.lags) <= 1
    assert of(directory, IdentityChecked) and all(probe.ok for probe in of(directory, IdentityChecked))
    for kind in ("full", "adapter"):
        live = [update.update.version for update in of(directory, WeightsLive) if update.update.kind == kind]
        assert live == list(range(len(live)))
    delivered = len(live or of(directory, WeightsLive)) - 1
    assert delivered == steps or (reason != "finished" and steps - 2 <= delivered < steps)
    assert not list(directory.rglob("*.safetensors")) or not list(directory.glob("**/tiny*-weights"))


# -- processes ----------------------------------------------------------------------------------------------------------------


def servers(of: int = 0) -> dict[int, list[int]]:
    """The processes of each server that this process, or the one named, has started; the server's main one first."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                leader = os.getsid(int(entry.name))
                words = Path(f"/proc/{leader}/cmdline").read_bytes()
                parent = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):  # gone meanwhile
                continue
            if server_guard.__file__.encode() in words and parent == (of or os.getpid()) and int(entry.name) != leader:
                found.setdefault(leader, []).append(int(entry.name))
    return {leader: sorted(members) for leader, members in found.items()}
