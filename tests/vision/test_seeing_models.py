"""Models that see: engine and trainer have the numbers of transformers' own forward pass over the same images."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.models.images import FOLDER, ROWS, KnownImages, source_of
from headrace.models.vision import FAMILIES as FAMILIES_OF
from headrace.models.vision import _prove, language_part, load_whole, make, save_language
from headrace.trainer.model.causal_lm import export_model, load_model
from headrace.trainer.step.reference import frozen
from headrace.trainer.step.trainer import residual_stream
from support import tiny_seeing
from support.few import few
from support.native_calls import drawn, greedy, make_engine, run
from support.tiny_seeing import FAMILIES, inputs, made, picture, prompt, seeing
from support.trainer_calls import gradients, near, trainer

TOLERANCE = 1e-5
IMAGES = [picture(1), picture(2), picture(3, 48, 32)]
ALIKE = {"qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe"}
"""Families that go the way of another one."""
EACH = [pytest.param(family, marks=[pytest.mark.slow] if family in ALIKE else []) for family in FAMILIES]


@cache
def directory_of(family: str) -> Path:
    """The directory that engine and trainer load, with all images; not to be changed."""
    return made(family, IMAGES)


@torch.no_grad()
def told(family, directory, images, tokens: tuple[int, ...], sampled: tuple[int, ...]) -> torch.Tensor:
    """[T, V] log-probs by the whole model, of the positions of `sampled`."""
    known = KnownImages(directory)
    whole = tiny_seeing.seeing(family)
    ids = torch.tensor([known.in_vocabulary((*tokens, *sampled))])
    logits = whole(input_ids=ids, **(inputs(family, images, ids) if images else {})).logits[0]
    return logits[len(tokens) - 1 : -1].log_softmax(-1)


WAYS = [
    pytest.param(family, path, marks=[pytest.mark.slow] if family in ALIKE else [])
    for family in FAMILIES
    for path in ("hf", "cache")
    if path == "cache" or not family.startswith(("qwen3_5", "gemma4"))
]


@pytest.mark.parametrize(("family", "path"), few(WAYS, keep=4))
def test_the_engine_has_the_log_probs_of_the_whole_model(family, path):
    directory = directory_of(family)
    engine = make_engine(directory, path=path, context_length=160)
    asked = {"one": IMAGES[:1], "other": IMAGES[1:2], "both": [IMAGES[2], IMAGES[0]], "none": []}
    requests = [greedy(name, prompt(family, directory, images), 5) for name, images in asked.items()]
    answers = run(engine, requests)
    for request in requests:
        answer = answers[request.id]
        expected = told(family, directory, asked[request.id], request.prompt, answer.tokens)
        assert answer.tokens == expected.argmax(-1).tolist()
        assert torch.tensor(answer.logprobs).sub(expected.max(-1).values).abs().max() < TOLERANCE


@pytest.mark.parametrize("path", ["hf", "cache"])
def test_prompts_that_differ_in_their_image_alone_share_nothing_of_it(path):
    directory = directory_of("smolvlm")
    engine = make_engine(directory, path=path)
    known = KnownImages(directory)
    text = "?" * 40
    first, second = (prompt("smolvlm", directory, [image], text) for image in IMAGES[:2])
    assert known.in_vocabulary(first) == known.in_vocabulary(second), "tokens of the vocabulary are the same"
    run(engine, [greedy("before", first, 3)])
    reused = engine.stats().cached_tokens
    answers = run(engine, [greedy("second", second, 4), *(drawn(str(i), second, seed=i, tokens=4) for i in range(2))])
    expected = told("smolvlm", directory, IMAGES[1:2], second, answers["second"].tokens)
    assert torch.tensor(answers["second"].logprobs).sub(expected.max(-1).values).abs().max() < TOLERANCE
    again = run(engine, [greedy("again", first, 3)])
    assert engine.stats().cached_tokens > reused, "the same image again is found"
    expected = told("smolvlm", directory, IMAGES[:1], first, again["again"].tokens)
    assert torch.tensor(again["again"].logprobs).sub(expected.max(-1).values).abs().max() < TOLERANCE


def test_an_engine_refuses_what_it_has_no_features_of():
    directory, more = made("smolvlm", IMAGES[:1]), directory_of("smolvlm")
    engine = make_engine(directory)
    unknown = prompt("smolvlm", more, IMAGES[2:])
    with pytest.raises(ValueError, match="is not in the model's vocabulary"):
        engine.add(greedy("unknown", unknown))
    with pytest.raises(ValueError, match="have no log-probs"):
        engine.add(greedy("scored", prompt("smolvlm", directory, IMAGES[:1]), prompt_logprobs=True))
    with pytest.raises(ConfigError, match='engine.path = "fused" does not serve llama here: its prompts hold features'):
        make_engine(directory, path="fused")


def test_a_server_is_told_that_a_run_takes_the_model_apart():
    with pytest.raises(ConfigError, match="it sees, and only a run takes its language part apart"):
        make_engine(tiny_seeing.saved("llava"))


def rows(family, directory, rng: random.Random) -> list[tuple[list, Row]]:
    """Rows with the images of each: two rollouts of a prompt with one image, one of the same text with another, one without."""
    made_rows = []
    for images in (IMAGES[:1], IMAGES[:1], IMAGES[1:2], [IMAGES[2], IMAGES[0]], []):
        tokens = tuple(rng.randrange(95) for _ in range(rng.randint(2, 6)))
        count = len(tokens)
        row = Row(
            prompt(family, directory, images),
            tokens,
            tuple(rng.gauss(-4, 0.5) for _ in range(count)),
            (rng.gauss(0, 1),) * count,
            (True,) * count,
            (0,) * count,
        )
        made_rows.append((images, row))
    return made_rows


def expected_gradients(family, directory, given) -> dict[str, torch.Tensor]:
    """By autograd over the whole model, row by row: PPO by its formula, the mean over tokens."""
    whole, known = seeing(family), KnownImages(directory)
    losses = []
    for images, row in given:
        ids = torch.tensor([known.in_vocabulary(row.prompt + row.tokens)])
        logits = whole(input_ids=ids, **(inputs(family, images, ids) if images else {})).logits[0]
        logprobs = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
        for place, token in enumerate(row.tokens):
            ratio = torch.exp(logprobs[place, token] - row.logprobs[place])
            advantage = row.advantages[place]
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    torch.stack(losses).mean().backward()
    trained = {id(tensor): name for name, tensor in whole.named_parameters() if tensor.grad is not None}
    part = language_part(whole)
    by_value = {tensor.data_ptr(): name for name, tensor in part.named_parameters()}
    return {
        by_value[tensor.data_ptr()]: tensor.grad
        for tensor in whole.parameters()
        if id(tensor) in trained and tensor.data_ptr() in by_value
    }


@pytest.mark.parametrize("path", ["torch", "kernels"])
@pytest.mark.parametrize("family", few(EACH, keep=2))
def test_the_trainer_has_the_gradient_of_the_whole_model(family, path):
    directory = directory_of(family)
    given = rows(family, directory, random.Random(5))
    groups = tuple(Group(number, Prompt("p", "", row.prompt), (), (row,)) for number, (_, row) in enumerate(given))
    made_trainer = trainer(directory, path=path)
    shares = "carried states" if family.startswith("qwen3_5") else "packed trees"
    assert made_trainer.path.startswith(f"{shares}, chunked head")
    _, found = gradients(made_trainer, Batch(0, groups, 1.0))
    expected = expected_gradients(family, directory, given)
    assert found.keys() == expected.keys() and len(found) > 15
    # blocks of the delta rule are rounded elsewhere; Gemma 4's gradient in float32 is off by 6e-6 in transformers, too, by the one in float64
    near(found, expected, {"qwen3_5": 5e-5, "qwen3_5_moe": 5e-5}.get(family, 1e-5 if family == "gemma4" else 3e-6))


@pytest.mark.parametrize("family", ["idefics3", "llava"])
def test_prompts_have_the_tokens_of_the_models_own_processor(family):
    """Of the two whose processors do without torchvision; the others are compared by their logits, above."""
    kind = {"idefics3": transformers.Idefics3Processor, "llava": transformers.LlavaProcessor}[family]
    more = {"image_seq_len": 4} if family == "idefics3" else {"patch_size": 8, "vision_feature_select_strategy": "full"}
    for splits in {"idefics3": (False, True), "llava": (False,)}[family]:
        options = {"do_image_splitting": splits} if family == "idefics3" else {}
        own = kind(tiny_seeing.processor(family, **options), tiny_seeing.tokenizer(family), **more)
        shown = [picture(5, 64, 40), IMAGES[0]]
        asked = own(text="<image><image>How many?", images=list(map(tiny_seeing.opened, shown)), return_tensors="pt")
        seen = [
            FAMILIES_OF[family](own.image_processor, seeing(family), own.tokenizer, tiny_seeing.opened(image)).text
            for image in shown
        ]
        tokens = own.tokenizer(f"{''.join(seen)}How many?", add_special_tokens=False)["input_ids"]
        assert asked["input_ids"][0].tolist() == tokens


def test_scores_are_those_of_words_alone():
    directory = directory_of("smolvlm")
    tokens = (*prompt("smolvlm", directory, IMAGES[:1]), 5, 6)
    scores = torch.tensor(trainer(directory).score(tokens))
    words = torch.tensor(tokens[1:]) < len(tiny_seeing.tokenizer("smolvlm"))
    assert scores.isnan().tolist() == (~words).tolist() and not words.all()
    with torch.no_grad():
        logits = load_model(directory, torch.device("cpu"))(input_ids=torch.tensor([tokens])).logits[0, :-1]
    expected = logits.log_softmax(-1)[words, torch.tensor(tokens[1:])[words]]
    assert (scores[words] - expected).abs().max() < TOLERANCE


def test_the_residual_stream_has_the_places_of_images():
    directory = directory_of("qwen2_5_vl")
    tokens = (*prompt("qwen2_5_vl", directory, IMAGES[2:]), 5, 6)
    found = residual_stream(trainer(directory), tokens)
    ids = torch.tensor([KnownImages(directory).in_vocabulary(tokens)])
    with torch.no_grad():
        given = inputs("qwen2_5_vl", IMAGES[2:], ids)
        expected = seeing("qwen2_5_vl")(input_ids=ids, **given, output_hidden_states=True).hidden_states
    assert len(found) == len(expected)
    for own, other in zip(found[:-1], expected, strict=False):  # the last one there is behind the norm
        assert (own - other[0]).abs().max() < TOLERANCE


def test_the_reference_of_a_run_sees_the_same_images():
    """A frozen copy, which shares the table."""
    directory = directory_of("smolvlm")
    model = load_model(directory, torch.device("cpu"))
    copied = frozen(model, torch.float32)
    tokens = torch.tensor([prompt("smolvlm", directory, IMAGES[:1])])
    assert copied.get_input_embeddings().images is model.get_input_embeddings().images
    assert torch.equal(copied(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_a_number_without_a_row_is_refused():
    directory, more = made("smolvlm", IMAGES[:1]), directory_of("smolvlm")
    model = load_model(directory, torch.device("cpu"))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([prompt("smolvlm", more, IMAGES[2:])]))


def test_features_that_are_not_the_whole_models_are_refused():
    directory = made("internvl", IMAGES[:1])
    whole, words = seeing("internvl"), tiny_seeing.tokenizer("internvl")
    seen = FAMILIES_OF["internvl"](tiny_seeing.processor("internvl"), whole, words, tiny_seeing.opened(IMAGES[0]))
    _prove(whole, directory, words, IMAGES[0].digest, seen)
    rows = directory / FOLDER / ROWS
    save_file({name: tensor + 0.1 for name, tensor in load_file(rows).items()}, rows)
    with pytest.raises(ConfigError, match="gives other numbers for a text with an image than the whole model"):
        _prove(whole, directory, words, IMAGES[0].digest, seen)


def test_the_language_part_has_the_dtype_of_its_files_where_that_loses_nothing(tmp_path):
    for family in ("smolvlm", "llava"):  # with a tied head, and with one of its own
        seeing(family).bfloat16().save_pretrained(tmp_path / family)
        tiny_seeing.tokenizer(family).save_pretrained(tmp_path / family)
        save_language(load_whole(tmp_path / family), tmp_path / family, tmp_path / f"{family}-part")
        kept = load_file(tmp_path / f"{family}-part" / "model.safetensors")
        assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
        assert ("lm_head.weight" in kept) == (family == "llava")
        model, expected = load_model(tmp_path / f"{family}-part", torch.device("cpu")), load_whole(tmp_path / family)
        tokens = torch.arange(12)[None]
        assert (model(input_ids=tokens).logits - expected(input_ids=tokens).logits).abs().max() < TOLERANCE


def test_an_export_keeps_the_heads_that_predict_further_tokens(tmp_path):
    given, heads = tmp_path / "given", {"mtp.fc.weight": torch.randn(3, 4)}
    seeing("qwen3_5").save_pretrained(given)
    save_file({**load_file(given / "model.safetensors"), **heads}, given / "model.safetensors", {"format": "pt"})
    tiny_seeing.tokenizer("qwen3_5").save_pretrained(given)
    directory = tmp_path / "work" / "model"
    (directory / FOLDER).mkdir(parents=True)
    make(given, tmp_path, directory, {})
    model = load_model(directory, torch.device("cpu"))
    export_model(model, directory, tmp_path / "out", dtype="float32", whole=model.state_dict().__getitem__)
    before, after = (load_file(path / "model.safetensors") for path in (given, tmp_path / "out"))
    assert before.keys() == after.keys() and all(after[name].equal(before[name]) for name in before)


@pytest.mark.parametrize("family", few(EACH, keep=2))
def test_an_export_is_the_whole_model_with_the_trained_language_part(family, tmp_path):
    directory = directory_of(family)
    assert source_of(directory) == tiny_seeing.saved(family)
    model = load_model(directory, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    saved = model.state_dict()
    export_model(model, directory, tmp_path / "out", dtype="float32", whole=saved.__getitem__)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert type(whole) is type(seeing(family)) and not (tmp_path / "out" / FOLDER).exists()
    assert (tmp_path / "out" / "preprocessor_config.json").exists() and (tmp_path / "out" / "tokenizer.json").exists()
    tokens = prompt(family, directory, IMAGES[:1])
    ids = torch.tensor([KnownImages(directory).in_vocabulary(tokens)])
    with torch.no_grad():
        expected = whole(input_ids=ids, **inputs(family, IMAGES[:1], ids)).logits
        assert (model(input_ids=torch.tensor([tokens])).logits - expected).abs().max() < TOLERANCE
        before = seeing(family)(input_ids=ids, **inputs(family, IMAGES[:1], ids)).logits
        assert (before - expected).abs().max() > 0.01
