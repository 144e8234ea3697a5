"""Every recipe starts, as `headrace recipes` copies it, and its README has what the gallery shows."""

from __future__ import annotations

import asyncio
import json
import runpy
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.core.errors import ConfigError
from headrace.facts.facts import Accounting, Evaluated, ProcessesUsed, ProcessUse, RunEnded, RunStarted
from headrace.facts.records import MetricsFact
from headrace.run.config import load_config
from headrace.run.rehearse import rehearse
from headrace.run.rehearsed import Rehearsal
from headrace.settings.toml import dump, dump_changed
from support.few import few

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(folder for folder in (ROOT / "recipes").iterdir() if folder.is_dir())
NEED_MORE = {
    "openenv": "environment.name",
    "verifiers": "environment.python",
}
"""Recipes that need something else to be started or installed: the refusal names this."""
PLAIN = (
    "train.minutes=0",
    "engine.context_length=4096",
    "engine.kv_gib=0.01",
    "engine.dtype=float32",
    "train.dtype=float32",
)
"""Nothing is measured, and prompts have one token a character."""


STARTS_PROCESSES = (
    "attempts",
    "game",
    "gym",
    "openenv",
    "proposer",
    "self_play",
    "verifiers",
    "agent",
    "atropos",
    "dots",
)
"""Recipes whose environment is played once by a process, or whose images are computed with: seconds each."""


def starting() -> Iterator[object]:
    for folder in FOLDERS:
        if folder.name not in NEED_MORE:
            marks = (pytest.mark.slow,) if folder.name in STARTS_PROCESSES else ()
            yield pytest.param(folder.name, marks=marks)


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for prompts that are tokenised by character."""
    directory = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(tiny_llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return directory


@contextmanager
def reward_service(folder: Path) -> Iterator[str]:
    """Serves the recipe's own rewards on a free port."""
    handler = runpy.run_path(str(folder / "reward_service.py"))["Handler"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()


def started(folder: Path, model: Path, *sets: str) -> Rehearsal:
    config = load_config(folder / f"{folder.name}.toml", [f"model.path={json.dumps(str(model))}", *PLAIN, *sets])
    return asyncio.run(rehearse(config))


def copied(name: str, monkeypatch: pytest.MonkeyPatch, here: Path) -> Path:
    monkeypatch.chdir(here)
    assert main(["recipes", name]) == 0
    return here / name


@pytest.mark.parametrize("name", few(list(starting()), keep=3))
def test_a_recipe_starts(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = copied(name, monkeypatch, tmp_path)
    if name == "service":
        with reward_service(folder) as url:
            found = started(folder, model, f'reward.services=[{{name="exact", url="{url}"}}]')
    else:
        if name == "distill":
            (folder / "teacher").symlink_to(model)
        if name == "dots":  # its model sees, and its images are drawn
            monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
            made = runpy.run_path(str(folder / "make_dots.py"))
            made["make_images"]()
            made["make_model"]("smolvlm")
            model = folder / "model"
        found = started(folder, model)
    assert found.problems == [] and {"Run", "Prompts", "Algorithm", "Memory"} <= {
        part.partition(",")[0] for part in found.sections
    }


@pytest.mark.parametrize("name", NEED_MORE)
def test_a_recipe_that_needs_more_says_so(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = copied(name, monkeypatch, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        started(folder, model, *(['environment.name="http://127.0.0.1:9"'] if name == "openenv" else []))
    assert name in str(refused.value) or NEED_MORE[name] in str(refused.value)


ALL = [path for folder in FOLDERS for path in sorted(folder.glob("*.toml"))]
SHORT = [path for path in ALL if "[[adapters]]" not in path.read_text()]
"""Configs of one run: an adapter that sets its own steps takes no others from the line."""


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_a_recipe_can_be_tried_for_a_step(path: Path):
    assert load_config(path, ["train.steps=1"]).train.steps == 1


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_changed_settings_of_a_recipe_are_all_of_it(path: Path, tmp_path: Path):
    config = load_config(path)
    written = tmp_path / path.name
    written.write_text(dump_changed(config))
    assert load_config(written) == config and len(written.read_text()) < len(dump(config)) / 3


def test_the_gallery_shows_every_recipe_with_its_record():
    made = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    page, shelved = made["gallery"](), [name for names in made["SHELVES"].values() for name in names]
    assert sorted(shelved) == [folder.name for folder in FOLDERS]
    for folder in FOLDERS:
        card = made["card"]((folder / "README.md").read_text())
        assert f"[{card.title}](recipes/{folder.name}.md)" in page and all(card.rows.values())
        assert f"headrace recipes {folder.name}\n" in (folder / "README.md").read_text()


def recorded(after: float = 0.7, reason: str = "finished") -> list[MetricsFact]:
    def held_out(phase: str, step: int, reward: float) -> Evaluated:
        return Evaluated(1.0, phase, step, 64, reward, 0.03, 9.0)  # type: ignore[arg-type]

    machine = {"cpu": "a CPU", "threads": "2"}
    return [
        RunStarted(0.0, "demo", "", 5, 60, 2, 8, 4, 1, 1, {}, machine=machine),
        held_out("before", 0, 0.1),
        held_out("during", 30, 0.9),
        ProcessesUsed(5.0, {"engine": ProcessUse(1, 1.0, 1 << 30), "trainer": ProcessUse(2, 1.0, 2 << 30)}),
        ProcessesUsed(9.0, {"engine": ProcessUse(1, 1.0, 1 << 30)}),
        held_out("after", 60, after),
        RunEnded(269.4, reason, 60, Accounting(), 0.5, 0.2),
    ]


def test_a_record_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    made = runpy.run_path(str(ROOT / "docs" / "make_recipe.py"))
    table = made["rows"](recorded(), "today")
    assert table == {
        "learned": "held-out reward 0.100 ± 0.030 → 0.700 ± 0.030 (64 prompts, seed 5)",
        "time": "4:29 for 60 steps of 2 groups, with loading and measuring",
        "memory": "3.0 GiB in all processes; pages that they share count in each",
        "record": "today, 2 threads of a CPU",
    }
    readme = (ROOT / "recipes" / "demo" / "README.md").read_text()
    new = made["written"](readme, table)
    card = runpy.run_path(str(ROOT / "docs" / "gallery.py"))["card"]
    assert card(new).rows == table and card(new).title == card(readme).title and "curve of this run" in new
    assert made["written"](new, table) == new, "a second record replaces the first one"
    assert [line for line in readme.splitlines() if not line.startswith("|") and line not in new.splitlines()] == []
    assert "does not prove" in made["rows"](recorded(after=0.18), "today")["learned"]
    for broken in (recorded()[:-1], recorded(reason="interrupted"), recorded()[:2] + recorded()[-1:]):
        with pytest.raises(ValueError, match="a record"):
            made["rows"](broken, "today")


def test_a_readme_without_its_record_is_refused():
    read = runpy.run_path(str(ROOT / "docs" / "gallery.py"))["card"]
    whole = (ROOT / "recipes" / "demo" / "README.md").read_text()
    with pytest.raises(ValueError, match="memory"):
        read("\n".join(line for line in whole.splitlines() if not line.startswith("| memory")))
