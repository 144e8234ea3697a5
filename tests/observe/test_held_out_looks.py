"""Held-out samples: each prompt at the first and the last evaluation of its set, with what differs marked."""

from __future__ import annotations

import re
import time
from html import unescape

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.facts.facts import Evaluated, HeldOutLook
from headrace.facts.run_state import RunState
from headrace.views.report.rollouts import from_first_difference, held_out_samples, marked


def looked(step: int, text: str, name: str = "", *rewards: float, prompt: str = "p") -> Evaluated:
    look = HeldOutLook(prompt, "2 < 3?", text, rewards or (0.0, 1.0))
    phase = "during" if step else "before"
    return Evaluated(1.0, phase, step, 1, 0.5, 0.1, 3.0, looks=(look,), name=name, beside=name == "hard")  # type: ignore[arg-type]


def shown(*evaluations: Evaluated) -> str:
    state = RunState()
    for evaluation in evaluations:
        state.fold(evaluation)
    return held_out_samples(state)


def test_every_set_shows_its_prompt_then_and_now() -> None:
    html = shown(
        looked(0, "It is <two>.", "sums"),
        looked(0, "no", "hard"),
        looked(4, "never", "sums"),
        looked(9, "It is three.", "sums", 1.0, 1.0),
    )
    assert re.findall("<h4>(.*?)</h4>", html) == ["sums", "hard"]
    assert "It is <del>&lt;two&gt;</del>." in html and "It is <ins>three</ins>." in html and "2 &lt; 3?" in html
    assert (
        "step 0" in html and "step 9" in html and "step 4" not in html and html.count("●●") == html.count("○●") - 1 == 1
    )
    assert shown() == "" and "<h4>" not in shown(looked(0, "no"))


def test_a_prompt_that_the_last_evaluation_has_not_scored_stands_alone() -> None:
    html = shown(looked(0, "one"), looked(5, "two", prompt="another"))
    assert "one" in html and "two" not in html and html.count("step ") == 1


def test_texts_with_little_in_common_are_not_marked() -> None:
    assert marked("alpha beta", "12 + 13 = 25") == ("alpha beta", "12 + 13 = 25")


def test_texts_of_one_word_again_and_again_are_compared_in_little_time() -> None:
    """What a policy that has collapsed writes. Each word of one text equals each of the other."""
    before = time.process_time()
    left, right = marked("so " + ". " * 6000 + "a", "so " + "b" + ". " * 6000 + "a")
    assert time.process_time() - before < 1.0
    assert left.startswith("so ") and left.endswith("a") and right.startswith("so <ins>b")


def test_a_common_begin_and_end_are_no_change() -> None:
    assert marked("a b c d", "a x c d") == ("a <del>b</del> c d", "a <ins>x</ins> c d")
    assert marked("a a", "a a a") == ("a a", "a a<ins> a</ins>") and marked("", "") == ("", "")


def test_long_texts_are_shown_where_they_first_differ() -> None:
    same = "a line\n" * 100
    assert from_first_difference(same + "yes" + "!" * 99, same + "no", 20) == (
        "(690 characters before) … ne\na line\nyes!!!!!!! … (92 characters more)",
        "(690 characters before) … ne\na line\nno",
    )
    assert from_first_difference("a\nb", "a\nc", 3) == ("a\nb", "a\nc")


@settings(max_examples=60)
@given(st.text("ab <&\n", max_size=20), st.text("ab <&\n", max_size=20))
def test_marks_change_no_text(then: str, now: str) -> None:
    plain = [unescape(re.sub("</?(?:del|ins)>", "", html)) for html in marked(then, now)]
    assert plain == [then, now]
