"""A fleet of engines as one engine: where requests go, who serves, and what becomes of requests when a member goes."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from headrace.core.errors import CheckpointError, ConfigError, IdentityError, WorkerDied
from headrace.core.reports import Capabilities
from headrace.core.steps import Finished, StepOutput, merged
from headrace.core.types import Completion, Request, RolloutKey, Sampling
from headrace.core.weights import AdapterSpec
from headrace.engine.fleet.fleet import Fleet, in_common
from headrace.engine.fleet.member import Member
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import MemberMoved, Warned, Withdrawn
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request, update

LENGTH = 20
TOKEN = 0.1
SILENCE, NOBODY = 5.0, 60.0


@dataclass
class Flock:
    """A fleet over fakes, all of which sample the same token at the same place of a request."""

    engines: list[FakeEngine]
    fleet: Fleet
    facts: FactList
    heard: list[StepOutput] = field(default_factory=list)

    def moves(self) -> list[tuple[str, str]]:
        return [(fact.member, fact.state) for fact in self.facts.of(MemberMoved)]

    def warnings(self) -> list[str]:
        return [fact.message for fact in self.facts.of(Warned)]

    def told(self, name: str) -> list[int]:
        """The tokens of a request that listeners were told of."""
        pairs = [zip(one.request_ids, one.tokens, strict=True) for one in self.heard]
        return [token for pair in pairs for who, token in pair if who == name]


def telemetry(facts: FactList) -> Telemetry:
    clock = asyncio.get_running_loop().time
    return Telemetry(facts.record, clock, Waits(facts.record, clock, 1e6, 1e6))


async def flock(engines: list[FakeEngine], version: int | None = 0, facts: FactList | None = None) -> Flock:
    facts = facts or FactList()
    parts = {str(number): engine for number, engine in enumerate(engines, 1)}
    made = Flock(engines, Fleet(parts, FleetPatience(NOBODY, SILENCE), telemetry(facts)), facts)
    made.fleet.listen(made.heard.append)
    await made.fleet.open()
    if version is not None:
        await made.fleet.load(update(version))
    return made


def engine(token: float = TOKEN, **options: Any) -> FakeEngine:
    return FakeEngine(**{"seconds_per_token": token, "length": lambda rng: LENGTH, **options})


def run(
    case: Callable[[Flock], Coroutine[Any, Any, None]],
    *engines: FakeEngine,
    count: int = 2,
    facts: FactList | None = None,
) -> None:
    async def main() -> None:
        made = await flock(list(engines) or [engine() for _ in range(count)], facts=facts)
        try:
            async with asyncio.timeout(10_000):
                await case(made)
        finally:
            await made.fleet.close()

    virtual_time.run(main())


def ask(name: str, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return request(name, prompt, LENGTH)


def rollout(ticket: int, index: int) -> Request:
    return ask(str(RolloutKey(ticket, index)), (ticket, 7))


async def undisturbed(one: Request) -> tuple[int, ...]:
    """The tokens that a request has on an engine of its own."""
    alone = engine(0.0)
    await alone.load(update(0))
    return (await alone.generate(one)).tokens


def started(flock: Flock, *requests: Request) -> list[asyncio.Task[Completion]]:
    return [asyncio.ensure_future(flock.fleet.generate(one)) for one in requests]


def places(flock: Flock) -> list[set[str]]:
    return [set(engine.unfinished()) for engine in flock.engines]


# -- where requests go ------------------------------------------------------------------------------------------------------


def test_a_group_is_on_one_member_and_groups_are_balanced_by_what_runs() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *(rollout(0, i) for i in range(4)), *(rollout(1, i) for i in range(2)))
        tasks += started(flock, *(rollout(2, i) for i in range(4)))
        await asyncio.sleep(TOKEN)
        first, second = places(flock)
        assert first == {f"t0/{i}" for i in range(4)} and second == {
            f"t{t}/{i}" for t, n in ((1, 2), (2, 4)) for i in range(n)
        }
        tasks += started(flock, rollout(3, 0))
        await asyncio.sleep(TOKEN)
        assert "t3/0" in places(flock)[0], "4 requests run on the first member, 6 on the second"
        tasks += started(flock, ask("t2/4", (2, 7)))
        await asyncio.sleep(TOKEN)
        assert "t2/4" in places(flock)[1], "its group's prompt lies there"
        await asyncio.gather(*tasks)
        assert not flock.fleet.unfinished()

    run(case)


def test_equal_prompts_without_a_group_share_a_member_too() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, ask("a", (5, 6)), ask("b", (8,)), ask("c", (5, 6)))
        await asyncio.sleep(TOKEN)
        assert places(flock) == [{"a", "c"}, {"b"}]
        await asyncio.gather(*tasks)

    run(case)


def test_among_equals_the_one_with_fewer_tokens_is_taken() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, ask("long", tuple(range(100))), ask("short", (1,)), ask("next", (2,)))
        await asyncio.sleep(TOKEN)
        assert places(flock) == [{"long"}, {"short", "next"}]
        await asyncio.gather(*tasks)

    run(case)


def test_a_fork_goes_where_its_source_is() -> None:
    async def case(flock: Flock) -> None:
        from headrace.core.types import Fork

        source, other = started(flock, ask("source", (5,)), ask("other", (6,)))
        await asyncio.gather(source, other)
        (fork,) = started(flock, Request("fork", (), Sampling(max_tokens=3), fork=Fork("other", 2)))
        await asyncio.sleep(TOKEN / 2)
        assert places(flock) == [set(), {"fork"}]
        assert (await fork).tokens
        flock.engines[1].vanish("was killed")
        await asyncio.sleep(0)
        flock.engines[1].reappear()
        await asyncio.sleep(1)
        with pytest.raises(ValueError, match="request other is not known"):
            await flock.fleet.generate(Request("again", (), Sampling(max_tokens=3), fork=Fork("other", 2)))

    run(case)


# -- members that go ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dies", "hangs", "is lost"])
def test_requests_go_on_elsewhere_from_their_tokens(how: str) -> None:
    async def case(flock: Flock) -> None:
        requests = [rollout(t, i) for t in range(2) for i in range(3)]
        tasks = started(flock, *requests)
        await asyncio.sleep(5.5 * TOKEN)
        first = flock.engines[0]
        match how:
            case "dies":
                first.vanish("was killed by SIGKILL")
            case "hangs":
                first.stopped = True
            case "is lost":
                first.die()
        done = await asyncio.gather(*tasks)
        for one, completion in zip(requests, done, strict=True):
            assert completion.tokens == await undisturbed(one) and len(completion.tokens) == LENGTH
            assert tuple(flock.told(one.id)) == completion.tokens, "each token is told once"
            assert completion.versions() == [0] * LENGTH
        assert sum(len(engine.requests) for engine in flock.engines) == 9, "three are issued a second time"
        again = [one for one in flock.engines[1].requests if one.prefix]
        assert {len(one.prefix) for one in again} == {5} and len(again) == 3
        assert flock.moves() == [("1", "lost" if how == "is lost" else "away")]
        assert "its 3 requests go on elsewhere from 15 tokens (1 of 2 members serve)" in flock.warnings()[0]

    run(case)


def test_a_member_comes_back_with_the_newest_weights() -> None:
    async def case(flock: Flock) -> None:
        one, two = flock.engines
        one.stopped = True
        await asyncio.sleep(3 * SILENCE)
        assert flock.moves() == [("1", "away")]
        await flock.fleet.load(update(1))
        await flock.fleet.load(update(2))
        assert (one.version, two.version) == (0, 2)
        one.stopped = False
        await asyncio.sleep(1)
        assert one.version == 2 and flock.moves() == [("1", "away"), ("1", "serving")]
        assert [fact.key for fact in flock.facts.of(Withdrawn)] == [flock.facts.of(Warned)[0].key], "it serves again"
        done = await asyncio.gather(*started(flock, *(rollout(t, 0) for t in range(4))))
        assert all(set(completion.versions()) == {2} for completion in done)
        assert Counter(len(engine.requests) for engine in flock.engines) == {2: 2}

    run(case)


def test_a_member_that_hangs_for_long_is_killed_and_its_replacement_comes_back() -> None:
    """Nothing else would ever replace it: its process is there, and says nothing."""

    async def case(flock: Flock) -> None:
        one = flock.engines[0]
        one.stopped = True
        await asyncio.sleep(9 * SILENCE)
        assert one.kills == 0 and flock.moves() == [("1", "away")]
        await flock.fleet.load(update(1))
        await asyncio.sleep(4 * SILENCE)
        assert one.kills == 1 and one.version == 1 and flock.moves() == [("1", "away"), ("1", "serving")]
        assert "has not answered for 50 s more; it is killed" in flock.warnings()[-1]
        await asyncio.sleep(40 * SILENCE)
        assert one.kills == 1

    run(case)


def test_a_member_whose_process_is_being_replaced_is_not_killed() -> None:
    async def case(flock: Flock) -> None:
        flock.engines[0].vanish("was killed by SIGKILL")
        await asyncio.sleep(60 * SILENCE)
        flock.engines[0].reappear()
        await asyncio.sleep(1)
        assert flock.engines[0].kills == 0 and flock.moves() == [("1", "away"), ("1", "serving")]

    run(case)


def test_a_member_that_is_away_is_asked_to_load_every_newer_version() -> None:
    """When it is back it restores what it was asked to load last. Of older versions than the two newest there are no files."""

    async def case(flock: Flock) -> None:
        one, _ = flock.engines
        newest = 0

        async def publish() -> None:
            nonlocal newest
            newest += 1
            await flock.fleet.load(update(newest))

        one.is_kept = lambda asked: asked.version >= newest - 1
        one.load_seconds = 2.0
        loading = asyncio.ensure_future(publish())
        await asyncio.sleep(1)
        one.vanish("did not answer in the middle of an update")
        await loading
        for _ in range(4):
            await publish()
            await asyncio.sleep(1)
        one.reappear()
        await asyncio.sleep(5)
        assert flock.moves() == [("1", "away"), ("1", "serving")] and one.version == newest == 5

        probing = asyncio.Event()

        async def probe(part: Any) -> float:
            if part is one:
                probing.set()
                await asyncio.sleep(3)
            return await check()(part)

        one.vanish("was killed")
        await publish()
        await flock.fleet.examine(newest, probe)
        one.reappear()
        await probing.wait()
        one.vanish("was killed while it was probed")
        for _ in range(4):
            await publish()
            await asyncio.sleep(1)
        one.reappear()
        await asyncio.sleep(5)
        assert flock.moves()[-1] == ("1", "serving") and one.version == newest == 10

    run(case)


def test_a_version_is_live_when_every_member_in_rotation_has_it() -> None:
    slow = engine(load_seconds=SILENCE - 1)

    async def case(flock: Flock) -> None:
        before = asyncio.get_running_loop().time()
        report = await flock.fleet.load(update(1))
        assert asyncio.get_running_loop().time() - before == pytest.approx(SILENCE - 1)
        assert [engine.version for engine in flock.engines] == [1, 1] and report.version == 1
        assert report.verify_seconds == SILENCE - 1 and not flock.moves()

    run(case, engine(), slow)


def test_all_members_are_asked_at_once_and_one_that_fails_stays() -> None:
    """A trial is judged by its caller: who fails it does not come back with another version."""

    async def case(flock: Flock) -> None:
        await flock.fleet.load(update(1))
        asked: list[Any] = []
        everybody = asyncio.Event()

        async def check(part: Any) -> float:
            asked.append(part)
            if len(asked) == 3:
                everybody.set()
            await everybody.wait()
            if part is asked[1]:
                raise IdentityError("kept old weights")
            return 0.5

        found, errors = await flock.fleet.ask_serving(check)
        assert list(found.values()) == [0.5, 0.5] and [str(error) for error in errors.values()] == ["kept old weights"]
        assert all(member.serves for member in flock.fleet.members)

    run(case, engine(), engine(), engine())


def test_a_fleet_says_how_many_engines_its_bytes_are_the_sum_of() -> None:
    async def case(flock: Flock) -> None:
        report = await flock.fleet.load(update(1))
        assert (report.received, report.engines) == (90, 2), "the third one does not say what it received"

    run(case, engine(receives=40), engine(receives=50), engine())


def test_a_slow_member_delays_nobody_beyond_the_deadline() -> None:
    slow = engine(load_seconds=3 * SILENCE)

    async def case(flock: Flock) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(4 * SILENCE)
        assert flock.moves() == [("2", "away"), ("2", "serving")], "the first weights were late already"
        before = now()
        tasks = started(flock, rollout(0, 0), rollout(1, 0))
        await flock.fleet.load(update(1))
        assert now() - before == pytest.approx(SILENCE)
        assert (
            flock.moves()[-1] == ("2", "away") and "5 s later than another one with version 1" in flock.warnings()[-1]
        )
        done = await asyncio.gather(*tasks)
        assert [one.versions()[-1] for one in done] == [1, 0], "the second was done before its member was too late"
        await asyncio.sleep(4 * SILENCE)
        assert flock.moves()[-1] == ("2", "serving") and slow.version == 1

    run(case, engine(), slow)


def test_a_load_that_is_cancelled_is_one_at_every_member() -> None:
    async def case(flock: Flock) -> None:
        loading = asyncio.ensure_future(flock.fleet.load(update(1)))
        await asyncio.sleep(1)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await asyncio.sleep(SILENCE)
        assert [engine.version for engine in flock.engines] == [0, 0]

    run(case, engine(load_seconds=2.0), engine(load_seconds=2.0))


def test_a_request_never_goes_back_to_older_weights() -> None:
    """The first member has version 1 and dies while the second is still loading it."""
    late = engine(load_seconds=4.0)

    async def case(flock: Flock) -> None:
        tasks = started(flock, rollout(0, 0))
        await asyncio.sleep(TOKEN / 2)
        loading = asyncio.ensure_future(flock.fleet.load(update(1)))
        await asyncio.sleep(3 * TOKEN)
        flock.engines[0].vanish("was killed")
        await asyncio.sleep(10 * TOKEN)
        assert not flock.engines[1].unfinished(), "it waits for version 1"
        await loading
        (completion,) = await asyncio.gather(*tasks)
        assert len(completion.tokens) == LENGTH and completion.versions() == sorted(completion.versions())
        assert completion.versions()[-1] == 1

    run(case, engine(), late)


def test_a_turn_is_not_sampled_by_older_weights_than_the_turn_before() -> None:
    late = engine(load_seconds=4.0)

    async def case(flock: Flock) -> None:
        loading = asyncio.ensure_future(flock.fleet.load(update(1)))
        await asyncio.sleep(TOKEN)
        (first,) = await asyncio.gather(*started(flock, rollout(0, 0)))
        assert set(first.versions()) == {1}
        flock.engines[0].vanish("was killed")
        second = await flock.fleet.generate(ask("t0/0.1", (0, 7, 9)))
        assert set(second.versions()) == {1}
        await loading

    run(case, engine(), late)


def test_what_a_member_sends_after_it_has_left_is_ignored() -> None:
    async def case(flock: Flock) -> None:
        (task,) = started(flock, rollout(0, 0))
        await asyncio.sleep(4.5 * TOKEN)
        first = flock.fleet.members[0]
        flock.fleet._rotation.expel(first, "is tried out")
        stale = StepOutput(0, ("t0/0",), (99,), (-1.0,), (0,))
        for listener in flock.engines[0]._listeners:
            listener(stale)
        completion = await task
        assert completion.tokens == await undisturbed(rollout(0, 0)) and len(flock.told("t0/0")) == LENGTH

    run(case)


def test_rows_that_were_accepted_are_not_when_their_request_has_gone_elsewhere_or_has_come_again() -> None:
    """A member that repeats its rows is believed without a look at the requests, as long as they stay."""

    async def case(flock: Flock) -> None:
        first, second = flock.fleet.members

        def say(member: Member, version: int) -> None:
            said = merged([StepOutput(version, ("t0/0",), (99,), (-1.0,), (0,))])
            flock.fleet._rotation.requests.heard(member, said)

        def said() -> int:
            return sum(token == 99 for one in flock.heard for _, token, _, _ in one.sampled())

        (task,) = started(flock, rollout(0, 0))
        await asyncio.sleep(0.5 * TOKEN)
        holder, other = (first, second) if first.attempts else (second, first)
        say(holder, 0)
        say(holder, 0)
        say(other, 0)
        assert said() == 2
        flock.fleet._rotation.expel(holder, "is tried out")
        await asyncio.sleep(0.1 * TOKEN)
        say(holder, 0)
        assert said() == 2, "another member has it"
        say(other, 0)
        assert said() == 3
        other.attempts["t0/0"].floor = 1
        flock.fleet._rotation.requests.look_at(other)  # as for any request that comes or goes
        say(other, 0)
        assert said() == 3 and not other.serves, "the version is compared again"
        task.cancel()

    run(case, engine(), engine())


def test_a_member_that_samples_with_old_weights_is_taken_out_before_a_token_is_accepted() -> None:
    async def case(flock: Flock) -> None:
        await flock.fleet.load(update(1))
        (task,) = started(flock, rollout(0, 0))
        await asyncio.sleep(4.5 * TOKEN)
        flock.engines[0].version = 0
        completion = await task
        assert set(completion.versions()) == {1} and completion.tokens == await undisturbed(rollout(0, 0))
        assert "sampled with version 0 after version 1 had gone live there" in flock.warnings()[0]
        flock.engines[0].version = 1

    run(case)


# -- the end of a fleet -----------------------------------------------------------------------------------------------------


def test_the_fleet_is_lost_with_its_last_member() -> None:
    async def case(flock: Flock) -> None:
        (task,) = started(flock, rollout(0, 0))
        watch = asyncio.ensure_future(flock.fleet.watch())
        await asyncio.sleep(2.5 * TOKEN)
        flock.engines[0].die()
        await asyncio.sleep(2.5 * TOKEN)
        assert not watch.done() and not task.done()
        flock.engines[1].die()
        with pytest.raises(WorkerDied, match="fleet has no member left: 1: .*; 2: "):
            await watch
        with pytest.raises(WorkerDied):
            await task
        assert len(flock.fleet.unfinished()["t0/0"].tokens) == 4, "what it had is still known"
        with pytest.raises(WorkerDied):
            await flock.fleet.generate(rollout(1, 0))

    run(case)


def test_nobody_is_waited_for_longer_than_the_patience() -> None:
    async def case(flock: Flock) -> None:
        now = asyncio.get_running_loop().time
        watch = asyncio.ensure_future(flock.fleet.watch())
        (task,) = started(flock, rollout(0, 0))
        for one in flock.engines:
            one.vanish("was killed by SIGKILL")
        before = now()
        with pytest.raises(
            WorkerDied, match=r"no member for 60 s \(engine.patience\); the last to leave was .: was killed"
        ):
            await watch
        assert now() - before == pytest.approx(NOBODY)
        with pytest.raises(WorkerDied):
            await task

    run(case)


class FullDisk(FactList):
    """Cannot write that a member has moved."""

    full = False

    def record(self, fact: Any) -> None:
        if self.full and isinstance(fact, MemberMoved):
            raise CheckpointError("the disk is full")
        super().record(fact)


class LostUnderARequest(FakeEngine):
    """The request is the first to find that it is lost."""

    async def until_end(self, request: Request) -> Finished:
        await asyncio.sleep(3 * TOKEN)
        raise WorkerDied("engine", "was killed by SIGKILL")


@pytest.mark.parametrize("finder", ["care", "request"])
def test_a_loss_that_cannot_be_recorded_ends_the_fleet_whoever_finds_it(finder: str) -> None:
    """Nobody awaits the task of a request, or that which cares for a member."""
    first, unheard = engine() if finder == "care" else LostUnderARequest(), list[dict[str, Any]]()

    async def case(flock: Flock) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        disk, watch = flock.facts, asyncio.ensure_future(flock.fleet.watch())
        assert isinstance(disk, FullDisk)
        (task,) = started(flock, rollout(0, 0))
        await asyncio.sleep(2.5 * TOKEN)
        disk.full = True
        if finder == "care":
            first.vanish("was killed by SIGKILL")
        for one in (watch, task):
            with pytest.raises(CheckpointError, match="the disk is full"):
                await one

    run(case, first, engine(), facts=FullDisk())
    gc.collect()  # asyncio reports the error of a task that nobody has asked for it when the task goes
    assert not unheard


def test_requests_wait_while_nobody_serves() -> None:
    async def case(flock: Flock) -> None:
        for one in flock.engines:
            one.vanish("was killed by SIGKILL")
        await asyncio.sleep(1)
        (task,) = started(flock, rollout(0, 0))
        loading = asyncio.ensure_future(flock.fleet.load(update(1)))
        await asyncio.sleep(NOBODY / 2)
        assert not task.done() and not loading.done()
        flock.engines[1].reappear()
        assert (await task).versions() == [1] * LENGTH and (await loading).version == 1

    run(case)


# -- identity -----------------------------------------------------------------------------------------------------------------


def check(*wrong: FakeEngine) -> Callable[[Any], Awaitable[float]]:
    async def probe(part: Any) -> float:
        await part.score((1, 2, 3))
        if part in wrong:
            raise IdentityError("the log-probs differ by 3 on average")
        return 0.1

    return probe


def test_a_member_whose_probe_fails_serves_nobody_until_another_probe_passes() -> None:
    async def case(flock: Flock) -> None:
        one, two = flock.engines
        assert await flock.fleet.examine(0, check(one)) == 0.1
        assert flock.moves() == [("1", "away")] and "the log-probs differ by 3" in flock.warnings()[0]
        await flock.fleet.load(update(1))
        await asyncio.sleep(1)
        assert one.version == 1 and flock.moves() == [("1", "away")], "it has the weights, and no probe has passed"
        await flock.fleet.load(update(2))
        await flock.fleet.examine(2, check())
        await asyncio.sleep(5)
        assert flock.moves() == [("1", "away"), ("1", "serving")]
        with pytest.raises(IdentityError):
            await flock.fleet.examine(2, check(one, two))

    run(case)


def test_a_member_that_comes_back_is_probed_first() -> None:
    async def case(flock: Flock) -> None:
        one, _ = flock.engines
        wrong: list[FakeEngine] = []

        async def probe(part: Any) -> float:
            return await check(*wrong)(part)

        await flock.fleet.examine(0, probe)
        one.vanish("was killed")
        await asyncio.sleep(1)
        wrong.append(one)
        one.reappear()
        await asyncio.sleep(5)
        assert flock.moves() == [("1", "away")]

    run(case)


def test_a_fleet_ends_at_once_if_all_that_live_have_failed_their_probe() -> None:
    """No version follows that could pass: nobody samples for it."""

    async def case(flock: Flock) -> None:
        one, two = flock.engines
        await flock.fleet.examine(0, check(one))
        await asyncio.sleep(1)
        two.die()
        await asyncio.sleep(1)
        with pytest.raises(IdentityError, match="(?s)computes the policy that is trained.*differ by 3.*killed"):
            await flock.fleet.watch()

    run(case)


def test_a_member_that_failed_at_an_earlier_version_is_waited_for_if_the_probe_of_this_one_is_there() -> None:
    async def case(flock: Flock) -> None:
        one, two = flock.engines
        await flock.fleet.examine(0, check(one))
        one.load_seconds = 5.0
        await flock.fleet.load(update(1))
        await flock.fleet.examine(1, check())
        two.die()
        await asyncio.sleep(10)
        assert flock.moves() == [("1", "away"), ("2", "lost"), ("1", "serving")]

    run(case)


def test_a_fleet_that_ends_while_a_member_loads_lets_go_of_it() -> None:
    """The care of a member watched for changes in a loop that never let any other task run."""

    async def case(flock: Flock) -> None:
        one, two = flock.engines
        one.load_seconds = 10 * NOBODY
        one.vanish("was killed")
        one.reappear()
        await asyncio.sleep(1)
        two.vanish("was killed")
        with pytest.raises(WorkerDied, match="had no member"):
            await asyncio.wait_for(flock.fleet.watch(), 2 * NOBODY)
        for _ in range(50):  # a loop that does not end lets no virtual time pass
            await asyncio.sleep(0)
        assert all(care.done() for member, care in flock.fleet._tasks.items() if member)

    run(case)


def test_the_only_engine_that_comes_back_as_another_one_ends_the_fleet_at_once() -> None:
    async def case(flock: Flock) -> None:
        (one,) = flock.engines
        wrong: list[FakeEngine] = []
        await flock.fleet.examine(0, lambda part: check(*wrong)(part))
        one.vanish("was killed")
        wrong.append(one)
        await asyncio.sleep(1)
        one.reappear()
        await asyncio.sleep(5)
        with pytest.raises(IdentityError):
            await asyncio.wait_for(flock.fleet.watch(), 1)

    run(case, count=1)


def test_weights_that_one_member_refuses_take_it_out_and_those_that_all_refuse_are_an_error() -> None:
    async def case(flock: Flock) -> None:
        one, _ = flock.engines
        refuses = True
        load = one.load

        async def picky(update: Any, parts: int = 1) -> Any:
            if refuses:
                raise IdentityError("these are not the bytes that were published")
            return await load(update, parts)

        one.load = picky  # type: ignore[method-assign]
        await flock.fleet.load(update(1))
        assert flock.moves() == [("1", "away")] and "not the bytes" in flock.warnings()[0]
        refuses = False
        await asyncio.sleep(2)
        assert one.version == 1 and flock.moves()[-1] == ("1", "serving")
        with pytest.raises(IdentityError):
            await flock.fleet.load(update(2, "wrong"))
        assert flock.moves()[-1] == ("1", "serving"), "nobody is to blame"
        assert (await flock.fleet.load(update(2))).version == 2

    run(case)


# -- interrupts -----------------------------------------------------------------------------------------------------------------


def test_abort_ends_everything_even_where_a_member_dies_meanwhile() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *(rollout(t, 0) for t in range(4)))
        await asyncio.sleep(3.5 * TOKEN)
        flock.engines[0].stopped = True
        await flock.fleet.abort()
        done = await asyncio.gather(*tasks)
        assert [one.stop for one in done] == ["interrupted"] * 4
        assert [len(one.tokens) for one in done] == [3] * 4
        later = await flock.fleet.generate(msgspec.structs.replace(rollout(0, 0), prefix=done[0].tokens))
        assert done[0].tokens + later.tokens == await undisturbed(rollout(0, 0))

    run(case)


def test_drain_lets_the_running_ones_end_and_admits_nobody_new() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *(rollout(t, 0) for t in range(2)))
        await asyncio.sleep(3.5 * TOKEN)
        draining = asyncio.ensure_future(flock.fleet.drain())
        await asyncio.sleep(TOKEN)
        late = started(flock, rollout(2, 0))
        flock.engines[0].vanish("was killed")
        await draining
        assert all(task.done() for task in tasks) and not late[0].done()
        flock.engines[0].reappear()
        await asyncio.sleep(2)
        assert flock.moves()[-1] == ("1", "serving")
        late += started(flock, rollout(3, 0))
        await asyncio.sleep(5)
        assert not any(task.done() for task in late), "it came back into a fleet that admits nobody"
        await flock.fleet.load(update(1))
        await flock.fleet.resume()
        assert all(set(one.versions()) == {1} for one in await asyncio.gather(*late))

    run(case)


def test_a_cancelled_request_leaves_its_member() -> None:
    async def case(flock: Flock) -> None:
        (task,) = started(flock, rollout(0, 0))
        await asyncio.sleep(3.5 * TOKEN)
        task.cancel()
        await asyncio.sleep(TOKEN)
        assert places(flock) == [set(), set()] and not flock.fleet.unfinished()
        assert (await flock.fleet.generate(rollout(0, 0))).tokens == await undisturbed(rollout(0, 0))

    run(case)


# -- members that a person adds and removes -----------------------------------------------------------------------------------


def test_a_member_is_added_and_another_removed_while_it_runs() -> None:
    async def case(flock: Flock) -> None:
        await flock.fleet.load(update(1))
        tasks = started(flock, *(rollout(t, 0) for t in range(4)))
        await asyncio.sleep(3.5 * TOKEN)
        third = engine()
        flock.fleet.add("3", third)
        await asyncio.sleep(TOKEN)
        assert third.version == 1 and flock.moves() == [("3", "serving")]
        await flock.fleet.remove("1")
        done = await asyncio.gather(*tasks)
        for ticket, one in enumerate(done):
            assert one.tokens == await undisturbed(rollout(ticket, 0))
        assert flock.moves()[-1] == ("1", "removed") and {len(one.prefix) for one in third.requests} == {4}
        assert (await flock.fleet.stats()).sampled_tokens == 4 * LENGTH
        with pytest.raises(ConfigError, match="there is no member 1; there are 2, 3"):
            await flock.fleet.remove("1")
        with pytest.raises(ConfigError, match="3 is a member already"):
            flock.fleet.add("3", third)
        await flock.fleet.remove("2")
        with pytest.raises(ConfigError, match="no other member than 3 serves"):
            await flock.fleet.remove("3")

    run(case)


# -- what it can do -----------------------------------------------------------------------------------------------------------


def test_a_fleet_can_do_what_every_member_can() -> None:
    all_ = Capabilities(
        4096, "kernels llama at http://a", masks=True, adapters=8, spans=True, exact=True, arithmetic="one"
    )
    less = Capabilities(1024, "kernels llama at http://b", adapters=2, spans=True, exact=True, arithmetic="one")
    assert in_common([all_, less]) == Capabilities(
        1024, "2 members: kernels llama", adapters=2, spans=True, exact=True, arithmetic="one"
    )
    other = in_common([all_, msgspec.structs.replace(all_, arithmetic="two")])
    assert not other.exact and not other.arithmetic and other.masks


def test_adapters_are_loaded_into_every_member() -> None:
    async def case(flock: Flock) -> None:
        spec = AdapterSpec(name="policy", rank=2, alpha=4.0, rslora=False)
        new = msgspec.structs.replace(update(1), kind="adapter", adapter=spec)
        with pytest.raises(ValueError, match="no adapter policy is loaded"):
            await flock.fleet.generate(msgspec.structs.replace(rollout(0, 0), adapter="policy"))
        await flock.fleet.load(new)
        flock.engines[0].vanish("was killed")
        await asyncio.sleep(1)
        await flock.fleet.load(msgspec.structs.replace(new, version=2, fingerprint="fake-2"))
        flock.engines[0].reappear()
        await asyncio.sleep(1)
        assert [engine.adapters for engine in flock.engines] == [{"policy": 2}] * 2
        asked = [msgspec.structs.replace(rollout(t, 0), adapter="policy") for t in range(2)]
        assert all(set(one.versions()) == {2} for one in await asyncio.gather(*started(flock, *asked)))

    run(case)


class Mute(FakeEngine):
    """A member that can make no completion."""

    async def generate(self, request: Request) -> Completion:
        raise AssertionError("the fleet has heard the tokens, and makes the completion")


def test_the_completion_of_a_request_is_made_once() -> None:
    async def case(flock: Flock) -> None:
        assert (await flock.fleet.generate(ask("t0/0"))).tokens == await undisturbed(ask("t0/0"))

    run(case, Mute(TOKEN, length=lambda rng: LENGTH))
