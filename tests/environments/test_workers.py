"""User code in processes beside generation: whatever it does, it ends its own rollout only."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from itertools import starmap
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.function import open_function
from headrace.episodes.environments.workers import environment_pool as processes
from headrace.episodes.environments.workers import tools
from headrace.episodes.episodes import Played, roll_out
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.few import few
from support.tool_chats import CALL, WrittenEngine, play_all, pool_of

ENV = '''
import asyncio, ctypes, os, sys, time
from pathlib import Path

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return int(a) + int(b)

def large(a: int) -> str:
    """Says much.

    Args:
        a: how much
    """
    return "x" * 10_000_000

def breaks(a: int) -> int:
    """Fails.

    Args:
        a: a number
    """
    raise KeyError("gone")

def sleeps(a: int) -> int:
    """Never returns.

    Args:
        a: a number
    """
    time.sleep(3600)

def exits(a: int) -> int:
    """Ends the program, it thinks.

    Args:
        a: a number
    """
    sys.exit(3)

TOOLS = [add, large, breaks, sleeps, exits]

async def play(agent, prompt, how="", mark="", **columns):
    """The ten lines of the documents, after something that `how` names."""
    try:
        if how == "exits":
            sys.exit(3)
        if how == "dies":
            os._exit(9)
        if how == "raises":
            raise RuntimeError("no such luck")
        if how == "blocks":
            await agent.chat(prompt)
            time.sleep(3600)
        if how == "holds":
            await agent.chat(prompt)
            ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock, and no core
        if how == "hog":
            await agent.chat(prompt)
            much = [bytearray(1 << 24) for _ in range(1 << 12)]
        if how == "waits":
            await agent.chat(prompt)
            await asyncio.sleep(3600)
        reply = await agent.chat(prompt, tools=TOOLS if how == "calls" else None)
        for _ in range(3):
            if not reply.tool_calls:
                break
            agent.reward("called", 0.25)
            reply = await agent.chat(await agent.call(reply))
        return float(reply.text == "12")
    finally:
        if mark:
            Path(mark).write_text("torn down")

def plain(agent, prompt, how="", mark="", **columns):
    try:
        reply = agent.chat(prompt, tools=TOOLS if how == "calls" else None)
        if how == "waits":
            time.sleep(3600)
        if how == "spins":
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
        while reply.tool_calls and reply.stop != "limit":
            reply = agent.chat(agent.call(reply))
        return {"right": reply.text == "12", "turns": 2}
    finally:
        if mark:
            Path(mark).write_text("torn down")

async def nothing(agent, prompt):
    await agent.chat(prompt)

async def strange(agent, prompt):
    await agent.chat(prompt)
    return {"one": 1, "two": "many"}

async def twice(agent, prompt, mark):
    """Another path when it is played again."""
    seen = Path(mark)
    count = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (count + 1))
    await agent.chat(f"life {count}")
    if not count:
        os._exit(1)
    return count

async def interrupts(agent, prompt):
    await agent.chat(prompt)
    async def inner():
        raise KeyboardInterrupt("inner")
    await asyncio.gather(inner())

def interrupts_plainly(agent, prompt):
    agent.chat(prompt)
    raise KeyboardInterrupt("plain")

async def half_a_character(agent, prompt):
    await agent.chat(prompt)
    raise ValueError("bad \\ud800 text")

async def cancels_itself(agent, prompt):
    await agent.chat(prompt)
    raise asyncio.CancelledError("mine")

async def enormous(agent, prompt):
    await agent.chat(prompt)
    return {"one": 1, "two": 1e300}

async def enormous_turn(agent, prompt):
    await agent.chat(prompt)
    agent.reward("step", -1e300)
    return 1.0

async def empty(agent, prompt):
    await agent.chat(prompt)
    return {}

async def double(agent, prompt):
    await agent.chat(prompt, tools=[add, add])

async def needs(agent, prompt, missing):
    return 0.0

async def odd(agent, prompt):
    await agent.chat([{"role": "user", "content": 3}])

async def endless(agent, prompt):
    while True:
        await agent.chat(prompt)
'''


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("env") / "env.py"
    path.write_text(textwrap.dedent(ENV))
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(tool_chats.save_tokenizer(tmp_path_factory.mktemp("tokens"), tool_chats.HERMES))


TWELVE = WrittenEngine("12<|im_end|>")


def reason(result: Played | Failure) -> str:
    return result.reason if isinstance(result, Failure) else ""


def call(name: str, arguments: str) -> str:
    return CALL.replace("NAME", name).replace("ARGUMENTS", arguments)


# --- the ten lines of the documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["play", "plain"])
def test_a_tool_is_called_and_its_result_is_the_next_message(env: Path, encoder: ChatEncoder, function: str) -> None:
    engine = WrittenEngine(call("add", '{"a": 5, "b": 7}'), "12<|im_end|>")
    (found,) = play_all(env, encoder, [({"how": "calls"}, engine)], function=function)
    assert isinstance(found, Played), found
    first, second = found.episode.turns
    assert first.messages == ({"role": "user", "content": "6 and 6?"},)
    assert first.reply["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 5, "b": 7}}
    assert second.messages == ({"role": "tool", "content": "12", "tool_call_id": "call00001", "name": "add"},)
    if function == "play":
        assert found.rewards == {"play": 1.0} and found.turn_rewards == ({"called": 0.25}, {})
    else:
        assert found.rewards == {"right": 1.0, "turns": 2.0} and not found.turn_rewards
    assert "Adds two numbers." in encoder.written(engine.asked[0].context)


WRONG = [
    (call("mul", "{}"), "unknown_tool", "there is no tool mul; there are: add, large"),
    (call("add", '{"a": 1}'), "wrong_arguments", "missing a required argument: 'b'"),
    (call("breaks", '{"a": 1}'), "raised", "KeyError: 'gone'"),
    (call("exits", '{"a": 1}'), "raised", "SystemExit: 3"),
    (call("sleeps", '{"a": 1}'), "timeout", "took more than 3 s"),
    ("<tool_call>add 1</tool_call><|im_end|>", "malformed", "cannot be read"),
    (call("large", '{"a": 1}'), "", "x" * 300 + " ... (9,999,700 characters more)"),
]


def test_what_goes_wrong_with_a_call_is_an_observation(env: Path, encoder: ChatEncoder) -> None:
    pids: list[int] = []
    rollouts = [({"how": "calls"}, WrittenEngine(says, "12<|im_end|>")) for says, _, _ in WRONG]
    found = play_all(env, encoder, rollouts, tool_seconds=3.0, tool_characters=300, pids=pids)
    for one, (_, problem, words) in zip(found, WRONG, strict=True):
        assert isinstance(one, Played), one
        (message,) = one.episode.turns[1].messages
        assert message.get("problem", "") == problem and words in message["content"]
        assert words in encoder.written(one.episode.turns[1].context) and one.rewards == {"play": 1.0}
    assert not pids, "a process in which a tool hangs gets no more rollouts, and ends with its last one"


# --- one that fails, among others that do not -------------------------------------------------------------------------------

OTHERS: list[tuple[dict[str, Any], WrittenEngine]] = [({}, TWELVE)] * 3


def test_one_that_fails_ends_no_other(env: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    failing = {
        "exits": ("environment_raised", "SystemExit: 3"),
        "raises": ("environment_raised", "no such luck"),
        "hog": ("environment_memory", "MemoryError"),
        "waits": ("environment_timeout", "took more than 3 s"),
    }
    rollouts = [({"how": how, "mark": str(tmp_path / how)}, TWELVE) for how in failing]
    found = play_all(env, encoder, [*OTHERS, *rollouts, *OTHERS], seconds=3.0, memory_gib=0.5)
    assert [reason(one) for one in found] == [""] * 3 + [why for why, _ in failing.values()] + [""] * 3
    for one, (how, (_, words)) in zip(found[3:7], failing.items(), strict=True):
        assert isinstance(one, Failure) and words in one.detail, one
        assert (tmp_path / how).read_text() == "torn down"
    raised = found[4]
    assert isinstance(raised, Failure) and "no such luck" in raised.traceback and "env.py" in raised.traceback


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "ended with exit code 9"),
        pytest.param("blocks", "kept its event loop from running", marks=pytest.mark.waits),
        pytest.param("holds", "never gives up Python's interpreter", marks=pytest.mark.waits),
    ],
)
def test_one_that_ends_its_process_is_found_out(
    env: Path, encoder: ChatEncoder, how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SILENT", 12.0)
    found = play_all(env, encoder, [*OTHERS, ({"how": how}, TWELVE), *OTHERS], seconds=0.0)
    assert [reason(one) for one in found] == [""] * 3 + ["environment_died"] + [""] * 3
    assert isinstance(found[3], Failure) and words in found[3].detail


def test_a_plain_function_that_never_ends_is_ended_with_its_process(
    env: Path, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 1.0)
    rollouts = [*OTHERS, ({"how": "spins"}, TWELVE)]
    found = play_all(env, encoder, rollouts, function="plain", seconds=2.0)
    assert [reason(one) for one in found] == ["", "", "", "environment_timeout"]


def test_one_that_is_played_again_has_the_turns_of_its_last_life(
    env: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    engine = WrittenEngine("12<|im_end|>")
    (found,) = play_all(env, encoder, [({"mark": str(tmp_path / "lives")}, engine)], function="twice")
    assert isinstance(found, Played) and found.rewards == {"twice": 1.0}
    assert [turn.messages[0]["content"] for turn in found.episode.turns] == ["life 1"]
    assert len(engine.sampled) == 2


@pytest.mark.parametrize(
    ("function", "failure", "words"),
    few(
        starmap(
            pytest.param,
            [
                ("nothing", "environment_reward", "returned None: is its return statement missing?"),
                ("strange", "environment_reward", "the reward two is 'many' (str), which is not a number"),
                ("interrupts", "environment_raised", "KeyboardInterrupt: inner"),
                ("interrupts_plainly", "environment_raised", "KeyboardInterrupt: plain"),
                ("half_a_character", "environment_raised", r"ValueError: bad \ud800 text"),
                ("cancels_itself", "environment_raised", "CancelledError: mine"),
                ("enormous", "environment_reward", "the reward two is 1e+300, and at most 1e+15 can be trained with"),
                ("enormous_turn", "environment_reward", "the reward step of a turn is -1e+300, and at most"),
                ("empty", "environment_reward", "returned no reward, and there is no reward function"),
                ("double", "environment_raised", "two tools have one name; there are: add, add"),
                (
                    "needs",
                    "environment_raised",
                    "it needs missing, which is not a column of the task; there are: prompt",
                ),
                ("odd", "environment_raised", "a message has the texts role and content"),
                ("endless", "environment_turns", "cut off at its limit of turns"),
            ],
        ),
        keep=5,
    ),
)
def test_what_a_function_does_wrong_is_said(
    env: Path, encoder: ChatEncoder, function: str, failure: str, words: str
) -> None:
    (found,) = play_all(env, encoder, [({}, TWELVE)], function=function)
    assert isinstance(found, Failure) and (found.reason, True) == (failure, words in found.detail), found


def test_what_cannot_be_loaded_is_refused(env: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(4)")
    none = tmp_path / "none.py"
    none.write_text("def play():\n    pass\nclass Game:\n    pass\n")
    for spec, words in {
        f"{env}:plya": "did you mean play?",
        f"{broken}:play": "exit code 4",
        f"{none}:play": "takes no agent",
        f"{none}:Game": "a class without step",
        f"{tmp_path}/missing.py:play": "there is no file",
    }.items():
        with pytest.raises(ConfigError) as error:
            open_function(EnvironmentConfig(function=spec), encoder, system="", log=None)
        assert words in str(error.value), str(error.value)


def test_a_tool_of_minutes_blocks_nobody(env: Path, encoder: ChatEncoder) -> None:
    """One rollout waits in a tool until it is cancelled; forty others are played meanwhile, in the same process."""

    async def main() -> None:
        kind = open_function(EnvironmentConfig(function=f"{env}:play", workers=1), encoder, system="", log=None)
        slow, quick = (
            WrittenEngine(call("sleeps", '{"a": 1}')),
            WrittenEngine(call("add", '{"a": 5, "b": 7}'), "12<|im_end|>"),
        )
        calls = Prompt("p", "6 and 6?", (1,), {"how": "calls"})
        try:
            waits = asyncio.create_task(roll_out(kind, calls, [0], ask=slow, decode=encoder.decode))
            while not slow.asked:
                await asyncio.sleep(0.01)
            found = await roll_out(kind, calls, list(range(40)), ask=quick, decode=encoder.decode)
            assert [reason(one) for one in found] == [""] * 40 and not waits.done()
            assert len(pool_of(kind).pids) == 1
            waits.cancel()
            await asyncio.wait({waits})
        finally:
            await kind.close()

    asyncio.run(main())


# --- schemas of tools ---------------------------------------------------------------------------------------------------


def typed(word: str, count: int = 2, *, kind: Literal["a", "b"], many: list[dict[str, float]] | None = None) -> str:
    """Says a word.

    Args:
        word: the word
        count: how often (choices: [1, 2])
        kind: in which way
        many: what else

    Returns:
        what was said
    """
    return word * count


def untyped(word):
    """Says a word.

    Args:
        word: the word
    """


def silent(word: str) -> None:
    pass


@pytest.mark.parametrize("tool", [typed, untyped, silent])
def test_the_schema_of_a_tool_is_that_of_transformers(tool: Any) -> None:
    try:
        expected = get_json_schema(tool)
    except Exception as error:
        with pytest.raises(ValueError) as raised:
            tools.schema_of(tool)
        assert str(error) in str(raised.value)
    else:
        assert tools.schema_of(tool) == expected


def test_the_schema_of_a_tool_costs_neither_torch_nor_transformers() -> None:
    code = """
import sys
from headrace.episodes.environments.workers.tools import schema_of
def add(a: int) -> int:
    '''Adds.

    Args:
        a: a number
    '''
print(schema_of(add)["function"]["name"], sorted({"torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "add []\n"
