"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import headrace
from headrace import cli
from headrace.commands.arguments import run_directory
from headrace.commands.installed import doctor
from headrace.commands.running import demo_command as starting
from headrace.core.errors import CheckpointError, ConfigError, TrainingError, WorkerDied
from headrace.run.config import load_config
from support.pseudo_terminal import in_terminal

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
model.path = "smollm2-135m-instruct"
task = { kind = "reasoning_gym", name = "chain_sum" }
reward.function = "reasoning_gym"
"""


def raising(error: BaseException):
    def work() -> int:
        raise error

    return work


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    return path


# --- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("task.path is missing"), 2, "headrace: task.path is missing\n"),
        (ConfigError("one\ntwo"), 2, "headrace: one\nheadrace: two\n"),
        (TrainingError("no gradient"), 1, "headrace: no gradient\n"),
        (CheckpointError("torn"), 1, "headrace: torn\n"),
        (WorkerDied("engine", "was killed"), 1, "headrace: the engine process was killed\n"),
        (KeyboardInterrupt(), 130, "headrace: interrupted\n"),
    ],
)
def test_errors_are_one_message_and_a_code(capsys, error, code, words):
    assert cli.exit_code(raising(error)) == code
    assert capsys.readouterr() == ("", words)


def test_notes_of_an_error_are_printed_below_it(capsys):
    error = TrainingError("it stopped")
    error.add_note("go on with: headrace train --resume runs/a")
    cli.exit_code(raising(error))
    assert capsys.readouterr().err == "headrace: it stopped\nheadrace: go on with: headrace train --resume runs/a\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.exit_code(raising(ZeroDivisionError()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "absent.toml"], "there is no file absent.toml"),
        (["train", "mine.tml"], "did you mean mine.toml?"),
        (["train"], "name a config: headrace train CONFIG.toml"),
        (["train", "mine.toml", "--set", "train.stesp=1"], "did you mean train.steps?"),
        (["train", "mine.toml", "--set", "rollout.temperature=0"], "use 1.0 for training"),
        (["train", "mine.toml", "--name", "a/b"], "name = "),
        (["train", "mine.toml", "--set", "reward.function="], "nothing gives rewards: set reward.function"),
        (["train", "--resume", "runs/absent"], "there is no run runs/absent"),
        (["train", "--resume", "."], "is not the directory of a run: it has no config.toml"),
        (["demo", "--set", "train.stesp=1"], "did you mean train.steps?"),
        (["eval", "absent.toml"], "there is no file absent.toml"),
        (["eval", "absent"], "there is no run absent"),
        (["report", "absent"], "there is no run absent"),
        (["export", "absent", "--to", "x"], "there is no run absent"),
    ],
)
def test_bad_input_is_code_2_and_a_sentence(config, capsys, arguments, words):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err and out == "" and "Traceback" not in err


def test_the_demo_is_a_line_of_train_with_all_that_train_reads():
    heard: list[Sequence[str]] = []
    parser = cli.front_parser()
    asked = parser.parse_args(["demo", "--name", "first", "--board", "--set", "train.minutes=3", "--set", "seed=-1"])
    starting.demo(lambda words: heard.append(words) or 0)(asked)
    line = parser.parse_args(["train", *heard[0]])
    assert (Path(line.config).name, line.name, line.set) == ("demo.toml", "first", ["train.minutes=3", "seed=-1"])
    assert line.board and not line.settings and not line.dry_run


@pytest.mark.parametrize(
    "arguments", [["fly"], ["export"], ["eval", "x.toml", "--prompts", "0"], ["train", "--nmae", "x"]]
)
def test_wrong_arguments_are_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: headrace")


@pytest.mark.parametrize(
    ("line", "meant"),
    [("trian", "train"), ("train x.toml --dryrun", "--dry-run"), ("ls --jsn", "--json"), ("completion fsh", "fish")],
)
def test_a_mistyped_word_is_answered_with_the_one_that_was_meant(line, meant, capsys):
    with pytest.raises(SystemExit):
        cli.main(line.split())
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_refusals_fit_a_terminal_of_eighty_columns_and_break_no_word(tmp_path):
    for words in (["frobnicate"], ["report", "a-" * 20 + "b " + "c-" * 20]):
        code, out = in_terminal([sys.executable, "-m", "headrace", *words], tmp_path, {"PYTHONPATH": str(ROOT)})
        lines = out.replace("\r\n", "\n").splitlines()
        assert code == 2 and len(lines) > 1 and max(map(len, lines)) <= 80
        assert not any(line.endswith("-") for line in lines)


def test_the_bare_command_lists_every_command_by_what_it_is_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    assert not any(line.endswith("-") for line in listed.splitlines())
    with pytest.raises(SystemExit):
        cli.main(["frobnicate"])
    known = capsys.readouterr().err.partition("it is one of ")[2].strip().split(", ")
    assert sorted(known) == sorted(name for names in cli.GROUPS.values() for name in names)
    assert all(f"\n  {name} " in listed for name in known) and max(map(len, listed.splitlines())) <= 80


@pytest.mark.slow
def test_teachers_are_enough_to_learn_from_and_several_adapters_are_evaluated_one_by_one(config, tiny_llama, capsys):
    taught = f"""algo.name = 'opd'
eval.prompts = 0
engine.context_length = 256
[[teachers]]
name = 'a'
path = '{tiny_llama}'
"""
    text = CONFIG.replace('reward.function = "reasoning_gym"\n', "").replace("smollm2-135m-instruct", str(tiny_llama))
    config.write_text(text + taught)
    assert cli.main(["train", str(config), "--dry-run"]) == 0
    assert "the run learns only from its teachers" in capsys.readouterr().out
    two = CONFIG + "lora.rank = 4\n[[adapters]]\nname = 'a'\n[[adapters]]\nname = 'b'\n"
    config.write_text(two)
    assert cli.main(["eval", str(config)]) == 2
    assert "trains several adapters (a, b); evaluate one" in capsys.readouterr().err


# --- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_is_named_by_its_directory_or_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert run_directory("first") == Path("runs/first")
    assert run_directory("runs/first") == Path("runs/first")
    assert run_directory(str(tmp_path / "runs" / "first")) == tmp_path / "runs" / "first"
    with pytest.raises(ConfigError, match=r"did you mean runs/first\?"):
        run_directory("frist")


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--settings"]])
def test_dry_run_begins_with_the_line_that_starts_it_and_prints_settings_that_load(config, tmp_path, capsys, flags):
    sets = ["--set", "train.steps=7"]
    assert cli.main(["train", str(config), *sets, "--dry-run", *flags]) == 0
    out = capsys.readouterr().out
    verdict, line = out.splitlines()[:2]
    assert verdict == "Ready: start it with" and line.split() == ["headrace", "train", str(config), *sets]
    assert re.search(r"engine.*\n(.*\n)*.*trainer", out), out
    settings = re.search(r"\nSettings.*\n\n((?:.*\n)+?)\nFiles", out)[1]
    assert ("[staleness]" in settings) == bool(flags), "those that have their defaults are left out"
    (tmp_path / "again.toml").write_text(settings)
    loaded, given = load_config(tmp_path / "again.toml"), load_config(config, ["train.steps=7"])
    assert loaded.train.steps == 7 and (loaded.model, loaded.task, loaded.name) == (given.model, given.task, given.name)
    assert not (tmp_path / "runs").exists()


def test_python_has_the_same_doors(config):
    assert headrace.load_config(config).name == "mine"
    assert callable(headrace.train) and callable(headrace.evaluate) and callable(headrace.export)
    assert headrace.RunConfig is type(headrace.load_config(config))
    with pytest.raises(ConfigError, match="did you mean train.steps"):
        headrace.train(config, sets=["train.stpes=1"])
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        headrace.trian  # noqa: B018


# --- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_of_a_machine_that_can_run(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("Python", "torch", "transformers", "Memory", "CPU cores", "smollm2-135m-instruct", "engine", "Ready"):
        assert word in out


def test_doctor_says_what_is_wrong_and_how_to_mend_it(capsys):
    assert doctor.print_findings({"Software": [doctor.DoctorFinding("torch", "bad", "1.0", "pip install torch")]}) == 1
    out = capsys.readouterr().out
    assert "Cannot run yet: torch" in out and "pip install torch" in out
    assert doctor.print_findings({"Software": [doctor.DoctorFinding("[trackio]", "note", "not installed")]}) == 0


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.11.0", ">=2.11,<2.14", True),
        ("2.10.1", ">=2.11,<2.14", False),
        ("2.14.0", ">=2.11,<2.14", False),
        ("6.0.0.dev0", ">=5.17,<6", False),
        ("1.0", "", True),
    ],
)
def test_doctor_reads_version_ranges(version, wanted, fits):
    assert doctor.satisfies(version, wanted) == fits


def test_a_broken_torch_is_a_finding_and_no_crash():
    probe = subprocess.Popen(
        [sys.executable, "-c", "raise ImportError('libcuda is broken')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert doctor.torch_facts(probe) == "ImportError: libcuda is broken"
    assert [found.state for found in doctor.torch_findings("ImportError: libcuda is broken")] == ["bad"]


def test_doctor_knows_the_extras_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {
        name: [extra.requirement, *extra.beside] for name, extra in doctor.EXTRAS.items()
    }  # what is printed can be installed
    elsewhere = {"vllm", "triton"}  # for another environment; for tests of GPU kernels without a GPU
    assert named == {name: extras[name] for name in extras.keys() - {"demo", "dev", "all"} - elsewhere}


def test_an_option_that_takes_several_words_may_be_given_several_times() -> None:
    """argparse keeps only the last, without a word."""
    (commands,) = (action for action in cli.front_parser()._actions if action.choices)
    several = [
        (name, option)
        for name, parser in commands.choices.items()
        for option in parser._actions
        if option.option_strings and option.nargs in ("+", "*")
    ]
    assert several and not [(name, one.dest) for name, one in several if "Extend" not in type(one).__name__]
