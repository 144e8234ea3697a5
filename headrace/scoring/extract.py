"""What a reward function sees of a completion. Nothing found is the empty string: an answer that was not given."""

from __future__ import annotations

import re
from collections.abc import Callable

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


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    "last_number": last_number,
    "answer_tag": answer_tag,
}
