"""What Python can do that the command line cannot: run inside a running loop, pass rows, functions and callbacks, get an object."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy
import pandas
import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.facts.facts import RunEnded, Warned
from headrace.run.config import dump_config, load_config
from headrace.run.hosting import run_loop
from headrace.run.python_inputs import with_python_inputs
from headrace.run.run import Callbacks
from headrace.settings.process_config import ChosenConfig
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.terminal import NotebookScreen, as_html
from support.tiny_run import of, tiny_config

ROWS = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(100)]


def share_of_e(prompts, completions, answer, **columns):
    assert all(right.isdigit() for right in answer)
    return [text.count("e") / max(len(text), 1) for text in completions]


def brief(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]


def handed_config(directory: Path, model: Path, **tables: Any) -> dict[str, Any]:
    """Without a task and a reward of its own."""
    config = tiny_config(directory, model, **tables)
    return {**config, "task": {"held_out": 16}, "reward": {"workers": 3}}


# -- a whole run inside a running loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_llama):
    """A run of six steps that was called in a coroutine, with everything that Python can pass."""
    folder = tmp_path_factory.mktemp("python")
    config = handed_config(folder, tiny_llama, eval={"prompts": 4, "every": 3})
    steps: list[headrace.Step] = []
    evaluations: list[headrace.Evaluation] = []
    threads = set()

    def on_step(step: headrace.Step) -> None:
        threads.add(threading.current_thread())
        steps.append(step)

    async def main() -> headrace.RunResult:
        return headrace.train(
            config,
            {"e": share_of_e, "brief": (brief, 0.1)},
            dataset=(row for row in ROWS),
            on_step=on_step,
            on_evaluation=evaluations.append,
        )

    handler = signal.getsignal(signal.SIGINT)
    result = asyncio.run(main())
    assert signal.getsignal(signal.SIGINT) is handler
    return SimpleNamespace(
        config=config, result=result, steps=steps, evaluations=evaluations, threads=threads, folder=folder
    )


def test_it_trains_inside_a_running_loop(trained):
    assert (trained.result.reason, trained.result.step) == ("finished", 6)


def test_callbacks_see_every_step_and_evaluation_in_the_callers_thread(trained):
    assert trained.threads == {threading.main_thread()}
    assert [step.step for step in trained.steps] == [1, 2, 3, 4, 5, 6]
    assert {(evaluation.phase, evaluation.step) for evaluation in trained.evaluations} == {
        ("before", 0),
        ("during", 3),
        ("after", 6),
    }
    assert trained.steps[0].run == "tiny" and set(trained.steps[0].rewards) == {"e", "brief"}


def test_the_history_is_what_the_callbacks_saw(trained):
    history = trained.result.history
    for name in ("step", "reward", "loss", "lag_max", "length_mean", "tokens", "truncated"):
        assert history[name] == [asdict(step)[name] for step in trained.steps]
    frame = pandas.DataFrame(history)
    assert len(frame) == 6 and list(frame["rewards.brief"]) == [step.rewards["brief"] for step in trained.steps]
    both = frame["rewards.e"] + 0.1 * frame["rewards.brief"]
    assert all(abs(both - frame["reward_trained"]) < 1e-9), "the weights count"
    assert trained.result.held_out["reward"] == [evaluation.reward for evaluation in trained.evaluations]


def test_the_object_has_samples_paths_and_a_report(trained):
    result = trained.result
    samples = result.samples
    assert len(samples["prompt"]) >= 6 and set(samples["prompt"]) <= {row["prompt"] for row in ROWS}
    assert [path.name for path in result.checkpoints] == ["step-000004", "step-000006"]
    assert repr(result).startswith(f"<headrace run {result.directory}: finished at step 6 of 6, held-out reward ")
    html = result._repr_html_()
    assert html.count("<iframe") == 1 and 'sandbox="allow-scripts"' in html
    inside = html.partition('srcdoc="')[2]
    assert inside.count('"') == 1 and "<script" not in html, "nothing of the report can leave its frame"


def test_it_exports(trained, tmp_path):
    from transformers import AutoModelForCausalLM

    assert trained.result.export(tmp_path / "model").name == "step-000006"
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_the_settings_say_what_was_passed(trained):
    kept = load_config(trained.result.directory / "config.toml")
    assert [(function.function, function.weight) for function in kept.reward.functions] == [
        ("python:e", 1.0),
        ("python:brief", 0.1),
    ]
    assert " · 100 rows · " in trained.result.state.started.headline
    assert kept.task.kind == "python" and kept.task.rows.endswith("(100 rows)")
    assert (kept.task.held_out, kept.reward.workers) == (16, 3), "what no object replaces stays"


def test_an_evaluation_of_a_run_uses_its_settings_and_tells_its_step(trained, capfd):
    passed = {**trained.config, "rollout": {"group_size": 4, "max_tokens": 3}}
    measured = headrace.evaluate(passed, run=trained.result.directory, reward=brief, dataset=ROWS, prompts=16)
    assert measured.step == 6
    assert measured.length_mean > 3 and measured.prompts == 16
    assert "rollout.max_tokens = 8 (the config passed says 3)" in capfd.readouterr().err


def files(directory: Path) -> dict[str, bytes]:
    kept = [directory / name for name in ("config.toml", "metrics.jsonl")]
    kept += (directory / "journal").iterdir()
    return {path.name: path.read_bytes() for path in kept}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"dataset": [*ROWS, {"prompt": "more", "answer": "1"}], "reward": share_of_e}, "the rows (dataset=) was"),
        ({"dataset": [{**row, "answer": "0"} for row in ROWS], "reward": share_of_e}, "the rows (dataset=) was"),
    ],
    ids=["another row", "another answer"],
)
def test_a_run_is_not_resumed_with_other_rows(trained, given, said):
    before = files(trained.result.directory)
    with pytest.raises(ConfigError, match="cannot be resumed") as refused:
        headrace.train(resume=trained.result.directory, **given)
    assert said in str(refused.value)
    assert files(trained.result.directory) == before


def test_the_call_that_began_a_run_resumes_it_with_what_was_chosen(tmp_path: Path, tiny_llama: Path) -> None:
    """The config is whole only with the rows and rewards of the call, and open only with its `sets`."""
    given = (handed_config(tmp_path, tiny_llama), ['engine.dtype="auto"'], share_of_e, ROWS)
    asked, _ = with_python_inputs(*given)
    chosen = ChosenConfig(wishes={"engine.dtype": "auto"})
    began = replace(asked, engine=replace(asked.engine, dtype="bfloat16"), chosen=chosen)
    (tmp_path / "config.toml").write_text(dump_config(began))
    again, _ = with_python_inputs(*given, resume=tmp_path)
    assert asked.engine.dtype == "auto" and again == began


@pytest.mark.parametrize("command", [["train", "--resume"], ["eval"]])
def test_the_command_line_says_what_it_cannot_pass(trained, command, capsys):
    from headrace.cli import main

    assert main([*command, str(trained.result.directory)]) == 2
    output = capsys.readouterr().err
    assert "the reward e, the reward brief, its rows" in output and "headrace.train(resume=...)" in output


# -- stopping ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_callback_stops_a_run_and_another_one_breaks_it(tmp_path, tiny_llama):
    config = handed_config(tmp_path, tiny_llama, train={"steps": 100_000}, checkpoint={"every": 0})

    def enough(step: headrace.Step) -> None:
        if step.step == 2:
            raise headrace.StopTraining("two are enough")

    result = headrace.train(config, [share_of_e, brief], dataset=ROWS, on_step=enough)
    assert result.reason == "interrupted" and 2 <= result.step < 100_000
    assert [int(path.name[5:]) for path in result.checkpoints] == [result.step]
    assert any("on_step asked to stop (two are enough)" in warning.message for warning in of(result.directory, Warned))

    def broken(step: headrace.Step) -> None:
        {}["no such column"]

    with pytest.raises(KeyError, match="no such column") as raised:
        headrace.train(resume=result.directory, reward=[share_of_e, brief], dataset=ROWS, on_step=broken)
    assert raised.traceback[-1].name == "broken"
    assert "headrace.train(resume=" in raised.value.__notes__[-1]
    ended = of(result.directory, RunEnded)[-1]
    assert ended.reason.startswith("on_step raised KeyError: 'no such column' (")
    assert ended.step > result.step and (result.directory / "checkpoints" / f"step-{ended.step:06d}").is_dir()


@pytest.mark.whole
def test_an_interrupt_in_a_running_loop_writes_a_checkpoint_and_returns(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 100_000})

    def press(step: headrace.Step) -> None:
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    async def main() -> headrace.RunResult:
        return headrace.train(config, on_step=press)

    result = asyncio.run(main())
    assert result.reason == "interrupted" and 2 <= result.step < 100_000
    assert [int(path.name[5:]) for path in result.checkpoints][-1] == result.step


# -- the loop and the calling thread ----------------------------------------------------------------------------------------


def in_a_loop(main: Any, errands: Any = None) -> None:
    async def around() -> None:
        run_loop(main, errands)

    asyncio.run(around())


def test_a_loop_of_its_own_only_where_it_is_needed():
    threads = []

    async def main(on_signal):
        threads.append(threading.current_thread())

    run_loop(main)
    in_a_loop(main)
    errands: Any = SimpleQueue()
    run_loop(main, errands)
    assert threads[0] is threading.main_thread()
    assert [thread.name for thread in threads[1:]] == ["headrace-loop", "headrace-loop"]


def test_an_error_of_the_loop_is_raised_by_the_caller():
    async def main(on_signal):
        raise ConfigError("it cannot work")

    with pytest.raises(ConfigError, match="it cannot work"):
        in_a_loop(main)


def test_interrupts_reach_the_loop_each_once_however_early():
    heard: list[int] = []

    async def main(on_signal):
        os.kill(os.getpid(), signal.SIGINT)  # before anybody listens
        await asyncio.sleep(0.05)
        on_signal(lambda number: heard.append(1))
        for count in (1, 2, 3):
            async with asyncio.timeout(60):
                while len(heard) < count:
                    await asyncio.sleep(0.01)
            if count < 3:
                os.kill(os.getpid(), signal.SIGINT)

    in_a_loop(main)
    assert len(heard) == 3


def test_a_second_interrupt_leaves_a_callback_that_does_not_end():
    errands: Any = SimpleQueue()
    began, heard = threading.Event(), []

    def endless() -> None:
        began.set()
        while True:
            time.sleep(0.01)

    async def main(on_signal):
        left = asyncio.Event()
        on_signal(lambda number: (heard.append(1), len(heard) == 2 and left.set()))
        errands.put(endless)
        await asyncio.to_thread(began.wait, 60)
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            while len(heard) < count:
                await asyncio.sleep(0.01)
        await left.wait()

    in_a_loop(main, errands)
    assert heard == [1, 1]


def test_callbacks_that_cannot_be_called_are_refused():
    async def later(step: Any) -> None: ...

    with pytest.raises(ConfigError, match="on_step = 3 cannot be called"):
        Callbacks(on_step=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_evaluation is async; pass a plain function"):
        Callbacks(on_evaluation=later)


# -- rows -------------------------------------------------------------------------------------------------------------------

CONFIG = {"name": "x", "model": {"path": "nowhere"}, "task": {"held_out": 2}, "eval": {"prompts": 2}}


def taken(**passed: Any) -> Any:
    return with_python_inputs(CONFIG, (), **{"reward": brief, "dataset": ROWS, **passed})


def test_rows_are_the_same_in_every_form():
    import datasets

    same = [ROWS, tuple(ROWS), iter(ROWS), pandas.DataFrame(ROWS), datasets.Dataset.from_list(ROWS)]
    found = [taken(dataset=one) for one in same]
    assert all(list(inputs.rows) == ROWS for _, inputs in found)
    assert len({config.task.rows for config, _ in found}) == 1


def test_the_format_of_a_dataset_rounds_no_number():
    """Tensors of torch are float32 unless told otherwise, and 0.1 is another number there."""
    import datasets

    plain = datasets.Dataset.from_list([{"prompt": "a", "x": 0.1}])
    formatted = plain.with_format("torch")
    for one in (
        formatted,
        formatted.with_format("torch", columns=["prompt", "x"]),
        plain.to_iterable_dataset().with_format("torch"),
    ):
        assert taken(dataset=one)[1].rows == [{"prompt": "a", "x": 0.1}]
    chosen = plain.with_format("torch", columns=["prompt"])
    assert taken(dataset=chosen)[1].rows == [{"prompt": "a"}], "a choice of columns is the user's"
    changed = plain.with_transform(lambda batch: {"prompt": [text.upper() for text in batch["prompt"]]})
    assert taken(dataset=changed)[1].rows == [{"prompt": "A"}], "and so is a transform"


def test_what_is_missing_in_a_frame_is_none():
    frame = pandas.DataFrame([{"prompt": "a", "n": 1, "s": "x"}, {"prompt": "b"}])
    assert taken(dataset=frame)[1].rows == [{"prompt": "a", "n": 1.0, "s": "x"}, {"prompt": "b", "n": None, "s": None}]


def test_rows_take_the_place_of_a_file():
    config, _ = with_python_inputs(
        {**CONFIG, "task": {"kind": "jsonl", "path": "a.jsonl", "held_out": 2}}, (), brief, ROWS
    )
    assert (config.task.kind, config.task.path, config.task.held_out) == ("python", "", 2)


class _Splits(dict): ...


@pytest.mark.parametrize(
    "dataset, said",
    [
        ("rows.jsonl", "dataset= takes rows, not the text 'rows.jsonl'; a file of rows is named in task.path"),
        (_Splits(train=ROWS), "not a mapping \\(of train\\); of a DatasetDict pass one split"),
        (3, "not a int"),
        ([ROWS[0], "text"], "dataset=, row 2: a str where a dict of columns is needed"),
        ([{"prompt": "a", "x": object()}], "dataset=, row 1: the column x cannot be kept in the journal"),
        (
            [{"prompt": "a", "x": numpy.datetime64(1, "ns")}],
            "column x .*datetime64\\[ns\\], of which Python would be given an",
        ),
        ([{"prompt": "a", "x": numpy.zeros(2, "m8[ns]")}], "column x .*timedelta64\\[ns\\]"),
        ([{"prompt": "a", "x": numpy.zeros(2, [("y", int)])}], "column x cannot be kept"),
        ([{"prompt": "a", "x": numpy.longdouble(1)}], "column x cannot be kept"),
        ([{"prompt": "a", 1: "x", "1": "y"}], "dataset=, row 1: two columns have one name as text"),
        (pandas.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"]), "two columns 'x', of which one would be lost"),
    ],
)
def test_what_is_no_table_of_rows_is_refused(dataset, said):
    with pytest.raises(ConfigError, match=said):
        taken(dataset=dataset)


@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "dataset= holds no rows"),
        ([{"question": "a"}] * 9, "there is no column prompt \\(task.prompt\\) in dataset=.*its columns are: question"),
        ([{"prompt": ""}], "dataset=, row 1: the prompt in column prompt is empty"),
        ([{"prompt": "a", "completions": 1}], "dataset=, row 1: the column completions has a name"),
        ([{"prompt": "a"}], "dataset= has 1 rows, of which none is left to train on"),
    ],
)
def test_rows_are_checked_as_those_of_a_file_are(rows, said, tiny_llama):
    from headrace.models.chat import ChatEncoder
    from headrace.run.build import build_task

    config, inputs = taken(dataset=rows)
    with pytest.raises(ConfigError, match=said):
        build_task(config.task, ChatEncoder(tiny_llama), 0, inputs.rows)


def test_rows_that_are_not_passed_again_are_missed(tiny_llama):
    from headrace.models.chat import ChatEncoder
    from headrace.run.build import build_task

    with pytest.raises(ConfigError, match="kept in no file: pass the same rows from Python again"):
        build_task(taken()[0].task, ChatEncoder(tiny_llama), 0)


@pytest.mark.parametrize(
    "task, said",
    [
        (
            {"kind": "python"},
            "task.rows is missing: task.kind = python needs what headrace.train\\(dataset=...\\) writes",
        ),
        ({"kind": "python", "rows": "a", "path": "b"}, "task.path means nothing to task.kind = python"),
        ({"kind": "jsonl", "path": "b", "rows": "a"}, "task.rows means nothing to task.kind = jsonl"),
    ],
)
def test_a_file_cannot_ask_for_rows_of_python(task, said):
    with pytest.raises(ConfigError, match=said):
        load_config({**CONFIG, "task": {"held_out": 2, **task}})


# -- rewards ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward, specs",
    [
        (brief, [("python:brief", 1.0)]),
        (lambda prompts, completions: [], [("python:reward", 1.0)]),
        ([brief, (share_of_e, 0.5)], [("python:brief", 1.0), ("python:share_of_e", 0.5)]),
        ({"short": brief, "e": (share_of_e, -2)}, [("python:short", 1.0), ("python:e", -2.0)]),
        (headrace.trl_reward(brief), [("python:brief", 1.0)]),
    ],
)
def test_one_or_several_functions(reward, specs):
    config, inputs = taken(reward=reward)
    assert [(spec.function, spec.weight) for spec in config.reward.specs] == specs
    assert len(inputs.rewards) == len(specs)
    assert load_config(json.loads(json.dumps(asdict(config)))) == config


def test_functions_take_the_place_of_those_of_the_settings():
    settings = {**CONFIG, "reward": {"function": "a.py:b", "extract": "last_number", "timeout": 7}}
    config, _ = with_python_inputs(settings, (), brief, ROWS)
    assert [spec.function for spec in config.reward.specs] == ["python:brief"] and config.reward.timeout == 7


def test_a_function_in_the_place_of_one_with_an_extract_gets_that_part_of_a_completion_on_a_resume_too():
    settings = {**CONFIG, "reward": {"function": "a.py:b", "extract": "last_number"}}
    config, _ = with_python_inputs(settings, (), brief, ROWS)
    assert [(spec.function, spec.extract) for spec in config.reward.specs] == [("python:brief", "last_number")]
    again, _ = with_python_inputs(asdict(config), (), brief, ROWS)
    assert again.reward == config.reward


def test_several_functions_in_the_place_of_one_with_an_extract_are_refused():
    settings = {**CONFIG, "reward": {"function": "a.py:b", "extract": "last_number"}}
    with pytest.raises(
        ConfigError, match="reward.extract = 'last_number' is for one function, and reward= passes 2: leave it"
    ):
        with_python_inputs(settings, (), [brief, share_of_e], ROWS)
    del settings["reward"]["extract"]
    assert len(with_python_inputs(settings, (), [brief, share_of_e], ROWS)[0].reward.specs) == 2


@pytest.mark.parametrize(
    "reward, said",
    [
        ("rewards.py:exact", "a function in a file is named in the settings"),
        ([], "reward= is empty"),
        ({"a": 3}, "the reward function a is a int, which cannot be called"),
        ({"a": (brief, float("nan"))}, "the reward a has the weight nan"),
        ({"a:b": brief}, "the reward a:b has a colon in its name"),
    ],
)
def test_what_is_no_reward_is_refused(reward, said):
    with pytest.raises(ConfigError, match=said):
        taken(reward=reward)


def test_a_config_is_needed_or_a_run():
    with pytest.raises(ConfigError, match="pass a config"):
        headrace.train()
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        headrace.train(resume="nowhere")


def test_an_adapter_with_a_task_of_its_own_and_rows_for_all_are_one_too_many():
    adapters = [{"name": "north", "task": {"kind": "jsonl", "path": "a"}}, {"name": "south"}]
    with pytest.raises(ConfigError, match="north has its own task"):
        with_python_inputs({**CONFIG, "lora": {"rank": 4}, "adapters": adapters}, (), brief, ROWS)


# -- the notebook's screen --------------------------------------------------------------------------------------------------


def test_a_notebook_screen_updates_one_display_and_takes_it_away():
    shown: list[str] = []
    moved = threading.Event()
    count = iter(range(10**9))

    def display(first: str) -> Any:
        shown.append(first)

        def update(text: str) -> None:
            shown.append(text)
            moved.set()

        return update

    screen = NotebookScreen(lambda: Text(f"<b>step {next(count)}</b>"), display)
    assert moved.wait(60)
    screen.stop()
    screen.stop()
    assert "&lt;b&gt;step 0" in shown[0] and "<b>" not in "".join(shown)
    assert len(shown) >= 3 and shown[-1] == "" and shown.count("") == 1


def test_html_has_no_background_and_no_document():
    html = as_html(Text("plain ").append("good", "bold green"))
    assert html.startswith("<pre") and "background" not in html and "<html" not in html
    assert "font-weight: bold" in html


def test_without_a_notebook_nothing_of_it_is_loaded():
    code = (
        "import sys, headrace.views.screen.terminal as s; assert not s.in_notebook(); print('IPython' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
