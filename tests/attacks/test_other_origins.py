"""Pages of other origins, in a browser that reaches the servers of its machine: none of their requests is obeyed, on any route."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

import headrace
from headrace.episodes.environments.agents.handing_out import Desk
from headrace.episodes.environments.gateway.gateway import ROUTES, Gateway
from headrace.serve.serving import Serving
from headrace.serve.start import make_app
from headrace.serve.training.tinker_routes import routes
from headrace.testing.fake_engine import FakeEngine
from headrace.views.board.board_routes import make_board_app
from headrace.views.board.runs_board import RunsBoard
from headrace.web.limits import ServerLimits
from support.few import few
from support.served import faked

TOKEN = "0123456789abcdef0123"
HERE = "127.0.0.1:8000"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "http://127.0.0.1:8001"},
    {"Origin": "http://127.0.0.1"},
    {"Origin": f"http://{HERE}.evil.example"},
    {"Origin": "null"},
    {"Origin": HERE},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "what comes later"},
    {"Sec-Fetch-Site": "cross-site", "Origin": f"http://{HERE}"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
]
OWN = [
    {},
    {"Origin": f"http://{HERE}"},
    {"Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "https://board.example"},  # behind a proxy
]
PERMISSION = [
    {"Authorization": f"Bearer {TOKEN}"},
    {"X-API-Key": TOKEN},
    {"Cookie": "headrace_board=1"},
    {"Content-Type": "application/json"},
    {"Content-Type": "text/plain"},
]


def _apps() -> dict[str, tuple[Starlette, list[str]]]:
    """Each server's application, with and without a token, and the paths of its routes."""
    serving: Any = SimpleNamespace(limits=ServerLimits())
    door: Any = SimpleNamespace(serving=serving)
    board = RunsBoard(Path("/nowhere"), held=lambda path: False, make_pieces=lambda path: None)
    encoder: Any = None
    gateway = Gateway(encoder, (), {}, ServerLimits())
    rollouts: Any = SimpleNamespace(gateway=gateway)
    Desk(rollouts, True, Path("/nowhere/address"))
    (secret,) = gateway.doors
    made: dict[str, tuple[Starlette, list[str]]] = {
        "gateway": (gateway.application(), ["", f"{secret}/next", *(f"{secret}/{path}" for path in ROUTES)]),
    }
    for token in ("", TOKEN):
        for name, app in (
            ("serve", make_app(serving, token)),
            ("tinker", make_app(serving, token, routes(door))),
            ("board", make_board_app(board, token)),
        ):
            paths = [route.path.lstrip("/") for route in app.routes if isinstance(route, Route)]
            made[f"{name} {'with a token' if token else ''}"] = app, [*paths, "nowhere", "%2e%2e/pause", "/pause"]
    return made


APPS = _apps()
CLIENTS = {
    name: TestClient(app, base_url=f"http://{HERE}", raise_server_exceptions=False) for name, (app, _) in APPS.items()
}


def test_all_routes_of_all_servers_are_tried() -> None:
    paths = {name: set(paths) for name, (_, paths) in APPS.items()}
    assert {"pause", "resume", "v1/load_lora_adapter", "headrace/weights"} <= paths["serve "] <= paths["tinker "]
    assert "api/v1/optim_step" in paths["tinker "] and "api/csv" in paths["board with a token"]
    assert any(path.endswith("/next") for path in paths["gateway"])
    makers = [
        path.relative_to(Path(headrace.__file__).parent).as_posix()
        for path in sorted(Path(headrace.__file__).parent.rglob("*.py"))
        if re.search(r"\bStarlette\(", path.read_text())
    ]
    fakes = ["testing/servers/fake_sglang.py", "testing/servers/fake_vllm.py"]  # of other servers, for tests
    assert makers == [*fakes, "web/application.py"], "no server is without the guard"


@given(st.data())
@example(None)
def test_what_another_page_sends_is_refused_on_every_route(data: st.DataObject | None) -> None:
    name = data.draw(st.sampled_from(sorted(APPS))) if data else "serve "
    path = data.draw(st.sampled_from(APPS[name][1])) if data else "pause"
    method = data.draw(st.sampled_from(METHODS)) if data else "POST"
    foreign = data.draw(st.sampled_from(FOREIGN)) if data else FOREIGN[0]
    more = data.draw(st.sampled_from(PERMISSION)) if data else {}
    body = data.draw(st.sampled_from([None, b"", b"{}", b"mode=abort"])) if data else b""
    answer = CLIENTS[name].request(method, f"/{path}", headers={**more, **foreign}, content=body)
    assert answer.status_code == 403, (name, method, path, foreign)
    assert method == "HEAD" or "sent by a page of" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", few(OWN, keep=2), ids=str)
def test_programs_and_a_server_s_own_pages_are_not_refused(name: str, method: str, own: dict[str, str]) -> None:
    answer = CLIENTS[name].request(method, "/nowhere", headers=own)
    assert answer.status_code in (401, 404, 405), answer.text


def test_a_link_to_the_board_opens_it(tmp_path: Path) -> None:
    board = RunsBoard(tmp_path, held=lambda path: False, make_pieces=lambda path: None)
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with TestClient(make_board_app(board), base_url=f"http://{HERE}") as client:
        assert client.get("/", headers=link).status_code == 200
        assert client.post("/", headers=link).status_code == 403
        assert client.get("/", headers={**link, "Sec-Fetch-Dest": "iframe"}).status_code == 403


def test_a_page_cannot_pause_an_engine(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        engine = FakeEngine(seconds_per_token=0.001)
        async with asyncio.timeout(300), faked(tiny_tokenizer, engine) as (client, serving):
            assert isinstance(serving, Serving)
            for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                assert (await client.post("/pause", headers=headers))[0] == 403
                assert not serving.paused
            assert (await client.post("/pause?mode=keep"))[0] == 200 and serving.paused
            assert (await client.post("/resume", headers={"Origin": "null"}))[0] == 403 and serving.paused
            assert (await client.post("/resume", headers={"Origin": client.url}))[0] == 200 and not serving.paused

    asyncio.run(go())
