"""The part of a completion that a reward function receives. If nothing is found, it is the empty string: no answer was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.types import Completion

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def last_number(text: str) -> str:
    """Returns the last number, without thousands separators: `so 1,234.` -> `1234`."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


def answer_tag(text: str) -> str:
    """Returns the text in the last `<answer>...</answer>`."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else ""


_EXTRACTORS: dict[str, Callable[[str], str]] = {"last_number": last_number, "answer_tag": answer_tag}


@dataclass(frozen=True)
class Extractor:
    kind: str = ""
    """`last_number` or `answer_tag`; empty for the whole text."""
    of_truncated: bool = False
    """Whether to look for an answer in completions that were cut off: the last number of an unfinished sentence is not its answer."""

    def __call__(self, completion: Completion) -> str:
        if not self.kind:
            return completion.text
        cut = completion.stop == "length" and not self.of_truncated
        return "" if cut else _EXTRACTORS[self.kind](completion.text)
