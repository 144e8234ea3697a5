"""What a book of requests knows of each, beside plain lists of the same passes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from headrace.core.steps import Columns, Finished, SampledTokens, StepOutput, merged
from headrace.core.types import VersionSpan
from headrace.engine.request_book import RequestBook
from headrace.testing.makers import request

Told = list[tuple[int, float, int, int, bool]]


def spans_of(told: Told) -> list[VersionSpan]:
    """The label of each token, where it differs from the one before."""
    labels = [one[2:] for one in told]
    return [VersionSpan(i, *label) for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]


def is_told(sampled: SampledTokens, told: Told) -> bool:
    return (
        len(sampled) == len(told)
        and sampled.tokens.tolist() == [one[0] for one in told]
        and sampled.logprobs.tolist() == [one[1] for one in told]
        and sampled.spans == spans_of(told)
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
        kept: list[tuple[SampledTokens, Told]] = []
        for turn in range(400):
            if engines.chance.random() < 0.3:
                engines.act()
            for rows in engines.rows:
                if rows:
                    engines.book.enter_output(engines.say(rows))
            if turn % 7 == 0:
                copies = engines.book.unfinished(None)
                assert {name: len(copy.sampled) for name, copy in copies.items()} == {
                    name: len(told) for name, told in engines.told.items()
                }
                kept += [(copy.sampled, list(engines.told[name])) for name, copy in copies.items()]
                engines.chance.shuffle(kept)
                for sampled, told in kept[5:]:
                    assert is_told(sampled, told), "what was copied stays as it was"
                del kept[5:]
        for name, copy in engines.book.unfinished(None).items():
            assert is_told(copy.sampled, engines.told[name])

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
        assert all(len(one.sampled) == 3 * Columns.MANY for one in book.unfinished(None).values())

    asyncio.run(case())


def test_several_tokens_of_a_request_in_one_output_are_in_their_order() -> None:
    async def case() -> None:
        book = RequestBook()
        for name in "ab":
            book.enter(request(name, (1, 2), 9))
        for names, tokens in (("ab", (1, 2)), ("aab", (3, 4, 5)), ("ab", (6, 7))):
            count = len(names)
            book.enter_output(StepOutput(3, tuple(names), tokens, (-0.5,) * count, (3,) * count))
        found = {name: one.sampled.tokens.tolist() for name, one in book.unfinished(None).items()}
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
