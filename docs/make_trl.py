"""Writes the table of TRL's arguments into docs/from_trl.md, between its marks: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.compat.trl.other_trainers import ASYNC_GRPO, DISTILLATION, ONLINE_DPO, RLOO
from headrace.compat.trl.trl_settings import FIELDS, Fate, TrlField

TARGET = Path(__file__).with_name("from_trl.md")
HEADS: dict[Fate, str] = {
    "honoured": "| honoured | here |",
    "no meaning": "| without a meaning here, because | arguments |",
    "refused": "| refused, unless it has its default | TRL's default | because |",
}


def tables() -> Iterator[str]:
    for fate, head in HEADS.items():
        yield f"{head}\n{'|---' * (head.count('|') - 1)}|"
        match fate:
            case "honoured":
                yield from (f"| `{name}` | {_cell(one.words)} |" for name, one in FIELDS.items() if one.fate == fate)
            case "no meaning":
                yield from _by_reason(FIELDS)
            case "refused":
                yield from _by_name(FIELDS, fate)
        yield ""


def differences() -> Iterator[str]:
    """Fields that GRPOConfig lacks, or has with another default."""
    for kind in (RLOO, ASYNC_GRPO, ONLINE_DPO, DISTILLATION):
        own = {name: field for name, field in kind.fields.items() if field != FIELDS.get(name)}
        yield f"| `{kind.title}Config` | its default | here |\n|---|---|---|"
        yield from _by_name(own, "honoured")
        yield from _by_name(own, "refused", "refused: ")
        yield ""
        if without := list(_by_reason(own)):
            yield f"{HEADS['no meaning']}\n|---|---|"
            yield from without
            yield ""


def _by_name(fields: Mapping[str, TrlField], fate: Fate, before: str = "") -> Iterator[str]:
    """Yields a row for all arguments of which the same is said."""
    for words, names in _named(fields, fate).items():
        quoted, defaults = (
            ", ".join(f"`{one}`" for one in cells) for cells in (names, (repr(fields[name].default) for name in names))
        )
        yield f"| {quoted} | {defaults} | {before}{_cell(words)} |"


def _by_reason(fields: Mapping[str, TrlField]) -> Iterator[str]:
    for words, names in _named(fields, "no meaning").items():
        yield f"| {_cell(words)} | {', '.join(f'`{name}`' for name in names)} |"


def _named(fields: Mapping[str, TrlField], fate: Fate) -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for name, field in fields.items():
        if field.fate == fate:
            named.setdefault(field.words, []).append(name)
    return named


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(text: str) -> str:
    """Returns the page with the current tables. Raises ValueError if a mark is missing."""
    for title, lines in (("fields", tables()), ("other trainers", differences())):
        begin, end = f"<!-- {title}: `make docs` -->\n", f"<!-- end of {title} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{chr(10).join(lines)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
