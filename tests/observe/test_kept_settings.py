"""What is told of a step, or of a checkpoint, is told by the settings and the numbers of its time, and runs are compared by all that they ever had."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from msgspec.structs import replace

from headrace.commands.publishing.model_card import CARD, write_card
from headrace.commands.show.diff import compare_runs
from headrace.facts.facts import Evaluated
from headrace.facts.kept_settings import settings_by_step, settings_over
from headrace.facts.records import StepRow, read_metrics
from headrace.facts.run_state import RunState
from headrace.facts.verdicts import stretches
from headrace.run.config import dump_config, load_config
from headrace.views.report import plots
from headrace.views.report.data import load, sampled
from headrace.views.report.side_by_side import ComparedRun, final_numbers, settings_apart
from support.fact_stream import write_run

DIGEST = "# contents of reward.function: {}\n"


def test_the_settings_of_a_step_are_those_of_its_stretch(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 3\n")
    for until, seed in ((4, 1), (9, 2)):
        (tmp_path / f"config.until-step-{until}.toml").write_text(f"seed = {seed}\n")
    of_step = settings_by_step(tmp_path)
    assert [of_step(step)["seed"] for step in (0, 3, 4, 8, 9, 50)] == [1, 1, 2, 2, 3, 3]
    assert settings_over(tmp_path) == {"seed": "1 until step 4, then 2 until step 9, then 3"}


def test_runs_that_end_alike_are_told_apart_by_what_a_resume_changed_and_by_what_their_files_hold(
    tmp_path: Path,
) -> None:
    same = "[train]\nlearning_rate = 0.5\nsteps = 30\n"
    one = write_run(tmp_path / "a", config=same + DIGEST.format("a" * 32))
    other = write_run(tmp_path / "b", config=same + DIGEST.format("b" * 32))
    assert settings_apart({"a": one, "b": other}) == {"contents of reward.function": ["aaaaaaaa", "bbbbbbbb"]}
    (other / "config.toml").write_text(f"seed = 0\n{same}")
    assert settings_apart({"a": one, "b": other}) == {}, "an earlier version wrote no digests"
    (other / "config.until-step-10.toml").write_text(f"seed = 0\n{same.replace('0.5', '0.1')}")
    assert settings_apart({"a": one, "b": other}) == {"train.learning_rate": ["0.5", "0.1 until step 10, then 0.5"]}
    assert ("train.learning_rate", 0.5, "0.1 until step 10, then 0.5") in compare_runs(one, other).settings


def test_a_report_shows_what_settings_were_before_a_resume(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", config="[train]\nlearning_rate = 0.5\n")
    before = (run / "config.toml").read_text()
    assert load(run).config == before
    (run / "config.until-step-10.toml").write_text(before.replace("0.5", "0.1"))
    assert load(run).config == f"# train.learning_rate: 0.1 until step 10, then 0.5\n\n{before}"


def test_tokens_out_of_a_loss_are_those_of_the_settings_of_their_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    plain = [view.left_out for view in sampled(run)]
    (run / "config.until-step-30.toml").write_text((run / "config.toml").read_text())
    with (run / "config.toml").open("a") as file:
        file.write('[staleness]\noverdue = "trim"\nmax_lag = 0\n')
    assert [view.left_out for view in sampled(run)] == plain, "no step was trained after the resume"
    (run / "config.until-step-30.toml").unlink()
    assert [view.left_out for view in sampled(run)] != plain


def of_card(run: Path, folder: Path, step: int) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    write_card(run, folder, step, "mine")
    return (folder / CARD).read_text()


def test_the_card_of_an_earlier_checkpoint_has_the_numbers_and_the_settings_of_then(
    tmp_path: Path, tiny_llama: Path
) -> None:
    run, folder = write_run(tmp_path / "x"), tmp_path / "model"
    settings = {
        "model": {"path": str(tiny_llama)},
        "task": {"kind": "seeds"},
        "environment": {"kind": "reasoning_gym", "name": "lcm"},
    }
    for path, algo in (("config.until-step-10.toml", "gspo"), ("config.toml", "rloo")):
        (run / path).write_text(dump_config(load_config({**settings, "algo": {"name": algo}})))
    rows = [fact for fact in read_metrics(run) if isinstance(fact, StepRow)]
    tokens = [sum(row.report.loss_tokens for row in rows[:count]) for count in (8, 20, 30)]
    early, between, whole = (of_card(run, folder, step) for step in (8, 20, 30))
    assert "8 optimizer steps of gspo" in early and 'name = "gspo"' in early and "rloo" not in early
    assert "| steps | 8 of 30 |" in early and "| steps | 20 of 30 |" in between
    for card, count in zip((early, between, whole), tokens, strict=True):
        assert f"| tokens trained | {count:,} |" in card
    for card in (between, whole):
        assert "- `algo.name`: gspo until step 10, then rloo" in card
    assert "until step" not in early
    for step, card in ((8, early), (20, between)):
        state = load(run, until=step).state
        assert state.step == step and all(one.step <= step for one in state.evals)
        later = [one for one in read_metrics(run) if isinstance(one, Evaluated) and one.step > step]
        assert later, "the run was measured again"
        assert all(f"{one.reward_mean:.3f}" not in card or one.step <= step for one in later)


def test_held_out_rewards_of_two_meanings_are_neither_listed_as_a_gain_nor_joined_by_a_line(tmp_path: Path) -> None:
    """`headrace compare` and the card of a model gave the first under one reward, and the last under another that a resume had brought."""
    run = write_run(tmp_path / "x")
    facts = list(read_metrics(run))
    (before,) = [fact for fact in facts if isinstance(fact, Evaluated) and fact.phase == "before"]
    for step, reward, measure in ((10, 0.25, "a"), (20, 7.5, "b"), (25, 8.5, "b")):
        facts.append(replace(before, phase="during", step=step, reward_mean=reward, reward_sem=0.5, measure=measure))
    state, data = RunState(), load(run)
    for fact in facts:
        if not isinstance(fact, Evaluated) or fact.phase == "during":
            state.fold(fact)
    numbers = final_numbers(ComparedRun(dataclasses.replace(data, state=state), ""))
    assert (numbers["held-out reward, first"], numbers["held-out reward, last"]) == ("7.500 ± 0.500", "8.500 ± 0.500")
    assert [[one.step for one in alike] for alike in stretches(state.evals)] == [[10], [20, 25]]
    page = plots.held_out(dataclasses.replace(data, state=state))
    assert page.count('class="line c2"') == 1 and "means something else from step 20 on" in page
    assert stretches([]) == [] and len(stretches([replace(one, measure="") for one in state.evals])) == 1
