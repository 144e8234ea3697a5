"""Plays one episode of the user's environment before a model is loaded. Each reply is a fixed text, so that nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.protocols import EnvironmentKind
from headrace.core.types import Completion, Prompt, VersionSpan
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Decode, Played, TurnAsked
from headrace.run.rehearsal.reward import Encode, stand_in


async def try_environment(
    kind: EnvironmentKind, prompt: Prompt, seed: int, *, answer: str, encode: Encode, decode: Decode
) -> Played:
    """Plays one rollout. The text of each reply is the row's own answer, or a fixed sentence. `answer`: the column of the right answer.

    Raises ConfigError with the traceback if the rollout fails."""
    text, _ = stand_in(prompt, answer=answer)

    async def ask(asked: TurnAsked) -> Completion:
        tokens = encode(text, True)
        return Completion(tokens, (0.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")

    (played,) = await roll_out(kind, prompt, [seed], ask=ask, decode=decode)
    if isinstance(played, Failure):
        said = f"the environment fails on row {prompt.id}, with {text!r:.60} in place of each reply: {played.detail}"
        raise ConfigError("\n".join([said, *played.traceback.splitlines()]))
    return played


def episode_lines(played: Played, text: str, credit: str) -> Iterator[tuple[str, str]]:
    """Yields the lines of the page. `text`: the tokens of the last turn's path, as the model is given them; `credit`: `algo.credit`."""
    turns, rewards = played.episode.turns, ", ".join(f"{name} = {value:g}" for name, value in played.rewards.items())
    given = ", ".join(f"{name} = {value:g}" for turn in played.turn_rewards for name, value in turn.items())
    yield "returned", f"{rewards or 'no reward of its own'}{f'; to turns: {given}' if given else ''}"
    cut = f", cut off at its limit of {played.episode.cut}" if played.episode.cut else ""
    yield "", f"for {turns[-1].completion.text!r:.60} as each reply, after {len(turns)} turn(s){cut}"
    agents = dict.fromkeys(turn.agent or "the first" for turn in turns)
    if len(agents) > 1:
        sums = (
            '. All share the sum of the rewards; algo.credit = "agent" gives each its own' if credit != "agent" else ""
        )
        yield "agents", f"{', '.join(agents)}{sums}"
    yield "the first turn", text
