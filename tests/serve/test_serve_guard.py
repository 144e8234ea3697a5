"""Who may ask: every route, without exception."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.core.errors import ConfigError
from headrace.serve.config import ServeConfig
from headrace.serve.start import ROUTES
from headrace.settings.secrets import read_token
from headrace.web.limits import is_loopback
from headrace.web.server import bind
from support.served import faked

TOKEN = "0123456789abcdef0123"


def test_every_route_asks_for_the_token(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with asyncio.timeout(120), faked(tiny_tokenizer, token=TOKEN) as (client, serving):
            paths = [route.path for route in ROUTES] + ["/", "/docs", "/nowhere", "/health/"]
            for path in paths:
                for wrong in ("", "Bearer ", f"Bearer {TOKEN}x", TOKEN, f"bearer {TOKEN}", "Basic Og=="):
                    for ask in (client.get, client.post):
                        status, answer = await ask(path, headers={"Authorization": wrong} if wrong else {})
                        assert status == 401, (path, wrong)
                        assert answer["error"]["code"] == "invalid_api_key"
            right = {"Authorization": f"Bearer {TOKEN}"}
            assert (await client.get("/health", headers=right))[0] == 200
            assert (await client.get("/health", headers={**right, "Host": "gpu.example.org"}))[0] == 200
            assert serving.counters.completions == 0 and not serving.paused

    asyncio.run(go())


def test_without_a_token_a_page_in_a_browser_cannot_call_it(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with asyncio.timeout(120), faked(tiny_tokenizer) as (client, _):
            for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.5", "[2001:db8::1]:80"):
                assert (await client.get("/health", headers={"Host": host}))[0] == 403, host
            for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000"):
                assert (await client.get("/health", headers={"Host": host}))[0] == 200, host

    asyncio.run(go())


def test_what_is_a_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "", "gpu")))


def test_an_address_that_others_reach_needs_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "gpu-box"):
        with pytest.raises(ConfigError, match="--token-file"):
            ServeConfig(model="tiny", host=host)
        assert ServeConfig(model="tiny", host=host, token=TOKEN).token == TOKEN
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "--token-file" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="at least 16"):
        ServeConfig(model="tiny", token="short")


def test_a_token_comes_from_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(path, "--token-file")
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(path, "--token-file")
    path.chmod(0o600)
    assert read_token(path, "--token-file") == TOKEN
    for wrong in ("", "two words", "tökën-tökën-tökën"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="one token"):
            read_token(path, "--token-file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "train.steps=3"], "not a setting of the server"),
        (["--set", "engine.kv_gb=3"], "kv_gib"),
        (["--port", "99999"], "65535"),
        (["--adapters", "-1"], "max_adapters"),
    ],
)
def test_settings_that_are_none_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_answer_in_two_parts_does_not_wait_for_an_acknowledgement() -> None:
    async def go() -> int:
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(
            lambda reader, writer: accepted.set_result(writer), sock=bind("127.0.0.1", 0)
        )
        _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer = await accepted
        delay = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()
        writer.close()
        server.close()
        return delay

    assert asyncio.run(go()) == 1
