"""The README's first screen holds: its lines are commands, its links lead somewhere, and a CSV file becomes a run by its three lines."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import markdown
import pytest

from docs.site_pages import plain_pipes, slug
from headrace import cli
from headrace.algo.recipes import RECIPES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n    ", "")
PAGES = [ROOT / name for name in ("README.md", "ROADMAP.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MADE = ("messages.md", "commands.md", "recipes.md", "index.md", "api")
"""Pages that are made with the site."""


def test_the_number_of_recipes_is_told_as_it_is() -> None:
    status, picture = (ROOT / "docs" / name for name in ("status.md", "architecture.svg"))
    assert f"GRPO and {len(RECIPES) - 1} other recipes" in README
    assert f"There are {len(RECIPES)} in" in (ROOT / "docs" / "choosing.md").read_text()
    assert (
        f"[{len(RECIPES)} recipes of one table]" in status.read_text()
        and f"{len(RECIPES)} recipes" in picture.read_text()
    )


def test_the_page_of_what_works_has_the_counts_of_the_page_of_models():
    models, status = ((ROOT / "docs" / name).read_text() for name in ("models.md", "status.md"))
    served, of = re.search(r"^(\d+) of (\d+) are served", models, re.MULTILINE).groups()
    kernels, refused = re.search(r"(\d+) by `kernels`.* (\d+) are refused", models).groups()
    assert f"[{served} of the {of} architectures" in status and f"({refused} are refused by name" in status
    assert f"{kernels} in C++ on a CPU" in status


def test_the_site_shows_no_backslash_before_a_pipe_in_the_code_of_a_table() -> None:
    html = markdown.markdown(
        plain_pipes("| a | b |\n|---|---|\n| `int \\| None` | the largest \\|r\\| |"), extensions=["tables"]
    )
    assert "<td><code>int | None</code></td>\n<td>the largest |r|</td>" in html
    assert plain_pipes("`a \\| b`") == "`a \\| b`"  # no table


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 120 and max(map(len, README.splitlines())) <= 320


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", text):
        file = (page.parent / target).resolve() if target else page
        if file.parent == ROOT / "docs" and (file.name in MADE or "api" in target):
            continue
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(re.sub(r"[`*]|\]\(.*?\)|\[", "", heading), "-") for heading in headings}, (
                page,
                anchor,
            )


def test_every_line_of_the_readme_and_of_the_cheatsheet_is_a_command() -> None:
    lines = re.findall(r"^(headrace .*)$", README, re.MULTILINE)
    lines += re.findall(r"`(headrace [a-z]+[^`]*)`", README)
    lines += re.findall(r"^(headrace .*?)(?: {2,}.*)$", (ROOT / "docs" / "cheatsheet.md").read_text(), re.MULTILINE)
    assert len(lines) >= 30
    for line in lines:
        words = shlex.split(line.partition("#")[0].partition(" -- ")[0])[1:]
        parsed, unknown = cli.front_parser().parse_known_args(words)
        assert not unknown and parsed.command, line


def test_a_csv_file_becomes_a_run_by_the_lines_of_the_readme(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], *([f"{i} + {i}?", str(2 * i)] for i in range(100))])
    init, rehearsal, train = re.findall(r"^(headrace .*?)(?: {2,}#.*)?$", README, re.MULTILINE)
    words = [str(tiny_llama) if word == "smollm2-135m-instruct" else word for word in shlex.split(init)[1:]]
    assert cli.main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "mine.toml", "rewards.py"]
    assert cli.main(shlex.split(rehearsal)[1:]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("✓")
    assert shlex.split(train) == ["headrace", "train", "mine.toml", "--board"]
    scope: dict[str, object] = {}
    exec(re.search(r"```python\n(def exact.*?)```", README, re.DOTALL)[1], scope)  # type: ignore[index]
    assert scope["exact"](prompts=[], completions=["4", "5"], answer=["4", "4"]) == [1.0, 0.0]  # type: ignore[operator]


def test_every_decision_has_a_line_in_the_design_notes() -> None:
    listed = re.findall(r"\]\(decisions/([^)]+)\)", (ROOT / "docs/design-notes.md").read_text())
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
