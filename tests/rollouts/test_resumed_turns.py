"""Rollouts whose environment is killed go on in the turn in which they were: with the same tokens, and no tool that was finished again."""

from __future__ import annotations

import asyncio
import itertools
import textwrap
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Prompt
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.function import open_function
from headrace.episodes.episodes import Played, roll_out
from headrace.episodes.rollout_session import NotebookPage, TurnAsked
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.few import few
from support.tool_chats import CALL, WrittenEngine

ENV = '''
import asyncio, os, time
from pathlib import Path

LOG = Path(__file__).with_name("log")

def log(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

async def look(word: str) -> str:
    """Looks a word up. It finds something else every time.

    Args:
        word: the word
    """
    found = f"{word} {os.urandom(3).hex()}"
    log("look", word)
    return found

async def never(word: str) -> str:
    """Finds nothing before it is killed.

    Args:
        word: the word
    """
    log("never", word)
    if len(LOG.read_text().split("never")) < 3:
        await asyncio.sleep(3600)
    return f"{word} at last"

class Looks:
    """Two turns with tools, and one without. With `dies` it ends its process before the turn of that number, once."""

    tools = [look, never]

    def __init__(self, prompt, dies=-1, limit=9, **columns):
        self.prompt, self.dies, self.limit = prompt, dies, limit
        self.turns, self.found = 0, []

    async def step(self, agent, reply):
        if reply is None:
            return self.prompt
        self.turns += 1
        if self.turns == self.dies and not (LOG.parent / "dead").exists():
            (LOG.parent / "dead").write_text("")
            os._exit(3)
        if not reply.tool_calls or reply.stop == "limit":
            return {"turns": self.turns, "found": len(self.found)}
        results = await agent.call(reply)
        self.found += [one["content"] for one in results]
        agent.reward("found", len(results))
        agent.state(f"{len(self.found)} found")
        return results

    def export_state(self):
        return {"turns": self.turns, "found": self.found}

    def restore(self, state):
        log("restored", state["turns"])
        self.turns, self.found = state["turns"], state["found"]

class Plain(Looks):
    """The same without async."""

    def step(self, agent, reply):
        if reply is None:
            return self.prompt
        self.turns += 1
        if not reply.tool_calls:
            return {"turns": self.turns, "found": len(self.found)}
        results = agent.call(reply)
        self.found += [one["content"] for one in results]
        agent.state(f"{len(self.found)} found")
        return results

    def close(self):
        log("closed")

class Bare:
    """Nothing but the conversation."""

    tools = [look, never]

    def __init__(self, prompt):
        self.prompt = prompt

    async def step(self, agent, reply):
        if reply is None:
            return self.prompt
        return await agent.call(reply) if reply.tool_calls else len(reply.text)

class Two:
    """Two roles in turn."""

    tools = {"black": [look]}

    def __init__(self, prompt):
        self.prompt, self.said = prompt, []

    async def step(self, agent, reply):
        if reply is not None:
            self.said.append(f"{reply.role}: {reply.text}")
        if reply and reply.tool_calls:
            return "black", await agent.role("black").call(reply)
        if len(self.said) == 1:
            agent.role("white").state("white alone knows it")
        if len(self.said) == 4:
            agent.role("white").reward("won", 1)
            return {"said": len(self.said)}
        return ("black" if len(self.said) % 2 else "white"), f"turn {len(self.said)}"

    def export_state(self):
        return self.said

    def restore(self, state):
        self.said = state

class Wrong(Bare):
    def export_state(self):
        return {"file": open(__file__)}

    def restore(self, state):
        pass

class Large(Wrong):
    def export_state(self):
        return b"x" * (1 << 21)

class NoSteps:
    pass

async def play(agent, prompt):
    return 1.0
'''
LOOK = CALL.replace("NAME", "look").replace("ARGUMENTS", '{"word": "WORD"}')
NEVER = LOOK.replace("look", "never")


@pytest.fixture
def env(tmp_path: Path) -> Path:
    path = tmp_path / "env.py"
    path.write_text(textwrap.dedent(ENV))
    (tmp_path / "log").write_text("")
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(tool_chats.save_tokenizer(tmp_path_factory.mktemp("tokens"), tool_chats.HERMES))


class Stopping(WrittenEngine):
    """Samples no turn from number `at` on, as if the run were killed in it."""

    def __init__(self, *says: str, at: int = 99) -> None:
        super().__init__(*says)
        self.at = at
        self.reached = asyncio.Event()

    async def __call__(self, asked: TurnAsked) -> Completion:
        if asked.turn >= self.at:
            self.asked.append(asked)
            self.reached.set()
            await asyncio.Event().wait()
        return await super().__call__(asked)


def lines(env: Path) -> list[str]:
    return (env.parent / "log").read_text().splitlines()


def again(page: NotebookPage) -> NotebookPage:
    """What another process finds."""
    return NotebookPage(before=page.notes)


async def played(
    env: Path, encoder: ChatEncoder, engine: WrittenEngine, page: NotebookPage, until: Any = None, **config: Any
) -> Played | Failure | None:
    """Plays one rollout in a process of its own, up to its end, or until something has happened."""
    settings = EnvironmentConfig(workers=1, **{"function": f"{env}:Looks", **config})
    kind = open_function(settings, encoder, system="", log=None)
    prompt = Prompt("p", "6 and 6?", (1,))
    playing = asyncio.ensure_future(
        roll_out(kind, prompt, [7], ask=engine, decode=encoder.decode, page=lambda _, __: page)
    )
    try:
        if until is None:
            (found,) = await playing
            return found
        await until()
        return None
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await kind.close()


def killed_at(
    env: Path, encoder: ChatEncoder, turn: int, *says: str, **config: Any
) -> tuple[Played, Stopping, list[str]]:
    """Kills the rollout in that turn and lets another process go on. Returns the episode, the engine, and what was logged before."""

    async def main() -> tuple[Played, Stopping, list[str]]:
        engine, page = Stopping(*says, at=turn), NotebookPage()
        await played(env, encoder, engine, page, engine.reached.wait, **config)
        before, engine.at = lines(env), 99
        engine.asked.clear()
        found = await played(env, encoder, engine, again(page), **config)
        assert isinstance(found, Played), found
        return found, engine, before

    return asyncio.run(main())


SAYS = (LOOK.replace("WORD", "one"), LOOK.replace("WORD", "two"), "12<|im_end|>")


@pytest.mark.parametrize(
    ("name", "turn"), few(starmap(pytest.param, [("Looks", 0), ("Looks", 2), ("Plain", 1)]), keep=1)
)
def test_the_state_of_the_last_turn_is_restored(env: Path, encoder: ChatEncoder, name: str, turn: int) -> None:
    found, engine, before = killed_at(env, encoder, turn, *SAYS, function=f"{env}:{name}")
    assert [line for line in lines(env) if line.startswith("look")] == ["look one", "look two"], "each once"
    assert f"restored {turn}" in lines(env)[len(before) :]
    assert found.rewards == {"turns": 3.0, "found": 2.0}
    if name == "Looks":
        assert found.turn_rewards == ({"found": 1.0}, {"found": 1.0}, {})
    else:
        assert lines(env).count("closed") == 2
    turns = found.episode.turns
    assert [one.parents for one in turns] == [(), (0,), (1,)]
    assert [one.messages[0]["content"].split()[0] for one in turns[1:]] == ["one", "two"]
    assert [one.state for one in turns] == ["", "1 found", "2 found"], (
        "the names of its states, that of each turn alone"
    )
    paths = [one.context for one in engine.asked]
    assert len(set(paths)) == len(paths) == 3 and all(
        later[: len(path)] == path for path, later in itertools.pairwise(paths)
    ), "C5: each turn extends the tokens of the one before"


def test_a_rollout_that_another_one_took_down_goes_on_too(env: Path, encoder: ChatEncoder) -> None:
    """Its process ended in a step: that step is taken again, in another process, and none before it."""

    async def main() -> Played | Failure | None:
        engine = Stopping(*SAYS)
        settings = EnvironmentConfig(workers=1, function=f"{env}:Looks")
        kind = open_function(settings, encoder, system="", log=None)
        try:
            prompt = Prompt("p", "6 and 6?", (1,), {"dies": 2})
            (found,) = await roll_out(kind, prompt, [7], ask=engine, decode=encoder.decode)
            return found
        finally:
            await kind.close()

    found = asyncio.run(main())
    assert isinstance(found, Played) and found.rewards == {"turns": 3.0, "found": 2.0}
    assert lines(env) == ["look one", "restored 1", "look two"]


def test_a_rollout_that_had_ended_is_not_played_again(env: Path, encoder: ChatEncoder) -> None:
    """Its group was not scored yet when the run was killed: no step is taken twice, and no process is started."""

    async def main() -> tuple[Any, Any]:
        engine, page = Stopping(*SAYS), NotebookPage()
        first = await played(env, encoder, engine, page)
        return first, await played(env, encoder, engine, again(page))

    first, second = asyncio.run(main())
    assert isinstance(second, Played) and second == first and second.turn_rewards[1] == {"found": 1.0}
    assert lines(env) == ["look one", "look two"]


def test_without_state_each_tool_call_that_was_finished_is_kept(env: Path, encoder: ChatEncoder) -> None:
    both = LOOK.replace("WORD", "one").replace("<|im_end|>", "") + NEVER.replace("WORD", "two")

    async def main() -> Played | Failure | None:
        engine, page = Stopping(both, "12<|im_end|>"), NotebookPage()

        async def looked() -> None:
            while len(page.notes) < 2:  # the turn, and the result of the call that ends
                await asyncio.sleep(0.01)

        settings = {"function": f"{env}:Bare", "resumes": "stateless"}
        await played(env, encoder, engine, page, looked, **settings)
        return await played(env, encoder, engine, again(page), **settings)

    found = asyncio.run(main())
    assert isinstance(found, Played) and found.rewards == {"Bare": 2.0}
    assert sorted(lines(env)) == ["look one", "never two", "never two"], "the one that had not ended is called again"
    said = [message["content"] for message in found.episode.turns[1].messages]
    assert said[0].startswith("one ") and said[1] == "two at last"


def test_roles_go_on_with_their_own_conversations(env: Path, encoder: ChatEncoder) -> None:
    says = ("hello<|im_end|>", LOOK.replace("WORD", "one"), "found<|im_end|>", "so<|im_end|>", "end<|im_end|>")
    found, _, _ = killed_at(env, encoder, 3, *says, function=f"{env}:Two")
    assert [turn.agent for turn in found.episode.turns] == ["white", "black", "black", "black"]
    assert [turn.parents for turn in found.episode.turns] == [(), (), (1,), (2,)]
    assert found.turn_rewards[0] == {"white.won": 1.0} and lines(env) == ["look one"]
    assert not any(turn.state for turn in found.episode.turns), "what one role names is no state of another's"


def test_notes_that_follow_other_completions_are_not_used(env: Path, encoder: ChatEncoder) -> None:
    """Completions were lost, and sampled otherwise: the rollout goes on behind them, with the state from before."""

    async def main() -> Played | Failure | None:
        engine, page = Stopping(*SAYS, at=2), NotebookPage()
        await played(env, encoder, engine, page, engine.reached.wait)
        return await played(env, encoder, WrittenEngine("other<|im_end|>"), again(page))

    found = asyncio.run(main())
    assert isinstance(found, Played) and found.rewards == {"turns": 1.0, "found": 0.0}
    assert [turn.completion.text for turn in found.episode.turns] == ["other"] and lines(env)[-1] == "restored 0"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"function": "play", "resumes": "exported"}, "needs a class with step, export_state and restore"),
        ({"function": "Bare", "resumes": "exported"}, "needs a class with step, export_state and restore"),
        ({"function": "play", "resumes": "stateless"}, "needs a class with step, and"),
        ({"function": "NoSteps"}, "is a class without step"),
    ],
)
def test_what_cannot_be_exported_is_refused_at_the_start(
    env: Path, encoder: ChatEncoder, config: dict[str, Any], words: str
) -> None:
    settings = EnvironmentConfig(**{**config, "function": f"{env}:{config['function']}"})
    with pytest.raises(ConfigError, match=words):
        open_function(settings, encoder, system="", log=None)


@pytest.mark.parametrize(("name", "words"), [("Wrong", "cannot be kept"), ("Large", "2,097,157 bytes")])
def test_a_state_that_cannot_be_kept_is_a_failure(env: Path, encoder: ChatEncoder, name: str, words: str) -> None:
    found = asyncio.run(played(env, encoder, WrittenEngine("1<|im_end|>"), NotebookPage(), function=f"{env}:{name}"))
    assert isinstance(found, Failure) and found.reason == "environment_raised" and words in found.detail
