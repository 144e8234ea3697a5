"""C5 over the chat templates that models are published with: those that TRL's package has, read where `make bench-trl-setup` installed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_conversation import CALLS, TOOL, result_of, talked, user

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.episodes.environments.conversation import Conversation
from headrace.episodes.environments.workers.episode_frames import ChatReply
from headrace.episodes.episodes import Played
from headrace.models.chat import ChatEncoder
from support.gateway.written_turns import Model, check_rows, encoder_of

FOUND = sorted((Path(__file__).parents[3] / ".venv-trl/lib").glob("python3*/site-packages/trl/chat_templates/*.jinja"))
TEMPLATES = [path for path in FOUND if not path.stem.endswith("_training")]
"""Without those that TRL has changed for training."""
THINKS = "<think>\nhm\n</think>\n\n ok <|im_end|>"
PLAIN = ["12<|im_end|>", "so 3<|im_end|>", THINKS, "ok<|im_end|>"]
STRAIGHT = {"qwen2_5": 0, "qwen2_5_vl": 0, "qwen3_instruct_2507": 0, "qwen3_vl": 0, "lfm2": 0, "qwen3": 1}
"""Paths that begin anew, for templates whose turns end with `<|im_end|>`: Qwen3's drops what was thought before the last question."""
CALLED = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
}
TEXT_ALONE = "llava_next"
"""It reads lists of parts in place of a text."""


def ends(played: Played) -> int:
    return sum(not turn.parents for turn in played.episode.turns[1:])


def plain(encoder: ChatEncoder) -> Played | Failure:
    model = Model(encoder, list(PLAIN))
    found = talked(model, lambda _, number, reply: [user("go on")] if number < len(PLAIN) else None, tools=None)
    if isinstance(found, Played):
        check_rows(found, model)
    return found


def with_call(encoder: ChatEncoder, family: str) -> tuple[Played, int]:
    """Also returns the number of calls that were read."""
    end = next((one for one in ("<|im_end|>", "<|eot_id|>", "</s>") if CALLS[family].endswith(one)), "")
    model, read = Model(encoder, [CALLS[family], "is 12" + end, "ok" + end]), list[str]()

    def talk(_: Conversation, number: int, reply: ChatReply | None) -> Sequence[Mapping[str, Any]] | None:
        good = [call for call in reply.calls if not call.problem] if reply else []
        read.extend(one.name for one in good)
        return None if number == 3 else [result_of(reply)] if reply and good else [user("1 and 11?")]

    found = talked(model, talk, tools=[TOOL])
    assert isinstance(found, Played), found
    check_rows(found, model)
    return found, len(read)


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATES, reason="no package trl in .venv-trl: make bench-trl-setup")
def test_what_was_sampled_is_what_is_trained_with_every_published_template(tmp_path: Path) -> None:
    assert len(TEMPLATES) > 30 and {*STRAIGHT, *CALLED, TEXT_ALONE} <= {path.stem for path in TEMPLATES}
    for path in TEMPLATES:
        encoder = encoder_of(tmp_path / path.stem, path.read_text())
        found = plain(encoder)
        if path.stem == TEXT_ALONE:
            assert isinstance(found, Failure) and "the chat template" in found.detail
            continue
        assert isinstance(found, Played), (path.stem, found)
        assert STRAIGHT.get(path.stem, ends(found)) == ends(found), path.stem
        try:
            encoder.call_format  # noqa: B018
        except ConfigError as error:
            assert path.stem not in CALLED and (
                "does not show tools" in str(error) or "writes tool calls" in str(error)
            )
            continue
        read = {family: with_call(encoder, family) for family in CALLS}
        if family := CALLED.get(path.stem):
            assert ends(read[family][0]) == 0 and read[family][1] == 1, path.stem
        assert sum(count for _, count in read.values()) >= 1, f"{path.stem} reads no calls of any family"
