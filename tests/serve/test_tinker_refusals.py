"""A request that is refused takes its number, whichever route it came by: those behind it are done, and nothing that was learned is lost."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from starlette.applications import Starlette

from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.serve.config import TrainLimits
from headrace.serve.training import samplers, sessions
from headrace.serve.training.futures import Promise
from headrace.serve.training.samplers import SavedAdapter, Shelf
from headrace.serve.training.saved_weights import Store
from headrace.serve.training.tinker_messages import (
    MESSAGES,
    PROTOBUF,
    CreateSampler,
    CreateSession,
    NumberedRequest,
    Params,
    PromptChunk,
    SampleBody,
    SamplePrompt,
    of_json,
    of_protobuf,
)
from headrace.serve.training.tinker_routes import routes
from headrace.serve.training.tinker_service import TinkerService
from headrace.testing.fake_engine import FakeEngine
from headrace.trainer.shared.calls import AdamStep, SharedLora, StepDone
from headrace.web.errors import Refused, answer_error
from headrace.web.limits import ServerLimits
from support.few import few
from support.served import faked

LIMITS = ServerLimits(body_bytes=4096, body_seconds=5.0)


class PatientTrainer:
    """A trainer that makes any step and notes what it was asked for."""

    def __init__(self) -> None:
        self.steps: list[AdamStep] = []
        self.spoiled: list[str] = []
        self.removed: list[str] = []
        self.slow = asyncio.Event()
        """Unset: it makes no adapter."""
        self.slow.set()

    async def add(self, name: str, lora: SharedLora) -> None:
        await self.slow.wait()

    async def remove(self, name: str) -> None:
        self.removed.append(name)

    async def spoil(self, name: str, why: str) -> None:
        self.spoiled.append(why)

    async def optim_step(self, call: AdamStep) -> StepDone:
        self.steps.append(call)
        return StepDone(version=len(self.steps), grad_norm=1.0)


class Caller:
    """A client of the routes, with one model."""

    def __init__(self, http: httpx.AsyncClient, service: TinkerService, trainer: PatientTrainer) -> None:
        self.http, self.service, self.trainer = http, service, trainer
        self.session = self.model = ""

    async def post(self, path: str, body: Any = None, media: str = "application/json", **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(f"/api/v1/{path}", content=content, headers={"Content-Type": media}, **more)

    async def begin(self) -> None:
        self.session = (await self.post("create_session", {})).json()["session_id"]
        asked = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        promised = (await self.post("create_model", asked)).json()
        self.model = (await self.result(promised)).json()["model_id"]

    async def result(self, promised: Any) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": promised["request_id"]})

    async def step(self, number: int) -> Any:
        asked = {"model_id": self.model, "seq_id": number, "adam_params": {"learning_rate": 0.5}}
        return (await self.result((await self.post("optim_step", asked)).json())).json()


def talk(tmp_path: Path, case: Callable[[Caller], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        serving: Any = SimpleNamespace(name="tiny", limits=LIMITS)
        given = TrainLimits(**{"gap_seconds": 1.0, **limits})
        service = TinkerService(serving, Store(tmp_path), given, directory=tmp_path, places=1)
        trainer: Any = PatientTrainer()
        service.trainer = trainer
        kinds = [Refused, ValueError, Exception]
        app = Starlette(routes=routes(service), exception_handlers=dict.fromkeys(kinds, answer_error))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            caller = Caller(http, service, trainer)
            await caller.begin()
            await case(caller)
        await service.close()

    asyncio.run(main())


def passed(model: str, number: int, **fields: Any) -> bytes:
    return bytes(MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=number, **fields).SerializeToString())


async def refused(caller: Caller, path: str, body: Any, status: int, media: str = "application/json") -> None:
    """It is refused as number 1, and number 2 is done at once."""
    answer = await caller.post(path, body, media)
    assert answer.status_code == status, answer.text
    assert (await caller.step(2)).get("metrics") == {"grad_norm": 1.0, "version": 1}, answer.text
    assert [step.learning_rate for step in caller.trainer.steps] == [0.5], "what was refused is not done"
    late = await caller.step(1)
    assert "error" in late and late["category"] == "user", "its number is taken"


JSON_ROUTES = {
    "optim_step": {"adam_params": {}},
    "save_weights": {"path": "name"},
    "save_weights_for_sampler": {"path": "name"},
    "load_weights": {"path": "tinker://s:train:0/weights/x", "optimizer": True},
}
"""The routes of numbered requests, with bodies that fit but for the weights, which are not there."""

REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "a learning rate of NaN": ("optim_step", {"adam_params": {"learning_rate": math.nan}}, 400),
    "a learning rate below 0": ("optim_step", {"adam_params": {"learning_rate": -1.0}}, 400),
    "no parameters": ("optim_step", {"adam_params": None}, 400),
    "a name with a space": ("save_weights", {"path": "step 10"}, 400),
    "no name": ("save_weights", {}, 400),
    "a lifetime that is too short": ("save_weights", {"path": "a", "ttl_seconds": 1}, 400),
    "a bad name of a sampler": ("save_weights_for_sampler", {"path": "../x"}, 400),
    "neither name nor sampler": ("save_weights_for_sampler", {}, 400),
    "weights that are not there": ("load_weights", JSON_ROUTES["load_weights"], 404),
    "no path of weights": ("load_weights", {"path": "/etc/passwd", "optimizer": True}, 400),
    "a token for weights": ("load_weights", {**JSON_ROUTES["load_weights"], "weights_access_token": "x"}, 400),
    "too large a body": ("save_weights_for_sampler", {"path": "a", "user_metadata": {"x": "y" * 5000}}, 413),
}


@pytest.mark.parametrize("what", few([one for one in REFUSED if one != "too large a body"], keep=3))
def test_a_refused_request_takes_its_number(tmp_path: Path, what: str) -> None:
    path, fields, status = REFUSED[what]

    async def case(caller: Caller) -> None:
        await refused(caller, path, {"model_id": caller.model, "seq_id": 1, **fields}, status)
        assert not caller.trainer.spoiled, "the gradient so far stays"

    talk(tmp_path, case)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_refused_pass_takes_its_number_and_the_gradient_that_it_would_have_been_in(
    tmp_path: Path, forward_only: bool
) -> None:
    async def case(caller: Caller) -> None:
        body = passed(caller.model, 1, loss_fn="nonsense", forward_only=forward_only)
        await refused(caller, "forward_backward", body, 400, PROTOBUF)
        assert len(caller.trainer.spoiled) == (not forward_only)

    talk(tmp_path, case)


@pytest.mark.parametrize("spoilt", ["too large", "torn", "as JSON"])
def test_a_pass_whose_body_is_not_read_takes_its_number_too(tmp_path: Path, spoilt: str) -> None:
    async def case(caller: Caller) -> None:
        body = passed(
            caller.model,
            1,
            loss_fn="cross_entropy",
            data=[{"model_input": [{"encoded_text": {"tokens": b"1234" * 2000}}]}],
        )
        form = {
            "too large": (body, 413, PROTOBUF),
            "torn": (body[:2000], 400, PROTOBUF),
            "as JSON": (body[:2000], 415, "application/json"),
        }
        found, status, media = form[spoilt]
        await refused(caller, "forward_backward", found, status, media)
        assert len(caller.trainer.spoiled) == 1

    talk(tmp_path, case)


def test_a_number_that_is_sent_again_is_left_to_its_client(tmp_path: Path) -> None:
    """Where too much is pending, the answer is 429: the client sends the same request once more, and then it is done."""

    async def case(caller: Caller) -> None:
        bad = {"model_id": caller.model, "seq_id": 1, "adam_params": None}
        blocking = [caller.service.futures.open(f"b{number}", "s") for number in range(2)]
        assert (await caller.post("optim_step", {**bad, "adam_params": {}})).status_code == 429
        assert (await caller.post("optim_step", bad)).status_code == 429, "it could not be noted"
        caller.service.futures.end("s")
        assert all(one.answer for one in blocking)
        assert (await caller.step(1))["metrics"]["version"] == 1

    talk(tmp_path, case, pending=2)


def test_a_number_that_nobody_can_have_is_not_waited_for(tmp_path: Path) -> None:
    """All numbers before it would have to come first, and the model is lost where they do not within a while."""

    async def case(caller: Caller) -> None:
        for number in (1 << 62, 10**30):
            answer = await caller.post("optim_step", {"model_id": caller.model, "seq_id": number, "adam_params": {}})
            assert answer.status_code == 400
        answer = await caller.post("forward_backward", passed(caller.model, -1), "application/x-protobuf")
        assert answer.status_code == 400
        await asyncio.sleep(0.3)
        assert (await caller.step(1)).get("metrics") == {"grad_norm": 1.0, "version": 1}

    talk(tmp_path, case, gap_seconds=0.1)


def test_strangers_take_no_number(tmp_path: Path) -> None:
    async def case(caller: Caller) -> None:
        for model in ("nobody:train:0", f"{caller.session}:train:9", ""):
            assert (await caller.post("optim_step", {"model_id": model, "seq_id": 1})).status_code in (400, 404)
        assert (await caller.post("save_weights", b"\xff{")).status_code == 400
        assert (await caller.step(1))["metrics"]["version"] == 1

    talk(tmp_path, case)


_NOTHING = object()
_VALUES = st.sampled_from([_NOTHING, None, True, -1, 0, 1, 2.5, math.nan, "", "a b", "../x", "ok", [], {}, {"x": 1}])
_FIELDS = (
    "adam_params",
    "path",
    "optimizer",
    "ttl_seconds",
    "overwrite",
    "kind",
    "sampling_session_seq_id",
    "type",
    "unknown",
)


_BODIES = st.tuples(st.sampled_from(list(JSON_ROUTES)), st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4))


@settings(max_examples=8)
@given(bodies=st.lists(_BODIES, min_size=4, max_size=16), data=st.data())
def test_whatever_the_bodies_of_numbered_requests_are_the_next_one_is_done(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(bodies))))

    async def case(caller: Caller) -> None:
        answers = []
        for number in order:
            route, fields = bodies[number]
            body = {"model_id": caller.model, "seq_id": number + 1, **JSON_ROUTES[route], **fields}
            answer = await caller.post(route, {name: value for name, value in body.items() if value is not _NOTHING})
            answers.append((answer.status_code, answer.text))
        assert all(status == 200 or json.loads(text)["error"]["message"] for status, text in answers)
        assert "metrics" in await caller.step(len(bodies) + 1), answers

    talk(tmp_path_factory.mktemp("service"), case)


@settings(max_examples=60)
@given(model=st.text(max_size=20), number=st.integers(0, 2**31 - 1), rest=st.binary(max_size=40), cut=st.booleans())
def test_the_numbers_of_a_message_are_in_its_first_bytes(model: str, number: int, rest: bytes, cut: bool) -> None:
    body = passed(model, number, loss_fn="cross_entropy")
    if not model or not number:  # protobuf leaves out what is empty or 0
        return
    assert len(model.encode()) < 128
    found = of_protobuf(body[: 2 + len(model.encode()) + 6] if cut else body + rest)
    assert found == NumberedRequest(model, number, trains=True)


@settings(max_examples=60)
@given(st.binary(max_size=40))
def test_other_bytes_have_no_number_and_raise_nothing(body: bytes) -> None:
    for found in (of_protobuf(body), of_json(body)):
        assert found is None or (isinstance(found.model, str) and isinstance(found.number, int))


def test_json_that_is_hard_to_read_has_no_number() -> None:
    assert of_json(b"[" * 100_000) is None and of_json(b'{"seq_id": 1' + b"0" * 5000 + b"}") is None
    assert of_json(b'{"model_id": "m", "seq_id": true}') is None


# -- numbers that are used twice ----------------------------------------------------------------------------------------

TWICE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "optim_step": ("optim_step", {"adam_params": {"learning_rate": 0.5}}, {"adam_params": {"learning_rate": 0.25}}),
    "save_weights": ("save_weights", {"path": "one"}, {"path": "two"}),
    "another operation": ("save_weights", {"path": "one"}, {"path": "one", "ttl_seconds": 4000}),
}


@pytest.mark.parametrize("what", TWICE)
def test_another_request_with_a_number_that_was_used_is_refused_and_the_same_one_is_not_done_again(
    tmp_path: Path, what: str
) -> None:
    """Two clients that share a session count alike: neither may be told that its request was done when it was the other's."""
    path, first, second = TWICE[what]

    async def case(caller: Caller) -> None:
        numbered = {"model_id": caller.model, "seq_id": 1}
        promised = await caller.post(path, {**numbered, **first})
        other = await caller.post(path, {**numbered, **second})
        assert other.status_code == 400 and other.json()["error"]["code"] == "number_used", other.text
        again = await caller.post(path, {**numbered, **first})
        assert again.json() == promised.json()
        assert len(caller.trainer.steps) <= 1
        asked = {"session_id": caller.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 3}}
        assert (await caller.post("create_model", asked)).json()["error"]["code"] == "number_used"

    talk(tmp_path, case)


def test_a_sampler_whose_answer_was_lost_is_asked_for_again_under_another_number_of_samplers(tmp_path: Path) -> None:
    """As `tinker` 0.38 does: it counts its samplers anew for each attempt, and the requests of a model once."""

    async def case(caller: Caller) -> None:
        asked = {"model_id": caller.model, "seq_id": 1, "sampling_session_seq_id": 0}
        first = await caller.post("save_weights_for_sampler", asked)
        again = await caller.post("save_weights_for_sampler", {**asked, "sampling_session_seq_id": 1})
        assert first.status_code == again.status_code == 200 and again.json() == first.json(), again.text
        other = await caller.post(
            "save_weights_for_sampler", {**asked, "sampling_session_seq_id": 2, "kind": "inflight"}
        )
        assert other.status_code == 400 and other.json()["error"]["code"] == "number_used", other.text

    talk(tmp_path, case)


def test_another_pass_with_a_number_that_was_used_is_refused_and_spoils_nothing(tmp_path: Path) -> None:
    async def case(caller: Caller) -> None:
        bodies = [whole_pass(caller.model, 1, token) for token in (3, 4)]
        first, second = [await caller.post("forward_backward", body, PROTOBUF) for body in bodies]
        assert first.status_code == 200, first.text
        assert second.status_code == 400 and second.json()["error"]["code"] == "number_used", second.text
        assert (await caller.post("forward_backward", bodies[0], PROTOBUF)).json() == first.json()
        assert not caller.trainer.spoiled

    talk(tmp_path, case)


def whole_pass(model: str, number: int, token: int) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([token], np.int32).tobytes()
    for name, kind, dtype in (("target_tokens", np.int64, 2), ("weights", np.float32, 1)):
        datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = np.ones(1, kind).tobytes(), dtype
    return bytes(message.SerializeToString())


def test_a_sampler_keeps_its_weights_and_samples_without_a_number_are_each_their_own(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with asyncio.timeout(300), faked(tiny_tokenizer) as (_, serving):
            service = TinkerService(serving, Store(tiny_tokenizer), TrainLimits(), directory=tiny_tokenizer, places=1)
            session = service.create_session(CreateSession())["session_id"]
            asked = CreateSampler(session_id=session, sampling_session_seq_id=0, base_model="tiny")
            sampler = service.create_sampler(asked)
            assert service.create_sampler(asked) is sampler
            with pytest.raises(Refused, match="is there already, and samples from base; give another"):
                service.create_sampler(
                    structs.replace(asked, base_model=None, model_path="tinker://x/sampler_weights/y")
                )

            def sampled(tokens: list[int], number: int | None) -> str:
                prompt = SamplePrompt(chunks=[PromptChunk(tokens=tokens)])
                params = Params(max_tokens=1)
                body = SampleBody(prompt=prompt, sampling_params=params, sampling_session_id=sampler.id, seq_id=number)
                return service.sample(body)[0].id

            assert sampled([1, 2], 5) == sampled([1, 2], 5)
            with pytest.raises(Refused, match="was used before, by another request"):
                sampled([9, 9], 5)
            assert sampled([1, 2], None) != sampled([9, 9], None), (
                "the second would be answered with the first's sample"
            )
            await service.close()

    asyncio.run(go())


def test_a_prompt_that_is_too_long_is_counted_and_not_made(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "tokens_of", lambda body: pytest.fail("millions of tokens become a tuple"))
    chunks = [PromptChunk(tokens=[1] * 60), PromptChunk(tokens=[1] * 40)]
    body = SampleBody(prompt=SamplePrompt(chunks=chunks), sampling_params=Params(), base_model="tiny")

    async def go() -> None:
        async with faked(tiny_tokenizer, FakeEngine(context_length=100)) as (_, serving):
            with pytest.raises(Refused, match="a prompt of 100 tokens leaves room for 0"):
                samplers.requests_of(serving, samplers.Sampler(id="a", session="s"), body, "a")

    asyncio.run(go())


def test_sessions_that_are_over_are_forgotten_at_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_OVER", 3)

    async def go() -> None:
        freed: list[str] = []

        async def free(session: Any) -> None:
            freed.append(session.id)

        known = sessions.Sessions(300.0, free)
        names = []
        for _ in range(9):
            one = known.begin(CreateSession(user_metadata={"x": "y" * 10_000}))
            assert one.wishes.user_metadata is None
            names.append(one.id)
            await known.finish(one.id, "it is over")
        last = known.begin(CreateSession())
        assert freed == names
        found = {"gone": 0, "not_found": 0}
        for name in names:
            with pytest.raises(Refused) as raised:
                known.get(name)
            found[raised.value.code] += 1
        assert found == {"gone": 3, "not_found": 6} and known.get(last.id) is last
        await known.close()

    asyncio.run(go())


def test_a_model_is_not_lost_to_a_request_for_another_with_its_number(tmp_path: Path) -> None:
    """The answer to the request that made it was dropped, so that the server cannot tell whether this is the same one."""

    async def case(caller: Caller) -> None:
        await caller.step(1)
        asked = {"session_id": caller.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        for _ in range(2):
            answer = (await caller.result((await caller.post("create_model", asked)).json())).json()
        assert "there is a model" in answer["error"] and "give another model_seq_id" in answer["error"]
        assert (await caller.step(2)).get("metrics") == {"grad_norm": 1.0, "version": 2}
        assert not caller.trainer.removed

    talk(tmp_path, case, kept_bytes=1)


def test_a_session_that_ends_while_a_model_is_made_is_freed_whole(tmp_path: Path) -> None:
    async def case(caller: Caller) -> None:
        caller.trainer.slow.clear()
        asked = {"session_id": caller.session, "base_model": "tiny", "lora_config": {"rank": 2}}
        for number in (1, 2):
            await caller.post("create_model", {**asked, "model_seq_id": number})
        while len(caller.service.models()) < 3:
            await asyncio.sleep(0.01)
        ended = await caller.post(f"sessions/{caller.session}/finish", {})
        assert ended.status_code == 200, ended.text
        assert {*caller.trainer.removed} == {f"{caller.session}:train:{number}" for number in range(3)}

    talk(tmp_path, case)


def test_samplers_of_the_same_weights_keep_them_in_the_engine_together(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """One has ended and the other samples, while a third wants their place: it waits for it."""

    async def case() -> None:
        async with faked(tiny_tokenizer) as (_, serving):
            shelf, order = Shelf(serving, places=1), list[str]()
            first, same, other = (SavedAdapter(adapter_update(*one)) for one in (("a", 1), ("a", 1), ("b", 2)))

            async def third() -> None:
                async with shelf.borrowed(other, Promise(id="3", owner="")):
                    order.append("the other")

            async with shelf.borrowed(first, Promise(id="1", owner="")):
                async with shelf.borrowed(same, Promise(id="2", owner="")):
                    pass
                asking = asyncio.ensure_future(third())
                while not shelf._turn.locked():
                    await asyncio.sleep(0)
                forgetting = asyncio.ensure_future(shelf.forget(same))
                await asyncio.sleep(0.05)
                assert "a" in serving.loaded and not asking.done() and not forgetting.done()
                order.append("the first")
            async with asyncio.timeout(300):
                await asyncio.gather(asking, forgetting)
            assert order == ["the first", "the other"] and "a" not in serving.loaded

    asyncio.run(case())


def adapter_update(name: str, load: int) -> WeightUpdate:
    spec = AdapterSpec(name=name, rank=1, alpha=1.0)
    return WeightUpdate(version=0, kind="full", fingerprint=f"fake-{load}", nbytes=0, seconds=0.0, adapter=spec)
