"""What ends a completion: one truth for engines, rewards, teachers and exports, whatever the files say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import headrace
from headrace.core.types import Completion, VersionSpan
from headrace.facts.facts import GroupEnded
from headrace.models.chat import ChatEncoder
from headrace.models.tokenizer import end_tokens, name_all
from support.checkpoints import CHATML, edit, save_tokenizer, save_weights
from support.tiny_run import of, tiny_config

LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|stop|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
SPACED = "{% for m in messages %}[INST] {{ m['content'] }} [/INST] </s>{% endfor %}"
PLAIN = "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}### assistant:{% endif %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
BROKEN = "{{ raise_exception('nobody may use this') }}"
SHOUTING = "{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}"

CASES = {
    "a config of the base model, a template of a fine-tuned one": (CHATML, None, 0, {0, 2}, 2),
    "both agree": (CHATML, None, 2, {2}, 2),
    "a template that trims and writes a start token": (
        LLAMA,
        ("<s>", "<|start|>", "<|stop|>", "<|eot|>", "<|end|>"),
        [4],
        {3, 4},
        3,
    ),
    "a space before the end": (SPACED, ("<s>", "</s>"), 1, {1}, 1),
    "an end of a message that is no end of a turn": (
        HARMONY,
        ("<|end|>", "<|start|>", "<|message|>", "<|return|>", "<|call|>"),
        [3, 4],
        {3, 4},
        3,
    ),
    "plain text behind an answer": (PLAIN, None, 0, {0}, 0),
    "no template": (None, None, 0, {0}, 0),
    "no template, and the tokenizer's end is one of the config's": (None, None, [0, 2], {0, 2}, 2),
    "a template that refuses everything": (BROKEN, None, 0, {0}, 0),
    "a template that changes what is said": (SHOUTING, None, 0, {0}, 0),
    "nothing but a template": (CHATML, None, None, {2}, 2),
}


@pytest.mark.parametrize(("template", "specials", "named", "ends", "written"), CASES.values(), ids=CASES)
def test_one_truth_about_ends(
    tmp_path: Path, template: str | None, specials: tuple[str, ...] | None, named: object, ends: set[int], written: int
):
    more = {"specials": specials, "eos": specials[-1]} if specials else {}
    if specials and "<s>" in specials:
        more |= {"bos": "<s>", "eos": specials[1]}
    save_weights(save_tokenizer(tmp_path, template, **more), ends=named, generation=named)
    encoder = ChatEncoder(tmp_path)
    assert end_tokens(tmp_path) == encoder.end_tokens() == ends
    assert encoder.encode_completion("a", ended=True)[-1] == written
    assert written not in encoder.encode_completion("a", ended=False)
    name_all(tmp_path)
    assert ends == set(encoder_of_files(tmp_path)), (
        "another engine, which knows no template, reads the same from an export"
    )


def encoder_of_files(directory: Path) -> frozenset[int]:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    return ChatEncoder(directory).endings.named


def test_ends_are_read_once_for_a_fleet_and_anew_where_a_file_has_changed(tmp_path: Path) -> None:
    save_weights(save_tokenizer(tmp_path), ends=0)
    assert end_tokens(tmp_path) is end_tokens(tmp_path)
    edit(tmp_path / "config.json", eos_token_id=[0, 4])
    os.utime(tmp_path / "config.json", ns=(1, 1))  # however coarse the clock of the file system is
    assert end_tokens(tmp_path) == {0, 2, 4}


def test_only_an_end_that_the_model_wrote_is_one(tmp_path: Path) -> None:
    encoder = ChatEncoder(save_weights(save_tokenizer(tmp_path), ends=0))

    def ended(stop: str, *tokens: int) -> bool:
        return encoder.has_ended(Completion(tokens, (0.0,) * len(tokens), (VersionSpan(0, 0, 0),), stop, ""))  # type: ignore[arg-type]

    assert ended("stop", 40, 2) and ended("stop", 40, 0)
    assert not ended("stop", 40, 41), "a stop string"
    assert not ended("length", 40, 2) and not ended("stop")


def test_rewards_see_special_tokens_but_never_the_end(tmp_path: Path) -> None:
    shows = ChatEncoder(save_weights(save_tokenizer(tmp_path), ends=0))
    tokens = (*shows.encode_completion("<think>so</think> 4", ended=True), 0)
    assert shows.decode(tokens) == "<think>so</think> 4"
    assert shows.with_special_tokens("hide").decode(tokens) == "so 4"
    assert shows.decode(tokens) == "<think>so</think> 4", "the encoder that it was made of is as it was"


@pytest.mark.slow
def test_a_model_that_ends_as_its_template_does_ends_in_the_engine(tmp_path: Path) -> None:
    """It writes `<|im_end|>` at once, and its config names `<|endoftext|>`: it was sampled on to rollout.max_tokens."""
    import torch
    from safetensors.torch import load_file, save_file

    model = save_weights(save_tokenizer(tmp_path / "model"), tied=False, ends=0, generation=0)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 6.0
    weights["lm_head.weight"] *= 0.01
    weights["lm_head.weight"][2, 0] = 5.0
    save_file(
        {name: torch.clone(weight) for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"}
    )
    config = tiny_config(tmp_path, model, train={"steps": 1, "learning_rate": 1e-9}, rollout={"max_tokens": 32})
    (tmp_path / "counts.py").write_text(
        "def counts(completions, **columns):\n    return [float(n) for n in range(len(completions))]\n"
    )
    config |= {"reward": {"function": f"{tmp_path / 'counts.py'}:counts"}}
    headrace.train(config)
    ended = of(tmp_path / "runs" / "tiny", GroupEnded)
    assert ended and all(set(one.lengths) == {1} and not one.truncated for one in ended), ended[0]
