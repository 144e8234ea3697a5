"""The official client of Tinker over connections that lose requests and answers, cut them, and send them twice: what is learned is what is learned without, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from tinker import types
from tinker_server import KEY, Running, running

pytestmark = pytest.mark.slow

ADAM = types.AdamParams(learning_rate=0.01, eps=1e-8)
FAULTS = ("lost", "unheard", "cut", "twice", "together", "late")


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


class LosingProxy:
    def __init__(self, port: int, chance: random.Random) -> None:
        self._port, self._chance = port, chance
        self.url = ""
        self._apart: set[asyncio.Task[bytes]] = set()

    async def open(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.closing(writer):
            writer.write(request)
            return await _message(reader)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError), contextlib.closing(writer):
            while True:
                request = await _message(reader)
                fault = self._chance.choice(FAULTS) if self._chance.random() < 0.25 else ""
                if fault == "lost":
                    return
                if fault in ("unheard", "together"):
                    self._apart.add(asyncio.ensure_future(self._ask(request)))
                if fault == "unheard":
                    await asyncio.sleep(0.01)
                    return
                if fault == "twice":
                    await self._ask(request)
                await asyncio.sleep(0.2 * self._chance.random() * (fault == "late"))
                answer = await self._ask(request)
                if fault == "cut":
                    writer.write(answer[: self._chance.randrange(len(answer))])
                    return
                writer.write(answer)
                await writer.drain()


@contextmanager
def losing(server: Running, seed: int) -> Iterator[str]:
    """The address of a proxy in a thread of its own."""
    proxy, loop, up = LosingProxy(int(server.url.rpartition(":")[2]), random.Random(seed)), asyncio.new_event_loop(), threading.Event()  # fmt: skip
    loop.create_task(proxy.open()).add_done_callback(lambda _: up.set())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield proxy.url
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def datum(chance: random.Random) -> types.Datum:
    tokens = [chance.randrange(5, 40) for _ in range(chance.randrange(4, 20))]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def learned(client: tinker.ServiceClient, seed: int, saved: Path) -> tuple[list[object], str]:
    """The losses, and a digest of the weights and moments in the end."""
    chance, told = random.Random(seed), list[object]()
    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()
    paths: list[str] = []
    for number in range(12):
        match chance.choice(("steps", "steps", "save", "load", "sample")):
            case "steps":
                futures = []
                for _ in range(3):
                    futures += [model.forward_backward([datum(chance)], "cross_entropy") for _ in range(2)]
                    futures.append(model.optim_step(ADAM))
                told.append([sorted(future.result().metrics.items()) for future in reversed(futures)])
            case "save":
                paths.append(model.save_state(f"s{number}").result().path)
            case "load" if paths:
                model = client.create_training_client_from_state_with_optimizer(chance.choice(paths)).result()
            case "sample":
                sampler = model.save_weights_and_get_sampling_client().result()
                params = types.SamplingParams(max_tokens=6, seed=number, stop=[])
                drawn = sampler.sample(types.ModelInput.from_ints([1, 5, 9]), 2, params).result()
                told.append([sequence.tokens for sequence in drawn.sequences])
    name, _, place = model.save_state("end").result().path.removeprefix("tinker://").partition("/")
    digest = hashlib.sha256()
    for file in sorted((saved / name / place).iterdir()):
        digest.update(b"" if file.name == "checkpoint.json" else file.read_bytes())
    return told, digest.hexdigest()


def test_what_is_learned_over_bad_connections_is_what_is_learned_without(tiny_llama: Path, tmp_path: Path) -> None:
    with running(tiny_llama, tmp_path) as server:
        for seed in (1, 5, 7):
            with server.client() as client:
                expected = learned(client, seed, tmp_path / "checkpoints")
            with losing(server, seed) as url, tinker.ServiceClient(base_url=url, api_key=KEY) as client:
                assert learned(client, seed, tmp_path / "checkpoints") == expected
