"""Pages of the site that are made of other files, and links to files outside docs/ (a hook of mkdocs; see mkdocs.yml).

The front page is the README, `commands.md` prints every `--help`, `recipes.md` shows every recipe, and a source file to which a page links becomes a page.
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

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".jsonl": "json", ".sh": "bash", ".yml": "yaml"}
WIDTH = "84"


def slug(value: str, separator: str) -> str:
    """Anchors as GitHub makes them, since the pages are read there too."""
    kept = re.sub(r"[^\w\- ]", "", normalize("NFKC", value).strip().lower())
    return kept.replace(" ", separator)


def on_files(files: Files, config: Any) -> Files:
    made = {"commands.md": _commands(), "recipes.md": _recipes()}
    unread = ["README.md", *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    while unread:
        file = unread.pop()
        text = (ROOT / file).read_text(encoding="utf-8")
        if not file.startswith("docs/"):
            made[_page_of(file)] = text if file.endswith(".md") else _code(file, text)
        if file.endswith(".md"):
            unread += [one for one in _outside(file, text) if _page_of(one) not in made]
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at files outside docs/ to the pages that show them."""
    here = page.file.src_uri
    file = _file_of(here)

    def point(match: re.Match[str]) -> str:
        target = _target(file, match[2])
        if target is None or not (ROOT / target).is_file():
            return match[0]  # a web address, or a dead link, at which mkdocs stops
        return f"{match[1]}{relpath(_page_of(target), dirname(here) or '.')}{match[3]}"

    return LINK.sub(point, markdown)


def _target(file: str, link: str) -> str | None:
    """The path of a link from the root of the checkout."""
    return None if ":" in link or link.startswith("/") else normpath(join(dirname(file), link))


def _outside(file: str, text: str) -> list[str]:
    targets = [_target(file, match[2]) for match in LINK.finditer(text)]
    return [one for one in targets if one and not one.startswith("docs/") and (ROOT / one).is_file()]


def _page_of(file: str) -> str:
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file == "README.md":
        return "index.md"
    return f"source/{file}" if file.endswith(".md") else f"source/{file}.md"


def _file_of(page: str) -> str:
    """The file that a page shows, from the root of the checkout."""
    if page == "index.md":
        return "README.md"
    return page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"


def _code(file: str, text: str) -> str:
    return f"# {file}\n\n{_block(text, LANGUAGES.get(Path(file).suffix, 'text'))}\n"


def _block(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def _recipes() -> str:
    parts = ["# Recipes", "`headrace recipes` lists them, and `headrace recipes NAME` copies one with its files."]
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        parts += [f"## {path.stem}", _block(path.read_text(encoding="utf-8"), "toml")]
    return "\n\n".join(parts) + "\n"


def _commands() -> str:
    """Every `--help`, as a narrow terminal prints it."""
    parts = ["# Commands"]
    parts += [_block(_help(), "text")]
    for name in re.findall(r"^    ([a-z]+) ", _help(), flags=re.MULTILINE):
        parts += [f"## headrace {name}", _block(_help(name), "text")]
    return "\n\n".join(parts) + "\n"


def _help(*command: str) -> str:
    asked = [sys.executable, "-m", "headrace", *command, "--help"]
    return subprocess.run(
        asked, env={**os.environ, "COLUMNS": WIDTH}, check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
