"""Rewards: what a function is asked, every way in which it can go wrong, and that no failure is ever a zero."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.scoring.builtin import reasoning_gym_reward
from headrace.episodes.scoring.config import OverlongConfig, RewardConfig, RewardSpec
from headrace.episodes.scoring.extract import answer_tag
from headrace.episodes.scoring.job import Effort, read_values
from headrace.episodes.scoring.reward_scorer import RewardScorer, punished, soft_overlong_punishment
from headrace.episodes.scoring.workers.reward_worker import load_functions
from headrace.episodes.tasks.reasoning_gym import columns_of
from headrace.loop.world import virtual_time
from headrace.processes.health.user_prints import LOG, SCREEN
from headrace.testing.fake_scorer import FakeScorer
from support.few import few
from support.runs.processes import gone

PROMPT = Prompt("train/0", "2 + 2 =", (7, 8), {"answer": "4", "tags": ["easy"]})

FILE = """
import asyncio, os, sys, time

def exact(prompts, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def length(completions, **columns):
    assert set(columns) == {"prompts", "completion_tokens", "answer", "tags"}, columns
    return [len(c) for c in completions]

def raises(completions):
    inner(completions)

def inner(completions):
    raise KeyError("lost")  # line 15

def forgets(completions):
    pass

def partly(completions):
    return [1.0, None, float("nan")][: len(completions)]

def too_few(completions):
    return [1.0] * (len(completions) - 1)

def wrong_type(completions):
    return ["1.0"] * len(completions)

def a_number(completions):
    return 1.0

def needs(completions, solution):
    return [1.0] * len(completions)

def leaves(completions):
    sys.exit(3)

def never(completions):
    while True:
        time.sleep(0.01)

def dies(completions):
    os.kill(os.getpid(), 9)

def forks(completions):
    if os.fork() == 0:
        return [100.0] * len(completions)
    time.sleep(0.2)
    return [1.0] * len(completions)

async def forks_later(completions):
    return forks(completions)

def chatty(completions):
    print("x" * 100_000)
    os.write(1, b"to the file descriptor")
    try:
        input()
    except EOFError:
        pass
    return [float(os.getpid())] * len(completions)

async def later(completions, answer):
    await asyncio.sleep(0.05)
    return [2.0 * (c == a) for c, a in zip(completions, answer)]

begun = 0

async def meets(completions):
    global begun
    begun += 1
    while begun < 20:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

async def sleeps_for_ever(completions):
    await asyncio.sleep(1e6)

async def refuses_to_end(completions):
    while True:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            pass

async def blocks(completions):
    time.sleep(1e6)

async def raises_later(completions):
    raise ValueError("later")

def interrupts(completions):
    raise KeyboardInterrupt

def half_a_character(completions):
    raise ValueError("bad \\ud800 text")

def ends_everything(completions):
    class End(BaseException):
        def __str__(self):
            raise RuntimeError
    raise End

async def interrupts_later(completions):
    raise KeyboardInterrupt("later")

async def cancels_itself(completions):
    raise asyncio.CancelledError("mine")

number = 3

def by_position(completions, /):
    return []
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return path


def episodes(*given: str | Episode) -> list[Episode]:
    return [
        one
        if isinstance(one, Episode)
        else Episode((Turn(PROMPT.tokens, Completion((i + 1,), (-1.0,), (VersionSpan(0, 0, 0),), "stop", one)),))
        for i, one in enumerate(given)
    ]


def run(scorer: RewardScorer, *given: str | Episode, prompt: Prompt = PROMPT) -> list[Scored | Failure]:
    """`given`: texts of completions that ended by themselves, or whole episodes."""

    async def once() -> list[Scored | Failure]:
        try:
            return await scorer.score(prompt, episodes(*given))
        finally:
            await scorer.close()

    return asyncio.run(once())


def score(config: RewardConfig, *texts: str, prompt: Prompt = PROMPT) -> list[Scored | Failure]:
    return run(RewardScorer(config), *texts, prompt=prompt)


def from_file(file: Path, *names: str, timeout: float = 20.0, workers: int = 2) -> RewardConfig:
    specs = tuple(RewardSpec(f"{file}:{name}") for name in names)
    return RewardConfig(functions=specs, timeout=timeout, workers=workers)


def rewards(results: list[Scored | Failure]) -> list[float]:
    assert all(isinstance(result, Scored) for result in results), results
    return [result.reward for result in results if isinstance(result, Scored)]


def reasons(results: list[Scored | Failure]) -> list[str]:
    return [result.reason if isinstance(result, Failure) else "scored" for result in results]


def detail(result: Scored | Failure) -> str:
    assert isinstance(result, Failure)
    return result.detail


# --- what works --------------------------------------------------------------------------------------------------------


def test_several_functions_are_weighted_and_named(file: Path) -> None:
    functions = (
        RewardSpec(f"{file}:exact", weight=2.0),
        RewardSpec(f"{file}:length", weight=-0.5),
        RewardSpec(f"{file}:later"),
        RewardSpec(f"{file}:exact", weight=0.25, extract="last_number"),
    )
    first, second = score(RewardConfig(functions=functions), "4", "is 4.")
    assert isinstance(first, Scored) and isinstance(second, Scored)
    assert first.rewards == {"exact": 1.0, "length": 1.0, "later": 2.0, "exact#2": 1.0}
    assert first.reward == 2.0 - 0.5 + 2.0 + 0.25
    assert second.rewards == {"exact": 0.0, "length": 5.0, "later": 0.0, "exact#2": 1.0}
    assert second.reward == -2.5 + 0.25
    assert first.episode.last.text == "4"


def test_what_the_user_s_code_prints_and_reads_does_not_reach_the_wire(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    scorer = RewardScorer(from_file(file, "chatty"), log=log)
    assert rewards(run(scorer, "a", "b"))[0] != os.getpid()
    assert log.read_text().count("x") == 100_000 and "to the file descriptor" in log.read_text()


def test_a_neighbour_of_the_file_can_be_imported_and_replaces_nothing_of_python(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("VALUE = 3")
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')")
    path = tmp_path / "r.py"
    path.write_text("import helpers, random\nrandom.random()\ndef f(completions):\n return [helpers.VALUE]")
    assert rewards(score(from_file(path, "f"), "a")) == [3.0]


def test_plain_functions_from_python(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        seen.update(columns, prompts=prompts, thread=threading.current_thread())
        columns["tags"][0].append("spoilt")
        return [c == "4" for c in completions]

    results = run(RewardScorer(RewardConfig(function="reasoning_gym"), [reward]), "4", "5")
    assert rewards(results) == [1.0, 0.0]
    assert seen["prompts"] == ["2 + 2 ="] * 2 and seen["answer"] == ["4", "4"]
    assert seen["completion_tokens"] == [[1], [2]]
    assert seen["thread"].daemon and seen["thread"] is not threading.main_thread()
    assert seen["tags"] == [["easy", "spoilt"], ["easy"]] and PROMPT.columns["tags"] == ["easy"], (
        "each has its own copy"
    )


async def _awaited(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


class _Callable:
    async def __call__(self, completions: list[str]) -> list[float]:
        return await _awaited(completions)


@pytest.mark.parametrize("function", [_awaited, _Callable(), functools.partial(_awaited)])
def test_async_callables_are_awaited(function: Callable[..., Any]) -> None:
    assert rewards(run(RewardScorer(RewardConfig(), [function]), "a", "bc")) == [1.0, 2.0]


def test_one_group_is_judged_by_all_functions_at_once() -> None:
    async def first(completions: list[str]) -> list[float]:
        begun.set()
        await other.wait()
        return [1.0] * len(completions)

    async def second(completions: list[str]) -> list[float]:
        other.set()
        await begun.wait()
        return [1.0] * len(completions)

    async def main() -> list[Scored | Failure]:
        return await RewardScorer(RewardConfig(timeout=60), [first, second]).score(PROMPT, episodes("a"))

    begun, other = asyncio.Event(), asyncio.Event()
    assert rewards(asyncio.run(main())) == [2.0]


def test_async_functions_of_a_file_wait_side_by_side(file: Path) -> None:
    async def main() -> None:
        scorer = RewardScorer(from_file(file, "meets", workers=1))
        results = await asyncio.gather(*(scorer.score(PROMPT, episodes("4")) for _ in range(20)))
        assert [rewards(result) for result in results] == [[1.0]] * 20 and len(scorer.pids) == 1
        await scorer.close()

    asyncio.run(main())


def test_plain_functions_of_a_file_share_the_workers(file: Path) -> None:
    async def main() -> int:
        scorer = RewardScorer(from_file(file, "exact", workers=2))
        results = await asyncio.gather(*(scorer.score(PROMPT, episodes("4", "5")) for _ in range(20)))
        assert [rewards(result) for result in results] == [[1.0, 0.0]] * 20
        alive = scorer.pids
        await scorer.close()
        assert not any(_runs(pid) for pid in alive)
        return len(alive)

    assert asyncio.run(main()) == 2


def test_one_function_may_see_an_extract(file: Path) -> None:
    assert rewards(score(RewardConfig(function=f"{file}:exact", extract="last_number"), "is 4.", "is")) == [1.0, 0.0]


def test_a_function_of_python_may_see_an_extract_too() -> None:
    config = RewardConfig(functions=(RewardSpec("python:longest", extract="last_number"),))
    (one,) = run(RewardScorer(config, [lambda completions: [float(text) for text in completions]]), "41 + 1 is 42.")
    assert isinstance(one, Scored) and one.reward == 42.0 and one.extracted == {"longest": "42"}


@pytest.mark.parametrize("extract", ["last_number", "answer_tag"])
def test_what_was_cut_off_has_no_answer_unless_asked_for(file: Path, extract: str) -> None:
    """`9 - 2 - 3 = 4 + 3 ...`, cut off behind the 4, is not the answer 4."""
    config = RewardConfig(function=f"{file}:exact", extract=extract)  # type: ignore[arg-type]
    text = "<answer>4</answer> or 4"
    cut = msgspec.structs.replace(episodes(text)[0].last, stop="length")
    both = [*episodes(text), Episode((Turn((7, 8), cut),))]
    whole, half = run(RewardScorer(config), *both)
    assert isinstance(whole, Scored) and isinstance(half, Scored)
    assert (whole.reward, half.reward) == (1.0, 0.0)
    assert (whole.extracted, half.extracted) == ({"exact": "4"}, {"exact": ""})
    asked = run(RewardScorer(replace(config, extract_truncated=True)), *both)
    assert rewards(asked) == [1.0, 1.0]
    assert isinstance(asked[1], Scored) and asked[1].extracted == {"exact": "4"}


def test_the_whole_text_is_given_of_what_was_cut_off_too(file: Path) -> None:
    cut = msgspec.structs.replace(episodes("4")[0].last, stop="length")
    (one,) = run(RewardScorer(RewardConfig(function=f"{file}:exact")), Episode((Turn((7, 8), cut),)))
    assert isinstance(one, Scored) and one.reward == 1.0 and one.extracted == {}


def test_no_episodes_no_call() -> None:
    assert run(RewardScorer(RewardConfig(), [lambda completions: 1 / 0])) == []


# --- what a function returns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        ([1, True], [1.0, 1.0]),
        ((0.5, -2.5), [0.5, -2.5]),
        (np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        ([np.float64(1.5), np.int64(2)], [1.5, 2.0]),
        ([1.0, None], [1.0, "reward_none"]),
        (None, ["reward_none"] * 2),
        ([math.nan, 1.0], ["reward_nan", 1.0]),
        ([math.inf, -math.inf], ["reward_nan"] * 2),
        ([10**400, 1.0], ["reward_too_large", 1.0]),
        ([-1e300, np.float32(3e38)], ["reward_too_large"] * 2),
        ([1e15, -(10**15)], [1e15, -1e15]),
        ([1.0], ["reward_wrong_count"] * 2),
        ([1.0] * 3, ["reward_wrong_count"] * 2),
        ([], ["reward_wrong_count"] * 2),
        (1.0, ["reward_wrong_type"] * 2),
        ("12", ["reward_wrong_type"] * 2),
        ({"a": 1.0, "b": 2.0}, ["reward_wrong_type"] * 2),
        (["1.0", 1.0], ["reward_wrong_type", 1.0]),
        ([[1.0], 1.0], ["reward_wrong_type", 1.0]),
        (np.ones((2, 2)), ["reward_wrong_type"] * 2),
        (np.ma.array([1.5, 2.5], mask=[0, 1]), [1.5, "reward_none"]),
        (list(np.ma.array([1.5, 2.5], mask=[0, 1])), [1.5, "reward_none"]),
        ([np.ma.array([1.5], mask=[1]), np.ma.array([2.5])], ["reward_none", 2.5]),
    ],
)
def test_what_comes_back_is_a_number_or_a_named_failure(returned: Any, outcome: list[Any]) -> None:
    assert [v.reason if isinstance(v, Failure) else v for v in read_values(returned, 2)] == outcome


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.floats(), max_size=2)
)


@given(st.lists(anything, max_size=5) | anything, st.integers(1, 5))
def test_there_is_always_one_outcome_a_completion_and_every_number_was_returned(returned: Any, count: int) -> None:
    values = read_values(returned, count)
    assert len(values) == count
    for place, value in enumerate(values):
        if isinstance(value, Failure):
            assert value.reason.startswith("reward_") and value.detail
        else:
            assert math.isfinite(value) and value == returned[place]


# --- where it raised ---


@pytest.mark.parametrize("where", ["process", "thread"])
def test_the_traceback_has_the_users_frames_and_no_others(file: Path, where: str) -> None:
    config, callables = RewardConfig(function=f"{file}:raises"), [_load(file, "raises")] if where == "thread" else []
    failed, _ = run(RewardScorer(config, callables), "a", "b")
    assert isinstance(failed, Failure) and failed.kind == "KeyError" and not failed.outage
    first, *frames, last = failed.traceback.splitlines()
    assert first == "Traceback (your frames):" and last == "KeyError: 'lost'"
    assert [line.split(", ")[1:] for line in frames if "File" in line] == [
        ["line 12", "in raises"],
        ["line 15", "in inner"],
    ]
    assert 'raise KeyError("lost")  # line 15' in failed.traceback and "headrace/scoring" not in failed.traceback


def test_a_service_that_does_not_answer_is_an_outage() -> None:
    class ServiceTimeout(TimeoutError): ...

    def refused(completions: list[str]) -> list[float]:
        raise ConnectionRefusedError("judge:80")

    def late(completions: list[str]) -> list[float]:
        raise ServiceTimeout

    for function in (refused, late):
        (failed,) = run(RewardScorer(RewardConfig(), [function]), "a")
        assert isinstance(failed, Failure) and failed.outage and failed.reason == "reward_unreachable"
    (failed,) = run(RewardScorer(RewardConfig(), [lambda completions: Path("/no/such/file").read_text()]), "a")
    assert isinstance(failed, Failure) and not failed.outage and failed.kind == "FileNotFoundError"


# --- a function that fails ---------------------------------------------------------------------------------------------

FAILURES = [
    ("raises", ["reward_raised"] * 3, "KeyError: 'lost' (", "mine.py:15)"),
    ("forgets", ["reward_none"] * 3, "returned None", "return statement"),
    ("partly", ["scored", "reward_none", "reward_nan"], "None", ""),
    ("too_few", ["reward_wrong_count"] * 3, "2 rewards came back for 3 completions", ""),
    ("wrong_type", ["reward_wrong_type"] * 3, "'1.0' (str), which is not a number", ""),
    ("a_number", ["reward_wrong_type"] * 3, "list of 3 numbers", ""),
    ("needs", ["reward_raised"] * 3, "it needs solution, which is not a column of the task; there are: answer", ""),
    ("leaves", ["reward_raised"] * 3, "SystemExit: 3", "mine.py:"),
    ("raises_later", ["reward_raised"] * 3, "ValueError: later", "mine.py:"),
    ("interrupts", ["reward_raised"] * 3, "KeyboardInterrupt (", "mine.py:"),
    ("half_a_character", ["reward_raised"] * 3, r"ValueError: bad \ud800 text", "mine.py:"),
    ("ends_everything", ["reward_raised"] * 3, "End: its text cannot be had (RuntimeError)", "mine.py:"),
    ("interrupts_later", ["reward_raised"] * 3, "KeyboardInterrupt: later", "mine.py:"),
    ("cancels_itself", ["reward_raised"] * 3, "CancelledError: mine", "mine.py:"),
]


@pytest.mark.parametrize("where", ["process", "thread"])
def test_every_failure_is_named(file: Path, where: str) -> None:
    async def main() -> None:
        config = from_file(file, *(name for name, *_ in FAILURES))
        for name, expected, *words in FAILURES:
            if where == "thread":
                results = await RewardScorer(config, [_load(file, name)]).score(PROMPT, episodes("a", "b", "c"))
            else:
                judge = next(judge for judge in scorer._parts if judge.name == name)
                alone = RewardScorer(config, [_load(file, "exact")])
                alone._parts = [judge]
                results = await alone.score(PROMPT, episodes("a", "b", "c"))
            assert reasons(results) == expected, name
            failed = next(result for result in results if isinstance(result, Failure))
            assert failed.detail.startswith(f"{name}: ") and all(word in failed.detail for word in words), failed

    async def around() -> None:
        try:
            await main()
        finally:
            await scorer.close()

    scorer = RewardScorer(from_file(file, *(name for name, *_ in FAILURES)))
    asyncio.run(around())


def _load(file: Path, name: str) -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    return space[name]


def test_an_interrupt_in_a_task_of_an_async_function_ends_no_other_call(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import asyncio\n"
        "async def inner():\n    raise KeyboardInterrupt('inner')\n"
        "async def outer(completions):\n    await asyncio.gather(inner())\n"
        "async def other(completions):\n    await asyncio.sleep(0.5)\n    return [1.0] * len(completions)\n"
    )

    async def main() -> None:
        scorer = RewardScorer(from_file(path, "outer", "other"))
        outer, other = scorer._parts
        try:
            both = await asyncio.gather(
                *(part.ask(part.job(PROMPT, episodes("a")), Effort()) for part in (outer, other))
            )
        finally:
            await scorer.close()
        (failed,), values = both
        assert (
            isinstance(failed, Failure)
            and failed.reason == "reward_raised"
            and "KeyboardInterrupt: inner" in failed.detail
        )
        assert values == [1.0]

    asyncio.run(main())


def test_what_one_call_prints_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, log = tmp_path / "mine.py", tmp_path / "rewards.log"
    path.write_text("def loud(completions):\n    print('x' * 1_000_000)\n    return [1.0] * len(completions)\n")
    assert rewards(run(RewardScorer(from_file(path, "loud"), log=log), "a")) == [1.0]
    assert log.read_text().count("x") == LOG
    assert (
        "headrace: the reward loud printed 1,000,001 characters in one call; 800,001 of them are left out"
        in log.read_text()
    )

    async def later(completions: list[str]) -> list[float]:
        return loud(completions)

    def loud(completions: list[str]) -> list[float]:
        print("x" * 1_000_000)
        return [1.0] * len(completions)

    for function in (loud, later):
        assert rewards(run(RewardScorer(RewardConfig(), [function]), "a")) == [1.0]
        print("y" * 2 * SCREEN)  # by others, it is shown
        shown = capsys.readouterr()
        assert shown.out.count("x") == SCREEN and shown.out.count("y") == 2 * SCREEN
        assert f"headrace: the reward {function.__name__} printed 1,000,001 characters in one call" in shown.err


def test_a_sum_that_lacks_a_part_is_no_reward(file: Path) -> None:
    config = RewardConfig(functions=(RewardSpec(f"{file}:exact"), RewardSpec(f"{file}:partly", weight=0.0)))
    assert reasons(score(config, "4", "4", "4")) == ["scored", "reward_none", "reward_nan"]


def test_a_sum_that_overflows_is_no_reward() -> None:
    scorer = RewardScorer(RewardConfig(), [lambda completions: [6e14], lambda completions: [5e14]])
    (failed,) = run(scorer, "a")
    assert isinstance(failed, Failure) and failed.reason == "reward_too_large"
    assert "the weighted sum of reward = 6e+14, reward#2 = 5e+14 is 1.1e+15" in failed.detail


# --- a function that never returns, or dies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    few(
        starmap(
            pytest.param,
            [
                ("never", "its process was killed"),
                ("sleeps_for_ever", "it was cancelled"),
                ("refuses_to_end", "it was cancelled"),
                ("blocks", "it blocked its event loop"),
            ],
        ),
        keep=2,
    ),
)
def test_a_function_of_a_file_that_never_returns(file: Path, name: str, words: str) -> None:
    async def main() -> None:
        scorer = RewardScorer(from_file(file, name, "exact", "later", timeout=1.0, workers=1))
        late = await scorer.score(PROMPT, episodes("4", "5"))
        assert reasons(late) == ["reward_timeout"] * 2
        assert "no answer within 1 s" in detail(late[0]) and words in detail(late[0]), late
        scorer._parts = [judge for judge in scorer._parts if judge.name != name]
        assert rewards(await scorer.score(PROMPT, episodes("4", "5"))) == [3.0, 0.0], "others go on"
        alive = scorer.pids
        await scorer.close()
        assert alive and not any(_runs(pid) for pid in alive)

    asyncio.run(main())


def test_a_callable_that_never_returns_is_abandoned_and_counted() -> None:
    def stuck(completions: list[str]) -> list[float]:
        release.wait()
        return [1.0] * len(completions)

    async def main() -> tuple[list[Scored | Failure], list[Scored | Failure]]:
        scorer = RewardScorer(RewardConfig(timeout=0.1, workers=1), [stuck])
        first = await scorer.score(PROMPT, episodes("a"))
        second = await scorer.score(PROMPT, episodes("a"))  # the abandoned thread holds no slot
        assert scorer.threads.abandoned == {"stuck": 2}
        await scorer.close()
        return first, second

    release = threading.Event()
    first, second = asyncio.run(main())
    assert reasons(first) == reasons(second) == ["reward_timeout"]
    assert "headrace-reward-stuck-" in detail(second[0]) and "abandoned (2 so far)" in detail(second[0])
    left = [thread for thread in threading.enumerate() if thread.name.startswith("headrace-reward-stuck")]
    assert len(left) == 2 and all(thread.daemon for thread in left), "closing waited for nobody, nor will the program"
    release.set()  # the threads now answer into a closed loop, which must not be noticed


@pytest.mark.parametrize("name", ["sleeps_for_ever", "refuses_to_end"])
def test_an_async_callable_that_never_returns(file: Path, name: str) -> None:
    async def main() -> list[Scored | Failure]:
        scorer = RewardScorer(RewardConfig(timeout=0.1), [_load(file, name)])
        results = await scorer.score(PROMPT, episodes("a", "b"))
        await scorer.close()
        return results

    loop = asyncio.new_event_loop()  # not asyncio.run, which waits for a task that refuses to end
    assert reasons(loop.run_until_complete(main())) == ["reward_timeout"] * 2
    loop.close()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_worker_killed_while_scoring_is_named_and_replaced(file: Path) -> None:
    async def main() -> None:
        scorer = RewardScorer(from_file(file, "never", "exact", workers=1, timeout=60))
        judges = scorer._parts
        scorer._parts = judges[:1]
        running = asyncio.ensure_future(scorer.score(PROMPT, episodes("4", "5")))
        await _until(lambda: scorer.pids)
        (pid,) = scorer.pids
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(running, 120)
        assert reasons(results) == ["reward_worker_died"] * 2 and "was killed by SIGKILL" in detail(results[0])
        scorer._parts = judges[1:]
        assert rewards(await scorer.score(PROMPT, episodes("4", "5"))) == [1.0, 0.0]
        assert scorer.pids != [pid]
        await scorer.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["forks", "forks_later"])
def test_a_fork_of_a_reward_function_answers_nothing(name: str, file: Path) -> None:
    """Neither in its place, nor to a later call."""

    async def main() -> None:
        scorer = RewardScorer(from_file(file, name, workers=1, timeout=60))
        for _ in range(2):
            assert rewards(await scorer.score(PROMPT, episodes("4", "5"))) == [1.0, 1.0]
        await scorer.close()

    asyncio.run(main())


def test_a_worker_that_cannot_be_started_is_named(file: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "scorer.log"
    results = asyncio.run(_score_and_close(RewardScorer(from_file(file, "exact"), log=gone)))
    assert reasons(results) == ["reward_worker_died"] and "could not be started: " in detail(results[0])


async def _score_and_close(scorer: RewardScorer) -> list[Scored | Failure]:
    try:
        return list(await scorer.score(PROMPT, episodes("4")))
    finally:
        await scorer.close()


def test_a_worker_whose_answer_makes_no_sense_is_killed_and_named(tmp_path: Path) -> None:
    file = tmp_path / "garbles.py"
    file.write_text(GARBLES)
    config = RewardConfig(functions=(RewardSpec(f"{file}:garbles"),), timeout=60.0)
    results = asyncio.run(_score_and_close(RewardScorer(config)))
    assert reasons(results) == ["reward_worker_died"] and "its answer made no sense" in detail(results[0])


GARBLES = """
import contextlib, os, struct

def garbles(completions, **columns):
    for fd in range(3, 64):  # one of them is the one that answers go to
        with contextlib.suppress(OSError):
            os.write(fd, struct.pack("<I", 5) + b"\\xc1" * 5)
    return [1.0] * len(completions)
"""


def test_a_function_that_kills_its_process(file: Path) -> None:
    assert reasons(score(from_file(file, "dies"), "a")) == ["reward_worker_died"]


def test_a_worker_killed_while_idle_costs_nothing(file: Path) -> None:
    async def main() -> None:
        scorer = RewardScorer(from_file(file, "exact", "later", workers=1))
        await scorer.score(PROMPT, episodes("4"))
        assert len(scorer.pids) == 2
        for pid in scorer.pids:
            os.kill(pid, signal.SIGKILL)
        await _until(lambda: not scorer.pids)
        assert rewards(await scorer.score(PROMPT, episodes("4"))) == [3.0]
        await scorer.close()

    asyncio.run(main())


def test_a_cancelled_call_frees_its_worker(file: Path) -> None:
    async def main() -> None:
        scorer = RewardScorer(from_file(file, "never", "exact", workers=1, timeout=60))
        judges = scorer._parts
        scorer._parts = judges[:1]
        running = asyncio.ensure_future(scorer.score(PROMPT, episodes("4")))
        await _until(lambda: scorer.pids)
        (pid,) = scorer.pids
        running.cancel()
        await asyncio.wait({running})
        assert not _runs(pid)
        scorer._parts = judges[1:]
        assert rewards(await scorer.score(PROMPT, episodes("4"))) == [1.0]
        await scorer.close()

    asyncio.run(main())


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_with_their_parent_whatever_they_are_doing(tmp_path: Path, stopped: bool) -> None:
    """And with them what a function started. One that is stopped does not read that its parent is gone."""
    import subprocess
    import sys

    noted, file = tmp_path / "child", tmp_path / "starting.py"
    file.write_text(f"""
import pathlib, subprocess, time
def starts(completions):
    child = subprocess.Popen(["sleep", "600"])
    part = pathlib.Path("{noted}.part")
    part.write_text(str(child.pid))
    part.rename("{noted}")
    time.sleep(600)
""")
    code = f"""
import asyncio, pathlib
from headrace.episodes.sandbox.sandbox_limits import DEFAULT
from headrace.episodes.scoring.workers.processes import WorkerProcess
from headrace.episodes.scoring.job import ScoringJob
async def main():
    worker = WorkerProcess([DEFAULT.as_text(), "{file}:starts"], None)
    await worker.start()
    print(worker.pid, flush=True)
    await worker.ask(0, ScoringJob("p", ("c",), ((1,),), {{}}), 600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline())]
    asyncio.run(_until(noted.exists))
    pids.append(int(noted.read_text()))
    assert all(map(_runs, pids))
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(map(gone, pids))


# --- what is refused at start ------------------------------------------------------------------------------------------


def refusal(config: RewardConfig, callables: tuple[Any, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        RewardScorer(config, callables)
    return str(caught.value)


def test_functions_that_cannot_be_loaded_are_refused_at_start(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ndef f(:\n")
    failing = tmp_path / "failing.py"
    failing.write_text("def f(completions): ...\n\n1 / 0\n")
    leaving = tmp_path / "leaving.py"
    leaving.write_text("import os\nos._exit(7)\n")
    assert f"there is no file {tmp_path / 'gone.py'}" in refusal(RewardConfig(function=f"{tmp_path / 'gone.py'}:f"))
    assert "mine.py defines no exakt; did you mean exact?" in refusal(RewardConfig(function=f"{file}:exakt"))
    assert "invalid syntax" in (said := refusal(RewardConfig(function=f"{broken}:f"))) and f"{broken}:2" in said
    said = refusal(RewardConfig(function=f"{failing}:f"))
    assert "ZeroDivisionError" in said and f"{failing}:3" in said
    assert "ended with exit code 7" in refusal(RewardConfig(function=f"{leaving}:f"))
    assert "is a int, which cannot be called" in refusal(RewardConfig(function=f"{file}:number"))
    assert "takes completions by position only" in refusal(RewardConfig(function=f"{file}:by_position"))


def test_a_config_without_rewards_is_refused() -> None:
    assert "set reward.function" in refusal(RewardConfig())
    assert "cannot be called" in refusal(RewardConfig(), ("a string",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"function": "exact"}, "of the form path/to/file.py:name"),
        ({"function": "file.txt:exact"}, "of the form path/to/file.py:name"),
        ({"function": "file.py:"}, "of the form path/to/file.py:name"),
        ({"functions": [{"function": "reasoning-gym"}]}, "of the form path/to/file.py:name"),
        ({"function": "reasoning_gym", "functions": [{"function": "reasoning_gym"}]}, "keep one of them"),
        ({"extract": "last_number"}, "reward.extract belongs to reward.function"),
        ({"timeout": 0}, "greater than 0"),
        ({"functions": [{"function": "reasoning_gym", "weight": math.inf}]}, "finite"),
        ({"functions": [{"function": "reasoning_gym", "extract": "first"}]}, "last_number"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RewardConfig(**arguments)


# --- built in ----------------------------------------------------------------------------------------------------------


def _entry(family: str, **options: Any) -> tuple[dict[str, Any], Prompt]:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(family, size=1, seed=3, **options)[0]
    return entry, Prompt("train/0", entry["question"], (1,), columns_of(entry))


@pytest.mark.slow
def test_the_verifier_of_reasoning_gym_in_a_process() -> None:
    entry, prompt = _entry("chain_sum")
    answer = entry["answer"]
    first, second, third = rewards(
        score(RewardConfig(function="reasoning_gym"), f" {answer}\n", "no idea", f"it is {answer}", prompt=prompt)
    )
    assert (first, second) == (1.0, 0.0) and 0 < third < 1


def test_an_answer_that_the_verifier_cannot_read_fails_alone() -> None:
    entry, prompt = _entry("prime_factorization")
    right, unreadable = reasoning_gym_reward(
        [prompt.text] * 2, [entry["answer"], "hello"], **{k: [v] * 2 for k, v in prompt.columns.items()}
    )
    assert right == 1.0 and isinstance(unreadable, Failure) and unreadable.reason == "reward_raised"


@pytest.mark.parametrize("family", ["arc_agi", "chain_sum", "knights_knaves", "prime_factorization", "countdown"])
def test_the_verifier_sees_the_entry_as_it_was_before_json(family: str) -> None:
    import msgspec

    entry, prompt = _entry(family)
    travelled = msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt)
    columns = {name: [value] for name, value in travelled.columns.items()}
    assert reasoning_gym_reward([prompt.text], [entry["answer"]], **columns) == [1.0]


def test_answer_tag() -> None:
    assert answer_tag("<answer>1</answer> no: <ANSWER>\n 2 \n</ANSWER>.") == "2"
    assert answer_tag("<answer>1") == answer_tag("1") == ""


# --- the fake ----------------------------------------------------------------------------------------------------------


def test_the_fake_scorer_has_settable_delay_rewards_and_failures() -> None:
    async def main(scorer: FakeScorer) -> tuple[list[Scored | Failure], float]:
        results = await scorer.score(PROMPT, episodes(*"abcdefgh"))
        return results, asyncio.get_running_loop().time()

    def go(scorer: FakeScorer) -> tuple[list[Scored | Failure], float]:
        awaited: Awaitable[Any] = main(scorer)
        return virtual_time.run(awaited)  # type: ignore[arg-type]

    results, seconds = go(FakeScorer(seconds=100.0))
    assert seconds == 100.0 and len(set(rewards(results))) == 8 and min(rewards(results)) > 0
    assert rewards(go(FakeScorer(reward=lambda prompt, episode: float(len(episode.last.text))))[0]) == [1.0] * 8
    assert set(reasons(go(FakeScorer(failure_rate=1.0))[0])) == {"reward_raised"}
    assert set(reasons(go(FakeScorer(failure_rate=0.5))[0])) == {"reward_raised", "scored"}


# -- soft overlong punishment ------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_soft_overlong_punishment_is_the_papers(cache: int, more: int, length: int) -> None:
    """By the three cases of DAPO's equation 13."""
    longest = cache + more
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    assert soft_overlong_punishment(length, longest, cache) == expected


def test_the_punishment_is_weighed_and_named_and_a_failure_stays_one() -> None:
    done = [episode(16), episode(12), episode(3)]
    scorer = punished(OverlongConfig(cache=8, weight=2.0), 16, FakeScorer(reward=lambda prompt, one: 1.0))
    found = virtual_time.run(scorer.score(PROMPT, done))
    assert [one.reward for one in found] == [-1.0, 0.0, 1.0]
    assert [one.rewards for one in found] == [
        {"fake": 1.0, "soft_overlong_punishment": value} for value in (-1.0, -0.5, 0.0)
    ]
    failing = punished(OverlongConfig(cache=8), 16, FakeScorer(failure_rate=1.0))
    assert all(isinstance(one, Failure) for one in virtual_time.run(failing.score(PROMPT, done)))
    plain = FakeScorer()
    assert punished(OverlongConfig(), 16, plain) is plain


def episode(count: int) -> Episode:
    tokens = tuple(range(count))
    return Episode((Turn((), Completion(tokens, (-1.0,) * count, (VersionSpan(0, 0, 0),), "stop")),))


def test_the_punishment_has_a_weight_of_its_own_among_the_rewards() -> None:
    config = RewardConfig(function="reasoning_gym", soft_overlong_punishment=OverlongConfig(cache=4, weight=0.5))
    assert config.weights == {"reasoning_gym": 1.0, "soft_overlong_punishment": 0.5}
    with pytest.raises(ValidationError, match="rename it"):
        RewardConfig(function="my.py:soft_overlong_punishment", soft_overlong_punishment={"cache": 4})  # type: ignore[arg-type]


def test_a_module_beside_one_file_does_not_serve_another(tmp_path: Path) -> None:
    """Python has one module of a name in a process, and files of two directories may each mean their own."""
    for place, value in (("first", 1.0), ("second", 2.0)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "scale_of_this_test.py").write_text(f"VALUE = {value}")
        (tmp_path / place / "mine.py").write_text(
            "import json\nfrom scale_of_this_test import VALUE\ndef r(completions): return [VALUE] * len(completions)"
        )
        (tmp_path / place / "plain.py").write_text(
            "import json, os\ndef r(completions): return [3.0] * len(completions)"
        )
    specs = [str(tmp_path / place) + ":r" for place in ("first/mine.py", "second/plain.py", "second/mine.py")]
    assert [function("a") for function in load_functions(specs[:2])] == [[1.0], [3.0]]
    with pytest.raises(
        ConfigError, match=r"second/mine.py imports scale_of_this_test, .* rename one of the two modules"
    ):
        load_functions(specs)
