"""The part of a completion that a reward function receives. If nothing is found, it is the empty string: no answer was given."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from headrace.types import Completion

Extract = Literal["", "last_number", "answer_tag", "code_block"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def last_number(text: str) -> str:
    """Returns the last number, without thousands separators: `so 1,234.` -> `1234`."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


def answer_tag(text: str) -> str:
    """Returns the text in the last `<answer>...</answer>`."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else ""


def code_block(text: str) -> str:
    """Returns the last block between lines of three backticks, also one that has no end."""
    found = _FENCED.findall(text)
    return found[-1] if found else ""


def written(answer: str, kinds: Collection[str]) -> str:
    """Returns an answer as a completion in which each of these kinds finds it."""
    if "answer_tag" in kinds:
        answer = f"<answer>{answer}</answer>"
    return f"```python\n{answer}\n```" if "code_block" in kinds and not code_block(answer) else answer


_EXTRACTORS: dict[str, Callable[[str], str]] = {
    "last_number": last_number,
    "answer_tag": answer_tag,
    "code_block": code_block,
}


@dataclass(frozen=True)
class Extractor:
    kind: str = ""
    """`last_number`, `answer_tag` or `code_block`; empty for the whole text."""
    of_truncated: bool = False
    """Whether to look for an answer in completions that were cut off: the last number of an unfinished sentence is not its answer."""

    def __call__(self, completion: Completion) -> str:
        if not self.kind:
            return completion.text
        cut = completion.stop == "length" and not self.of_truncated
        return "" if cut else _EXTRACTORS[self.kind](completion.text)
