"""Requests of clients without a model: their order, their results, their limits, their sessions, and the examples that they send."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.loop.world import virtual_time
from headrace.run.clients.process_trainer import StateLost
from headrace.serve.config import TrainLimits
from headrace.serve.training.futures import FutureAnswer, Futures
from headrace.serve.training.saved_weights import FACTS, NOTED, CheckpointFacts, Store
from headrace.serve.training.sessions import ClientSession, Model, Sessions
from headrace.serve.training.tinker_messages import (
    FLOAT32,
    INT64,
    MESSAGES,
    Adam,
    CreateModel,
    CreateSession,
    LoraBody,
    OptimStep,
    pass_of,
)
from headrace.serve.training.tinker_service import TinkerService
from headrace.trainer.shared.calls import AdamStep, SharedLora, StepDone
from headrace.web.errors import Refused


def model_of(futures: Futures, gap: float = 60.0) -> Model:
    model = Model(id="s:train:0", session="s", lora=LoraBody(rank=1), futures=futures, gap_seconds=gap)
    model.begin()
    return model


def doing(done: list[int], number: int, error: Exception | None = None) -> Callable[[], Awaitable[FutureAnswer]]:
    async def work() -> FutureAnswer:
        await asyncio.sleep(0)
        done.append(number)
        if error:
            raise error
        return FutureAnswer.json(number)

    return work


async def answer_of(futures: Futures, name: str) -> Any:
    found = await futures.wait(name)
    return found and json.loads(found.body)


def test_requests_are_done_in_the_order_of_their_numbers_and_one_that_fails_stops_none() -> None:
    async def go() -> None:
        futures, done = Futures(TrainLimits()), list[int]()
        model = model_of(futures)
        for number in (3, 4, 2, 5, 1):
            error = ValueError("no") if number == 2 else None
            model.submit(number, futures.open(f"{number}", "s"), doing(done, number, error))
            await asyncio.sleep(0.01)
        assert [await answer_of(futures, f"{number}") for number in (1, 3, 4, 5)] == [1, 3, 4, 5]
        assert done == [1, 2, 3, 4, 5]
        assert await answer_of(futures, "2") == {"error": "no", "category": "user"}
        model.submit(2, futures.open("again", "s"), doing(done, 2))
        assert "comes after request 5" in (await answer_of(futures, "again"))["error"]
        await model.end()

    asyncio.run(go())


def test_a_number_that_never_comes_fails_those_that_wait_for_it() -> None:
    async def go() -> None:
        futures, done = Futures(TrainLimits()), list[int]()
        model = model_of(futures, gap=0.05)
        model.submit(1, futures.open("1", "s"), doing(done, 1))
        model.submit(3, futures.open("3", "s"), doing(done, 3))
        answer = await answer_of(futures, "3")
        assert (
            answer["category"] == "server" and "request 2 of s:train:0 has not arrived within 0.05 s" in answer["error"]
        )
        model.submit(4, futures.open("4", "s"), doing(done, 4))
        assert (await answer_of(futures, "4"))["error"] == answer["error"]
        assert done == [1]
        await model.end()

    asyncio.run(go())


def test_what_the_trainer_lost_is_the_servers_fault_for_all_that_follows() -> None:
    async def go() -> None:
        futures, done = Futures(TrainLimits()), list[int]()
        model = model_of(futures)
        model.submit(1, futures.open("1", "s"), doing(done, 1, StateLost("trainer was killed")))
        model.submit(2, futures.open("2", "s"), doing(done, 2))
        for name in "12":
            answer = await answer_of(futures, name)
            assert answer["category"] == "server"
            assert answer["error"].startswith("trainer was killed. What this model has learned")
        assert done == [1]

    asyncio.run(go())


def test_results_wait_stay_a_while_and_are_bounded() -> None:
    async def go() -> None:
        limits = TrainLimits(pending=2, poll_seconds=0.02, kept_bytes=10)
        futures = Futures(limits)
        first, second = futures.open("first", "s"), futures.open("second", "t")
        with pytest.raises(Refused, match="2 requests are pending") as refused:
            futures.open("third", "s")
        assert refused.value.status == 429
        assert await futures.wait("first") is None
        futures.resolve(first, FutureAnswer.json("a long answer"))
        futures.resolve(first, FutureAnswer.json("another"))
        assert [await answer_of(futures, "first") for _ in range(2)] == ["a long answer"] * 2
        futures.open("third", "s")
        with pytest.raises(Refused, match="there is no request first here") as refused:
            await futures.wait("first")
        assert refused.value.status == 410, "it was dropped for its size"
        futures.end("t")
        assert "its session has ended" in (await answer_of(futures, "second"))["error"]
        assert second.answer and futures.pending == 1

        async def never() -> FutureAnswer:
            await asyncio.Event().wait()
            raise AssertionError

        futures.start(promise := futures.open("long", "s"), never())
        futures.cancel("long")
        assert "cancelled" in (await answer_of(futures, "long"))["error"]
        assert promise.task and promise.task.cancelled()

    asyncio.run(go())


def test_a_session_ends_without_heartbeats_and_is_freed_once() -> None:
    async def go() -> None:
        freed: list[str] = []

        async def free(session: ClientSession) -> None:
            freed.append(session.id)

        sessions = Sessions(0.2, free)
        one, two = sessions.begin(CreateSession()), sessions.begin(CreateSession())
        for _ in range(4):
            await asyncio.sleep(0.1)
            sessions.heard(two.id)
        assert freed == [one.id] and [session.id for session in sessions] == [two.id]
        for name, status in ((one.id, 410), ("nobody", 404)):
            with pytest.raises(Refused) as refused:
                sessions.heard(name)
            assert refused.value.status == status
        for _ in range(2):  # the second time for a client that has lost the answer
            await sessions.finish(two.id, "done")
        with pytest.raises(Refused, match="no session nobody"):
            await sessions.finish("nobody", "done")
        await sessions.close()
        assert freed == [one.id, two.id]

    virtual_time.run(go())


def tensor(message: Any, values: Any, dtype: Any, kind: int) -> None:
    array = np.asarray(values, dtype)
    message.dense, message.dtype = array.tobytes(), kind
    message.shape.extend(array.shape)


def request_of(targets: Any, weights: Any, tokens: list[int] | None = None) -> Any:
    message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens or [1, 2, 3], np.int32).tobytes()
    tensor(datum.loss_fn_inputs["target_tokens"], targets, np.int64, INT64)
    tensor(datum.loss_fn_inputs["weights"], weights, np.float32, FLOAT32)
    return message


def test_a_sparse_tensor_is_zero_where_it_lists_nothing() -> None:
    message = request_of([[0, 0]] * 3, [[0.0, 0.0]] * 3)
    for name, dtype, values in (("target_tokens", np.int64, [7, 8, 9]), ("weights", np.float32, [0.5, 0.25, 1.0])):
        sparse = message.data[0].loss_fn_inputs[name].sparse_csr
        sparse.values = np.array(values, dtype).tobytes()
        sparse.crow_indices = np.array([0, 0, 2, 3], np.int64).tobytes()
        sparse.col_indices = np.array([0, 1, 1], np.int64).tobytes()
    (example,) = pass_of(message).examples
    assert example.width == 2
    assert np.frombuffer(example.targets, np.int32).tolist() == [0, 0, 7, 8, 0, 9]
    assert np.frombuffer(example.inputs["weights"], np.float32).tolist() == [0, 0, 0.5, 0.25, 0, 1]


def test_a_sparse_tensor_with_two_values_for_one_place_is_refused() -> None:
    message = request_of([[0, 0]] * 3, [[0.0, 0.0]] * 3)
    sparse = message.data[0].loss_fn_inputs["weights"].sparse_csr
    sparse.values = np.array([0.5, 0.25], np.float32).tobytes()
    sparse.crow_indices = np.array([0, 0, 2, 2], np.int64).tobytes()
    sparse.col_indices = np.array([1, 1], np.int64).tobytes()
    with pytest.raises(Refused, match="it has several values for one place"):
        pass_of(message)


@pytest.mark.parametrize(
    ("targets", "weights", "tokens", "said"),
    [
        ([1, 2], [1, 1], None, r"data\[0\] has 3 tokens and 2 target_tokens"),
        ([1, 2, 3], [1, 1], None, r"data\[0\].weights has shape \[2\], and target_tokens \[3\]"),
        ([1, 2, 1 << 40], [1, 1, 1], None, "a number that is no token"),
        ([[[1]], [[2]], [[3]]], [[[1]], [[1]], [[1]]], None, "has 3 dimensions"),
        ([[], [], []], [[], [], []], None, "has no targets at any position"),
    ],
)
def test_examples_that_do_not_fit(targets: Any, weights: Any, tokens: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        pass_of(request_of(targets, weights, tokens))


def put(store: Store, name: str, lifetime: float | None = None, content: bytes = b"1234") -> str:
    path = f"tinker://s:train:0/weights/{name}"
    store.put(written(store, path, content), facts_of(path), lifetime)
    return path


def written(store: Store, path: str, content: bytes) -> Path:
    coming = store.coming(path, overwrite=True)
    coming.mkdir()
    (coming / "tensors").write_bytes(content)
    return coming


def facts_of(path: str) -> CheckpointFacts:
    return CheckpointFacts(
        path=path, kind="weights", base_model="tiny", lora=LoraBody(rank=1), version=3, saved_at=time.time()
    )


def test_paths_of_weights_lead_nowhere_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = put(store, "kept")
    assert store.facts(kept).nbytes == 4
    with pytest.raises(Refused, match="is there already"):
        store.coming(kept, overwrite=False)
    for path in (
        "tinker://../weights/x",
        "tinker://a/weights/../x",
        "tinker://a/other/x",
        "/etc/passwd",
        "tinker://a/weights/.x",
    ):
        with pytest.raises(Refused, match="is no path of weights"):
            store.place(path)
    assert list(store.of_model("..")) == []


@pytest.mark.parametrize("noted", [b"", b"nan", b"inf", b"-5", b"yesterday"])
def test_weights_expire_when_they_were_served_for_so_long(tmp_path: Path, noted: bytes) -> None:
    """By a clock that never jumps, and that does not count the time between two servers."""
    (tmp_path / ".served").write_bytes(noted)
    now = 1000.0
    store = Store(tmp_path, lambda: now)
    kept, short, long = put(store, "kept"), put(store, "short", 3600.0), put(store, "long", 10_000.0)
    now += 3599.0
    expires = store.expires_at(store.facts(short))
    assert expires == pytest.approx(time.time() + 1.0, abs=60.0) and store.expires_at(store.facts(kept)) is None
    now += 1.0
    with pytest.raises(Refused, match="have expired"):
        store.facts(short)
    assert [facts.path for facts in store.of_model("s:train:0")] == [kept, long]

    now = 7.0  # another machine start
    store = Store(tmp_path, lambda: now)
    now += 10_000.0 - 3600.0 - 1.0
    assert store.facts(long)
    now += NOTED + 1.0
    assert [facts.path for facts in store.of_model("s:train:0")] == [kept]


@pytest.mark.parametrize("cut", ["tensors", "facts", "renamed"])
def test_weights_that_take_the_place_of_others_are_there_after_a_kill_at_any_time(tmp_path: Path, cut: str) -> None:
    store = Store(tmp_path)
    path = put(store, "state", content=b"old")
    place, coming = store.place(path), written(store, path, b"new")
    if cut != "tensors":
        (coming / FACTS).write_bytes(msgspec.json.encode(facts_of(path)))
    if cut == "renamed":
        place.rename(place.with_name(".state.old"))
    store = Store(tmp_path)
    assert store.facts(path) and (place / "tensors").read_bytes() == (b"old" if cut == "tensors" else b"new")
    put(store, "state", content=b"newest")
    assert (place / "tensors").read_bytes() == b"newest"
    assert sorted(one.name for one in place.parent.iterdir()) == ["state"]


class _Noting:
    """A trainer that notes what it is asked for."""

    def __init__(self) -> None:
        self.added: list[SharedLora] = []
        self.steps: list[AdamStep] = []

    async def add(self, name: str, lora: SharedLora) -> None:
        self.added.append(lora)

    async def remove(self, name: str) -> None: ...

    async def optim_step(self, call: AdamStep) -> StepDone:
        self.steps.append(call)
        return StepDone(version=1, grad_norm=2.5)


def test_every_setting_of_an_adapter_and_of_its_optimizer_arrives_at_the_trainer(tmp_path: Path) -> None:
    async def go() -> None:
        serving: Any = SimpleNamespace(name="tiny")
        service = TinkerService(serving, Store(tmp_path), TrainLimits(), directory=tmp_path, places=1)
        trainer: Any = _Noting()
        service.trainer = trainer
        session = service.create_session(CreateSession())["session_id"]
        loras = [LoraBody(rank=3, seed=7, train_mlp=False), LoraBody(rank=5, seed=8, train_attn=False)]
        for number, lora in enumerate(loras):
            asked = CreateModel(session_id=session, model_seq_id=number, base_model="tiny", lora_config=lora)
            created = await answer_of(service.futures, service.create_model(asked).id)
        assert trainer.added == [
            SharedLora(rank=3, seed=7, attention=True, mlp=False),
            SharedLora(rank=5, seed=8, attention=False, mlp=True),
        ]
        given = {"learning_rate": 0.1, "beta1": 0.2, "beta2": 0.3, "eps": 0.4, "weight_decay": 0.5, "grad_clip_norm": 6}
        for number, settings in enumerate(({}, given, {"grad_clip_norm": -1.0}), 1):
            body = OptimStep(model_id=created["model_id"], seq_id=number, adam_params=Adam(**settings))
            answer = await answer_of(service.futures, service.optim_step(body).id)
        assert answer == {"metrics": {"grad_norm": 2.5, "version": 1}}
        name = created["model_id"]
        assert trainer.steps == [AdamStep(model=name), AdamStep(model=name, **given), AdamStep(model=name)]
        await service.close()

    asyncio.run(go())


def test_the_constants_of_a_loss_arrive() -> None:
    message = request_of([1, 2, 3], [1, 1, 1])
    message.loss_fn = "dro"
    datum = message.data[0].loss_fn_inputs
    for name in ("logprobs", "advantages"):
        datum[name].CopyFrom(datum["weights"])
    del datum["weights"]
    assert pass_of(message).constants == {"beta": 0.05}
    message.loss_fn_config["beta"] = 0.5
    assert pass_of(message).constants == {"beta": 0.5} and pass_of(message).backward
    message.loss_fn_config_v2["beta"].number = 0.75
    assert pass_of(message).constants == {"beta": 0.75}
    message.forward_only = True
    assert not pass_of(message).backward
