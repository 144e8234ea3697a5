"""What a reward function sees of a completion. Nothing found is the empty string: an answer that was not given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.types import Completion

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def last_number(text: str) -> str:
    """The last number, without thousands separators: `so 1,234.` -> `1234`."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


def answer_tag(text: str) -> str:
    """What stands in the last `<answer>...</answer>`."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else ""


_EXTRACTORS: dict[str, Callable[[str], str]] = {"last_number": last_number, "answer_tag": answer_tag}


@dataclass(frozen=True)
class Extractor:
    kind: str = ""
    """Empty for the whole text."""
    of_truncated: bool = False
    """Whether a completion that was cut off has an answer: the last number of half a sentence is not what it was about to say."""

    def __call__(self, completion: Completion) -> str:
        if not self.kind:
            return completion.text
        cut = completion.stop == "length" and not self.of_truncated
        return "" if cut else _EXTRACTORS[self.kind](completion.text)
