"""Pages of the site that are made of other files, and links to files outside docs/ (a hook of mkdocs; see mkdocs.yml).

The front page is the README, `commands.md` prints every `--help`, `gallery.py` makes the pages of recipes, `messages.py` that of messages,
`python_reference.py` those of the Python interface, and a source file to which a page links becomes a page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any
from unicodedata import normalize

from mkdocs.structure.files import File, Files

from docs import messages, python_reference
from docs.gallery import CURVE, FOLDER, LANGUAGES, block, gallery, pages
from headrace.cli import GROUPS

ROOT = Path(__file__).parent.parent
ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]+`")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
RECIPE = re.compile(r"recipes/(\w+)/([\w.]+)")
WIDTH = "84"
WIDE = ("recipes.md", "troubleshooting.md")
"""Pages without a table of contents beside them: cards need the room, and headings that are messages are too long for it."""


def slug(value: str, separator: str) -> str:
    """Anchors as GitHub makes them, since the pages are read there too."""
    kept = re.sub(r"[^\w\- ]", "", normalize("NFKC", value).strip().lower())
    return kept.replace(" ", separator)


def on_files(files: Files, config: Any) -> Files:
    made = {"commands.md": _commands(), "recipes.md": gallery()}
    made |= {f"recipes/{name}.md": text for name, text in pages().items()} | {"messages.md": messages.page()}
    made |= python_reference.pages()
    unread = ["README.md", *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    unread += [f"recipes/{name}/README.md" for name in pages()]
    while unread:
        file = unread.pop()
        text = (ROOT / file).read_text(encoding="utf-8")
        if _page_of(file) not in made and not file.startswith("docs/"):
            made[_page_of(file)] = text if file.endswith(".md") else _code(file, text)
        if file.endswith(".md"):
            unread += [one for one in _outside(file, text) if _page_of(one) not in made]
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for picture in FOLDER.glob(f"*/{CURVE}"):
        files.append(File.generated(config, f"recipes/{picture.parent.name}/{CURVE}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at files outside docs/ to the pages that show them, and writes tables as the site reads them."""
    here = page.file.src_uri
    if here in WIDE:
        page.meta["hide"] = ["toc"]
    file = _file_of(here)

    def point(match: re.Match[str]) -> str:
        target = _target(file, match[2])
        if target is None or not (ROOT / target).is_file():
            return match[0]  # a web address, or a dead link, at which mkdocs stops
        recipe = RECIPE.fullmatch(target)
        within = f"#{slug(recipe[2], '-')})" if recipe and Path(target).suffix in LANGUAGES else match[3]
        return f"{match[1]}{relpath(_page_of(target), dirname(here) or '.')}{within}"

    return plain_pipes(LINK.sub(point, markdown))


def plain_pipes(markdown: str) -> str:
    """The text with pipes in the code of tables as they are: GitHub takes them with a backslash, which the site would show."""
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def _target(file: str, link: str) -> str | None:
    """The path of a link from the root of the checkout."""
    return None if ":" in link or link.startswith("/") else normpath(join(dirname(file), link))


def _outside(file: str, text: str) -> list[str]:
    targets = [_target(file, match[2]) for match in LINK.finditer(text)]
    outside = [one for one in targets if one and not one.startswith("docs/") and not one.endswith(CURVE)]
    return [one for one in outside if (ROOT / one).is_file()]


def _page_of(file: str) -> str:
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file == "README.md":
        return "index.md"
    if recipe := RECIPE.fullmatch(file):
        return file if recipe[2] == CURVE else f"recipes/{recipe[1]}.md"
    return f"source/{file}" if file.endswith(".md") else f"source/{file}.md"


def _file_of(page: str) -> str:
    """The file that a page shows, from the root of the checkout."""
    if page == "index.md":
        return "README.md"
    if page.startswith("recipes/"):
        return f"{page.removesuffix('.md')}/README.md"
    return page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"


def _code(file: str, text: str) -> str:
    return f"# {file}\n\n{block(text, LANGUAGES.get(Path(file).suffix, 'text'))}\n"


def _commands() -> str:
    """Every `--help`, as a narrow terminal prints it."""
    parts = ["# Commands"]
    parts += [block(_help(), "text")]
    for name in (name for names in GROUPS.values() for name in names):
        parts += [f"## headrace {name}", block(_help(name), "text")]
    return "\n\n".join(parts) + "\n"


def _help(*command: str) -> str:
    asked = [sys.executable, "-m", "headrace", *command, "--help"]
    return subprocess.run(
        asked, env={**os.environ, "COLUMNS": WIDTH}, check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
