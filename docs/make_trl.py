"""Writes the lists of TRL's arguments into docs/from_trl.md, between its marks: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.compat.trl.other_trainers import ASYNC_GRPO, DISTILLATION, ONLINE_DPO, RLOO
from headrace.compat.trl.trl_settings import FIELDS, Fate, TrlField

TARGET = Path(__file__).with_name("from_trl.md")
HEADS: dict[Fate, str] = {
    "honoured": "**Honoured:**",
    "no meaning": "**Without a meaning here:**",
    "refused": "**Refused**, unless it has TRL's default:",
}


def arguments() -> Iterator[str]:
    for fate, head in HEADS.items():
        yield from (head, "", *_lines(FIELDS, fate), "")


def differences() -> Iterator[str]:
    """Fields that GRPOConfig lacks, or has with another default."""
    for kind in (RLOO, ASYNC_GRPO, ONLINE_DPO, DISTILLATION):
        own = {name: field for name, field in kind.fields.items() if field != FIELDS.get(name)}
        yield from (f"**`{kind.title}Config`**, with its defaults:", "")
        yield from _by_name(own, "honoured")
        yield from _by_name(own, "refused", "refused: ")
        as_below = {field.words for field in FIELDS.values()}
        without = {name: field for name, field in own.items() if field.fate == "no meaning"}
        if known := [name for name, field in without.items() if field.words in as_below]:
            yield f"- without a meaning, [as below](#every-argument): {', '.join(f'`{name}`' for name in known)}"
        yield from _by_reason({name: field for name, field in without.items() if name not in known})
        yield ""


def _lines(fields: Mapping[str, TrlField], fate: Fate) -> Iterator[str]:
    if fate == "honoured":
        return (f"- `{name}`: {one.words}" for name, one in fields.items() if one.fate == fate)
    return _by_reason(fields) if fate == "no meaning" else _by_name(fields, fate)


def _by_name(fields: Mapping[str, TrlField], fate: Fate, before: str = "") -> Iterator[str]:
    """Yields a line for all arguments of which the same is said, each with its default."""
    for words, names in _named(fields, fate).items():
        yield f"- {', '.join(f'`{name}` (`{fields[name].default!r}`)' for name in names)}: {before}{words}"


def _by_reason(fields: Mapping[str, TrlField]) -> Iterator[str]:
    for words, names in _named(fields, "no meaning").items():
        yield f"- {', '.join(f'`{name}`' for name in names)}: {words}"


def _named(fields: Mapping[str, TrlField], fate: Fate) -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for name, field in fields.items():
        if field.fate == fate:
            named.setdefault(field.words, []).append(name)
    return named


def page(text: str) -> str:
    """Returns the page with the current lists. Raises ValueError if a mark is missing."""
    for title, lines in (("fields", arguments()), ("other trainers", differences())):
        begin, end = f"<!-- {title}: `make docs` -->\n", f"<!-- end of {title} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{chr(10).join(lines)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
