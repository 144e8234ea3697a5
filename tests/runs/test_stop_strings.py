"""The text that a stop string leaves: to rewards and environments, and to who asks a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.core.chat.token_text import StreamedText
from headrace.durable.journal import read_steps
from headrace.engine.native.guides import Stopper
from headrace.facts.records import StepRow
from support.tiny_run import of, tiny_config

PIECES = ["t", "he", "then", "e", "ab", "abc", "🙂", "日本", "\u0301", " ", "x"]
"""What tokens decode to, as far as they are whole characters."""
END = 2
"""`<end>` of the tiny tokenizer."""
BYTES = [b"\xf0\x9f", b"\x99\x82", b"\xe6\x97", b"\xa5", *(piece.encode() for piece in PIECES)]


def decode(tokens: Any) -> str:
    return b"".join(BYTES[token] for token in tokens).decode(errors="replace")


@given(
    st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=12),
    st.sampled_from([("e",), ("bc", "日"), ("🙂",), ("he",), ("xx",)]),
)
@example([4, 6, 7], ("e",))  # "t", "then", "e": ends with the "then", whose "n" stays
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    sampled: list[int], stops: tuple[str, ...]
) -> None:
    """docs/scoring.md: the text keeps the string, and what else that token holds; a server's text ends before the string."""
    stopper = Stopper((), stops, decode)
    count = next((n + 1 for n, token in enumerate(sampled) if stopper.push(token)), 0)
    kept, served = sampled[: count or len(sampled)], StreamedText(decode, stops)
    text = decode(kept)
    shown = "".join(served.push([token], place == len(kept) - 1) for place, token in enumerate(kept))
    places = [text.find(stop) for stop in stops if stop in text]
    assert bool(count) == bool(places)
    assert not any(stop in decode(kept[:-1]) for stop in stops), "it went on behind the string"
    assert shown == text[: min(places, default=len(text))]


@pytest.mark.slow
def test_a_reward_reads_the_stop_string_and_the_journal_has_its_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def reward(completions: list[str], completion_tokens: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(zip(completions, map(len, completion_tokens), strict=True))
        return [float(len(text)) for text in completions]

    config = tiny_config(tmp_path, tiny_llama, train={"steps": 1}, rollout={"stop": ["7", "0"], "max_tokens": 12})
    del config["reward"]
    result = headrace.train(config, reward=reward)
    assert of(result.directory, StepRow)
    stopped = [
        rollout.episode.last
        for step in read_steps(result.directory)
        for group in step.groups
        for rollout in group.scored
    ]
    said = [one for one in stopped if set(one.text) & set("70")]
    assert said
    for one in said:
        assert one.text[-1] in "70" and not set(one.text[:-1]) & set("70") and one.stop == "stop"
        assert (one.text, len(one.tokens)) in seen


PLAY = """
async def play(agent, prompt, **columns):
    first = await agent.chat("e and o?")
    second = await agent.chat("and then?")
    return {"first": float(first.text[-1:] == "0"), "length": float(len(first.text) + len(second.text))}
"""


@pytest.mark.slow
def test_in_a_conversation_the_template_ends_the_turn_behind_the_string(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 1}, rollout={"stop": ["0"], "max_tokens": 12})
    del config["reward"]
    config["environment"] = {"function": f"{tmp_path / 'play.py'}:play", "max_turns": 2}
    config["engine"]["context_length"] = 128
    result = headrace.train(config)
    scored = [rollout for step in read_steps(result.directory) for group in step.groups for rollout in group.scored]
    stopped = [rollout for rollout in scored if "0" in rollout.episode.turns[0].completion.text]
    assert stopped
    for one in stopped:
        first, second = one.episode.turns
        assert first.completion.text.endswith("0") and one.rewards["first"] == 1.0
        assert first.reply["content"] == first.completion.text
        assert END not in first.completion.tokens and second.context[0] == END and second.parents == (0,)
