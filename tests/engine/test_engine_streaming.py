"""An update that goes live in parts: what serves between them, what is told of it, and that half of it is never left behind."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.reports import LoadReport
from headrace.core.steps import Finished, StepOutput, TokenDetails, Transcript, write_down
from headrace.core.types import Completion, Request, Sampling, VersionSpan
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.request_book import scoring
from headrace.engine.streaming import check_parts, mixtures
from headrace.loop.world import virtual_time
from headrace.processes.wire import Frame, pack_payload
from headrace.run.worker.engine_loop import HOLD, EngineLoop, Outputs
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request, update
from support.fake_engine_model import CoreDriver, prompt
from support.spans import spans_of
from support.tiny_models import make, parameters, saved

# --- the parts ---------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 30), parts=st.integers(1, 40))
def test_each_stage_replaces_one_group_of_neighbours_more(count: int, parts: int) -> None:
    before, after = ({f"p{i}": (which, i) for i in range(count)} for which in ("old", "new"))
    told = list(mixtures(before, after, parts))
    assert len(told) == min(parts, count) - 1
    news = [sum(which == "new" for which, _ in stage.values()) for stage in [before, *told, after]]
    groups = [more - less for less, more in itertools.pairwise(news)]
    assert min(groups) >= 1 and max(groups) - min(groups) <= 1
    for stage, new in zip(told, news[1:], strict=False):
        assert list(stage) == list(after) and list(stage.values()) == [*after.values()][:new] + [*before.values()][new:]


def test_what_cannot_be_streamed_is_refused_with_the_remedy() -> None:
    adapter = WeightUpdate(
        version=1, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=AdapterSpec("north", 8, 16.0)
    )
    with pytest.raises(ValueError, match=r"adapter north cannot go live in 2 parts.*parts = 1"):
        check_parts(adapter, 2)
    with pytest.raises(ValueError, match="in 0 parts; choose 1"):
        check_parts(WeightUpdate(version=1, kind="full", fingerprint="", nbytes=0, seconds=0.0), 0)
    check_parts(adapter, 1)


def test_spans_part_where_mixing_begins_and_ends() -> None:
    spans = spans_of([3, 3, 3, 4], [3, 3, 3, 3], [False, True, True, False])
    assert spans == (VersionSpan(0, 3, 3), VersionSpan(1, 3, 3, mixed=True), VersionSpan(3, 4, 3))
    assert spans_of([1, 1], [1, 1]) == (VersionSpan(0, 1, 1),)


# --- what serves between them ------------------------------------------------------------------------------------------

PATHS = ["fused", "hf"]


def real_engine(path: Any) -> NativeEngine:
    config = EngineConfig(
        path=path,
        dtype="float32",
        device="cpu",
        kv_gib=0.01,
        max_running=4,
        context_length=96,
        prefill_chunk=64,
        check=True,
    )
    engine = NativeEngine(saved("llama"), config)
    engine.swap(engine.prepare(update(0), weights(0)))
    return engine


def weights(seed: int) -> dict[str, torch.Tensor]:
    return parameters("llama") if not seed else {k: v.detach() for k, v in make("llama", seed).named_parameters()}


def run(engine: NativeEngine, *requests: Request) -> dict[str, Transcript]:
    told = {one.id: Transcript(request=one) for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        write_down(engine.step(), told.get)
    return told


def logprobs_of(tensors: Mapping[str, torch.Tensor], tokens: tuple[int, ...]) -> list[float]:
    """Hugging Face's own, in float32."""
    model = make("llama")
    model.load_state_dict(dict(tensors), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return [float(logits[place, token]) for place, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("path", PATHS)
def test_between_two_parts_the_mixture_serves_and_says_so(path: str) -> None:
    engine, old, new, tokens = real_engine(path), weights(0), weights(7), tuple(range(3, 40))
    found = []
    for stage in mixtures(old, new, 4):
        engine.swap(engine.prepare(update(1), stage, mixed=True))
        told = run(engine, scoring("s", tokens))["s"].scores
        assert told is not None and told.mixed and told.version == 0
        assert told.logprobs == pytest.approx(logprobs_of(stage, tokens), abs=1e-4)
        found.append(told.logprobs)
    engine.swap(engine.prepare(update(1), new))
    told = run(engine, scoring("s", tokens))["s"].scores
    assert told is not None and not told.mixed and told.version == 1
    assert told.logprobs == pytest.approx(logprobs_of(new, tokens), abs=1e-4)
    assert len({*found, told.logprobs}) == 4, "each part changed something"


def test_what_a_mixture_has_cached_is_for_nobody() -> None:
    driver = CoreDriver()
    text = prompt(64)
    for part in (0, 1, 2):
        if part:
            driver.stream(part)
        driver.run(request(f"{part}/a", text, 3))
        before = driver.engine.stats().cached_tokens
        driver.run(request(f"{part}/b", text, 3))
        assert driver.engine.stats().cached_tokens > before, "within one state what is computed is shared"
        driver.run(request(f"{part}/c", (1, *text), 3))
        for name in "abc":
            driver.check(f"{part}/{name}")
    driver.swap()
    before = driver.engine.stats().cached_tokens
    driver.run(request("after", text, 3))
    assert driver.engine.stats().cached_tokens == before and driver.engine.stats().swaps == 2, "the first, and this one"
    driver.check("after")


# --- the loop of the process -------------------------------------------------------------------------------------------


class Reported:
    """A `WorkerEnd` that keeps what is sent through it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def push(self, method: str, payload: Any) -> None:
        self.sent.append((method, payload))

    def reply(self, to: Frame, payload: Any) -> None:
        self.sent.append((f"reply {to.id}", payload))

    def fail(self, to: Frame, error: str, message: str) -> None:
        self.sent.append((f"failed {to.id}", message))

    def of(self, method: str) -> list[Any]:
        return [payload for name, payload in self.sent if name == method]


class Published:
    """A `WeightReceiver` of the fake model's weights."""

    received = 0

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        values = {"version": update.version, "poisoned": 0, "part": 0}
        return {name: torch.tensor(float(value)) for name, value in values.items()}


class Process:
    """What a worker's process runs, on this thread (and the one for weights)."""

    def __init__(self) -> None:
        self.end, self.inbox, self.core = Reported(), queue.Queue[Any](), CoreDriver(max_adapters=2).engine
        self.loop = EngineLoop(self.end, self.inbox, self.core, Published())  # type: ignore[arg-type]
        self.load(100, 1)

    def send(self, frame_id: int, method: str, payload: Any) -> None:
        self.inbox.put(Frame(frame_id, method, pack_payload(payload)))

    def begin_load(self, version: int, parts: int) -> None:
        self.send(version, "load", (update(version, "base"), parts))

    def until(self, true: Callable[[], Any]) -> None:
        for _ in range(10_000):
            if true():
                return
            self.send(0, "cancel", "nobody")  # so that it never waits for something to come
            self.loop.round()
        raise AssertionError("it never came true")

    def load(self, version: int, parts: int) -> LoadReport:
        self.begin_load(version, parts)
        self.until(lambda: self.end.of(f"reply {version}") or self.end.of(f"failed {version}"))
        assert not self.end.of(f"failed {version}"), self.end.of(f"failed {version}")
        return self.end.of(f"reply {version}")[0]

    def outputs(self) -> list[StepOutput]:
        return self.end.of("output")


@pytest.fixture
def process() -> Iterator[Process]:
    before = threading.active_count()
    yield Process()
    assert threading.active_count() <= before + 1


def test_a_pass_at_least_runs_between_two_parts_and_all_that_is_mixed_is_told(process: Process) -> None:
    for i in range(3):
        process.send(0, "add", request(f"r{i}", prompt(5, i), 100))
    process.until(lambda: len(process.outputs()) > 3)
    report = process.load(101, 3)
    process.until(lambda: not process.core.has_work())
    mixed = [output for output in process.outputs() if output.mixed]
    assert len(mixed) >= 2 and {output.version for output in mixed} == {100}, "the oldest weights in use"
    assert report.mixed_tokens == sum(output.token_count for output in mixed) and report.version == 101
    sent = [name for name, _ in process.end.sent]
    versions = [(payload.version, payload.mixed) for name, payload in process.end.sent if name == "output"]
    assert versions == sorted(versions), "old, mixed, new"
    first_new = next(
        i for i, (_, told) in enumerate(process.end.sent) if isinstance(told, StepOutput) and told.version > 100
    )
    assert sent.index("reply 101") < first_new, "that it is live is told before anything that comes of it"


def test_a_paused_engine_and_an_idle_one_take_all_parts(process: Process) -> None:
    assert process.load(101, 3).mixed_tokens == 0
    process.send(0, "add", request("r", prompt(5), 20))
    process.core.pause()
    assert process.load(102, 3).version == 102
    assert not process.outputs(), "not a single pass"


def test_half_an_update_is_taken_back(process: Process) -> None:
    """The last part is refused when an adapter came meanwhile that belongs to the weights before."""
    process.send(0, "add", request("r", prompt(5), 100))
    process.begin_load(101, 2)
    process.until(lambda: any(output.mixed for output in process.outputs()))
    spec = AdapterSpec("north", 8, 16.0, base="base-100")
    process.core.swap(
        process.core.prepare(
            WeightUpdate(version=0, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec), {"number": 0}
        )
    )  # type: ignore[dict-item]
    process.until(lambda: process.end.of("failed 101"))
    assert "belongs to base weights base-100" in process.end.of("failed 101")[0]
    process.until(lambda: process.outputs()[-1].finished)
    last = process.outputs()[-1]
    assert not last.mixed and last.version == 100 and process.core.stats().version == 100
    process.core.unload("north")
    assert process.load(102, 2).version == 102


# --- the fake ----------------------------------------------------------------------------------------------------------


def test_the_fake_streams_alike() -> None:
    async def go() -> tuple[Completion, LoadReport]:
        engine = FakeEngine(seconds_per_token=0.1, load_seconds=1.0, length=lambda rng: 40)
        await engine.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0), parts=4)
        generating = asyncio.ensure_future(engine.generate(Request("r", (1,), Sampling(max_tokens=100))))
        await asyncio.sleep(1.02)
        report = await engine.load(
            WeightUpdate(version=1, kind="full", fingerprint="fake-1", nbytes=0, seconds=0.0), parts=4
        )
        return await generating, report

    answer, report = virtual_time.run(go())
    assert [(span.version, span.mixed) for span in answer.spans] == [(0, False), (0, True), (1, False)]
    assert report.mixed_tokens == answer.spans[2].start - answer.spans[1].start == 8


# --- several passes in a message


class HeldClock:
    """Outputs with a clock that the test sets, and what they sent: the token of a pass is its number."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, list[tuple[float, list[int]]]()
        self.outputs = Outputs(self.push, lambda: self.now)

    def push(self, method: str, payload: Any) -> None:
        assert method == "output"
        tokens: dict[str, list[int]] = {}
        for name, token, *_ in payload.sampled():
            tokens.setdefault(name, []).append(token)
        first = next(iter(tokens.values()))
        assert all(other == first for other in tokens.values())
        self.sent.append((self.now, first))

    def passes(self, count: int, seconds: float, rows: int = 64, ends: Sequence[int] = ()) -> None:
        for number in range(count):
            self.now = round(self.now + seconds, 6)
            names = tuple(f"t{row}/0" for row in range(rows))
            finished = (Finished("t0/0", "stop"),) if number in ends else ()
            columns = (number,) * rows, (-0.5,) * rows, (0,) * rows
            self.outputs.add(StepOutput(4, names, *columns, finished=finished), seconds)


def test_fast_passes_of_many_rows_share_messages_and_none_waits_for_long() -> None:
    held = HeldClock()
    held.passes(64, 1 / 64)
    held.outputs.flush()
    assert [number for _, numbers in held.sent for number in numbers] == list(range(64)), "each once, in order"
    assert len(held.sent) <= 11
    made = [(number + 1) / 64 for number in range(64)]
    assert max(at - made[number] for at, numbers in held.sent for number in numbers) <= HOLD


LABELS = st.tuples(st.integers(3, 5), st.integers(2, 3), st.booleans())


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(LABELS, min_size=1, max_size=3), st.booleans(), st.data()), max_size=5
    )
)
def test_what_is_written_down_of_merged_passes_is_what_each_said(
    stretches: list[tuple[int, list[tuple[int, int, bool]], bool, st.DataObject]],
) -> None:
    """Passes with the same requests and labels come in stretches of one to four, as they do in an engine."""
    passes = []
    for count, labels, ends, data in stretches:
        names, mixed = tuple(f"t{i}/0" for i in range(len(labels))), labels[0][2]
        for number in range(count):
            tokens = data.draw(st.tuples(*[st.integers(0, 2**31 - 1)] * len(names)))
            logprobs = data.draw(st.tuples(*[st.floats(max_value=0.0, allow_nan=False)] * len(names)))
            details = (TokenDetails(names[0], mask=bytes([number, 0, 0, 0])),) if ends else ()
            passes.append(
                StepOutput(
                    2,
                    names,
                    tokens,
                    logprobs,
                    tuple(kv for _, kv, _ in labels),
                    versions=tuple(version for version, _, _ in labels),
                    finished=(Finished(names[-1], "stop"),) if ends and number == count - 1 else (),
                    details=details,
                    mixed=mixed,
                )
            )
    sent: list[StepOutput] = []
    held = Outputs(lambda method, output: sent.append(output), lambda: 0.0)
    for one in passes:
        held.add(one, 0.0)
    held.flush()
    wire = [msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) for output in sent]
    found, expected = (written(outputs) for outputs in (wire, passes))
    assert found == expected and sum(output.token_count for output in wire) == sum(len(one.tokens) for one in passes)
    names = {f"t{i}/0" for i in range(2)}
    assert written([output.only(names) for output in wire]) == {name: found[name] for name in names if name in found}


def written(outputs: Sequence[StepOutput]) -> dict[str, Completion]:
    told: dict[str, Transcript] = {}
    for output in outputs:
        write_down(output, lambda name: told.setdefault(name, Transcript(request=request(name, (1,), 9))))
    return {name: transcript.so_far() for name, transcript in told.items()}


@pytest.mark.parametrize(
    ("passes", "messages"),
    [
        ({"count": 20, "seconds": 0.01, "rows": 4}, 20),  # somebody may watch
        ({"count": 20, "seconds": 0.11}, 20),  # passes of a laptop
        ({"count": 4, "seconds": 0.001, "ends": (0, 1, 2, 3)}, 4),  # a turn that is over
    ],
)
def test_what_somebody_may_wait_for_is_not_held(passes: dict[str, Any], messages: int) -> None:
    held = HeldClock()
    held.passes(**passes)
    assert len(held.sent) == messages


def test_a_message_of_held_passes_stays_small() -> None:
    held = HeldClock()
    held.passes(40, 0.0001, rows=2000)
    assert max(len(numbers) for _, numbers in held.sent) <= 5


def test_held_passes_are_sent_before_any_answer(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every pass held as long as possible, the order of what a fast engine tells is that of a slow one."""
    monkeypatch.setattr("headrace.run.worker.engine_loop.HOLD_ROWS", 0)
    monkeypatch.setattr("headrace.run.worker.engine_loop.HOLD", 1e9)
    process.send(0, "add", request("r", prompt(5), 100))
    process.send(0, "stats", None)
    for _ in range(10):
        process.loop.round()
    assert not process.end.of("output"), "they are held"
    process.load(101, 1)
    names = [name for name, _ in process.end.sent]
    assert names.index("output") < names.index("reply 101")
