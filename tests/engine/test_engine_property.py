"""Whatever happens to the engine, in whatever order: what a request samples is what it would sample alone, every block is
accounted for, and nothing is lost. On the fake model, whose logits are a hash of what its cache really holds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types import Fork, Request, Sampling
from headrace.engine.request_book import scoring
from headrace.testing.makers import request
from support.fake_engine_model import ADAPTERS, POISON, CoreDriver, RecurrentRunner, Reported, prompt
from support.fake_own_cache import FakeOwnCache, Kind

PROMPTS = [
    prompt(length, seed) for length, seed in ((1, 0), (5, 1), (31, 2), (32, 3), (33, 4), (50, 5), (64, 6), (70, 7))
]
PROMPTS += [PROMPTS[5] + prompt(9, 8), PROMPTS[5][:20] + prompt(30, 9), PROMPTS[7][:64]]
"""Lengths around a block's, and some that begin alike."""
assert POISON not in {token for text in PROMPTS for token in text}

REFUSALS = ("not known", "made room for others", "waits for room", "not computed that far", "shorten the prompt")


class Chaos:
    """Everything that can happen to an engine, drawn at random, and what must be true whatever it was."""

    OPERATIONS = {
        "step": 50, "add": 12, "go_on": 6, "fork": 8, "score": 4, "reissue": 3, "cancel": 4, "swap": 5, "stream": 5, "swap_adapter": 3,
        "hold": 2, "resume": 3, "abort": 1,
    }  # fmt: skip

    def __init__(self, seed: int, runner: Any = None, ahead: bool = False) -> None:
        """`runner`: the one to try, which serves no adapters and no exactness where it is a model's own cache; None: the fake one, which serves everything.
        `ahead`: passes are asked for before the tokens of the one before are known."""
        self.rng = rng = random.Random(seed)
        own_cache = isinstance(runner, FakeOwnCache)
        self.adapters = () if own_cache else ADAPTERS
        self.swap_policy = rng.choice(["keep", "recompute"])
        self.tight = rng.random() < 0.5
        """Short prompts, long completions, few blocks: those that run push each other out."""
        self.driver = CoreDriver(
            blocks=rng.choice([5, 7, 9] if self.tight else [4, 5, 12, 40]),
            ends=range(6),
            max_running=rng.randint(1, 6),
            prefill_chunk=rng.choice([5, 16, 64]),
            swap=self.swap_policy,
            exact=rng.random() < 0.3 and not own_cache,
            max_adapters=len(self.adapters),
            runner=runner,
        )
        self.driver.runner.feeds = ahead
        for name in self.adapters:
            self.driver.swap_adapter(name)
        if self.tight:  # completions that turn out to be short make admission generous
            short = Sampling(max_tokens=120)
            self.driver.run(*(Request(f"short {i}", (i % 30 + 6,), short) for i in range(40)))
        self.names: list[str] = []
        self.cancelled: set[str] = set()
        self.forks: dict[str, Fork] = {}
        self.part = 0
        """Of an update that is being streamed in."""

    def run(self, operations: int) -> Counter[str]:
        names, weights = list(self.OPERATIONS), list(self.OPERATIONS.values())
        for _ in range(operations):
            getattr(self, self.rng.choices(names, weights)[0])()
            self.driver.engine.integrity()
        self.driver.engine.resume()
        self.driver.run()
        self.check()
        stats = self.driver.engine.stats()
        return Counter(
            preempted=stats.preemptions,
            forks=len(self.forks),
            lost=sum("had to make room" in told.error for told in self.driver.told.values()),
            recomputed=stats.recomputed_tokens,
            fed=getattr(self.driver.runner, "fed", 0),
            mixed=sum(part > 0 for told in self.driver.told.values() for part in told.parts),
            cached=stats.cached_tokens,
        )

    # -- what can happen ----------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self.names.append(f"r{len(self.names)}")
        return self.names[-1]

    def told(self, name: str) -> Reported:
        return self.driver.told.get(name, Reported())  # a fork that was refused has none

    def sampling(self, prompt: int = 70) -> Sampling:
        return Sampling(
            max_tokens=120 - prompt if self.tight else self.rng.choice([1, 3, 20, 50]),
            temperature=self.rng.choice([1.0, 1.0, 0.0]),
            seed=len(self.names),
            ignore_eos=self.rng.random() < (0.7 if self.tight else 0.4),
        )

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            if self.driver.engine.has_work():
                self.driver.step()

    def add(self) -> None:
        text, adapter = (
            self.rng.choice(PROMPTS[:3] if self.tight else PROMPTS),
            self.rng.choice(["", "", *self.adapters]),
        )
        priority = self.rng.randint(0, 2)
        for _ in range(self.rng.choice([1, 2, 5])):
            name = self.name()
            sampling = self.sampling(len(text))
            self.driver.add(Request(name, text, sampling, adapter=adapter, priority=priority))

    def go_on(self) -> None:
        """The next turn of a conversation."""
        ended = [name for name in self.names if self.told(name).stop == "length"]
        if ended:
            before = self.rng.choice(ended)
            text = self.context(before) + tuple(self.driver.told[before].tokens) + (7,) * self.rng.randint(0, 3)
            if len(text) <= 70:
                adapter = self.driver.requests[before].adapter
                self.driver.add(Request(self.name(), text, self.sampling(), adapter=adapter))

    def score(self) -> None:
        self.driver.add(scoring(self.name(), self.rng.choice(PROMPTS)))

    def reissue(self) -> None:
        begun = tuple(self.rng.randrange(6, 39) for _ in range(self.rng.randint(1, 9)))
        sampling = Sampling(max_tokens=12, seed=len(self.names), ignore_eos=True)
        self.driver.add(Request(self.name(), self.rng.choice(PROMPTS), sampling, prefix=begun))

    def fork(self) -> None:
        sources = [name for name in self.names if self.told(name).tokens and name not in self.cancelled]
        if not sources:
            return
        of = self.rng.choice(sources[-8:])
        kept = self.rng.randint(0, len(self.driver.told[of].tokens))
        begun = len(self.driver.requests[of].prefix)  # a re-issued request counts what it had sampled before
        name = self.name()
        try:
            self.driver.add(Request(name, (), self.sampling(), fork=Fork(of, begun + kept)))
        except ValueError as error:
            assert any(text in str(error) for text in REFUSALS), error
        else:
            self.forks[name] = Fork(of, kept)

    def cancel(self) -> None:
        under_way = [name for name in self.driver.told if not self.told(name).stop and name not in self.cancelled]
        if under_way:
            name = self.rng.choice(under_way)
            self.driver.engine.cancel(name)
            self.cancelled.add(name)

    def swap(self) -> None:
        self.part = 0
        self.driver.swap()

    def stream(self) -> None:
        """One part more; three are the whole update. Or it is taken back."""
        self.part += 1
        if self.part == 3:
            self.swap()
            return
        if self.rng.random() < 0.2:
            self.part = 0
        if self.part or self.driver.runner.part:
            self.driver.stream(self.part)

    def swap_adapter(self) -> None:
        if self.adapters:
            self.driver.swap_adapter(self.rng.choice(self.adapters))

    def hold(self) -> None:
        self.rng.choice([self.driver.engine.pause, self.driver.engine.drain])()

    def resume(self) -> None:
        self.driver.engine.resume()

    def abort(self) -> None:
        self.driver.engine.abort()
        self.assert_empty()

    # -- what must be true --------------------------------------------------------------------------------------------------

    def assert_empty(self) -> None:
        stats = self.driver.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)

    def context(self, name: str) -> tuple[int, ...]:
        """All that came before the first token that `name` sampled, told independently of the engine."""
        if name not in self.forks:
            return self.driver.requests[name].prompt + self.driver.requests[name].prefix
        fork = self.forks[name]
        return self.context(fork.of) + tuple(self.driver.told[fork.of].tokens[: fork.at_token])

    def adapter(self, name: str) -> str:
        return self.adapter(self.forks[name].of) if name in self.forks else self.driver.requests[name].adapter

    def check(self) -> None:
        self.assert_empty()
        for name in self.names:
            told = self.driver.told.get(name)
            if told is None:  # a fork that was refused
                continue
            self.driver.check(name, self.context(name), self.adapter(name))
            assert told.versions == sorted(told.versions)
            assert all(kv <= version for kv, version in zip(told.kv_versions, told.versions, strict=True))
            if self.swap_policy == "recompute" and name not in self.forks:
                assert told.kv_versions == told.versions
            if name not in self.cancelled:
                self.check_end(name)

    def check_end(self, name: str) -> None:
        told, wanted = self.driver.told[name], self.driver.requests[name]
        most = wanted.sampling.max_tokens - len(wanted.prefix)
        match told.stop:
            case "length":
                assert len(told.tokens) == most, "nothing is lost, nothing sampled twice"
            case "stop":
                assert told.tokens[-1] < 6 and min(told.tokens[:-1], default=6) >= 6 and not wanted.sampling.ignore_eos
            case "error":
                assert name in self.forks and "had to make room" in told.error and not told.tokens
            case stop:
                assert stop == "interrupted" and len(told.tokens) <= most


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_each_request_samples_what_it_would_alone(seed: int) -> None:
    Chaos(seed).run(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "memory"), [("attention", 3000), ("stacked", None), ("stacked", 30_000), ("list", 3000)]
)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_a_models_own_cache_samples_so_too(kind: Kind, memory: int | None, seed: int) -> None:
    """What spans say of the cache is true then as well, though states are lost and computed again, and sequences run together that come and go."""
    Chaos(seed, FakeOwnCache(kind, memory)).run(40)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_a_state_has_seen_what_the_blocks_of_its_sequence_hold(seed: int) -> None:
    """Forked, shared, preempted, kept for others, and taken from those that nobody asked for again."""
    Chaos(seed, RecurrentRunner()).run(60)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_passes_that_are_asked_for_ahead_change_nothing(seed: int) -> None:
    Chaos(seed, ahead=True).run(60)


@pytest.mark.slow
def test_passes_are_asked_for_ahead_in_most_orders() -> None:
    """Not in all: where sequences begin and end all the time, there is nothing to ask for."""
    assert sum(Chaos(seed, ahead=True).run(60)["fed"] > 0 for seed in range(3)) >= 2


@pytest.mark.slow
def test_the_chaos_reaches_what_it_is_for() -> None:
    happened: Counter[str] = Counter()
    for seed in (300, 312, 320):
        happened += Chaos(seed).run(60)
    assert all(happened[what] > 0 for what in ("preempted", "forks", "lost", "recomputed", "cached", "mixed")), happened


def test_a_block_that_holds_what_it_should_not_is_noticed() -> None:
    driver = CoreDriver()
    driver.add(request("a", PROMPTS[5], 20))
    for _ in range(6):
        driver.step()
    driver.runner.cache["token"][driver.runner.forwarded[-1].tables[0, 0], 3] += 1
    driver.run()
    with pytest.raises(AssertionError, match="of a"):
        driver.check("a")


class Interruptions:
    """Pause, abort, load, issue again, resume, in whatever order: requests that are interrupted go on from their prefix."""

    def __init__(self, seed: int, runner: Any = None, ahead: bool = False) -> None:
        """As for `Chaos`."""
        self.rng = rng = random.Random(seed)
        self.adapters = () if runner else ADAPTERS
        self.driver = CoreDriver(
            blocks=rng.choice([5, 12, 40]),
            max_running=rng.randint(1, 4),
            prefill_chunk=rng.choice([5, 16, 64]),
            swap=rng.choice(["keep", "recompute"]),
        )
        self.driver.runner.feeds = ahead
        self.issues: list[list[str]] = []
        """Of every request, one after the other."""
        self.part = 0

    def run(self) -> None:
        operations = (
            [self.step] * 6 + [self.add] * 2 + [self.pause, self.resume, self.drain, self.abort, self.load, self.load]
        )
        operations += [self.go_on] * 3
        for _ in range(50):
            self.rng.choice(operations)()
            self.driver.engine.integrity()
        self.driver.engine.resume()
        while any(self.driver.told[names[-1]].stop != "length" for names in self.issues):
            self.driver.run()
            self.go_on()
        self.check()

    def add(self) -> None:
        name = f"r{len(self.issues)}"
        self.driver.add(request(name, self.rng.choice(PROMPTS), self.rng.choice([1, 9, 40]), seed=len(self.issues)))
        self.issues.append([name])

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            if self.driver.engine.has_work():
                self.driver.step()

    def pause(self) -> None:
        self.driver.engine.pause()

    def resume(self) -> None:
        self.driver.engine.resume()

    def drain(self) -> None:
        self.driver.engine.drain()

    def abort(self) -> None:
        """Those that are here end, paused or not, with the next thing that is told; those that come at once behind it do not."""
        here = [names[-1] for names in self.issues if not self.driver.told[names[-1]].stop]
        self.driver.engine.abort()
        if late := self.rng.random() < 0.5:
            self.add()
        if here:
            assert self.driver.engine.has_work()
            self.driver.step()
        assert all(self.driver.told[name].stop == "interrupted" for name in here)
        assert not late or self.driver.told[self.issues[-1][0]].stop != "interrupted"

    def load(self) -> None:
        """At once, or in three parts."""
        if self.part == 0 and self.rng.random() < 0.5:
            self.driver.swap()
            return
        self.part = (self.part + 1) % 3
        if self.part:
            self.driver.stream(self.part)
        else:
            self.driver.swap()

    def go_on(self) -> None:
        for names in self.issues:
            told, before = self.driver.told[names[-1]], self.driver.requests[names[-1]]
            if told.stop == "interrupted":
                name = f"{names[0]}/{len(names)}"
                prefix = (*before.prefix, *told.tokens)
                self.driver.add(Request(name, before.prompt, before.sampling, prefix=prefix))
                names.append(name)

    def check(self) -> None:
        for names in self.issues:
            whole: list[int] = []
            for name in names:
                wanted = self.driver.requests[name]
                assert wanted.prefix == tuple(whole)
                self.driver.check(name)  # each token is what the model says, drawn with the number of its place
                whole += self.driver.told[name].tokens
            assert len(whole) == wanted.sampling.max_tokens, "nothing is lost, nothing sampled twice"


@pytest.mark.parametrize("ahead", [False, True])
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_interrupted_in_any_order_no_token_is_lost_or_sampled_twice(ahead: bool, seed: int) -> None:
    Interruptions(seed, ahead=ahead).run()
