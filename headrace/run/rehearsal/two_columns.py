"""One real row side by side: what the model sees, and what the reward sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.core.reports import Sight, TextPart
from headrace.core.types import Prompt
from headrace.models.chat import ChatEncoder


def sight_of(
    encoder: ChatEncoder,
    prompt: Prompt,
    completion: Sequence[int],
    *,
    system: str = "",
    given: str | None = None,
    reward: str = "",
) -> Sight:
    """`completion`: tokens; `system`: task.system; `given`: the part of the completion's text that the reward function receives, if not all of
    it; `reward`: what it gave, in words."""
    messages = prompt.columns.get(prompt.chat) if prompt.chat else None
    known: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    known += messages if isinstance(messages, list) else [{"role": "user", "content": prompt.text}]
    text = encoder.decode(completion)
    return Sight(
        row=prompt.id,
        asked=tuple(_parts(encoder, prompt.tokens, known)),
        answered=tuple(_parts(encoder, completion, [{"role": "assistant", "content": text}])),
        prompt=prompt.text,
        completion=text if given is None else given,
        reward=reward,
    )


def _parts(encoder: ChatEncoder, tokens: Sequence[int], known: Sequence[Mapping[str, Any]]) -> Iterator[TextPart]:
    """Cuts the text of tokens at special tokens, and the rest into what the messages say and what the template wrote."""
    groups = [
        (special, list(some)) for special, some in itertools.groupby(tokens, lambda token: token in encoder.special)
    ]
    texts = [(special, encoder.written(some)) for special, some in groups]
    plain = "".join("\0" * len(text) if special else text for special, text in texts)
    said = list(_places(plain, known))
    at = 0
    for special, text in texts:
        end = at + len(text)
        if special:
            yield TextPart(text, "special")
        else:
            borders = sorted(
                {at, end, *(min(max(place, at), end) for start, stop, _ in said for place in (start, stop))}
            )
            for start, stop in itertools.pairwise(borders):
                role = next((one for first, last, one in said if first <= start < last), "template")
                yield TextPart(plain[start:stop], role)
        at = end


def _places(text: str, known: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, str]]:
    """Finds each message in the text: begin, end and role. A message that the template has changed is left out."""
    at = 0
    for one in known:
        content = one["content"].strip() if isinstance(one.get("content"), str) else ""
        if content and (start := text.find(content, at)) >= 0:
            at = start + len(content)
            yield start, at, str(one["role"])
