"""Answers to questions that make no sense: an error in words each, without a path of the server, and never a lost connection."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, IdentityError, UnexpectedError, WorkerDied
from headrace.core.weights import WeightUpdate
from headrace.models.chat import ChatEncoder
from headrace.serve.config import TrainLimits
from headrace.serve.serving import Serving
from headrace.serve.start import make_app
from headrace.serve.training.futures import failure_of
from headrace.serve.training.saved_weights import Store
from headrace.serve.training.tinker_messages import CreateSession
from headrace.serve.training.tinker_routes import routes
from headrace.serve.training.tinker_service import TinkerService
from headrace.testing.fake_engine import FakeEngine
from headrace.views.board.board_parts import PARTS
from headrace.views.board.board_routes import make_board_app
from headrace.views.board.runs_board import RunsBoard
from headrace.web import sending
from headrace.web.errors import Refused, response_of, without_paths
from headrace.web.limits import ServerLimits
from headrace.web.sending import decoded
from support.fact_stream import write_run
from support.served import answering

PLACE = "a-secret-place"
"""A part of every path of these servers."""
NUMBERS = [
    "1" + "0" * 20,
    "-1" + "0" * 20,
    "1e308",
    "-0.0",
    "9007199254740993",
    "inf",
    "nan",
    "",
    "0x10",
    "1_0",
    "٣",
    "x" * 99,
]
NAMES = ["points", "window", "from", "to", "least", "most", "lag", "ticket", "rollout", "start"]
OTHER = ["order", "words", "cut", "failed", "gone", "over", "show", "part"]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    place = tmp_path_factory.mktemp(PLACE)
    write_run(place / "first")
    runs = RunsBoard(place, held=lambda path: False, make_pieces=lambda path: None)
    yield TestClient(make_board_app(runs), base_url="http://127.0.0.1")


PATHS = [f"/api/{name}" for name in ("metrics", "curves", "part", "lanes", "differences", "rollouts", "csv")]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_board_answers_strange_numbers_in_words(board: TestClient, data: st.DataObject) -> None:
    query: dict[str, Any] = {"run": data.draw(st.sampled_from(["first", "absent", "../first", ""]))}
    query["metric"] = data.draw(st.sampled_from(["loss", "absent", ""]))
    query["part"] = data.draw(st.sampled_from([*PARTS, "absent"]))
    query |= data.draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(NUMBERS), max_size=3))
    query |= data.draw(
        st.dictionaries(st.sampled_from(OTHER), st.sampled_from(["", "newest", "all", "1", "\0", "'"]), max_size=2)
    )
    answer = board.get(data.draw(st.sampled_from(PATHS)), params=query)
    assert answer.status_code in (200, 400, 404), (query, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"] and PLACE not in answer.text


WHOLE = {
    "curves": ["points", "window"],
    "part": ["to"],
    "lanes": ["to", "start"],
    "rollouts": ["lag", "ticket", "rollout", "start"],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in WHOLE.items() for name in names])
@pytest.mark.parametrize("number", ["1" + "0" * 20, "-1" + "0" * 20, "9007199254740994", "1" + "0" * 400])
def test_the_board_takes_no_whole_number_that_it_cannot_hold(
    board: TestClient, path: str, name: str, number: str
) -> None:
    query = {"run": "first", "metric": "loss", "part": sorted(PARTS)[0], "from": "1", name: number}
    answer = board.get(f"/api/{path}", params=query)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("path", PATHS)
def test_a_run_that_is_not_there_is_a_404(board: TestClient, path: str) -> None:
    answer = board.get(path, params={"run": "absent", "metric": "loss", "part": sorted(PARTS)[0]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_run")


# -- bodies of many parts -----------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.integers() | st.text('ab\\\\"{}[],: \n\u00e9', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\\\"{[a', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def parts_of(value: Any) -> int:
    """Objects, lists and texts."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts_of, value.values()))
    return 1 + sum(map(parts_of, value)) if isinstance(value, list) else int(isinstance(value, str))


@given(VALUES, st.sampled_from([None, 1]))
def test_a_body_is_refused_for_its_parts_exactly_where_there_are_too_many(value: Any, indent: int | None) -> None:
    body, parts = json.dumps(value, indent=indent).encode(), parts_of(value)
    for most in {max(0, parts - 1), parts, parts + 1}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sending, "MOST_PARTS", most)
            if parts > most:
                with pytest.raises(Refused, match=f"more than {most} objects, lists and texts"):
                    decoded(body, object)
            else:
                assert decoded(body, object) == value


# -- paths of the server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        Refused(400, f"cannot be read ([Errno 2] No such file or directory: '/usr/local/{PLACE} of mine/x.json')"),
        ValueError(f"/usr/{PLACE}/model holds nothing"),
        IdentityError(f'the weights in /home/{PLACE}/model, and in "/tmp/{PLACE}/y z", are others'),
        WorkerDied("engine", f"ended; its output is in /tmp/{PLACE}/engine.log"),
        CheckpointError(f"(/var/{PLACE}/a) and [/var/{PLACE}/b]: /var/{PLACE}/c"),
        ConfigError(f"file:///etc/{PLACE}/c"),
        UnexpectedError(f'Traceback\n  File "/usr/{PLACE}/e.py"\nKeyError: "/usr/{PLACE}/x"\n'),
        HeadraceError(f"//usr//{PLACE}//x"),
        KeyError(f"/usr/{PLACE}/x"),
        FileNotFoundError(2, "No such file", f"/usr/{PLACE}/x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_of_any_kind_holds_a_path(error: Exception) -> None:
    for body in (response_of(error).body, failure_of(error).body):
        said = bytes(body).decode()
        assert PLACE not in said, "of a path its last name stays"
        assert not re.search(r"/(usr|home|tmp|var|etc)\b", said), said
        assert "Traceback" not in said


@given(st.text("/ab'\" :", max_size=30))
def test_routes_and_what_is_no_path_of_this_machine_stay(text: str) -> None:
    for route in ("/v1/models", "/api/v1/asample", "http://127.0.0.1:80/v1", "and/or", "1/2"):
        assert route in without_paths(f"see {route} {text}")


def test_no_route_tells_where_the_server_keeps_things(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """All routes of `headrace serve --train` with bodies that are wrong, and half right."""
    place = tmp_path / PLACE
    (place / "mine" / "weights" / "broken").mkdir(parents=True)
    (place / "mine" / "sampler_weights" / "broken").mkdir(parents=True)
    facts = {"path": "tinker://mine/sampler_weights/broken", "kind": "sampler_weights", "base_model": "tiny"}
    facts |= {"lora": {"rank": 2}, "version": 1, "saved_at": 1.0}
    (place / "mine" / "sampler_weights" / "broken" / "checkpoint.json").write_text(json.dumps(facts))
    paths = ["tinker://mine/weights/broken", "tinker://mine/sampler_weights/broken", "tinker://x/weights/y", "/x", ""]
    bodies: list[Any] = [None, [], {}, {"name": "x"}]
    for path in paths:
        common = {"tinker_path": path, "path": path, "model_path": path, "model_id": "mine", "base_model": "tiny"}
        common |= {"session_id": "s", "seq_id": 1, "sampling_session_id": "s", "request_id": "r"}
        bodies += [common, *({name: value} for name, value in common.items())]
        bodies.append({"session_id": "s", "sampling_session_seq_id": 1, "model_path": path})
    bodies += [{"lora_name": "a", "lora_path": str(tiny_tokenizer / "absent")}, {"lora_name": "a"}]

    async def go() -> list[tuple[str, int, str]]:
        serving = Serving(
            engine=FakeEngine(seconds_per_token=0.001),
            encoder=ChatEncoder(tiny_tokenizer).with_special_tokens("hide"),
            name="tiny",
            limits=ServerLimits(body_seconds=5),
        )
        await serving.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
        door = TinkerService(serving, Store(place), TrainLimits(poll_seconds=0.01), directory=place, places=1)
        door.trainer = AsyncMock()
        door.trainer.add.side_effect = OSError(28, "No space left on device", str(place / "adapter"))
        app = make_app(serving, "", routes(door))
        session = door.create_session(CreateSession(sdk_version="0.38"))["session_id"]
        found = []
        async with asyncio.timeout(500), answering(app) as url, aiohttp.ClientSession(base_url=url) as client:
            for path, methods in methods_of(app):
                for body in bodies if "POST" in methods else [None]:
                    given = json.loads(json.dumps(body).replace('"s"', json.dumps(session)))
                    where = path.replace("{name}", "mine").replace("{path:path}", "nowhere")
                    async with client.request("POST" if "POST" in methods else "GET", where, json=given) as answer:
                        found.append((where, answer.status, f"{await answer.text()} {dict(answer.headers)}"))
        await door.close()
        return found

    answers = asyncio.run(go())
    assert {status for _, status, _ in answers} >= {200, 400, 404}
    for where, status, said in answers:
        assert PLACE not in said and str(tiny_tokenizer) not in said, (where, status, said)
        assert status != 500, (where, said)


def methods_of(app: Starlette) -> list[tuple[str, set[str]]]:
    return [(route.path, set(route.methods or ())) for route in app.routes if isinstance(route, Route)]
