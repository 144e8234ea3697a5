"""What a book of requests knows of each, beside plain lists of the same passes."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import msgspec
import pytest

from headrace.core.steps import Columns, Finished, SampledTokens, SoFar, StepOutput, merged
from headrace.core.types import VersionSpan
from headrace.engine.request_book import RequestBook
from headrace.loop.partial import TokenStore
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request

Told = list[tuple[int, float, int, int, bool]]


def spans_of(told: Told) -> list[VersionSpan]:
    """The label of each token, where it differs from the one before."""
    labels = [one[2:] for one in told]
    return [VersionSpan(i, *label) for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]


def is_told(so_far: SoFar, told: Told) -> bool:
    completion = so_far.completion()
    return (
        so_far.count == len(told)
        and list(completion.tokens) == [one[0] for one in told]
        and list(completion.logprobs) == [one[1] for one in told]
        and list(completion.spans) == spans_of(told)
    )


class Engines:
    """Two engines with rows that requests take and leave, and move between. Each tells of several passes at a time."""

    def __init__(self, seed: int) -> None:
        self.chance, self.book = random.Random(seed), RequestBook()
        self.told: dict[str, Told] = {}
        self.rows: list[list[str]] = [[], []]
        self.version, self.numbers = 0, 0

    def act(self) -> None:
        """One request comes, goes, ends or moves, or is cancelled, with a row that goes on for a while, under its name again later."""
        chance = self.chance
        rows = chance.choice(self.rows)
        name = chance.choice(rows) if rows else ""
        match chance.randrange(6):
            case 0:
                self.numbers += 1
                self.enter(f"t{self.numbers}/0", rows)
            case 1 if name in self.told:
                self.book.leave(name)
                del self.told[name]
            case 2 if name and name not in self.told:
                rows.remove(name) if chance.random() < 0.5 else self.enter(name, [])
            case 3 if name:
                chance.choice([one for one in self.rows if one is not rows]).append(name)
                rows.remove(name)
            case 4:
                chance.shuffle(rows)
            case 5 if name in self.told:
                self.book.enter_output(self.say(rows, finished=(Finished(name, "stop"),)))
                assert list(self.book.unfinished([name])[name].completion(Finished(name, "stop")).tokens) == [
                    one[0] for one in self.told[name]
                ]
                self.book.leave(name)
                del self.told[name]
                self.numbers += 1
                rows[rows.index(name)] = f"t{self.numbers}/0"
                self.enter(f"t{self.numbers}/0", [])

    def enter(self, name: str, rows: list[str]) -> None:
        self.book.enter(request(name, (1, 2), 1 << 20))
        self.told[name] = []
        rows.append(name)

    def say(self, rows: list[str], finished: tuple[Finished, ...] = ()) -> StepOutput:
        chance = self.chance
        self.version += chance.random() < 0.05
        mixed, count = chance.random() < 0.05, chance.choice((1, 1, 2, 7))
        kv = tuple(max(0, self.version - int(name[1:-2]) % 2) for name in rows)
        passes = []
        for _ in range(count):
            tokens = tuple(chance.randrange(1000) for _ in rows)
            logprobs = tuple(-chance.random() for _ in rows)
            passes.append(StepOutput(self.version, tuple(rows), tokens, logprobs, kv, mixed=mixed))
            for name, token, logprob, oldest in zip(rows, tokens, logprobs, kv, strict=True):
                if name in self.told:
                    self.told[name].append((token, logprob, self.version, oldest, mixed))
        whole = msgspec.structs.replace(
            merged(passes) if count > 1 or chance.random() < 0.5 else passes[0], finished=finished
        )
        return msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=StepOutput)


@pytest.mark.parametrize("seed", range(12))
def test_each_request_has_the_tokens_that_were_told_of_it_whatever_comes_goes_and_moves_beside_it(seed: int) -> None:
    async def case() -> None:
        engines = Engines(seed)
        kept: list[tuple[SoFar, Told]] = []
        for turn in range(400):
            if engines.chance.random() < 0.3:
                engines.act()
            for rows in engines.rows:
                if rows:
                    engines.book.enter_output(engines.say(rows))
            if turn % 7 == 0:
                copies = engines.book.unfinished(None)
                assert {name: copy.count for name, copy in copies.items()} == {
                    name: len(told) for name, told in engines.told.items()
                }
                kept += [(copy, list(engines.told[name])) for name, copy in copies.items()]
                engines.chance.shuffle(kept)
                for so_far, told in kept[5:]:
                    assert is_told(so_far, told), "what was copied stays as it was"
                del kept[5:]
        for name, copy in engines.book.unfinished(None).items():
            assert is_told(copy, engines.told[name])

    asyncio.run(case())


def test_outputs_with_the_rows_of_the_one_before_are_added_without_looking_at_the_requests() -> None:
    async def case() -> None:
        book, names = RequestBook(), tuple(f"t{row}/0" for row in range(20))
        for name in names:
            book.enter(request(name, (1, 2), 1 << 20))
        output = StepOutput(3, names, tuple(range(20)), (-0.5,) * 20, (3,) * 20)
        looked: list[str] = []
        book._pending = Looked(book._pending, looked)
        for _ in range(3 * Columns.MANY):
            book.enter_output(output)
        assert len(looked) == 3 * len(names), "once for each columns"
        assert all(one.count == 3 * Columns.MANY for one in book.unfinished(None).values())

    asyncio.run(case())


def test_several_tokens_of_a_request_in_one_output_are_in_their_order() -> None:
    async def case() -> None:
        book = RequestBook()
        for name in "ab":
            book.enter(request(name, (1, 2), 9))
        for names, tokens in (("ab", (1, 2)), ("aab", (3, 4, 5)), ("ab", (6, 7))):
            count = len(names)
            book.enter_output(StepOutput(3, tuple(names), tokens, (-0.5,) * count, (3,) * count))
        found = {name: one.tokens.tolist() for name, one in book.unfinished(None).items()}
        assert found == {"a": [1, 3, 4, 6], "b": [2, 5, 7]}

    asyncio.run(case())


class Looked(dict[str, Any]):
    def __init__(self, content: dict[str, Any], looked: list[str]) -> None:
        super().__init__(content)
        self._looked = looked

    def get(self, name: str, default: Any = None) -> Any:
        self._looked.append(name)
        return super().get(name, default)


def test_a_straggler_keeps_the_tokens_of_those_that_have_ended_for_a_bounded_number_of_its_own() -> None:
    """The memory of a request is bounded by its own tokens and those of a few columns."""
    sampled, alive = SampledTokens(), []
    for number in range(100):
        columns = Columns(width=8)
        sampled.note(columns, 0, ("a", number // 50, 0, False))
        columns.add(merged([StepOutput(0, tuple("abcdefgh"), (number,) * 8, (-0.5,) * 8, (0,) * 8)]).as_runs())
        alive.append(columns)
    assert len(sampled._parts) <= SampledTokens.MANY
    assert sampled.tokens.tolist() == list(range(100)) and [span.start for span in sampled.spans] == [0, 50]


def test_what_is_reported_of_a_request_after_its_end_is_no_part_of_its_completion() -> None:
    async def case() -> None:
        book = RequestBook()
        pending = {name: book.enter(request(name, (1, 2), 64)) for name in ("t0/0", "t0/1")}
        both = StepOutput(0, ("t0/0", "t0/1"), (5, 6), (-0.1, -0.2), (0, 0))
        book.enter_output(both)
        book.interrupt(["t0/0"])  # as a lost process leaves it, whose last words are still under way
        book.enter_output(both)
        book.enter_output(StepOutput(1, ("t0/0",), (7,), (-0.3,), (1,)))
        assert pending["t0/0"].so_far().tokens == (5,)
        assert pending["t0/1"].so_far().tokens == (6, 6)

    asyncio.run(case())


def test_what_a_checkpoint_takes_of_each_request_is_not_counted_by_the_garbage_collector() -> None:
    """Else it goes through all objects of the process in one turn of the event loop, because thousands are added at once."""

    async def case() -> None:
        engine, names = FakeEngine(), [f"t{row}/0" for row in range(500)]
        book, store = RequestBook(), TokenStore(engine)
        engine.unfinished = book.unfinished  # type: ignore[assignment]
        for name in names:
            book.enter(request(name, (1, 2), 64))
            store.asked[name] = asyncio.get_running_loop().create_future()
        book.enter_output(StepOutput(0, tuple(names), (5,) * 500, (-0.1,) * 500, (0,) * 500))
        gc.collect()
        before = len(gc.get_objects())
        captured = store.captured(names)
        assert len(captured) == 500 and len(gc.get_objects()) - before < 20

    asyncio.run(case())
