"""The warm start: what is trained of a row or of a pair, what is refused, and whole runs that begin with one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headrace
from headrace.algo.config import AlgoConfig
from headrace.algo.policy.pairs import PairLoss, Side
from headrace.algo.recipes import RECIPES
from headrace.core.errors import ConfigError
from headrace.episodes.tasks import demonstrations
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import Demonstrations, Preference, WarmStartConfig, read_demonstrations
from headrace.facts.facts import Evaluated, WarmStarted, WeightsLive
from headrace.facts.records import StepRow
from headrace.models.chat import ChatEncoder
from headrace.run import warm_start as warm
from headrace.run.config import load_config, read_config
from headrace.run.rehearse import try_files
from headrace.settings.toml import build
from headrace.trainer.config import TrainConfig
from headrace.trainer.dealing.share import head_of
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.whole_step import pairs_of
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
        ([{"prompt": "1?", "answer": "one<user>"}], {}, "holds <user>, by which the chat template begins or ends a turn", [ROW], {}),
        ([{"prompt": "1?", "answer": "ÖNE"}], {}, "has no token for, and would teach the model to write <unk>", [ROW], {}),
        ([{"prompt": [TALK[0], {**TALK[1], "weight": 0}]}], {"answer": ""}, "not to be trained", [{"prompt": TALK}], {}),
        ([{"prompt": [TALK[0], {**TALK[1], "train": False}]}], {"answer": ""}, "not to be trained", [{"prompt": TALK}], {}),
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


def test_an_end_that_stands_for_unknown_characters_too_is_trained_as_an_end(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    """GPT-2 and its kin have one token for both, and tokens for all bytes."""
    model = tmp_path / "model"
    shutil.copytree(tiny_tokenizer, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": "<end>"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    encoder = ChatEncoder(model)
    assert encoder.unknown == 2 and given(tmp_path, [ROW], model).trained[0].answer[-1] == 2


# -- pairs --------------------------------------------------------------------------------------------------------------------

PAIRS = [
    {"prompt": f"{a} and {b}?", "answer": f"{b} then {a}", "rejected": f"{b} or {a}."} for a in "123" for b in "ab"
]
PAIR, DPO = {"prompt": "1?", "answer": "one", "rejected": "two"}, {"loss": "dpo"}


def preferring(model: Any, reference: Any, pairs: Demonstrations, beta: float) -> torch.Tensor:
    """DPO as one would write it down (arXiv 2305.18290, eq. 7): each answer by itself, and sums over its tokens."""

    def likelihood(model: Any, prompt: Any, answer: Any) -> torch.Tensor:
        logprobs = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(answer)[:, None]).sum()

    def gain(prompt: Any, answer: Any) -> torch.Tensor:
        with torch.no_grad():
            before = likelihood(reference, prompt, answer)
        return likelihood(model, prompt, answer) - before

    margins = [gain(one.prompt, one.answer) - gain(one.prompt, one.rejected) for one in pairs.trained]
    return -torch.nn.functional.logsigmoid(beta * torch.stack(margins)).mean()


@pytest.mark.parametrize("tokens", [24, 2048])
def test_the_gradient_of_pairs_is_that_of_dpo_against_the_model_before(
    tmp_path: Path, tiny_llama: Path, tokens: int
) -> None:
    """Also where the two answers of a pair lie in different microbatches, and where they begin alike."""
    pairs = given(tmp_path, PAIRS, tiny_llama, loss="dpo", pair_beta=0.7, epochs=2)
    train = TrainConfig(
        dtype="float32", device="cpu", microbatch_tokens=tokens, path="torch", learning_rate=0.01, steps=2
    )
    trainer = TorchTrainer(tiny_llama, train, AlgoConfig("dpo", pair_beta=0.7), 0)
    first, second = pairs.batches("")
    report = trainer.step(first)
    assert report.pairs == len(PAIRS) and report.loss == pytest.approx(0.693147, abs=1e-5)
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64) for _ in range(2))
    policy.load_state_dict({name: one.detach().double() for name, one in trainer._model.state_dict().items()})
    loss = preferring(policy, reference, pairs, 0.7)
    loss.backward()
    sums = trainer._gradient(1.0, pairs=pairs_of(head_of(second))).fill(trainer._plans(second)[0])
    assert float(loss.detach()) < 0.6 and sums.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    found = {name: parameter.grad for name, parameter in trainer._model.named_parameters()}
    for name, parameter in policy.named_parameters():
        assert torch.allclose(found[name].double(), parameter.grad, atol=2e-6, rtol=1e-4), name


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.loss.pairs])
def test_a_warm_start_has_every_constant_of_its_loss_of_pairs(tmp_path: Path, name: str) -> None:
    """And the trainer gets each, and another value of any makes another warm start."""
    reads = RECIPES[name].loss.reads()
    assert {constant for constant, losses in demonstrations._CONSTANTS.items() if name in losses} == set(reads)
    values = {constant: 0.3 + place / 100 for place, constant in enumerate(reads) if constant != "pair_flips"}
    configs = [
        load_config(tiny_config(tmp_path, tmp_path, warm_start={"path": "pairs.jsonl", "loss": name, **own}))
        for own in (values, *({**values, constant: 0.2} for constant in values))
    ]
    given_to_trainer = warm._algorithm(configs[0].warm_start).recipe.loss.constants()
    assert {"pair_flips": 0.0, **given_to_trainer} == {"pair_flips": 0.0, **values}
    pairs = Demonstrations(
        trained=[Preference((1,), (2,), rejected=(3,))], held_out=[], seed=0, epochs=1, rows_per_step=1
    )
    marks = [
        warm._mark(config, warm.train_config(config.warm_start, config.train, 1, adapted=False), pairs)
        for config in configs
    ]
    assert len(set(marks)) == len(configs)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.loss.pairs])
def test_every_loss_of_pairs_has_rows_and_is_measured_without_torch_as_with_it(name: str) -> None:
    loss = AlgoConfig(build(WarmStartConfig, {"path": "x", "loss": name}).loss).recipe.loss
    assert isinstance(loss, PairLoss)
    lists = (
        [[-3.0, -9.0, -40.0], [-4.0, -4.0, -30.0], [3.0, 2.0, 7.0]],
        [[-5.0, -3.0, -2.0], [-4.0, -5.0, -2.5], [4.0, 2.0, 9.0]],
    )
    arrays, tensors = (
        [Side(*map(make, side)) for side in lists] for make in (np.array, lambda x: torch.tensor(x).double())
    )
    for measured in (loss.of_pairs, loss.margin):
        assert isinstance(measured(*arrays), np.ndarray)
        assert measured(*arrays) == pytest.approx(measured(*tensors).numpy(), abs=1e-12)


def test_a_pair_is_read_from_texts_and_from_conversations(tmp_path: Path, tiny_llama: Path) -> None:
    (apart,) = given(tmp_path, [PAIR], tiny_llama, **DPO).trained
    talks = {"chosen": TALK, "rejected": [TALK[0], {**TALK[1], "content": "two"}]}
    (whole,) = given(tmp_path, [talks], tiny_llama, prompt="chosen", answer="", **DPO).trained
    text = ChatEncoder(tiny_llama).written
    assert isinstance(apart, Preference) and apart == whole
    assert (text(apart.answer), text(apart.rejected)) == ("one<end>", "two<end>")
    one, other, better = (
        given(tmp_path, [row], tiny_llama, **DPO) for row in (PAIR, {**PAIR, "rejected": "six"}, PAIR)
    )
    assert one.digest == better.digest != other.digest


@pytest.mark.parametrize(
    ("rows", "settings", "words", "remedied", "remedy"),
    [
        ([PAIR], {}, "row 1: its column rejected holds a worse answer, which warm_start.loss = ce does not read", [], DPO),
        ([PAIR], {}, 'or warm_start.rejected = "" to train the answers alone', [], {"rejected": ""}),
        ([ROW], DPO, r"row 1: there is no column rejected \(warm_start.rejected\)", [], {"loss": "ce"}),
        ([{**PAIR, "rejected": "one"}, PAIR], DPO, "row 1: its two answers are equal", [PAIR], {}),
        ([{**PAIR, "rejected": ""}], DPO, "row 1: in column rejected, its answer is empty, or no text", [PAIR], {}),
        ([{**PAIR, "rejected": "two<end>"}], DPO, "in column rejected, its answer holds a token that ends answers", [PAIR], {}),
        ([{**PAIR, "rejected": "two" * 20}], DPO, r"in column rejected, it has 66 tokens .* engine.context_length = 64", [], {"context": 66}),
        ([{"prompt": "2?", "answer": "one", "rejected": TALK}], DPO, "in column rejected, its conversation asks something else", [PAIR], {}),
        ([{**PAIR, "rejected": TALK[1:]}], DPO, "write that answer as a text", [{**PAIR, "rejected": "two"}], {}),
        ([{**PAIR, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}], DPO, "is an image; .* or remove such rows", [PAIR], {}),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_be_trained_is_refused_and_the_remedy_helps(
    tmp_path: Path, tiny_llama: Path, rows: list[Any], settings: Config, words: str, remedied: list[Any], remedy: Config
) -> None:
    with pytest.raises(ConfigError, match=words):
        given(tmp_path, rows, tiny_llama, **settings)
    assert given(tmp_path, remedied or rows, tiny_llama, **{**settings, **remedy}).trained


@pytest.mark.parametrize(
    ("settings", "words", "remedy"),
    [
        ({"loss": "kto"}, 'kto learns from single answers .*; use "dpo" or another', {"loss": "dpo"}),
        ({"loss": "ipo"}, "ipo is a loss of tokens; the preference loss of that name is ipo_pairs", {"loss": "ipo_pairs"}),
        ({"loss": "grpo"}, "warm_start.loss", DPO),
        ({"loss": "dpo", "rejected": ""}, "name the column with the worse one", {"rejected": "worse"}),
        ({"rejected": "worse"}, "warm_start.loss = ce compares none", DPO),
        ({"pair_beta": 0.5}, "warm_start.pair_beta is a constant of pairs", DPO),
        ({"pair_nll": 0.5}, "warm_start.pair_nll is a constant of pairs", {"loss": "cpo"}),
        ({"loss": "dpo", "pair_margin": 0.5}, "pair_margin is a constant of simpo, and warm_start.loss = dpo has none", {"loss": "simpo"}),
        ({"loss": "orpo", "pair_nll": 1.0}, "pair_nll is a constant of dpo and cpo, and warm_start.loss = orpo", {"loss": "cpo"}),
        ({"loss": "dpo", "pair_smoothing": 0.1, "pair_flips": 0.1}, "two answers to wrong preferences", {"pair_flips": 0.0}),
        ({"loss": "dpo", "pair_flips": 0.5}, "warm_start.pair_flips", {"pair_flips": 0.4}),
    ],
)  # fmt: skip
def test_settings_of_pairs_that_do_not_go_together_are_refused(
    tmp_path: Path, settings: Config, words: str, remedy: Config
) -> None:
    def loaded(own: Config) -> WarmStartConfig:
        return load_config(tiny_config(tmp_path, tmp_path, warm_start={"path": "pairs.jsonl", **own})).warm_start

    with pytest.raises(ConfigError, match=words):
        loaded(settings)
    assert loaded({**settings, **remedy}).paired


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


@pytest.mark.whole
@pytest.mark.parametrize("lora", [{}, pytest.param({"rank": 4}, marks=pytest.mark.slow)])
def test_a_run_prefers_the_chosen_answers_and_goes_on_from_there(
    tmp_path: Path, tiny_llama: Path, lora: Config
) -> None:
    rows = [{"prompt": f"{i} + {i}?", "answer": "eeee", "rejected": "oooo"} for i in range(40)]
    warm = {"path": written(tmp_path, rows), "held_out": 8, "epochs": 2, "rows_per_step": 16, "learning_rate": 1e-2}
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 1, "threads": 1, "path": "torch"}, lora=lora)
    config = {**config, "warm_start": {**warm, "loss": "dpo"}, "eval": {"prompts": 0}}
    found = asyncio.run(try_files(load_config(config)))
    lines = dict(found.sections["Warm start"])
    assert not found.problems and lines["loss"].startswith("dpo, of pairs (pair_beta = 0.1")
    assert lines["trained"] == "eeee<end>" and lines["rejected"] == "oooo<end>"
    run = headrace.train(config).directory
    (done,) = of(run, WarmStarted)
    assert done.loss == "dpo" and done.rows == 32 and done.steps == len(done.losses) == 4 and done.tokens == 2 * 32 * 10
    assert done.losses[0] == pytest.approx(0.6931, abs=1e-3) and done.held_out[0] == pytest.approx(0.6931, abs=1e-4)
    assert done.agreed[0] == 0.5 and done.agreed[-1] == 1.0 and done.held_out[-1] < 0.6
    assert "a pair (dpo), of the held-out pairs 50% → 100% agree" in done.words
    own = read_config(run / "config.toml")
    kept, before = (AutoModelForCausalLM.from_pretrained(path) for path in (own.model.path, tiny_llama))
    pairs = read_demonstrations(own.warm_start, own.task, ChatEncoder(tiny_llama), seed=0, context=64)
    held = dataclasses.replace(pairs, trained=pairs.held_out)
    assert float(preferring(kept, before, held, 0.1).detach()) == pytest.approx(done.held_out[-1], abs=1e-4)
    assert "Warm start: loss of the pairs, a pair (dpo)" in (run / "report.html").read_text()
    with pytest.raises(ConfigError, match=r"warm_start.loss"):
        headrace.train(config, resume=run, sets=["warm_start.loss=simpo"])


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
