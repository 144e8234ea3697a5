"""A step in one file: packed without places and secrets, done again stage by stage, and each stage that differs is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import cli
from headrace.commands.replay import bundle
from headrace.commands.replay.bundle import CODE, FACTS, read_bundle
from headrace.core.errors import ConfigError
from headrace.core.weights import FORM
from support.few import few
from support.tiny_run import tiny_config

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundled")
    config = tiny_config(
        directory, tiny_llama, train={"steps": 3}, checkpoint={"keep": 3, "every": 1}, watch={"identity_every": 0}
    )
    return headrace.train(config).directory


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 3 with the code and the weights before it."""
    file = tmp_path_factory.mktemp("file") / "whole.zip"
    assert cli.main(["replay", str(run), "--step", "3", "--export", str(file), "--include", "code", "weights"]) == 0
    return file


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("COLUMNS", "300")

    def call(*words: object) -> tuple[int, str]:
        code = cli.main(["replay", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out + err

    return call


def stages(out: str) -> dict[str, str]:
    names = ("reward", "advantage", "loss", "backward", "optimizer")
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()[:1] and line.split()[0] in names}
    return {
        name: "DIFFERS" if "DIFFERS" in rows[name] else "not done" if "not done" in rows[name] else "same"
        for name in names
        if name in rows
    }


def planted(whole: Path, tmp_path: Path, change: Callable[[Tree], None]) -> Path:
    """The bundle with other facts."""
    file = tmp_path / "planted.zip"
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == FACTS:
                facts = json.loads(content)
                change(facts)
                content = json.dumps(facts).encode()
            new.writestr(name, content)
    return file


@pytest.mark.slow
def test_on_the_same_machine_every_stage_is_the_same(
    whole: Path, tiny_llama: Path, said: Callable[..., tuple[int, str]]
) -> None:
    code, out = said(whole, "--model", tiny_llama, "--trust")
    assert code == 0, out
    assert set(stages(out).values()) == {"same"} and len(stages(out)) == 5, out
    assert "rewards of share_of_e" in out and "the same result in reward, advantage, loss, backward, optimizer" in out


def other_reward(facts: Tree) -> None:
    facts["journaled"]["groups"][0]["scored"][0]["rewards"]["share_of_e"] += 0.25


def other_advantage(facts: Tree) -> None:
    row = facts["journaled"]["groups"][0]["rows"][0]
    row["advantages"] = [1.001 * value for value in row["advantages"]]


def other_temperature(facts: Tree) -> None:
    for group in facts["journaled"]["groups"]:
        for row in group["rows"]:
            row["temperature"] = 0.7  # a row says its own


def other_gradient(facts: Tree) -> None:
    facts["journaled"]["report"]["grad_norm"] *= 1.001


def other_rate(facts: Tree) -> None:
    facts["settings"]["train"]["beta2"] = 0.9


@pytest.mark.parametrize(
    ("change", "first"),
    few(
        starmap(
            pytest.param,
            [
                (other_reward, "reward"),
                (other_advantage, "advantage"),
                (other_temperature, "loss"),
                (other_gradient, "backward"),
                (other_rate, "optimizer"),
            ],
        ),
        keep=2,
    ),
)
def test_a_difference_in_a_stage_is_named(
    whole: Path,
    tiny_llama: Path,
    tmp_path: Path,
    said: Callable[..., tuple[int, str]],
    change: Callable[[Tree], None],
    first: str,
) -> None:
    code, out = said(planted(whole, tmp_path, change), "--model", tiny_llama, "--trust")
    assert code == 1 and f"{first} is the first stage that differs" in out, out
    found = stages(out)
    assert all(verdict == "same" for name, verdict in list(found.items())[: list(found).index(first)]), out


def test_on_another_machine_sums_may_differ_within_a_tolerance(
    whole: Path, tiny_llama: Path, tmp_path: Path, said: Callable[..., tuple[int, str]]
) -> None:
    def elsewhere(facts: Tree) -> None:
        facts["machine"]["cpu"] = "another"
        facts["journaled"]["report"]["grad_norm"] *= 1.0001
        facts["after"] = "0" * 32
        row = facts["journaled"]["groups"][0]["rows"][0]
        row["advantages"] = [(1 + 1e-9) * value for value in row["advantages"]]

    code, out = said(planted(whole, tmp_path, elsewhere), "--model", tiny_llama, "--trust")
    assert code == 0 and set(stages(out).values()) == {"same"}, out

    def far(facts: Tree) -> None:
        elsewhere(facts)
        facts["updates"] = {name: [2 * moved, norm] for name, (moved, norm) in facts["updates"].items()}

    code, out = said(planted(whole, tmp_path, far), "--model", tiny_llama, "--trust")
    assert code == 1 and "optimizer is the first stage that differs" in out and "moved by" in out, out


def test_without_code_and_weights_the_advantages_are_still_made_again(
    run: Path, tmp_path: Path, said: Callable[..., tuple[int, str]]
) -> None:
    file = tmp_path / "small.zip"
    code, out = said(run, "--step", 3, "--export", file)
    assert code == 0 and "only reward and advantage" in out and "without reward.py" in out, out
    with zipfile.ZipFile(file) as archive:
        assert archive.namelist() == [FACTS]
    code, out = said(file)
    assert code == 0, out
    assert stages(out) == {"reward": "not done", "advantage": "same"} | dict.fromkeys(
        ("loss", "backward", "optimizer"), "not done"
    )


def test_the_first_step_needs_no_state(
    run: Path, tiny_llama: Path, tmp_path: Path, said: Callable[..., tuple[int, str]]
) -> None:
    file = tmp_path / "first.zip"
    assert said(run, "--step", 1, "--export", file)[0] == 0
    code, out = said(file, "--model", tiny_llama)
    assert code == 0 and stages(out)["optimizer"] == "same" and stages(out)["reward"] == "not done", out
    code, out = said(file)
    assert stages(out)["loss"] == "not done" and f"the model was a directory called {tiny_llama.name}" in out, out


def test_no_place_of_the_machine_and_no_secret_is_inside(
    whole: Path, run: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(whole) as archive:
        texts = b"".join(archive.read(name) for name in archive.namelist())
    for place in (run, run.parent.parent, tiny_llama, Path.home(), Path.cwd()):
        if len(place.parts) > 2:
            assert str(place).encode() not in texts, place
    with zipfile.ZipFile(whole) as archive:
        facts = json.loads(archive.read(FACTS))
    texts_of_settings = list(strings(facts["settings"]))
    assert "reward.py:share_of_e" in texts_of_settings and facts["model"] == tiny_llama.name
    assert not [text for text in texts_of_settings if "/" in text or "~" in text]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


def test_a_secret_of_the_environment_is_refused_and_nothing_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "KEY = 'sk-0123456789'\ndef f(prompts, completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace(f"{run.parent.parent / 'reward.py'}:share_of_e", f"{rewards}:f"))
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    file = tmp_path / "secret.zip"
    code, out = said(copy, "--step", 2, "--export", file, "--include", "code")
    assert code == 1 and "the value of the environment variable JUDGE_API_KEY" in out, out
    assert not list(tmp_path.glob("*.zip")) and not list(tmp_path.glob(".*"))
    assert said(copy, "--step", 2, "--export", file)[0] == 0


def test_code_in_a_bundle_runs_only_if_it_is_trusted(whole: Path, said: Callable[..., tuple[int, str]]) -> None:
    code, out = said(whole)
    assert code == 2 and "holds code that a replay runs (reward.py)" in out and "--trust" in out


def test_other_weights_than_the_step_began_with_are_refused(
    whole: Path, tiny_llama: Path, tmp_path: Path, said: Callable[..., tuple[int, str]]
) -> None:
    file = planted(whole, tmp_path, lambda facts: facts.update(before=FORM + "0" * 32))
    code, out = said(file, "--model", tiny_llama, "--trust")
    assert code == 1 and "holds other weights" in out, out


def test_fingerprints_of_an_earlier_form_are_not_compared(whole: Path, tmp_path: Path) -> None:
    now = read_bundle(whole, tmp_path / "now")
    assert now.before.startswith(FORM) and now.after.startswith(FORM)
    file = planted(whole, tmp_path, lambda facts: facts.update(before="0" * 32, after=now.after))
    found = read_bundle(file, tmp_path / "then")
    assert (found.before, found.after) == ("", now.after)


@pytest.mark.slow
def test_a_step_is_packed_under_other_cores_than_the_run_had(
    run: Path,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., tuple[int, str]],
) -> None:
    monkeypatch.setattr("headrace.native.arithmetic.usable_cores", lambda: 7)
    monkeypatch.setattr("headrace.processes.launch.local.usable_cores", lambda: 7)
    file = tmp_path / "other_cores.zip"
    code, out = said(run, "--step", 3, "--export", file, "--include", "weights", "--include", "code")
    assert code == 0 and "only near" not in out, out
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    assert "code/reward.py" in names and any(name.startswith("state/") for name in names), "each --include counts"
    code, out = said(file, "--model", tiny_llama, "--trust")
    assert code == 0 and set(stages(out).values()) == {"same"} and len(stages(out)) == 5, out


@pytest.mark.slow
def test_a_state_that_another_machine_made_anew_can_be_done_again(
    run: Path,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., tuple[int, str]],
) -> None:
    """There its weights have other bits than the run's."""
    monkeypatch.setattr("headrace.native.arithmetic.cpu_model", lambda: "Another 3000")
    expected = bundle.read_expected(run)
    others = dict.fromkeys(expected.fingerprints, "0" * 32)
    monkeypatch.setattr(bundle, "read_expected", lambda run_dir: dataclasses.replace(expected, fingerprints=others))
    file = tmp_path / "anew.zip"
    code, out = said(run, "--step", 3, "--export", file, "--include", "weights")
    assert code == 0 and "not the run's, only near it: the run had another machine (cpu was " in out, out
    code, out = said(file, "--model", tiny_llama)
    assert code == 0 and stages(out)["optimizer"] == "same" and "only near it" in out, out
    monkeypatch.undo()
    code, out = said(file, "--model", tiny_llama)  # on the run's own machine too, which is not compared bit for bit
    assert code == 0 and stages(out)["optimizer"] == "same", out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["RUN"], "--step N says which step"),
        (["RUN", "--step", "9", "--export", "x.zip"], "so there is no step 9"),
        (["RUN", "--step", "2", "--to", "3", "--export", "x.zip"], "a bundle holds one step"),
        (["RUN", "--step", "2", "--include", "code"], "name its file with --export"),
        (["RUN", "--step", "2", "--export", "x.zip", "--include", "adapter"], "the run trained all weights"),
        (["RUN", "--step", "2", "--trust"], "is not a bundle"),
        (["WHOLE", "--step", "2"], "is a bundle of one step"),
        (["text.zip"], "is not a bundle of headrace replay --export"),
        (["strange.zip"], "it holds ../outside"),
    ],
)
def test_what_cannot_work_is_refused(
    run: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., tuple[int, str]],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.zip").write_text("no zip")
    with zipfile.ZipFile("strange.zip", "w") as archive:
        archive.writestr("../outside", "x")
    code, out = said(*({"RUN": str(run), "WHOLE": str(whole)}.get(word, word) for word in words))
    assert code == 2 and told in out, out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["strange.zip", "text.zip"]


@pytest.mark.slow
def test_an_adapter_travels_with_its_step(
    tiny_llama: Path, tmp_path: Path, said: Callable[..., tuple[int, str]]
) -> None:
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 2}, lora={"rank": 4}, watch={"identity_every": 0})
    run = headrace.train(config).directory
    file = tmp_path / "adapter.zip"
    code, out = said(run, "--step", 2, "--export", file, "--include", "adapter", "code")
    assert code == 0, out
    with zipfile.ZipFile(file) as archive:
        texts = b"".join(archive.read(name) for name in archive.namelist())
        assert "state/adapter_model.safetensors" in archive.namelist()
    assert str(tmp_path).encode() not in texts and str(tiny_llama).encode() not in texts
    code, out = said(file, "--model", tiny_llama, "--trust")
    assert code == 0 and set(stages(out).values()) == {"same"}, out


def test_a_damaged_or_encrypted_bundle_is_refused_in_words(tmp_path: Path) -> None:
    """Each byte of it is changed, also those that say how it is packed."""
    file = tmp_path / "step.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FACTS, "[]")
        archive.writestr(f"{CODE}/reward.py", "x = 1\n" * 50)
    whole, said = file.read_bytes(), set[str]()
    for place in range(len(whole)):
        for changed in (whole[place] ^ 1, whole[place] ^ 0xFF):
            file.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            with pytest.raises(ConfigError) as raised:
                read_bundle(file, tmp_path / "folder")
            said.add(str(raised.value))
    assert any("encrypted" in one for one in said) and any("Error -3" in one for one in said)
