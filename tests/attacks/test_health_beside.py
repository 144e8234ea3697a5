"""Beside every attack, on every door, the process still answers others at once: measured as CPU time of its event loop, not as time that passes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.serve.training.tinker_messages import MESSAGES, PROTOBUF
from support.few import few
from support.health_beside import Attacked, attacked_doors, request, said_to

Attack = Callable[[Attacked], bytes]

MANY = 400_000
EMPTY = b'{"role":"user","content":""}'
ONE = b'"messages":[{"role":"user","content":"x"}]'
DEEP = b'{"a":' * 900 + b"1" + b"}" * 900


@pytest.fixture(scope="module")
def attacked(tiny_tokenizer: Path) -> Iterator[Attacked]:
    with attacked_doors(tiny_tokenizer) as found:
        yield found


Body = Callable[[], bytes]
"""What is sent is made when it is: together it is some hundred megabytes, and every worker of the suite reads this module."""


def of(door: str, path: str, body: Body, media: str = "application/json") -> Attack:
    return lambda them: said_to(them.place(door), request(them.path(door) + path, body(), media))


def raw(door: str, data: Body, patience: float = 300.0) -> Attack:
    return lambda them: said_to(them.place(door), data(), patience)


def listed(one: bytes, times: int = MANY) -> bytes:
    return b"[" + b",".join([one] * times) + b"]"


def chats(path: str) -> dict[str, Body]:
    """Bodies for a chat, by what is wrong with them."""
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": DEEP.decode()}}]}
    talk = [{"role": "user", "content": "x"}, call, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    return {
        f"{path}: a message of 6 MiB": lambda: b'{"messages":[{"role":"user","content":"' + b"a " * (3 << 20) + b'"}]}',
        f"{path}: messages without a text": lambda: b'{"messages":' + listed(EMPTY) + b"}",
        f"{path}: tools": lambda: b"{" + ONE + b',"tools":' + listed(b'{"function":{"name":"f"}}') + b"}",
        f"{path}: unknown fields": lambda: (
            b"{" + ONE + b"," + b",".join(b'"u%d":1' % one for one in range(MANY)) + b"}"
        ),
        f"{path}: arguments of great depth": lambda: json.dumps({"messages": talk}).encode(),
        f"{path}: a schema of great depth": lambda: (
            b"{" + ONE + b',"tools":[{"function":{"name":"f","parameters":' + DEEP + b"}}]}"
        ),
        f"{path}: brackets without end": lambda: b'{"messages":' + b"[" * MANY,
        f"{path}: quotes behind escaped backslashes": lambda: (
            b'{"messages":[{"role":"user","content":"' + b'\\\\\\"' * (15 << 18) + b'"}]}'
        ),
        f"{path}: escaped quotes": lambda: b'{"messages":[{"role":"user","content":"' + b'\\"' * (7 << 20) + b'"}]}',
    }


def posted(*sequences: bytes) -> bytes:
    """A group of Atropos."""
    every = b"[" + b",".join(sequences) + b"]"
    return b'{"tokens":' + every + b',"masks":' + every + b',"scores":' + listed(b"1", len(sequences)) + b"}"


def chunks(path: bytes = b"PATH") -> bytes:
    head = (
        b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head % path + b"1\r\nx\r\n" * 200_000


def example(tokens: int = 2, rows: object = (0, 1, 2), columns: object = (0, 0), width: int = 1) -> bytes:
    """A forward pass with one example, whose weights are a sparse tensor."""
    message = MESSAGES["ForwardBackwardRequest"](model_id="none", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(tokens, np.int32).tobytes()
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = np.ones(tokens, np.int64).tobytes(), 2
    weights.dtype, weights.sparse_csr.values = 1, np.ones(2, np.float32).tobytes()
    weights.shape.extend((tokens, width))
    weights.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
    weights.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    return bytes(message.SerializeToString())


def examples(count: int) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](model_id="none", seq_id=1, loss_fn="cross_entropy")
    for _ in range(count):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(1, np.int32).tobytes()
        for name, kind, number in (("target_tokens", np.int64, 2), ("weights", np.float32, 1)):
            datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = np.ones(1, kind).tobytes(), number
    return bytes(message.SerializeToString())


def numbered(them: Attacked) -> bytes:
    """A model whose requests are refused."""
    asked = {"session_id": them.doors["session"], "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 2}}
    said_to(them.place("tinker"), request("/api/v1/create_model", json.dumps(asked).encode()))
    model = f"{them.doors['session']}:train:7"
    last = b""
    for number, (path, more) in enumerate(
        [("save_weights", {"path": "step 10"}), ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True})],
        1,
    ):
        body = {"model_id": model, "seq_id": number, **more}
        last = said_to(them.place("tinker"), request(f"/api/v1/{path}", json.dumps(body).encode()))
    return last


def of_model(body: Callable[[], bytes]) -> Attack:
    def attack(them: Attacked) -> bytes:
        asked = {
            "session_id": them.doors["session"],
            "model_seq_id": 8,
            "base_model": "tiny",
            "lora_config": {"rank": 2},
        }
        said_to(them.place("tinker"), request("/api/v1/create_model", json.dumps(asked).encode()))
        message = MESSAGES["ForwardBackwardRequest"].FromString(body())
        message.model_id = f"{them.doors['session']}:train:8"
        return said_to(them.place("tinker"), request("/api/v1/forward_backward", message.SerializeToString(), PROTOBUF))

    return attack


def pipe(them: Attacked) -> bytes:
    place = Path(them.log).parent / "pipe"
    place.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(place / "adapter_config.json")
    body = json.dumps({"lora_name": "a", "lora_path": str(place)}).encode()
    return said_to(them.place("serve"), request("/v1/load_lora_adapter", body))


def to_pool(data: bytes) -> Attack:
    def attack(them: Attacked) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(60)
            connection.connect(them.url("pool"))
            connection.sendall(data)
            return connection.recv(1 << 16)
        return b""

    return attack


def crowd(door: str, data: bytes, count: int) -> Attack:
    """Connections at once that read nothing of their answers."""

    def attack(them: Attacked) -> bytes:
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                one = opened.enter_context(socket.create_connection(them.place(door), timeout=60))
                with contextlib.suppress(OSError):
                    one.sendall(data)
            return said_to(them.place("serve"), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")

    return attack


GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"

ATTACKS: dict[str, Attack] = {
    **{f"serve, {name}": of("serve", "/v1/chat/completions", body) for name, body in chats("chat").items()},
    **{f"gateway, {name}": of("gateway", "/v1/chat/completions", body) for name, body in chats("chat").items()},
    "serve: a prompt of 15 MiB": of("serve", "/v1/completions", lambda: b'{"prompt":"' + b"a " * (15 << 19) + b'"}'),
    "gateway: a prompt of 15 MiB": of("gateway", "/v1/completions", lambda: b'{"prompt":"' + b"a " * (15 << 19) + b'"}'),
    "serve: empty prompts": of("serve", "/v1/completions", lambda: b'{"prompt":' + listed(b'""', 1_000_000) + b"}"),
    "serve: prompts of one token": of("serve", "/v1/completions", lambda: b'{"prompt":' + listed(b"[1]", 1_000_000) + b"}"),
    "serve: a whole vocabulary": of("serve", "/v1/chat/completions", lambda: b"{" + ONE + b',"logprobs":true,"top_logprobs":49152}'),
    "serve: stop strings": of("serve", "/v1/completions", lambda: b'{"prompt":"x","stop":' + listed(b'"a"', 1_000_000) + b"}"),
    "serve: stop tokens": of("serve", "/v1/completions", lambda: b'{"prompt":"x","stop_token_ids":' + listed(b"1", 3_000_000) + b"}"),
    "serve: tokens": of("serve", "/inference/v1/generate", lambda: b'{"token_ids":' + listed(b"1", 4_000_000) + b"}"),
    "gateway: tokens": of("gateway", "/inference/v1/generate", lambda: b'{"token_ids":' + listed(b"1", 4_000_000) + b"}"),
    "serve: responses": of("serve", "/v1/responses", lambda: b'{"model":"tiny","input":' + listed(EMPTY) + b"}"),
    "serve: messages": of("serve", "/v1/messages", lambda: b'{"model":"tiny","max_tokens":5,"messages":' + listed(EMPTY) + b"}"),
    "serve: a name of 15 MiB": of("serve", "/v1/completions", lambda: b'{"prompt":"x","model":"' + b"/tmp/" * (3 << 20) + b'"}'),
    "serve: names to abort": of("serve", "/inference/v1/abort_requests", lambda: b'{"request_ids":' + listed(b'"a"', 1_000_000) + b"}"),
    "serve: another page": raw("serve", lambda: request("/pause?mode=abort", b"", more="Origin: https://evil.example\r\n")),
    "serve: a pipe": pipe,
    "serve: chunks of one byte": raw("serve", lambda: chunks(b"v1/completions"), 5.0),
    "serve: chunks for nobody": raw("serve", chunks, 5.0),
    "serve: headers": raw("serve", lambda: b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 12_000 + b"\r\n"),
    "serve: a long address": raw("serve", lambda: GET % (b"a" * (10 << 20))),
    "serve: requests behind each other": raw("serve", lambda: (GET % b"nowhere") * 20_000),
    **{f"atropos, {name}": of("atropos", "/v1/chat/completions", body) for name, body in chats("chat").items()},
    "atropos: a sequence of millions": of("atropos", "/scored_data", lambda: posted(listed(b"7", 3_000_000))),
    "atropos: long sequences": of("atropos", "/scored_data", lambda: posted(*[listed(b"7", 2 * 4000)] * 400)),
    "atropos: sequences of one token": of("atropos", "/scored_data", lambda: posted(*[b"[7]"] * 40_000)),
    "atropos: groups": of("atropos", "/scored_data_list", lambda: listed(posted(b"[7]"), 20_000)),
    "board: metrics": raw("board", lambda: GET % (b"api/curves?run=first&" + b"&".join([b"metric=a"] * 5000))),
    "board: numbers": raw("board", lambda: GET % b"api/curves?run=first&metric=loss&points=100000000000000000000"),
    "board: pages at once": crowd("board", GET % b"api/lanes?run=first", 100),
    "board: watchers": crowd("board", GET % b"api/events?run=first", 100),
    "board: chunks of one byte": raw("board", chunks, 5.0),
    "gateway: chunks of one byte": raw("gateway", chunks, 5.0),
    "tinker: numbered requests that are refused": numbered,
    "tinker: rows without end": of_model(lambda: example(rows=(0, 10**9, 2 * 10**9))),
    "tinker: columns that are none": of_model(lambda: example(columns=(-1, 5))),
    "tinker: rows that count around the world": of_model(lambda: example(rows=(0, 1 << 62, 2))),
    "tinker: examples": of_model(lambda: examples(40_000)),
    "tinker: tokens": of("tinker", "/api/v1/asample", lambda: b'{"prompt":{"chunks":[{"tokens":' + listed(b"1", 6_000_000) + b'}]},"sampling_params":{},"base_model":"tiny"}'),
    "tinker: chunks": of("tinker", "/api/v1/asample", lambda: b'{"prompt":{"chunks":' + listed(b'{"tokens":[]}') + b'},"sampling_params":{},"base_model":"tiny"}'),
    "tinker: no message": of("tinker", "/api/v1/forward_backward", lambda: b"\xff" * (1 << 20), PROTOBUF),
    "dial-in: silence": crowd("dial_in", b"", 200),
    "dial-in: a message of 4 GiB": raw("dial_in", lambda: b"\xff" * (1 << 20)),
    "dial-in: a message of great depth": raw("dial_in", lambda: (4000).to_bytes(4, "little") + b"\x91" * 4000),
    "pool: great depth": to_pool(b"[" * 4000 + b"\n"),
    "pool: a long question": to_pool(b"x" * 100_000 + b"\n"),
    "pool: half of a pair": to_pool(b'{"do":"add","member":"\\ud800"}\n'),
}  # fmt: skip

LIMITS = {": chunks of": 0.2}
"""Attacks that may take less at once than others, by a part of their names."""


@pytest.mark.parametrize("name", few(ATTACKS, keep=12))
def test_others_are_answered_beside(name: str, attacked: Attacked) -> None:
    attacked.begin()
    answer = ATTACKS[name](attacked)
    attacked.check(name, *(limit for word, limit in LIMITS.items() if word in name))
    assert b" 500 " not in answer.partition(b"\r\n")[0], answer


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the CPU time of another process's thread is told by Linux"
)
@pytest.mark.parametrize("name", [name for name in ATTACKS if "chunks of one byte" in name and "serve" in name])
def test_an_answer_takes_few_turns_of_an_attack(name: str, attacked: Attacked) -> None:
    """A connection, a question and an answer are several turns of the loop, and each may be behind one of the attack's."""
    attacking = threading.Thread(target=ATTACKS[name], args=(attacked,))
    attacking.start()
    costs = [attacked.cost_of_an_answer()]
    while attacking.is_alive():
        costs.append(attacked.cost_of_an_answer())
    attacking.join()
    assert max(costs[1:], default=0.0) < 0.25, costs


def test_a_search_for_garbage_does_not_look_at_what_was_there_at_the_start(attacked: Attacked) -> None:
    """It would take a quarter of a second of the event loop."""
    assert attacked.doors["searched"] < 50_000
