"""`curl` with broken input against `headrace serve`, and many connections of which half vanish."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import EngineConfig
from headrace.serve.config import ServeConfig
from headrace.serve.serving import Serving
from headrace.serve.start import make_app, opened
from headrace.testing.fake_engine import FakeEngine
from headrace.web.limits import ServerLimits
from support.served import answering, faked

CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
JSON = ("-H", "Content-Type: application/json")
LONGEST = 300

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def curl(*words: str, given: bytes = b"") -> tuple[int, str]:
    """Status and body. `given`: what `-d @-` and `-T -` read."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "-w", "\n%{http_code}", "--max-time", "60", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(given)
    body, _, status = out.decode().rpartition("\n")
    assert status.isdigit(), (out, err)
    return int(status), body


def run(model: Path, case: Callable[[str, Serving], Awaitable[None]], **settings: Any) -> None:
    async def go() -> None:
        async with asyncio.timeout(LONGEST), faked(model, **settings) as (client, serving):
            await case(client.url, serving)
            assert serving.under_way == 0, "everything was released"

    asyncio.run(go())


def body(**more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more})


BROKEN: list[tuple[tuple[str, ...], int, str]] = [
    ((*JSON, "-d", "{", CHAT), 400, "truncated"),
    ((*JSON, "-d", "", CHAT), 400, "truncated"),
    ((*JSON, "-d", body() + "}", CHAT), 400, "trailing"),
    ((*JSON, "-d", "'" + body() + "'", CHAT), 400, "malformed"),
    ((*JSON, "-d", '{"messages": "hi"}', CHAT), 400, "Expected `array`, got `str` - at `$.messages`"),
    ((*JSON, "-d", '{"prompt": 7}', TEXT), 400, "at `$.prompt`"),
    ((*JSON, "-d", '{"prompt": "a", "max_tokens": "many"}', TEXT), 400, "Expected `int | null`, got `str`"),
    ((*JSON, "-d", '{"prompt": "a", "n": 0}', TEXT), 400, "at `$.n`"),
    ((*JSON, "-d", '{"token_ids": [1.5]}', TOKENS), 400, "at `$.token_ids[0]`"),
    ((*JSON, "--data-binary", "@-", CHAT), 400, "not what this route takes"),
    (("-d", body(), CHAT), 415, "Content-Type: application/json"),
    ((*JSON, "-d", body(model="gpt-7"), CHAT), 404, "there is no model gpt-7 here; there are: tiny"),
    ((*JSON, "-d", body(temprature=1), CHAT), 400, "there is no field temprature; did you mean temperature?"),
    ((*JSON, "-d", body(), "/v1/chat"), 404, "/v1/chat is not served here"),
    ((CHAT,), 405, "takes POST, not GET"),
    ((*JSON, "-X", "DELETE", "-d", body(), CHAT), 405, "takes POST, not DELETE"),
    ((*JSON, "-H", "Host: evil.example", "-d", body(), CHAT), 403, "called as evil.example"),
    ((*JSON, "-H", "Content-Length: 99999999", "-d", body(), CHAT), 413, "a body may have 4000 bytes"),
    ((*JSON, "-d", body(user="x" * 4000), CHAT), 413, "a body may have 4000 bytes"),
    ((*JSON, "-H", "Transfer-Encoding: chunked", "-d", body(user="x" * 4000), CHAT), 413, "a body may have 4000 bytes"),
]  # fmt: skip


def test_broken_input_is_answered_with_a_status_and_a_sentence(tiny_tokenizer: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        for words, expected, said in BROKEN:
            status, text = await curl(*words[:-1], url + words[-1], given=b"\xff\xfe\x00{")
            answer = json.loads(text)["error"]
            assert (status, said in answer["message"]) == (expected, True), (words, status, text)
        assert serving.counters.completions == 0
        assert (await curl(*JSON, "-d", body(), url + CHAT))[0] == 200, "and it goes on"

    run(tiny_tokenizer, case, limits=ServerLimits(body_bytes=4000))


def test_a_slow_body_is_cut_off_and_nobody_waits_for_it(tiny_tokenizer: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        long = body(user="x" * 3000).encode()
        slow = asyncio.ensure_future(
            curl(*JSON, "--limit-rate", "100", "--expect100-timeout", "0", "-d", "@-", url + CHAT, given=long)
        )
        assert (await curl(*JSON, "-d", body(), url + CHAT))[0] == 200
        status, text = await slow
        assert status == 408 and "did not arrive within 1 seconds" in text

    run(tiny_tokenizer, case, limits=ServerLimits(body_seconds=1.0))


async def ask(url: str, number: int, tokens: int, leave_after: int = 0) -> list[int]:
    """A streamed request by hand. With `leave_after` the connection is dropped, without a word, after so many tokens."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    drawn = {"max_tokens": tokens, "ignore_eos": True, "seed": number}
    said = json.dumps({"token_ids": [1, 3, 10, 11, number % 40 + 3], "sampling_params": drawn, "stream": True})
    head = f"POST {TOKENS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n\r\n"
    writer.write((head + said).encode())
    sampled: list[int] = []
    answer = b""
    try:
        while line := await reader.readline():
            answer += line
            if line.startswith(b"data: {"):
                sampled += json.loads(line[6:])["choices"][0]["token_ids"]
            if line.startswith(b"data: [DONE]"):
                return sampled
            if leave_after and len(sampled) >= leave_after:
                writer.transport.abort()
                return sampled
    finally:
        writer.close()
    raise AssertionError(f"request {number} was broken off: {answer.decode()[-500:]}")


async def half_vanish(url: str, serving: Serving, count: int, tokens: int, wanted: int) -> None:
    """Asks `count` requests at once. Every second one wants `wanted` tokens and leaves after a few; the others must be what they are
    alone."""
    files = len(os.listdir("/proc/self/fd"))
    alone = {number: await ask(url, number, tokens) for number in range(0, count, count // 10)}
    cancelled = serving.counters.cancelled
    leaving = {number: 1 + number % 5 for number in range(1, count, 2)}
    asking = [ask(url, n, wanted if n in leaving else tokens, leave_after=leaving.get(n, 0)) for n in range(count)]
    answers = await asyncio.gather(*asking)
    assert all(len(answers[number]) == tokens for number in range(0, count, 2))
    assert {number: answers[number] for number in alone} == alone
    while serving.under_way or (await serving.engine.stats()).running:
        await asyncio.sleep(0.01)
    # On a busy machine some have all their tokens before their client, in this same process, comes to leaving.
    assert 0 < serving.counters.cancelled - cancelled <= count // 2
    while len(os.listdir("/proc/self/fd")) > files + 2:  # sockets close behind the last byte
        await asyncio.sleep(0.01)


def test_of_200_connections_half_vanish(tiny_tokenizer: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        await half_vanish(url, serving, count=200, tokens=20, wanted=20)

    engine = FakeEngine(seconds_per_token=0.005, length=lambda rng: 20, script=by_prompt)
    run(tiny_tokenizer, case, engine=engine)


def by_prompt(request: Any) -> list[int]:
    return [(request.prompt[-1] * place + request.sampling.seed) % 97 + 3 for place in range(1, 21)]


@pytest.mark.slow
def test_of_200_connections_to_the_engine_half_vanish_and_their_kv_is_free(tiny_llama: Path, tmp_path: Path) -> None:
    engine = EngineConfig(dtype="float32", device="cpu", kv_gib=0.05, context_length=200, max_running=64, exact=True)

    async def go() -> None:
        config = ServeConfig(model=str(tiny_llama), engine=engine, name="tiny")
        async with (
            asyncio.timeout(LONGEST),
            opened(config, tiny_llama, tmp_path) as serving,
            answering(make_app(serving, "")) as url,
        ):
            for _ in range(3):
                await half_vanish(url, serving, count=200, tokens=80, wanted=190)
                stats = await serving.engine.stats()
                assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)

    asyncio.run(go())
