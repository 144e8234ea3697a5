"""The warm start: what is trained of a row, what is refused, and whole runs that begin with one."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headrace
from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import Demonstrations, WarmStartConfig, read_demonstrations
from headrace.facts.facts import Evaluated, WarmStarted, WeightsLive
from headrace.facts.records import StepRow
from headrace.models.chat import ChatEncoder
from headrace.run.config import load_config, read_config
from headrace.run.rehearse import try_files
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer
from support.tiny_run import Config, kill_when, of, tiny_config
from support.tool_chats import PLAIN, save_tokenizer

NUMBERS = [{"prompt": f"{a} and {b}?", "answer": f"{b} then {a}"} for a in "123456789" for b in "abcdef"]


def written(directory: Path, rows: list[Any], name: str = "answers.jsonl") -> str:
    path = directory / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def given(
    directory: Path, rows: list[Any], model: Path, context: int = 64, template: Config | None = None, **settings: Any
) -> Demonstrations:
    config = WarmStartConfig(**{"path": written(directory, rows), "held_out": 0, **settings})
    task = TaskConfig(kind="jsonl", path="x", template=template or {})
    return read_demonstrations(config, task, ChatEncoder(model).using(task.rendering), seed=0, context=context)


def loss_of(model: Any, rows: Demonstrations, held_out: bool = False) -> torch.Tensor:
    """Cross-entropy as one would write it down: padded rows, prompts masked, the mean over the tokens of all answers."""
    ones = rows.held_out if held_out else rows.trained
    width = max(len(one.tokens) for one in ones)
    tokens, wanted, there = (torch.zeros(len(ones), width, dtype=torch.long) for _ in range(3))
    wanted -= 100
    for at, one in enumerate(ones):
        count, begin = len(one.tokens), len(one.prompt)
        tokens[at, :count], there[at, :count] = torch.tensor(one.tokens), 1
        wanted[at, begin:count] = torch.tensor(one.answer)
    logits = model(input_ids=tokens, attention_mask=there).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-100)


# -- rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 2048])
def test_the_gradient_is_that_of_cross_entropy_on_the_tokens_of_the_answers(
    tmp_path: Path, tiny_llama: Path, tokens: int
) -> None:
    """Also where the rows of a step are split over many microbatches, and where prompts begin alike."""
    rows = given(tmp_path, [*NUMBERS[:5], {"prompt": "1 and a?", "answer": "a longer answer, at last"}], tiny_llama)
    train = TrainConfig(dtype="float32", device="cpu", microbatch_tokens=tokens, path="torch")
    trainer = TorchTrainer(tiny_llama, train, AlgoConfig("ce"), 0)
    (batch,) = rows.batches("")
    sums = trainer._gradient(batch.temperature).fill(trainer._plans(batch)[0])
    found = {name: parameter.grad for name, parameter in trainer._model.named_parameters()}
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    loss = loss_of(plain, rows)
    loss.backward()
    assert sums.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    assert sums.tokens == sum(len(one.answer) for one in rows.trained)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(found[name].double(), parameter.grad, atol=1e-6, rtol=1e-4), name


def test_a_row_is_the_prompt_of_the_task_and_the_answer_with_its_end(tmp_path: Path, tiny_llama: Path) -> None:
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so?"},
    ]
    rows = [{"messages": [*said, {"role": "assistant", "content": "fine"}], "other": 1}]
    whole = given(tmp_path, rows, tiny_llama, prompt="messages", answer="").trained
    apart = given(tmp_path, [{"prompt": said, "answer": "fine"}], tiny_llama).trained
    text = ChatEncoder(tiny_llama).written
    for (one,) in (whole, apart):
        assert text(one.prompt) == "<user>hi<end><assistant>yes<end><user>so?<end><assistant>"
        assert text(one.answer) == "fine<end>"


def test_every_row_is_trained_once_an_epoch_and_held_out_questions_never(tmp_path: Path, tiny_llama: Path) -> None:
    twice = [*NUMBERS, *NUMBERS]
    rows = given(tmp_path, twice, tiny_llama, held_out=6, epochs=2, rows_per_step=7)
    asked = {one.prompt for one in rows.held_out}
    assert rows.held_out and len(rows.trained) == len(twice) - 2 * len(asked)
    batches = list(rows.batches("policy"))
    assert len(batches) == rows.steps == 2 * rows.steps_of_epoch and [batch.step for batch in batches] == list(
        range(rows.steps)
    )
    epochs = [batches[: rows.steps_of_epoch], batches[rows.steps_of_epoch :]]
    seen = [[(row.prompt, row.tokens) for batch in epoch for row in batch.rows] for epoch in epochs]
    wanted = sorted((one.prompt, one.answer) for one in rows.trained)
    assert sorted(seen[0]) == sorted(seen[1]) == wanted and seen[0] != seen[1]
    assert not asked & {prompt for prompt, _ in seen[0]}
    again = given(tmp_path, twice, tiny_llama, held_out=6, epochs=2, rows_per_step=7)
    assert list(again.batches("policy")) == batches and again.digest == rows.digest


ROW = {"prompt": "1?", "answer": "one"}
TALK = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]


@pytest.mark.parametrize(
    ("rows", "settings", "words", "remedied", "remedy"),
    [
        ([{"prompt": "1?", "anwser": "one"}], {}, r"row 1: there is no column answer \(warm_start.answer\); did", [], {"answer": "anwser"}),
        ([ROW, {"prompt": "1?", "answer": " "}], {}, "row 2: its answer is empty", [ROW], {}),
        ([ROW, {"prompt": "1?", "answer": 1}], {}, "row 2: its answer is empty, or no text", [ROW], {}),
        ([{"prompt": "1?", "answer": "one<end>"}], {}, "holds a token that ends answers", [ROW], {}),
        ([{"prompt": "1?" * 40, "answer": "one"}], {}, r"row 1: it has 87 tokens .* engine.context_length = 64", [], {"context": 87}),
        ([ROW, ROW], {"held_out": 2}, "held_out = 2 keeps back all of the 2 rows", [], {"held_out": 0}),
        ([ROW, ROW], {"held_out": 1}, "have the question of a held-out row", [], {"held_out": 0}),
        ([{"prompt": TALK[:1]}], {"answer": ""}, "ends with the assistant's answer", [{"prompt": TALK}], {}),
        ([{"prompt": "1?", "answer": "one"}], {"kind": "parquet"}, "set warm_start.kind to what it is", [], {"kind": "jsonl"}),
        ([], {}, "holds no rows", [ROW], {}),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_is_refused_and_the_remedy_helps(
    tmp_path: Path, tiny_llama: Path, rows: list[Any], settings: Config, words: str, remedied: list[Any], remedy: Config
) -> None:
    with pytest.raises(ConfigError, match=words):
        given(tmp_path, rows, tiny_llama, **settings)
    assert given(tmp_path, remedied or rows, tiny_llama, **{**settings, **remedy}).trained


OPENS = PLAIN.replace("assistant\n", "assistant\n{% if enable_thinking is not defined %}<think>\n{% endif %}")
THOUGHT = [TALK[0], {**TALK[1], "reasoning_content": "hm"}]


@pytest.mark.parametrize(
    ("row", "settings", "words", "remedied", "remedy"),
    [
        (ROW, {}, "its answer does not end it", {**ROW, "answer": "hm\n</think>\n\none"}, {}),
        (ROW, {}, "turn thinking off", ROW, {"template": {"enable_thinking": False}}),
        ({**ROW, "answer": "<think>\nhm\n</think>\none"}, {}, "has written before it already", {**ROW, "answer": "hm\n</think>\none"}, {}),
        ({"prompt": THOUGHT}, {"answer": ""}, "has reasoning_content beside its text", {"prompt": [TALK[0], {**TALK[1], "content": "hm</think>one"}]}, {}),
    ],
)  # fmt: skip
def test_an_answer_that_would_be_learned_within_a_thought_or_without_one_is_refused(
    tmp_path: Path, row: Config, settings: Config, words: str, remedied: Config, remedy: Config
) -> None:
    assert OPENS != PLAIN
    model = save_tokenizer(tmp_path / "model", OPENS)
    with pytest.raises(ConfigError, match=words):
        given(tmp_path, [row], model, **settings)
    (one,) = given(tmp_path, [remedied], model, **{**settings, **remedy}).trained
    whole = ChatEncoder(model).written(one.tokens)
    assert whole.count("<think>") == whole.count("</think>") == (0 if remedy else 1)


def test_a_model_without_an_end_of_answers_is_refused_and_naming_one_helps(tmp_path: Path, tiny_llama: Path) -> None:
    model = tmp_path / "endless"
    shutil.copytree(tiny_llama, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((model / name).read_text())
        settings |= {key: None for key in settings if key.startswith("eos_token")}
        (model / name).write_text(json.dumps(settings))
    (model / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="add eos_token_id to its generation_config.json"):
        given(tmp_path, [ROW], model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (one,) = given(tmp_path, [ROW], model).trained
    assert one.answer[-1] == 2


# -- settings -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"orchestration": {"bus": "jsonl:bus"}}, "parts elsewhere"),
        ({"engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}}, "servers at engine.urls"),
        ({"algo": {"kl": {"coef": 0.1, "place": "reward"}}}, "the engine of a reference"),
        ({"lora": {"rank": 4, "quantise": "int8"}}, "lora.quantise is rounded"),
        ({"task": {"examples": 2}}, "task.examples shows"),
        ({"train": {"minutes": 3.0}}, "train.minutes does not count"),
        (
            {"lora": {"rank": 4}, "adapters": [{"name": "a"}, {"name": "b"}]},
            "warm_start and demonstrations are for one policy",
        ),
        ({"warm_start": {"path": "", "epochs": 3}}, "warm_start.path is missing"),
        ({"warm_start": {"held_out": 0, "held_out_path": "more.jsonl"}}, "measures no row of warm_start.held_out_path"),
    ],
)
def test_what_does_not_go_with_a_warm_start_is_refused(tmp_path: Path, tables: Config, words: str) -> None:
    config = tiny_config(tmp_path, tmp_path, warm_start={"path": written(tmp_path, NUMBERS)})
    for name, table in tables.items():
        config[name] = {**config.get(name, {}), **table} if isinstance(table, dict) else table
    with pytest.raises(ConfigError, match=words):
        load_config(config)


def test_the_rehearsal_shows_a_row_as_tokens_and_counts_them(tmp_path: Path, tiny_llama: Path) -> None:
    warm = {"path": written(tmp_path, NUMBERS), "held_out": 4, "epochs": 3, "rows_per_step": 25}
    found = asyncio.run(try_files(load_config(tiny_config(tmp_path, tiny_llama, warm_start=warm))))
    assert not found.problems
    lines = dict(found.sections["Warm start"])
    assert lines["steps"] == "6, of 25 rows; 3 x 50 rows with 450 tokens in their answers"
    assert lines["rate"].startswith("1e-05 at most, cosine")
    assert lines["context"].endswith("?<end><assistant>") and lines["trained"].endswith("<end>")
    assert "masked, then" in lines["as tokens"] and lines["as tokens"].endswith(" 2")
    bad = {**warm, "path": written(tmp_path, [ROW, {"prompt": "2?"}], "bad.jsonl")}
    found = asyncio.run(try_files(load_config(tiny_config(tmp_path, tiny_llama, warm_start=bad))))
    (problem,) = found.problems
    assert "bad.jsonl, row 2: there is no column answer" in problem


# -- runs ---------------------------------------------------------------------------------------------------------------------


def warm_config(directory: Path, model: Path, **tables: Any) -> Config:
    """Answers of nothing but e, which the reward is for."""
    rows = [{"prompt": f"{i} + {i}?", "answer": "eeee"} for i in range(80)]
    warm = {"path": written(directory, rows), "held_out": 16, "epochs": 6, "rows_per_step": 16, "learning_rate": 1e-2}
    config = tiny_config(directory, model, train={"steps": 2, "threads": 1, "path": "torch"}, warm_start=warm)
    return {**config, "eval": {"prompts": 8}, **tables}


def test_a_run_learns_the_answers_and_goes_on_from_there(tmp_path: Path, tiny_llama: Path) -> None:
    """Also after a kill of what it has done since: a finished warm start is never repeated."""
    config = warm_config(tmp_path, tiny_llama, algo={"kl": {"coef": 0.01}})
    run = headrace.train(config).directory
    (done,) = of(run, WarmStarted)
    assert done.steps == 24 and done.rows == 64 and done.held_out_rows == 16 and done.tokens == 6 * 64 * 5
    assert done.held_out[-1] < 0.3 * done.held_out[0] and len(done.held_out) == 7
    assert done.losses[-1] < 0.3 * done.losses[0] and done.losses[0] == pytest.approx(done.held_out[0], rel=0.05)
    own = read_config(run / "config.toml")
    assert Path(own.model.path) == run.absolute() / "warm_start" / tiny_llama.name
    kept = AutoModelForCausalLM.from_pretrained(own.model.path, dtype=torch.float32)
    rows = read_demonstrations(own.warm_start, own.task, ChatEncoder(tiny_llama), seed=0, context=64)
    assert float(loss_of(kept, rows, held_out=True).detach()) == pytest.approx(done.held_out[-1], abs=1e-4)
    before, after = of(run, Evaluated)
    assert before.reward_mean > 0.5, "it says e before the first step of the run; without, 0.02 of what it says"
    first, second = of(run, StepRow)
    assert first.report.version == 1 and first.report.reference_kl == pytest.approx(0, abs=1e-6), (
        "the reference is warm"
    )
    assert second.report.reference_kl > 1e-7 and after.reward_mean > 0.5
    assert [fact.update.version for fact in of(run, WeightsLive)] == [0, 1, 2]
    seal = (run / "warm_start" / "warm_start.json").stat()
    with pytest.raises(ConfigError, match=r"warm_start.epochs"):
        headrace.train(config, resume=run, sets=["warm_start.epochs=7"])
    Path(config["warm_start"]["path"]).unlink()  # nobody reads them again
    again = headrace.train(config, resume=run, sets=["train.steps=3"])
    assert again.step == 3 and len(of(run, WarmStarted)) == 1
    assert (run / "warm_start" / "warm_start.json").stat() == seal
    assert "Warm start: loss of the answers" in (run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"rank": 4}, {"rank": 4, "publish": "merged"}])
def test_a_warm_start_that_is_killed_begins_again_bit_for_bit(tmp_path: Path, tiny_llama: Path, lora: Config) -> None:
    def config(name: str) -> Config:
        more = {"lora": lora} if lora else {}
        own = warm_config(tmp_path, tiny_llama, name=name, **more)
        own["train"]["steps"] = 1
        return {**own, "eval": {"prompts": 0}}

    whole = headrace.train(config("whole")).directory
    killed = tmp_path / "runs" / "killed"
    endless = config("killed")
    endless["warm_start"] = {**endless["warm_start"], "epochs": 10000}
    kill_when(endless, lambda: (killed / "warm_start.part").exists())
    assert not (killed / "warm_start").exists() and not (killed / "config.toml").exists()
    headrace.train(config("killed"))
    assert not (killed / "warm_start.part").exists()
    (one,), (other,) = of(whole, WarmStarted), of(killed, WarmStarted)
    assert (one.losses, one.held_out, one.mark) == (other.losses, other.held_out, other.mark)
    weights = [load_file(run / "warm_start" / tiny_llama.name / "model.safetensors") for run in (whole, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])
    assert one.losses[-1] < one.losses[0]


@pytest.mark.slow
def test_a_run_that_is_killed_after_its_warm_start_does_not_repeat_it(tmp_path: Path, tiny_llama: Path) -> None:
    config = warm_config(tmp_path, tiny_llama)
    run = tmp_path / "runs" / "tiny"
    config["train"]["steps"] = 10000
    kill_when(config, lambda: (run / "config.toml").exists())
    seal = (run / "warm_start" / "warm_start.json").stat()
    config["train"]["steps"] = 1
    result = headrace.train(resume=run, sets=["train.steps=1"])
    assert result.step == 1 and (run / "warm_start" / "warm_start.json").stat() == seal
    assert len(of(run, WarmStarted)) == 1
    for path in run.iterdir():  # as if it had been killed before it wrote anything else
        if path.name != "warm_start":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert headrace.train(config).step == 1
    assert (run / "warm_start" / "warm_start.json").stat() == seal and len(of(run, WarmStarted)) == 1
    shutil.rmtree(run / "journal"), (run / "metrics.jsonl").unlink()
    config["warm_start"]["epochs"] = 1
    assert headrace.train(config).step == 1
    assert (run / "warm_start" / "warm_start.json").stat() != seal, "with other settings it is another one"
