"""A run keeps the commit of each model of the hub that it began with, whatever its branch points to later.

The cache of the hub's client is laid out by hand, and the client is offline."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.commands.plan.answer import rates_file
from headrace.commands.publishing.model_card import _model
from headrace.commands.replay.bundle import without_places
from headrace.commands.training.sweep_command import different_commits
from headrace.core.errors import ConfigError
from headrace.models.resolve import HubModel, hub_model, resolve_model, short_name, with_commit
from headrace.run.config import config_of_run, dump_config, load_config, read_config
from headrace.run.hosting import complete
from headrace.run.pieces import pieces_of
from headrace.run.python_inputs import with_python_inputs
from headrace.run.rehearse import rehearse
from headrace.run.wording import headline
from support.tiny_run import Config, tiny_config

FIRST, SECOND = "a" * 40, "b" * 40

Commit = Callable[..., Path]


@pytest.fixture
def commit(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commit:
    """Puts a commit of a repository into the cache, and lets a branch point to it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(sha: str, *, repo: str = "org/student", branch: str = "main") -> Path:
        home = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        snapshot = home / "snapshots" / sha
        if not snapshot.exists():
            shutil.copytree(tiny_llama, snapshot)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / branch).write_text(sha)
        return snapshot

    return put


@pytest.mark.parametrize(
    ("path", "found", "short"),
    [
        ("org/name", HubModel("org/name"), "name"),
        ("org/na.me-1@main", HubModel("org/na.me-1", "main"), "na.me-1"),
        ("org/name@refs/pr/7", HubModel("org/name", "refs/pr/7"), "name"),
        (f"org/name@{FIRST}", HubModel("org/name", FIRST), "name"),
        ("org/name@", None, "name@"),
        ("org/name@a@b", None, "name@a@b"),
        ("/models/org/name", None, "name"),
        ("smollm2-135m-instruct", None, "smollm2-135m-instruct"),
    ],
)
def test_the_parts_of_a_name(path: str, found: HubModel | None, short: str) -> None:
    assert hub_model(path) == found and short_name(path) == short
    assert rates_file(path).stem.partition("-" if path.startswith("/") else "\n")[0] == short
    assert not found or found.is_pinned == (found.revision == FIRST)


def test_measured_rates_of_one_directory_are_not_those_of_another_of_its_name() -> None:
    assert rates_file("/a/export") != rates_file("/b/export") != rates_file("org/export") == rates_file("org/export@v2")


def test_a_revision_is_a_branch_a_tag_or_a_commit(commit: Commit, tmp_path: Path) -> None:
    first, second = commit(FIRST, branch="v1.0"), commit(SECOND)
    assert resolve_model("org/student") == second == resolve_model("org/student@main")
    assert resolve_model("org/student@v1.0") == first == resolve_model(f"org/student@{FIRST}")
    assert with_commit("org/student@v1.0", first) == f"org/student@{FIRST}"
    assert with_commit(str(first), first) == str(first), "a directory is named as it is"
    with pytest.raises(ConfigError, match=r"model.path = org/student@v9 is not a directory here(?!.*HF_HUB_CACHE)"):
        resolve_model("org/student@v9")
    with pytest.raises(ConfigError, match=f"hf download org/student --revision {'c' * 40}.*HF_HUB_CACHE"):
        resolve_model(f"org/student@{'c' * 40}")


def config_of(tmp_path: Path, model: str, **changes: object) -> Config:
    config = tiny_config(tmp_path, Path("unused"), name="hub", **changes)
    config["model"]["path"] = model
    return config


def taught(tmp_path: Path) -> Config:
    config = config_of(tmp_path, "org/student", algo={"name": "opd"}, train={"steps": 1})
    config["teachers"] = [{"name": "north.1", "path": "org/teacher@v1"}]
    del config["reward"]
    return config


def test_a_start_names_the_commits_and_a_resume_takes_them_or_refuses(commit: Commit, tmp_path: Path) -> None:
    first, teacher = commit(FIRST), commit(FIRST, repo="org/teacher", branch="v1")
    config, directory = taught(tmp_path), tmp_path / "runs" / "hub"
    found = complete(rehearse(load_config(config)))
    begun = found.config
    assert ("of the hub", f"org/teacher@{FIRST}, which a resume takes too") in found.sections["Run"]
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(dump_config(begun))
    assert begun.model.path == f"org/student@{FIRST}" and begun.teachers[0].path == f"org/teacher@{FIRST}"
    assert pieces_of(directory) is not None, "the texts of its tokens are by the tokenizer of that commit"
    assert headline(begun) == headline(load_config(config)), "nobody need read 40 digits"

    commit(SECOND), commit(SECOND, repo="org/teacher", branch="v1")
    for given in (config, config_of_run(directory), begun):
        again = with_python_inputs(given, resume=directory)[0]
        again = again.with_commits(again.chosen.models)
        assert (again.model, again.teachers) == (begun.model, begun.teachers), "the settings may name the branch again"
        assert complete(rehearse(again, resume=directory)).notes == complete(rehearse(begun, resume=directory)).notes
    for gone, setting in ((teacher, "the teacher north.1: path"), (first, "model.path")):
        shutil.rmtree(gone)
        with pytest.raises(ConfigError, match=f"{setting} = org/.*@{FIRST} is not a directory here"):
            complete(rehearse(begun, resume=directory))


@pytest.mark.slow
def test_a_whole_run_goes_on_with_what_it_began_with(commit: Commit, tmp_path: Path) -> None:
    commit(FIRST), commit(FIRST, repo="org/teacher", branch="v1")
    config = taught(tmp_path)
    directory = headrace.train(config).directory
    for moved in (commit(SECOND), commit(SECOND, repo="org/teacher", branch="v1")):
        for path in moved.iterdir():
            path.write_text("not what the run began with: whatever reads this fails")
    config["train"]["steps"] = 2
    assert headrace.train(config, resume=directory).step == 2
    assert read_config(config_of_run(directory)).model.path == f"org/student@{FIRST}"
    config["train"]["steps"] = 3
    for name in ("org/student@main", f"org/student@{SECOND}"):
        commit(SECOND)
        config["model"]["path"] = name
        with pytest.raises(ConfigError, match="a run cannot be resumed with other values here: model.path was"):
            headrace.train(config, resume=directory)


def test_no_model_that_is_loaded_by_its_name_is_forgotten(tmp_path: Path) -> None:
    algos: list[dict[str, Any]] = [
        {"name": "ppo", "critic": {"model": "org/values"}},
        {"name": "gkd", "distill": {"model": "org/teacher"}},
    ]
    known = {name for algo in algos for name in load_config(config_of(tmp_path, "org/student", algo=algo)).model_paths}
    sources = "".join(path.read_text() for path in Path(headrace.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"resolve_model\([^\n]*setting=\"([a-z_.]+)\"", sources))
    assert named and named <= known


def test_a_run_that_recorded_no_commit_goes_on_and_says_so(commit: Commit, tmp_path: Path) -> None:
    commit(FIRST)
    config = load_config(config_of(tmp_path, "org/student"))
    found = complete(rehearse(config, resume=tmp_path / "runs" / "hub"))
    assert any("model.path = org/student: this run began with a version" in note for note in found.notes)
    assert found.config.model.path == "org/student"


def test_a_critic_of_its_own_has_its_commit(commit: Commit, tmp_path: Path) -> None:
    commit(FIRST), commit(SECOND, repo="org/critic")
    config = load_config(config_of(tmp_path, "org/student", algo={"name": "ppo", "critic": {"model": "org/critic"}}))
    begun = complete(rehearse(config)).config
    assert begun.algo.critic.model == f"org/critic@{SECOND}" == begun.algo.recipe.critic.model
    commit(FIRST, repo="org/critic")
    again = config.with_commits(begun.chosen.models)
    assert again.algo == begun.algo
    found = complete(rehearse(config, resume=tmp_path / "runs" / "hub"))
    assert any("algo.critic.model = org/critic: this run began with a version" in note for note in found.notes)


def test_a_teacher_that_the_trainer_holds_has_its_commit(commit: Commit, tmp_path: Path) -> None:
    commit(FIRST), commit(SECOND, repo="org/teacher")
    algo = {"name": "gkd", "distill": {"model": "org/teacher"}}
    begun = complete(rehearse(load_config(config_of(tmp_path, "org/student", algo=algo)))).config
    assert begun.algo.distill.model == f"org/teacher@{SECOND}" == begun.algo.recipe.distill.model


def test_every_adapter_of_a_run_has_the_commit(commit: Commit, tmp_path: Path) -> None:
    commit(FIRST)
    config = config_of(tmp_path, "org/student", lora={"rank": 2})
    config["adapters"] = [{"name": "one"}, {"name": "two"}]
    settled = complete(rehearse(load_config(config))).config
    assert {run.model.path for run in settled.runs} == {f"org/student@{FIRST}"}


def test_a_sweep_says_that_its_runs_began_with_different_commits(tmp_path: Path) -> None:
    for name, commit in (("a", FIRST), ("b", FIRST), ("c", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f'[chosen.models]\n"org/student" = "org/student@{commit}"\n')
    runs = [tmp_path / name for name in "abcd"]  # the last has not begun
    assert not list(different_commits(runs[:2]))
    (said,) = different_commits(runs)
    assert f"org/student was org/student@{FIRST} in a, b; org/student@{SECOND} in c" in said


def test_what_leaves_the_machine_names_the_base_as_others_read_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/here", "r": 2}))
    without_places(tmp_path, f"org/student@{FIRST}")
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {
        "base_model_name_or_path": "org/student",
        "revision": FIRST,
        "r": 2,
    }
    without_places(tmp_path, "smollm2-135m-instruct")
    assert (
        json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "smollm2-135m-instruct"
    )
    assert _model(f"org/student@{FIRST}") == f"`org/student` (revision `{FIRST}`)"
