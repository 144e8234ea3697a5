"""A run whose engine joins from another process, for real, over 127.0.0.1."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.facts.facts import GroupEnded, IdentityChecked, RunEnded, Warned, WeightsLive, WorkerJoined, WorkerLost
from support import fake_servers
from support.bus.cutting import Cut, cutting
from support.runs.beside import PATIENCE, Beside, until
from support.runs.offered_workers import free_port, offering, token_file
from support.server_processes import servers
from support.tiny_run import SYNCHRONOUS, at_steps, of, tiny_config, until_noted, weights_of


def joining(directory: Path, model: Path, port: int, **tables: Any) -> dict[str, Any]:
    place = {"kind": "join", "listen": f"127.0.0.1:{port}", "token_file": str(token_file(directory))}
    return tiny_config(directory, model, orchestration={**place, **tables.pop("orchestration", {})}, **tables)


@pytest.mark.whole
def test_a_run_with_a_joined_engine_has_the_weights_of_the_local_run_bit_for_bit(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The joined engine has no weights of its own: its copy of the model holds none. Its connection is cut again and again."""
    (there := tmp_path / "there").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (tiny_llama / name).exists():
            shutil.copy(tiny_llama / name, there)
    headrace.train(tiny_config(tmp_path, tiny_llama, **SYNCHRONOUS, name="local"))
    port = free_port()
    config = joining(tmp_path, tiny_llama, port, **SYNCHRONOUS, name="joined")
    cuts = [
        Cut(number % 2 == 0, after, number % 3 == 0) for number, after in enumerate((1500, 900, 400, 70, 2000, 0, 700))
    ]
    with (
        cutting(f"127.0.0.1:{port}", cuts) as proxy,
        offering(tmp_path, int(proxy.address.rpartition(":")[2]), "--model", str(there)) as (worker,),
    ):
        result = headrace.train(config)
        assert worker.wait(PATIENCE) == 0
        assert worker.stderr and "the run needs this worker no more" in worker.stderr.read()
    assert result.step == 3
    local, joined = weights_of(tmp_path / "runs" / "local"), weights_of(tmp_path / "runs" / "joined")
    assert local.keys() == joined.keys() and all(torch.equal(local[name], joined[name]) for name in local)
    assert proxy.made >= 4 and not of(tmp_path / "runs" / "joined", WorkerLost)
    (seat,) = of(tmp_path / "runs" / "joined", WorkerJoined)
    assert (seat.who, seat.pid, seat.host) == ("engine", worker.pid, socket.gethostname())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "end"), [("auto", signal.SIGKILL), ("broadcast", signal.SIGTERM)])
def test_a_joined_engine_is_ended_and_another_one_takes_its_seat(
    kind: str, end: signal.Signals, tiny_llama: Path, tmp_path: Path
) -> None:
    """A worker that is killed is a death, and one that was asked to end has given its seat back."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = joining(tmp_path, tiny_llama, port, train={"steps": 6}, weight_sync={"kind": kind})
    with offering(tmp_path, port, count=2) as workers:
        seated: list[int] = []

        def kill() -> None:
            seated.append(of(run, WorkerJoined)[0].pid)
            os.kill(seated[0], end)
            until_noted(run, WorkerLost)

        thread = at_steps(config, {2: kill})
        result = headrace.train(config)
        thread.join()
        (other,) = [worker for worker in workers if worker.pid != seated[0]]
        assert other.wait(PATIENCE) == 0
        (ended_one,) = [worker for worker in workers if worker.pid == seated[0]]
        assert ended_one.wait(PATIENCE) == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    assert result.step == 6
    assert [worker.pid for worker in of(run, WorkerJoined)] == [seated[0], other.pid]
    (lost,) = of(run, WorkerLost)
    how = "has left: it was asked to end there" if end == signal.SIGTERM else "is lost: its connection has ended"
    assert f"(process {seated[0]}) {how}" in lost.how and lost.deaths == (end == signal.SIGKILL)
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["headrace", "vllm", "sglang"])
def test_a_joined_server_is_killed_and_another_workers_takes_its_seat(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """The server of vLLM or SGLang is a fake one. SGLang's, which fetches nothing, reads what its worker has fetched over TCP."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    engine: dict[str, Any] = {"kind": kind, "dtype": "float32", "context_length": 64}
    if kind != "headrace":
        python = fake_servers.interpreter(tmp_path)
        subprocess.run([python, "-m", "pip", "install", str(Path(headrace.__file__).parents[1])], check=True)
    config = joining(tmp_path, tiny_llama, port, train={"steps": 6}) | {"engine": engine}
    options = [] if kind == "headrace" else ["--engine-python", str(python)]
    with offering(tmp_path, port, *options, count=2) as workers:
        seated: list[int] = []

        def kill() -> None:
            seated.append(of(run, WorkerJoined)[0].pid)
            ((server, *_),) = servers(seated[0]).values()
            os.kill(server, signal.SIGKILL)
            until_noted(run, WorkerLost)

        thread = at_steps(config, {2: kill})
        result = headrace.train(config)
        thread.join()
        (other,) = [worker for worker in workers if worker.pid != seated[0]]
        (first,) = [worker for worker in workers if worker.pid == seated[0]]
        assert (first.wait(PATIENCE), other.wait(PATIENCE)) == (1, 0)
        assert not servers(seated[0]) and not servers(other.pid), "no server outlives the run"
    assert result.step == 6
    assert [worker.pid for worker in of(run, WorkerJoined)] == [seated[0], other.pid]
    (lost,) = of(run, WorkerLost)
    assert "its server was killed by SIGKILL" in lost.how and lost.requests_reissued
    assert {update.where.get("port") for update in (live.update for live in of(run, WeightsLive))} != {None}, "over TCP"
    assert of(run, IdentityChecked) and all(probe.ok for probe in of(run, IdentityChecked))
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0


def refused(directory: Path, port: int, *more: str) -> tuple[int, str]:
    with offering(directory, port, *more) as (worker,):
        output = worker.communicate(timeout=PATIENCE)[1]
        return worker.returncode, output


@pytest.mark.slow
def test_a_ticket_that_ends_every_engine_is_given_up_and_the_run_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    """Four workers: the ticket ends three of them, and the last one does the rest."""
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = joining(tmp_path, tiny_llama, port, train={"steps": 4})
    token = (tmp_path / "token").read_text()
    words = [
        sys.executable,
        str(Path(__file__).parents[1] / "joining" / "poisoned_worker.py"),
        "engine",
        "--join",
        f"127.0.0.1:{port}",
    ]
    given = {"HEADRACE_TOKEN": token, "HEADRACE_PATIENCE": str(PATIENCE), "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen(words, env={**os.environ, **given}) for _ in range(4)]
    try:
        result = headrace.train(config)
        assert sorted(worker.wait(PATIENCE) for worker in workers) == [-signal.SIGKILL] * 3 + [0]
    finally:
        for worker in workers:
            worker.kill()
    assert result.step == 4 and len(of(run, WorkerLost)) == 3
    (failed,) = [group for group in of(run, GroupEnded) if group.outcome == "failed"]
    assert (failed.ticket, failed.reason, failed.failures) == (3, "engine_died", {"engine_died": 4})
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0
    assert ended.accounting.failed == {"engine_died": 1}


@pytest.mark.slow
def test_strangers_are_turned_away_while_the_run_waits_over_tls(tiny_llama: Path, tmp_path: Path) -> None:
    """A wrong token, another model, plain bytes and a port scan; then the right one. All of it over TLS."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=headrace"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = joining(
        tmp_path,
        tiny_llama,
        port,
        orchestration={"cert": str(cert), "key": str(key)},
        train={"steps": 2},
        weight_sync={"encoding": "delta"},
    )
    token_file(tmp_path, "another-token-of-many-letters", "wrong")
    (other := tmp_path / "other").mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    told: list[tuple[int, str]] = []

    def come() -> None:
        until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))  # a port scan
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(100)
        told.append(refused(tmp_path, port, "--ca", str(cert), "--token-file", str(tmp_path / "wrong")))
        told.append(refused(tmp_path, port, "--ca", str(cert), "--model", str(other)))
        with offering(tmp_path, port, "--ca", str(cert)) as (worker,):
            told.append((worker.wait(PATIENCE), ""))

    thread = Beside(come)
    result = headrace.train(config)
    thread.join()
    assert result.step == 2
    (wrong, why), (differs, which), (right, _) = told
    assert wrong == 2 and "its token is not the controller's" in why
    assert differs == 2 and "is not the run's model" in which and "config.json" in which
    assert right == 0
    message = " ".join(warning.message for warning in of(run, Warned))
    assert "connections that were turned away" in message and "garbage 1, model 1, silent 1, token 1" in message
