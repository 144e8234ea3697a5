"""`headrace sweep`: which runs it makes, that it goes on where it stopped, and what its table says."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from headrace.cli import main
from headrace.commands.training.sweep_command import SweepRun, _tell, finished, reached, runs_of
from headrace.core.errors import ConfigError
from headrace.facts.facts import RunEnded, WarmStarted
from headrace.run.choosing import resumed_settings
from headrace.run.config import dump_config, load_config, read_config
from headrace.run.resume_rules import contents_of, written
from headrace.run.warm_start import FACT, FOLDER, begins_with
from support.fact_stream import write_run
from support.tiny_run import of, tiny_config


def config_of(directory: Path, model: Path, **tables: object) -> str:
    tree = tiny_config(directory, model, **{"train": {"steps": 2}, "eval": {"prompts": 4, "samples": 1}, **tables})
    path = directory / "tiny.toml"
    path.write_text(dump_config(read_config(tree)))
    return str(path)


def test_there_is_a_run_for_each_combination_and_seed(tmp_path: Path, tiny_tokenizer: Path) -> None:
    config = config_of(tmp_path, tiny_tokenizer, seed=5, lora={"rank": 2})
    over = ["train.learning_rate=1e-3,2e-3", "algo.name=grpo,rloo", 'lora.targets="all-linear",["q_proj","v_proj"]']
    runs = runs_of(config, over, 2, name="", sets=["rollout.max_tokens=4"])
    assert len(runs) == 16 and len({one.directory for one in runs}) == 16
    first, last = runs[0], runs[-1]
    assert (
        first.directory == tmp_path / "runs" / "tiny-sweep" / "learning_rate-1e-3_name-grpo_targets-all-linear_seed-5"
    )
    assert (
        last.values == ("train.learning_rate=2e-3", "algo.name=rloo", 'lora.targets=["q_proj","v_proj"]')
        and "seed=6" in last.sets
    )
    assert first.command(config)[:3] == ["headrace", "train", config] and "rollout.max_tokens=4" in first.command(
        config
    )
    (first.directory).mkdir(parents=True)
    (first.directory / "config.toml").touch()
    again = first.command(config)
    assert again[-2:] == ["--resume", str(first.directory)], "it goes on where it stopped"
    assert "rollout.max_tokens=4" in again, "with the settings that are given now"


def test_a_run_goes_on_with_a_config_that_is_whole_only_with_its_settings(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path = Path(config_of(tmp_path, tiny_tokenizer))
    path.write_text(path.read_text().replace(f'path = "{tiny_tokenizer}"\n', "", 1))
    given = [f'model.path="{tiny_tokenizer}"']
    (run,) = runs_of(str(path), ["train.learning_rate=1e-3"], 1, name="", sets=given)
    run.directory.mkdir(parents=True)
    (run.directory / "config.toml").write_text(dump_config(load_config(path, run.sets)))
    resumed = load_config(resumed_settings(path, run.directory, run.sets), run.sets)
    assert resumed.model.path == str(tiny_tokenizer) and resumed.train.learning_rate == 1e-3


def test_a_comma_in_a_text_or_an_array_does_not_divide_a_value(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = [r'''"Think, then \"answer\", please"''', "'Answer, and end]'", "Don't think"]
    listed = ['{ x = [["a, b"], [1]] }', '{ x = ["]"] }']
    over = [f"task.system={','.join(texts)}", f"task.template={','.join(listed)}"]
    runs = runs_of(config_of(tmp_path, tiny_tokenizer), over, 1, name="", sets=[])
    assert [one.values for one in runs] == [
        (f"task.system={text}", f"task.template={one}") for text in texts for one in listed
    ]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ("train.learning_rate", "write it as section.setting=value,value"),
        ("seed=1,2", "--seeds for seeds"),
        ("name=a,b", "names its runs itself"),
        ("train.steps=1,0", "train.steps=0: train.steps = 0 does not fit"),
        ("train.stepps=1", "is not a setting"),
        ("train.steps=1,1", "two runs would be called steps-1_seed-0"),
    ],
)
def test_everything_is_refused_before_a_run_is_started(
    tmp_path: Path, tiny_tokenizer: Path, over: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        runs_of(config_of(tmp_path, tiny_tokenizer), [over], 1, name="", sets=[])
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["algo.clip_high=0.3"], "algo.clip_high = None, and this sweep has 0.3"),
        (["train.steps=3"], "train.steps = 2, and this sweep has 3"),
        (["eval.samples=2"], "eval.samples = 1, and this sweep has 2"),
    ],
)
def test_a_run_that_has_begun_with_other_settings_is_not_compared(
    tmp_path: Path, tiny_tokenizer: Path, sets: list[str], words: str
) -> None:
    config, over = config_of(tmp_path, tiny_tokenizer), ["train.learning_rate=1e-3,2e-3"]
    runs = runs_of(config, over, 1, name="", sets=[])
    begun = load_config(config, runs[0].sets).with_chosen({"engine.threads": 1, "train.dtype": "float32"}, {})
    runs[0].directory.mkdir(parents=True)
    (runs[0].directory / "config.toml").write_text(dump_config(begun))
    assert runs_of(config, over, 1, name="", sets=["engine.max_running=3"]) != runs, "what a run chose is its own"
    with pytest.raises(ConfigError) as refused:
        runs_of(config, over, 1, name="", sets=sets)
    assert words in str(refused.value) and "give it another --name" in str(refused.value)
    assert runs_of(config, over, 1, name="other", sets=sets)


def test_a_run_that_has_begun_with_other_rows_is_not_compared(tmp_path: Path, tiny_tokenizer: Path) -> None:
    config = config_of(tmp_path, tiny_tokenizer)
    (run,) = runs_of(config, ["train.learning_rate=1e-3"], 1, name="", sets=[])
    begun = load_config(config, run.sets)
    run.directory.mkdir(parents=True)
    (run.directory / "config.toml").write_text(dump_config(begun) + written(contents_of(begun)))
    assert runs_of(config, ["train.learning_rate=1e-3,2e-3"], 1, name="", sets=[])
    with Path(begun.task.path).open("a") as rows:
        rows.write('{"prompt": "one more", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"another content of task.path: give this sweep another --name"):
        runs_of(config, ["train.learning_rate=1e-3,2e-3"], 1, name="", sets=[])


def test_a_run_that_has_begun_with_its_warm_start_goes_on(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    warm = {"path": str(tmp_path / "answers.jsonl"), "held_out": 0}
    config = config_of(tmp_path, tiny_tokenizer, warm_start=warm)
    (run,) = runs_of(config, ["train.learning_rate=1e-3"], 1, name="", sets=[])
    done = WarmStarted(
        t=0.0,
        model=str(tiny_tokenizer),
        path=warm["path"],
        rows=1,
        held_out_rows=0,
        epochs=1,
        tokens=2,
        seconds=1.0,
        learning_rate=1e-5,
        losses=(1.0,),
        held_out=(),
        mark="",
    )
    (run.directory / FOLDER / tiny_tokenizer.name).mkdir(parents=True)
    (run.directory / FOLDER / FACT).write_bytes(msgspec.json.encode(done))
    begun = begins_with(load_config(config, run.sets), run.directory)
    assert begun.model.path != str(tiny_tokenizer)
    (run.directory / "config.toml").write_text(dump_config(begun))
    assert runs_of(config, ["train.learning_rate=1e-3"], 1, name="", sets=[]) == [run]


def test_adapters_are_compared_each_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that trains several has their numbers in directories of theirs."""
    runs = [SweepRun((f"train.steps={steps}",), (), tmp_path / steps) for steps in ("30", "31", "32")]
    for seed, one in enumerate(runs[:2]):
        for number, name in enumerate(("left", "right")):
            write_run(one.directory / name, seed=2 * seed + number)
        (one.directory / "config.toml").write_text("seed = 0\n")
    write_run(runs[2].directory / "left"), write_run(runs[2].directory / "right", end=False)
    assert [list(finished(one.directory)) for one in runs] == [["left", "right"], ["left", "right"], []]
    rows = reached(runs)
    assert [row.adapter for row in rows] == ["left"] * 3 + ["right"] * 3
    assert [len(row.held_out) for row in rows] == [1, 1, 0] * 2 and len({tuple(row.held_out) for row in rows}) == 5
    assert rows[0].held_out > rows[1].held_out, "the best first"
    _tell(runs)
    said = capsys.readouterr().out
    assert said.count("1 of 1") == 4 and said.count("0 of 1") == 2 and said.count("right") == 3


def test_a_folder_of_any_name_is_the_one_of_its_runs(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = tmp_path / 'a "b" \\t'
    folder.mkdir()
    config = config_of(folder, tiny_tokenizer)
    (run,) = runs_of(config, ["train.steps=3"], 1, name="", sets=[])
    assert Path(load_config(config, run.sets).out) == run.directory.parent == folder / "runs" / "tiny-sweep"


def test_commands_are_printed_for_a_cluster(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, tiny_tokenizer)
    assert main(["sweep", config, "--over", "train.steps=1,2", "--seeds", "2", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith(f"headrace train {config} --set train.steps=") for line in lines)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_runs_are_trained_and_compared_and_finished_ones_are_not_repeated(
    tmp_path: Path, tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, tiny_llama)
    words = ["sweep", config, "--over", "train.learning_rate=1e-3,1e-2", "--seeds", "2"]
    runs = runs_of(config, words[3:4], 2, name="", sets=[])
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "4 runs in" in said and said.count("run 4 of 4") == 1
    assert said[said.rindex("learning_rate") :].count("2 of 2") == 2 and "±" in said
    assert all(finished(one.directory) for one in runs)
    rows = reached(runs)
    assert [len(row.held_out) for row in rows] == [2, 2] and all(
        math.isfinite(value) for row in rows for value in row.held_out
    )
    assert main(words) == 0 and "run 1 of" not in capfd.readouterr().out
    assert all(len(of(one.directory, RunEnded)) == 1 for one in runs)
