"""Adapters and weights that a client names: pipes, devices, damaged files and file systems that do not answer."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save, save_file

from headrace.core.errors import IdentityError
from headrace.core.weights import AdapterSpec
from headrace.engine.config import EngineConfig
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.serve import serving
from headrace.serve.config import ServeConfig
from headrace.serve.start import make_app, opened
from headrace.weight_sync.directory import DirectoryReceiver, offer_adapter
from headrace.weight_sync.files import Files
from headrace.weight_sync.packed import lay_out
from support.health_beside import answers
from support.served import Client, answering, faked

GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
FIT = {f"{Q}.lora_A.weight": torch.ones(2, 32), f"{Q}.lora_B.weight": torch.ones(32, 2)}
"""Tensors that fit the model of these tests."""

CONFIGS: dict[str, Any] = {
    "no r": {**GOOD, "r": None},
    "r is absent": {name: value for name, value in GOOD.items() if name != "r"},
    "r is text": {**GOOD, "r": "2"},
    "r is nothing": {**GOOD, "r": 0},
    "r is less": {**GOOD, "r": -3},
    "r is huge": {**GOOD, "r": 10**30},
    "no lora_alpha": {name: value for name, value in GOOD.items() if name != "lora_alpha"},
    "lora_alpha is text": {**GOOD, "lora_alpha": "high"},
    "rank_pattern is a list": {**GOOD, "rank_pattern": [1]},
    "rank_pattern holds text": {**GOOD, "rank_pattern": {"q_proj": "x"}},
    "alpha_pattern holds lists": {**GOOD, "alpha_pattern": {"q_proj": []}},
    "bias is a number": {**GOOD, "bias": 3},
    "another kind": {**GOOD, "peft_type": "IA3"},
    "no kind": {},
    "a list": [GOOD],
    "a text": "LORA",
    "nothing": None,
    "dora": {**GOOD, "use_dora": True},
    "layers that are there twice": {**GOOD, "layer_replication": [[0, 2], [1, 2]]},
    "at work behind some tokens only": {**GOOD, "alora_invocation_tokens": [1, 2]},
    "another model's rest": {**GOOD, "init_lora_weights": "pissa_niter_4"},
    "biases of its own": {**GOOD, "lora_bias": True},
    "a field of tomorrow": {**GOOD, "lora_of_tomorrow": {"rotated": True}},
}
TENSORS: dict[str, Callable[[Path], object]] = {
    "no safetensors": lambda file: file.write_bytes(b"not at all"),
    "an empty file": lambda file: file.write_bytes(b""),
    "a huge header": lambda file: file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}"),
    "a torn file": lambda file: (save_file(FIT, file), file.write_bytes(file.read_bytes()[:-9])),
    "half of a pair": lambda file: save_file({f"{Q}.lora_A.weight": FIT[f"{Q}.lora_A.weight"]}, file),
    "another width": lambda file: save_file({**FIT, f"{Q}.lora_A.weight": torch.ones(2, 31)}, file),
    "another rank": lambda file: save_file({name: one.repeat(2, 2) for name, one in FIT.items()}, file),
    "a module that is none": lambda file: save_file(
        {name.replace("q_proj", "z"): one for name, one in FIT.items()}, file
    ),
    "names that are none": lambda file: save_file({"x": torch.ones(3)}, file),
    "vectors": lambda file: save_file({name: one[0].clone() for name, one in FIT.items()}, file),
    "a number": lambda file: save_file({name: torch.tensor(1.0) for name in FIT}, file),
    "no tensors": lambda file: save_file({}, file),
    "a directory": lambda file: file.mkdir(),
    "a pipe": os.mkfifo,
    "an endless file": lambda file: file.symlink_to("/dev/zero"),
}


def adapter(place: Path, config: Any = GOOD, tensors: Callable[[Path], object] | None = None) -> Path:
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps(config))
    (tensors or (lambda file: save_file(FIT, file)))(place / "adapter_model.safetensors")
    return place


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_none_is_refused_in_words(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter that peft saved|not served") as raised:
        offer_adapter(adapter(tmp_path / "a", CONFIGS[name]), "a", 0)
    assert "Traceback" not in str(raised.value) and len(str(raised.value)) < 500


def test_what_peft_saves_of_a_plain_adapter_is_served(tmp_path: Path) -> None:
    """All fields of the installed version, which has more of them than the one before."""
    place = adapter(tmp_path / "a")
    LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(place)
    assert offer_adapter(place, "a", 0).adapter == AdapterSpec(name="a", rank=2, alpha=4.0)


def test_an_adapter_that_was_written_again_is_another_one_whatever_its_size_and_times(tmp_path: Path) -> None:
    place = adapter(tmp_path / "a")
    file, update = place / "adapter_model.safetensors", offer_adapter(tmp_path / "a", "a", 0)
    receiver = DirectoryReceiver(tmp_path, lambda path: {}, torch.float32)
    there, times = file.read_bytes(), file.stat()
    held = receiver.receive(update)
    with file.open("r+b") as written:
        written.write(save({name: one * 2 for name, one in FIT.items()}))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert all(torch.equal(held[name], one) for name, one in FIT.items()), "what was loaded changed with the file"
    with pytest.raises(IdentityError, match="it has been written since. Load it again"):
        receiver.receive(update)
    again = offer_adapter(place, "a", 1)
    assert torch.equal(receiver.receive(again)[f"{Q}.lora_A.weight"], torch.full((2, 32), 2.0))
    file.write_bytes(there)
    (place / "adapter_config.json").write_text(json.dumps({**GOOD, "lora_alpha": 8}))
    with pytest.raises(IdentityError):
        receiver.receive(update)


def test_a_config_that_is_a_pipe_a_device_or_too_long_is_refused_at_once(tmp_path: Path) -> None:
    place = adapter(tmp_path / "a")
    config = place / "adapter_config.json"
    for make in (os.mkfifo, lambda file: file.symlink_to("/dev/zero"), lambda file: file.write_bytes(b" " * (5 << 20))):
        config.unlink()
        make(config)
        with pytest.raises(ValueError, match="not a regular file|more than"):
            offer_adapter(place, "a", 0)


def test_bad_adapters_and_weights_leave_a_server_whole(tiny_llama: Path, tmp_path: Path) -> None:
    """The real engine."""
    engine = EngineConfig(dtype="float32", device="cpu", kv_gib=0.01, context_length=200, max_running=4, max_adapters=1)
    config = ServeConfig(model=str(tiny_llama), engine=engine, name="tiny")
    answered: dict[str, tuple[int, str]] = {}

    async def go() -> None:
        async with (
            asyncio.timeout(500),
            opened(config, tiny_llama, tmp_path / "logs") as serving,
            answering(make_app(serving, "")) as url,
            aiohttp.ClientSession(base_url=url) as session,
        ):
            client = Client(session)
            for number, (name, tensors) in enumerate(TENSORS.items()):
                body = {"lora_name": "bad", "lora_path": str(adapter(tmp_path / f"a{number}", GOOD, tensors))}
                status, answer = await client.post("/v1/load_lora_adapter", body)
                answered[name] = status, answer["error"]["message"] if status != 200 else "loaded"
            for number, make in enumerate((os.mkfifo, lambda file: file.symlink_to("/dev/zero"))):
                (place := tmp_path / f"w{number}").mkdir()
                make(place / "update.json")
                update = {"version": 5, "kind": "full", "fingerprint": "x", "nbytes": 1, "seconds": 0.0}
                status, answer = await client.post("/headrace/weights", {**update, "where": {"path": str(place)}})
                answered[f"weights {number}"] = status, answer["error"]["message"]
            body = {"lora_name": "good", "lora_path": str(adapter(tmp_path / "good"))}
            status, answer = await client.post("/v1/load_lora_adapter", body)
            assert status == 200, answer
            asked = {"model": "good", "token_ids": [1, 3, 10], "sampling_params": {"max_tokens": 3}}
            assert (await client.post("/inference/v1/generate", asked))[0] == 200

    asyncio.run(go())
    for name, (status, said) in answered.items():
        assert status == (409 if name.startswith("weights") else 400), (name, status, said)
        assert "Traceback" not in said and str(tmp_path) not in said and len(said) < 700, (name, said)


def test_no_other_base_weights_come_under_an_adapter_that_is_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    """Its tokens have its own version, which would be the same before and after them."""
    engine = EngineConfig(dtype="float32", device="cpu", kv_gib=0.01, context_length=200, max_running=4, max_adapters=1)
    parameters = parameters_from_dir(tiny_llama, torch.float32)
    transport = Files(str(tmp_path / "weights"))
    sender = transport.sender({"": lay_out(parameters.items(), torch.float32)})
    other = msgspec.to_builtins(sender.send(1, ((name, -tensor) for name, tensor in parameters.items())))
    load = {"lora_name": "good", "lora_path": str(adapter(tmp_path / "good"))}
    ask = {"model": "good", "token_ids": [1, 3, 10], "sampling_params": {"max_tokens": 8, "temperature": 0}}

    async def go() -> None:
        async with (
            asyncio.timeout(500),
            opened(ServeConfig(model=str(tiny_llama), engine=engine), tiny_llama, tmp_path / "logs") as serving,
            answering(make_app(serving, "")) as url,
            aiohttp.ClientSession(base_url=url) as session,
        ):
            client = Client(session)

            async def asked() -> tuple[Any, Any]:
                (choice,) = (await client.post("/inference/v1/generate", ask))[1]["choices"]
                return choice["token_ids"], choice["spans"]

            assert (await client.post("/v1/load_lora_adapter", load))[0] == 200
            own = await asked()
            status, answer = await client.post("/headrace/weights", other)
            assert await asked() == own, "what has one label is of one kind"
            assert status == 400 and "unload the adapter before new base weights" in answer["error"]["message"], answer
            assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "good"}))[0] == 200
            assert (await client.post("/headrace/weights", other))[0] == 200
            assert (await client.post("/v1/load_lora_adapter", load))[0] == 200
            assert (await asked())[0] != own[0]

    asyncio.run(go())
    transport.close()


def test_a_file_system_that_does_not_answer_holds_up_nobody_else(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving, "SECONDS", 0.2)
    mended = threading.Event()
    monkeypatch.setattr("headrace.serve.serving.offer_adapter", lambda *named: mended.wait())

    async def go() -> None:
        async with asyncio.timeout(300), faked(tiny_tokenizer) as (client, _):
            body = {"lora_name": "a", "lora_path": str(tmp_path / "gone")}
            bodies = [{**body, "lora_name": f"a{number}"} for number in range(20)]
            asking = [asyncio.ensure_future(client.post("/v1/load_lora_adapter", one)) for one in bodies]
            await asyncio.to_thread(answers, f"{client.url}/health")
            said = [(status, answer["error"]["message"]) for status, answer in await asyncio.gather(*asking)]
            assert {status for status, _ in said} == {503}
            assert sum("gone has not answered for 0.2 s" in one for _, one in said) == serving.AT_ONCE
            assert (await client.post("/v1/load_lora_adapter", body))[0] == 503, "its threads are still there"
            mended.set()
            while (await client.post("/v1/load_lora_adapter", body))[1]["error"]["code"] == "busy":
                await asyncio.sleep(0.01)

    try:
        asyncio.run(go())
    finally:
        mended.set()
