"""Whatever happens to the engine, in whatever order: what a request samples is what it would sample alone, every block is
accounted for, and nothing is lost. On the fake model, whose logits are a hash of what its cache really holds."""

from __future__ import annotations

from fake_engine_model import POISON, Driver, prompt, request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.types import Fork, Request, Sampling, scoring

PROMPTS = [prompt(length, seed) for length, seed in ((1, 0), (5, 1), (31, 2), (32, 3), (33, 4), (50, 5), (64, 6), (70, 7))]
PROMPTS += [PROMPTS[5] + prompt(9, 8), PROMPTS[5][:20] + prompt(30, 9), PROMPTS[7][:64]]
"""Lengths around a block's, and some that begin alike."""


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(4, 24),
        running=st.integers(1, 5),
        chunk=st.sampled_from([5, 16, 64]),
        swap=st.sampled_from(["keep", "recompute"]),
        exact=st.booleans(),
    )
    def start(self, blocks: int, running: int, chunk: int, swap: str, exact: bool) -> None:
        self.driver = Driver(blocks, max_running=running, prefill_chunk=chunk, swap=swap, exact=exact)
        self.keeps, self.paused = swap == "keep", False
        self.cancelled: set[str] = set()
        self.contexts: dict[str, tuple[int, ...]] = {}
        self.forks: dict[str, Fork] = {}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def context(self, name: str) -> tuple[int, ...]:
        """All that came before the first token that `name` sampled, told independently of the engine."""
        if name not in self.forks:
            return self.driver.requests[name].prompt + self.driver.requests[name].prefix
        fork = self.forks[name]
        return self.context(fork.of) + tuple(self.driver.told[fork.of].tokens[: fork.at_token])

    @rule(prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 40), priority=st.integers(0, 2), group=st.integers(1, 4))
    def add(self, prompt: tuple[int, ...], tokens: int, priority: int, group: int) -> None:
        for _ in range(group):
            self.driver.add(request(self.name(), prompt, tokens, seed=self.count, priority=priority))

    @rule(data=st.data(), more=st.integers(1, 20))
    def go_on(self, data: st.DataObject, more: int) -> None:
        """The next turn of a conversation."""
        ended = [name for name, told in self.driver.told.items() if told.stop == "length" and told.tokens]
        if not ended:
            return
        name = data.draw(st.sampled_from(ended))
        text = self.context(name) + tuple(self.driver.told[name].tokens) + (7,) * (more % 3)
        if len(text) + more <= 128:
            self.driver.add(request(self.name(), text, more, seed=self.count))

    @rule(prompt=st.sampled_from(PROMPTS[1:]))
    def score(self, prompt: tuple[int, ...]) -> None:
        self.driver.add(scoring(self.name(), prompt))

    @rule(prompt=st.sampled_from(PROMPTS), begun=st.lists(st.integers(0, 38), min_size=1, max_size=8))
    def reissue(self, prompt: tuple[int, ...], begun: list[int]) -> None:
        sampling = Sampling(max_tokens=12, seed=self.count, ignore_eos=True)
        self.driver.add(Request(self.name(), prompt, sampling, prefix=tuple(begun)))

    @rule(data=st.data(), tokens=st.integers(1, 20))
    def fork(self, data: st.DataObject, tokens: int) -> None:
        sources = [name for name, told in self.driver.told.items() if told.tokens and name not in self.cancelled]
        if not sources:
            return
        of = data.draw(st.sampled_from(sources))
        told, name = self.driver.told[of], self.name()
        fork = Fork(of, data.draw(st.integers(0, len(told.tokens))))
        begun = self.driver.requests[of].prefix  # a re-issued request counts what it had sampled before
        wanted = Request(
            name, (), Sampling(max_tokens=tokens, seed=self.count, ignore_eos=True), fork=Fork(of, fork.at_token + len(begun))
        )
        try:
            self.driver.add(wanted)
        except ValueError as error:
            refusals = ("not known", "made room for others", "waits for room", "not computed that far", "shorten the prompt")
            assert any(text in str(error) for text in refusals), error
        else:
            self.forks[name] = fork

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ones = [name for name, told in self.driver.told.items() if not told.stop and name not in self.cancelled]
        if open_ones:
            name = data.draw(st.sampled_from(open_ones))
            self.driver.engine.cancel(name)
            self.cancelled.add(name)

    @rule()
    def swap(self) -> None:
        self.driver.swap()

    @rule(steps=st.integers(1, 15))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.driver.engine.has_work():
                self.driver.step()

    @rule(then=st.sampled_from(["pause", "drain"]))
    def hold(self, then: str) -> None:
        getattr(self.driver.engine, then)()
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.driver.engine.resume()
        self.paused = False

    @rule()
    def abort(self) -> None:
        self.driver.engine.abort()
        stats = self.driver.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "driver"):
            self.driver.engine.integrity()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.engine.resume()
        self.driver.run()
        stats = self.driver.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
        for name, told in self.driver.told.items():
            if name not in self.cancelled:
                self.check_end(name)
                assert self.keeps or told.kv_versions == told.versions or self.forked(name)
            self.driver.check(name, self.context(name))
            assert told.versions == sorted(told.versions)

    def forked(self, name: str) -> bool:
        """A fork of what ended under older weights goes on from their entries, whatever the policy."""
        return name in self.forks

    def check_end(self, name: str) -> None:
        told, wanted = self.driver.told[name], self.driver.requests[name]
        most = wanted.sampling.max_tokens - len(wanted.prefix)
        if told.stop == "length":
            assert len(told.tokens) == most, "nothing is lost, nothing sampled twice"
        elif told.stop == "error":
            assert name in self.forks and "had to make room" in told.error and not told.tokens
        else:
            assert told.stop == "interrupted" and len(told.tokens) <= most


EngineMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineMachine.TestCase


def test_the_machine_can_fail() -> None:
    """A block that holds what it should not is noticed."""
    driver = Driver()
    driver.add(request("a", PROMPTS[5], 20))
    for _ in range(6):
        driver.step()
    driver.runner.cache["token"][driver.runner.passes[-1].tables[0, 0], 3] += 1
    driver.run()
    try:
        driver.check("a")
    except AssertionError:
        return
    raise AssertionError("a wrong block changed nothing")


assert POISON not in {token for text in PROMPTS for token in text}
