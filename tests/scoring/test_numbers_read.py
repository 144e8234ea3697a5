"""`last_number`: a number in any usual form is read as itself, whatever text is around it, and none is made of two."""

from __future__ import annotations

import asyncio
import re
from decimal import Decimal
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.batches import Failure
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.extract import Extractor, last_number
from headrace.episodes.scoring.reward_scorer import RewardScorer
from support.few import few

VALUES = {
    "": "", "none": "", "so 1,234.": "1234", "a\n12\n": "12", "The answer is 1,234.": "1234", "$1,234.00": "1234.00", "1,234,567": "1234567",
    "x = -3": "-3", "2 - 3 = -1": "-1", "3 + 4 = -7.50": "-7.50", "#### -3": "-3", "\\boxed{-42}": "-42", "**-3**": "-3", "$-3$": "-3",
    "5-3": "3", "7-3": "3", "5 - 3": "3", "x-3": "3", "f(x)-3": "3", "50%-3": "3", "π-3": "3", "5--3": "-3", "3×-2": "-2", "pages 3–5": "5",
    "−7": "-7", "–7": "-7", "-7": "-7", "−1,234.5e−3": "-1234.5e-3", "-$3.50": "-3.50", "-\\$3": "-3", "$-3.5": "-3.5", "+5": "5",
    "答案是-5。": "-5", "答案是5。": "5", "정답은 -5입니다": "-5", "٤٢": "42", "42": "42",
    "x=1,2": "2", "1, 2, 3": "3", "50,5": "5", "1,23": "23", "1,2345": "2345", "1234,567": "567", "1,234,56": "56", "1,00,000": "000", "0,123": "123",
    "1{,}234": "1234", "10,\\!080": "10080", "1 000": "000",
    "1e-5": "1e-5", "1.5e3": "1.5e3", "1E+5": "1e+5", "2e": "2", "2e, then": "2", "it is 1e5.": "1e5",
    "1.5 × 10^3": "1.5e3", "1.5\\times10^{-3}": "1.5e-3", "2 * 10**4": "2e4", "3·10⁻⁵": "3e-5", "2 × 10": "10", "3 x 10^2.5": "2.5",
    "x=.5": ".5", "-.5": "-.5", "7.": "7", "so...5": "5", "1..5": "5", "3.14.": "3.14", "v1.2.3": "3", "192.168.0.12": "12", "0.5%": "0.5",
    "3/4": "4", "2024-11-05": "05", "00012": "00012", "step 7": "7",
}  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_last_number(text: str) -> None:
    assert last_number(text) == VALUES[text]


def test_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/scoring.md").read_text()
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|", page.partition("| it reads |")[2].partition("\n\n")[0], re.MULTILINE)
    assert len(rows) == 8
    for said, reads in rows:
        texts, values = re.findall("`(.+?)`", said), re.findall("`(.+?)`", reads)
        values += values[-1:] * (len(texts) - len(values))
        assert [last_number(text) for text in texts] == values


SIGNS = ("", "-", "−", "–", "-$", "−€", "-\\$")
DIGITS = st.integers(0, 10**12)
BEFORE = st.sampled_from(
    ("", " ", "x = ", "(", "[", "is: ", "\n", "$", "\\boxed{", "答案是", "**", "1, ", "2 + ", "3; ", "= ", "“")
)
AFTER = st.sampled_from(
    (
        "",
        ".",
        ". ",
        ", so",
        "%",
        ")",
        "}",
        "$",
        "**",
        " km",
        "km",
        "。",
        "个",
        "\n",
        "!",
        "…",
        " – done",
        ", a, b.",
        "-fold",
    )
)


@st.composite
def written(draw: st.DrawFn) -> tuple[str, Decimal]:
    """A number as people and models write it, and its value."""
    whole = draw(DIGITS)
    form = draw(st.sampled_from(("{}", "{:,}")))
    latex = draw(st.sampled_from((",", "{,}", ",\\!")))
    cents = draw(st.sampled_from(("", ".0", ".5", ".250")))
    power = draw(st.integers(-12, 12))
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    ending = draw(
        st.sampled_from(("", f"e{power}", f"E{power:+}", f" × 10^{power}", f"\\times10^{{{power}}}", f"·10{raised}"))
    )
    sign = draw(st.sampled_from(SIGNS))
    value = Decimal(f"{whole}{cents}") * (Decimal(10) ** power if ending else 1)
    return f"{sign}{form.format(whole).replace(',', latex)}{cents}{ending}", -value if sign else value


@given(BEFORE, written(), AFTER)
def test_a_number_is_read_as_itself_whatever_is_around_it(before: str, number: tuple[str, Decimal], after: str) -> None:
    text, value = number
    found = last_number(f"{before}{text}{after}")
    assert Decimal(found) == value and float(found) == float(value)


@given(st.text("0123456789.,-−–eE+x× ^*{}()$%\\!a是٤²¹⁻\n", max_size=40))
def test_whatever_is_found_is_a_number_and_stands_there(text: str) -> None:
    found = last_number(text)
    if not found:
        assert not any(one.isdecimal() for one in text)
        return
    float(found)
    Decimal(found)
    digits, _, power = found.lstrip("-").partition("e")
    plain = re.sub(r",\\!|\{,\}|,", "", text).replace("٤", "4")
    assert digits in plain and (not found.startswith("-") or re.search("[-−–]", text))
    assert power.lstrip("+-") in plain.translate(str.maketrans("²¹", "21"))


def test_long_texts_of_digits_are_read_at_once() -> None:
    for text in ("1" * 100_000, "1." * 50_000, "1,111" * 20_000, "1," * 50_000 + "1", "1e" * 50_000, "-" * 100_000):
        last_number(text)


@pytest.mark.parametrize(
    ("kind", "said"), [("last_number", "{}"), ("answer_tag", "<answer>{}</answer>"), ("code_block", "```\n{}\n```")]
)
def test_what_is_considered_in_thinking_is_no_answer(kind: Any, said: str) -> None:
    def read(text: str) -> str:
        return Extractor(kind)(Completion((), (), (), "stop", text)).strip()

    three, five = said.format(3), said.format(5)
    assert read(f"<think>\n{three}\n</think>\n{five}") == "5"
    assert read(f"{three}\n</think>\n{five}") == "5", "a template may have opened it"
    assert read(f"<think>\n{three}\n</think>\nI cannot say.") == ""
    assert read(f"<think>\n{three}\n") == "", "it has not ended"
    assert read(five) == "5"


@pytest.mark.parametrize(
    ("end", "said", "counts"),
    few(
        starmap(
            pytest.param,
            [
                ("<think>\n", "so 5", 0.0),
                ("<think>\n", "or 3 </think>\n5", 1.0),
                ("", "so 5", 1.0),
                ("<think> </think>", "5", 1.0),
            ],
        ),
        keep=2,
    ),
)
def test_a_thought_that_the_template_has_opened_ends_before_there_is_an_answer(
    end: str, said: str, counts: float, tmp_path: Path
) -> None:
    """A completion that ends within its thinking has no answer, although nothing in its own text says so."""
    (tmp_path / "exact.py").write_text(
        "def exact(completions, **columns):\n    return [float(c == '5') for c in completions]\n"
    )
    spec = RewardConfig(function=f"{tmp_path / 'exact.py'}:exact", extract="last_number")
    asked = tuple(f"2 + 3? {end}".encode()[-8:])
    episode = Episode(
        (Turn(asked, Completion((1,), (-0.1,), (VersionSpan(start=0, version=1, kv_version=1),), "stop", said)),)
    )

    async def score() -> Scored | Failure:
        scorer = RewardScorer(spec, decode=lambda tokens: bytes(tokens).decode())
        try:
            (found,) = await scorer.score(Prompt(id="sums/0", text="2 + 3?", tokens=asked), [episode])
            return found
        finally:
            await scorer.close()

    found = asyncio.run(score())
    assert isinstance(found, Scored) and found.reward == counts
    assert found.extracted == {"exact": "5" if counts else ""}
