"""What the wheel holds, and that it does in an empty directory what a checkout does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path
from urllib.parse import unquote
from zipfile import ZipFile

import pytest

from headrace.cli import main
from headrace.commands.serving import serving_commands
from headrace.settings import extras
from headrace.settings.extras import install

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, each made from the files of the checkout."""
    made = tmp_path_factory.mktemp("dist")
    code = f"import os, hatchling.build as b; os.chdir({str(ROOT)!r}); b.build_wheel({str(made)!r}); b.build_sdist({str(made)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return made


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def tracked(*folders: str) -> set[str]:
    """The files that git has or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(listed.stdout.splitlines())


def test_the_wheel_holds_the_package_with_its_recipes_pages_and_kernels(packages: Path):
    with ZipFile(one(packages, "*.whl")) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    pages = {name for name in tracked("docs") if not name.endswith((".py", ".css"))}
    wanted = (tracked("headrace") - tracked("headrace/testing")) | {
        f"headrace/{name}" for name in tracked("recipes") | pages
    }
    assert inside == wanted
    assert {Path(name).suffix for name in inside} >= {".py", ".cpp", ".js", ".css", ".toml", ".jsonl"}


def test_a_recipe_links_to_pages_that_are_in_the_wheel_also_from_its_copy(packages: Path, tmp_path: Path, monkeypatch):
    with ZipFile(one(packages, "*.whl")) as wheel:
        wheel.extractall(tmp_path / "installed")
    package = tmp_path / "installed" / "headrace"
    monkeypatch.setattr("headrace.__file__", str(package / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    for readme in sorted(package.glob("recipes/*/README.md")):
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", readme.read_text())]
        assert links and all((readme.parent / link).is_file() for link in links if "//" not in link), (readme, links)
        assert main(["recipes", readme.parent.name]) == 0
        copied = re.findall(r"\]\(([^)]+)\)", (tmp_path / readme.parent.name / "README.md").read_text())
        pages = [
            Path(unquote(link.removeprefix("file://").partition("#")[0])) for link in copied if link.startswith("file:")
        ]
        assert len(pages) == sum("docs/" in link for link in links) and all(page.is_file() for page in pages), copied


def test_the_sdist_holds_what_its_tests_need(packages: Path):
    with tarfile.open(one(packages, "*.tar.gz")) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert inside >= tracked("headrace", "recipes", "tests", "docs") | {
        "pyproject.toml",
        "Makefile",
        "benchmarks/peers.mk",
        "requirements-dev.lock",
        "README.md",
        "LICENSE",
    }


def test_recipes_are_listed_and_copied_as_folders(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(folder.name in listed for folder in (ROOT / "recipes").iterdir())
    assert "learns to add and subtract" in listed
    assert main(["recipes", "tools"]) == 0
    assert "now: headrace train tools/tools.toml" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "tools").iterdir()} >= {"tools.toml", "calculator.py", "README.md"}
    assert (
        main(["recipes", "service.toml", "--to", "my/own"]) == 0 and (tmp_path / "my/own/reward_service.py").is_file()
    )
    assert main(["recipes", "tools"]) == 2
    assert "tools exists already; name another directory by --to" in capsys.readouterr().err
    assert main(["recipes", "tool"]) == 2 and "there are: agent, " in capsys.readouterr().err


def test_the_citation_the_changelog_and_the_package_state_one_version():
    version = next(line for line in (ROOT / "headrace" / "version.py").read_text().splitlines() if "=" in line).split(
        '"'
    )[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_are_installed_by_all_or_named_as_their_own():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    in_all = set(named["all"][0].partition("[")[2].rstrip("]").split(","))
    assert set(named) - in_all == {"all", "dev", "demo", "vllm", "triton"}
    # vllm: for the environment of a server of its own; triton: for tests without a GPU, beside one torch brings it


def test_the_environment_of_the_demo_serves_what_it_has_trained_and_shows_the_board():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named["demo"] == ["headrace[tasks,serve]"] and ".[demo]" in (ROOT / "Makefile").read_text()
    brought = {re.split(r"[><=]", one)[0] for one in named["serve"]}
    assert {*serving_commands.NEEDED} <= brought


@pytest.mark.slow
@pytest.mark.parametrize("active", [True, False])
def test_the_printed_command_installs_for_this_interpreter(active: bool, tmp_path: Path, monkeypatch):
    """It is followed, whether the environment is active or not. Everything is there already, so that no index is asked."""
    own = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{own}:/usr/bin:/bin" if active else "/usr/bin:/bin")
    command = install("serve")
    assert command.startswith("pip install " if active else f"{sys.executable} -m pip install ")
    done = subprocess.run(["sh", "-c", f"{command} --no-index"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "already satisfied: uvicorn" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir()), "no redirection has made a file"


def test_an_environment_without_pip_is_told_of_uv(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "pip")
    assert install("serve").startswith(f"uv pip install --python {sys.executable} 'uvicorn>=")


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo_in_an_empty_directory(packages: Path, tmp_path: Path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    place = Path(
        subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    with ZipFile(one(packages, "*.whl")) as wheel:
        wheel.extractall(place)
    # The dependencies are those of this environment; headrace itself, which is editable there, comes from the wheel.
    (place / "theirs.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    empty = tmp_path / "empty"
    empty.mkdir()
    small = (
        "train.steps=2",
        "train.warmup_steps=1",
        "eval.prompts=8",
        "staleness.groups_per_step=2",
        "rollout.group_size=4",
    )
    sets = [word for setting in small for word in ("--set", setting)]
    command = [python, "-m", "headrace", "demo", "--name", "first", *sets]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=empty, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished at step 2 of 2" in done.stdout and (empty / "runs" / "first" / "report.html").is_file()
    code = "import headrace; print(headrace.__file__)"
    where = subprocess.run(
        [python, "-c", code], cwd=empty, env=alone, check=True, capture_output=True, text=True
    ).stdout
    assert where.startswith(str(place))
