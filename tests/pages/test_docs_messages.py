"""docs/troubleshooting.md quotes messages that the sources have, and has those of the tables of advice and of failures."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import pytest

from docs import messages
from headrace.facts.verdicts import RULES
from headrace.loop import run_limits

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = messages.quoted(PAGE)


def test_every_quoted_message_is_one_of_the_sources():
    assert len(QUOTED) == PAGE.count("\n### ") > 25
    assert messages.unknown(QUOTED) == [], "a message has changed: quote it anew in docs/troubleshooting.md"


@pytest.mark.parametrize("old", ["the moon has … craters", "raise rollout.max_tokens: … of completions are cut off"])
def test_a_message_that_no_source_has_is_found(old):
    assert messages.unknown([old]) == [old]


@pytest.mark.parametrize("rule", RULES)
def test_advice_is_on_the_page(rule):
    """One of the texts of the rule stands behind one of the headings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(RULES[rule])))
    texts = [
        text for node in ast.walk(tree) if isinstance(node, ast.expr) and len(text := messages.template(node)) > 20
    ]
    assert any(messages.could_be(heading, text) for heading in QUOTED for text in texts)


def test_every_reason_for_which_a_run_stops_is_on_the_page():
    missing = [reason for reason in (*run_limits._BARREN, *run_limits._FAILED) if f"`{reason}`" not in PAGE]
    assert missing == [], "add its row, with the remedy, to docs/troubleshooting.md"


def test_all_messages_are_listed_once_with_their_parts():
    page = messages.page()
    assert page.count("\n- ") > 300 and "### ConfigError: tasks" in page
    assert '- `nothing gives rewards: set reward.function = "path/to/file.py:name"' in page
    lines = [line for line in page.splitlines() if line.startswith("- ")]
    assert all(line.count("`") % 2 == 0 and messages.HOLE not in line for line in lines)
