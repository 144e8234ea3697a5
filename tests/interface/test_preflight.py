"""The preflight: each contradiction in a model's files is found before anything is loaded, and its remedy is followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_endings import LLAMA

import headrace
from headrace.cli import main
from headrace.core.chat.messages import Rendering
from headrace.core.errors import ConfigError, IdentityError
from headrace.core.reports import Finding
from headrace.core.types import Prompt
from headrace.models.chat import ChatEncoder
from headrace.models.lora import LoraConfig
from headrace.run.rehearsal.first_rows import sight_of
from headrace.run.rehearsal.preflight import preflight
from headrace.views.screen.console import Console
from headrace.views.screen.preflight_view import show_preflight
from support.checkpoints import CHATML, SIZE, edit, save_tokenizer, save_weights
from support.tiny_run import tiny_config


def looked_at(directory: Path, **more: Any) -> dict[str, Finding]:
    return {one.what: one for one in preflight(ChatEncoder(directory), **more)}


def sound(directory: Path, **more: Any) -> Path:
    return save_weights(save_tokenizer(directory), **more)


def trains(directory: Path, model: Path, **tables: Any) -> None:
    """A run of one step, to its end."""
    train = {"steps": 1, "learning_rate": 1e-6, "dtype": "float32"}
    config = tiny_config(directory, model, **{"train": train, "checkpoint": {"every": 1}, **tables})
    config["engine"]["context_length"] = 128
    assert headrace.train(config).reason == "finished"


def test_a_sound_model_agrees_in_everything(tmp_path: Path) -> None:
    found = looked_at(sound(tmp_path), lora=LoraConfig(rank=2), turns=True)
    assert {one.verdict for one in found.values()} == {"agrees"}, found
    assert set(found) == {"ends", "begin", "vocabulary", "head", "roles", "turns", "rewards", "adapter"}
    assert (
        "<|im_end|> (2) ends an answer" in found["ends"].text
        and f"{SIZE} tokens, {SIZE} rows" in found["vocabulary"].text
    )


# --- contradictions, and their remedies --------------------------------------------------------------------------------


def other_head(directory: Path) -> Path:
    edit(sound(directory, tied=False) / "config.json", tie_word_embeddings=True)
    return directory


def no_head(directory: Path) -> Path:
    edit(sound(directory) / "config.json", tie_word_embeddings=False)
    return directory


def too_few_rows(directory: Path) -> Path:
    return sound(directory, rows=SIZE - 8)


def an_end_beyond(directory: Path) -> Path:
    return sound(directory, generation=[2, SIZE])


def without_head(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def enlarge(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(SIZE)
    model.save_pretrained(directory)


CONTRADICTIONS: dict[str, tuple[Callable[[Path], Path], str, str, Callable[[Path], object]]] = {
    "a head of its own beside tied: its own": (
        other_head, "head", 'write "tie_word_embeddings": false into config.json',
        lambda to: edit(to / "config.json", tie_word_embeddings=False),
    ),
    "a head of its own beside tied: the embedding": (other_head, "head", "remove lm_head.weight from the files", without_head),
    "untied without a head": (no_head, "head", "write true into config.json", lambda to: edit(to / "config.json", tie_word_embeddings=True)),
    "more tokens than rows": (too_few_rows, "vocabulary", "model.resize_token_embeddings(len(tokenizer))", enlarge),
    "an end that has no row": (an_end_beyond, "vocabulary", "correct eos_token_id", lambda to: edit(to / "generation_config.json", eos_token_id=2)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_and_its_remedy_helps(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, what, remedy, mend = CONTRADICTIONS[name]
    model = make(tmp_path / "model")
    found = looked_at(model)
    assert found[what].verdict == "refused" and remedy in found[what].text, found
    assert [one.what for one in found.values() if one.verdict == "refused"] == [what]
    with pytest.raises(ConfigError, match="model"):
        trains(tmp_path, model)
    assert not (tmp_path / "runs").exists(), "before anything is written"
    assert main(["preflight", str(model)]) == 2
    assert "✗ 1 contradiction" in capsys.readouterr().out
    mend(model)
    assert looked_at(model)[what].verdict == "agrees"
    trains(tmp_path, model)


@pytest.mark.slow
def test_adapters_are_trained_and_served_beside_a_model_that_transformers_computes(tmp_path: Path) -> None:
    model = sound(tmp_path / "model", family="gpt_neox")
    trains(tmp_path, model, lora={"rank": 2, "publish": "adapter"})


def test_adapters_of_experts_that_the_engine_cannot_serve_are_refused_with_a_remedy(tmp_path: Path) -> None:
    model = sound(tmp_path)
    edit(model / "config.json", model_type="glm4_moe")
    asked = {"rank": 2, "experts": True, "publish": "adapter"}
    found = looked_at(model, lora=LoraConfig(**asked), several=True)["adapter"]
    assert found.verdict == "refused" and "train one at a time ([lora] instead of [[adapters]])" in found.text
    found = looked_at(model, lora=LoraConfig(**asked))["adapter"]
    assert "serves no adapters of experts beside glm4_moe" in found.text and 'set lora.publish = "merged"' in found.text
    for mended in ({"publish": "merged"}, {"experts": False}):
        assert looked_at(model, lora=LoraConfig(**asked | mended))["adapter"].verdict == "agrees"


def test_targets_that_reach_nothing_are_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    model = sound(tmp_path)
    assert (
        looked_at(model, lora=LoraConfig(rank=2, targets=("q_proj", "v_proj")))["adapter"].text
        == "reaches 4 layers: q_proj, v_proj"
    )
    for target in ("qkv_proj", "lm_head", "embed_tokens"):
        found = looked_at(model, lora=LoraConfig(rank=2, targets=("q_proj", target)))["adapter"]
        assert found.verdict == "refused" and f"lora.targets names {target}" in found.text and "down_proj" in found.text


def test_what_is_never_a_contradiction(tmp_path: Path) -> None:
    padded = looked_at(sound(tmp_path / "padded", rows=SIZE + 20, tied=False))
    assert padded["vocabulary"].text == f"{SIZE} tokens, {SIZE + 20} rows (20 unused)"
    copied = sound(tmp_path / "copied")
    weights = load_file(copied / "model.safetensors")
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
        copied / "model.safetensors",
        {"format": "pt"},
    )
    assert looked_at(copied)["head"].text == "the embedding, of which lm_head.weight is a copy (tied)"
    for family in ("gpt2", "gpt_neox", "phi3", "gemma3_text", "qwen3", "mixtral", "olmo2"):
        for tied in (True, False):
            found = looked_at(sound(tmp_path / f"{family}-{tied}", family=family, tied=tied))
            assert not [one for one in found.values() if one.verdict == "refused"], (family, tied, found)


# --- remarks -----------------------------------------------------------------------------------------------------------


def test_an_end_that_only_the_template_knows_is_remarked_on(tmp_path: Path) -> None:
    found = looked_at(sound(tmp_path, ends=0))["ends"]
    assert (
        found.verdict == "remark"
        and "<|im_end|> (2), which neither" in found.text
        and "<|endoftext|> (0)" in found.text
    )
    nothing = looked_at(save_weights(save_tokenizer(tmp_path / "n", None), ends=None), chat=False)["ends"]
    assert nothing.verdict == "remark" and "nothing ends a completion" in nothing.text


def test_start_tokens(tmp_path: Path) -> None:
    specials = ("<s>", "<|start|>", "<|stop|>", "<|eot|>", "<|end|>")
    given = {"specials": specials, "eos": "<|eot|>", "bos": "<s>", "adds_bos": True}
    once = save_weights(save_tokenizer(tmp_path / "once", LLAMA, **given), ends=3)
    assert looked_at(once)["begin"].text == "the template writes <s> (0) once"
    assert looked_at(once, chat=False)["begin"].text == "<s> (0) is put before plain text"
    encoder = ChatEncoder(once)
    assert encoder.encode_text("<s>hello") == encoder.encode_text("hello"), "a row that begins with it already"
    assert encoder.encode_text("<s><s>a")[:3] != encoder.encode_text("a")[:3], "whoever writes two means one more"
    twice = save_weights(save_tokenizer(tmp_path / "twice", "{{ bos_token }}" + LLAMA, **given), ends=3)
    assert looked_at(twice)["begin"].verdict == "remark"
    none = save_weights(save_tokenizer(tmp_path / "none", LLAMA.replace("{{ bos_token }}", ""), **given), ends=3)
    assert "the template writes none" in looked_at(none)["begin"].text


ALTERNATES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1].lstrip() if not loop.last else m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As those of SmolVLM and Idefics: what is no list of parts, it writes nothing of."""


def test_a_template_that_writes_parts_alone_writes_what_the_usual_one_does(tmp_path: Path) -> None:
    usual, parts = (ChatEncoder(save_tokenizer(tmp_path / name, of)) for name, of in (("a", CHATML), ("b", PARTS)))
    chat = [{"role": role, "content": f"{role} <|im_end|> here"} for role in ("system", "user", "assistant", "user")]
    assert parts.encode_messages(chat) == usual.encode_messages(chat)
    assert parts.endings.turn == usual.endings.turn is not None


def test_a_template_that_leaves_out_a_question_is_refused_and_one_without_system_messages_where_there_is_one(
    tmp_path: Path,
) -> None:
    silent = save_weights(
        save_tokenizer(tmp_path / "silent", "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}")
    )
    found = looked_at(silent)["texts"]
    assert found.verdict == "refused" and "writes nothing of a question" in found.text
    unheard = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    assert unheard != CHATML
    model = save_weights(save_tokenizer(tmp_path / "unheard", unheard))
    assert (looked_at(model)["texts"].verdict, looked_at(model, system=True)["texts"].verdict) == ("remark", "refused")


def test_a_template_that_writes_the_date_is_remarked_on(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    found = looked_at(save_weights(save_tokenizer(tmp_path, dated)))["date"]
    assert found.verdict == "remark" and "tomorrow" in found.text
    assert "date" not in looked_at(sound(tmp_path / "other"))
    given = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + CHATML
    model = save_weights(save_tokenizer(tmp_path / "given", given))
    encoder = ChatEncoder(model)
    assert 'task.template = { date_string = "1 Jan 2026" }' in looked_at(model)["date"].text
    fixed = encoder.using(Rendering(arguments={"date_string": "1 Jan 2026"}))
    assert "date" not in [one.what for one in preflight(fixed)]
    assert fixed.encode_messages([{"role": "user", "content": "a"}])[0].startswith("1 Jan 2026")


def test_templates_say_what_they_refuse_and_rewrite(tmp_path: Path) -> None:
    picky = looked_at(save_weights(save_tokenizer(tmp_path / "a", ALTERNATES)))
    assert picky["roles"].text.startswith("the template refuses a system message, two user messages in a row")
    forgets = save_weights(save_tokenizer(tmp_path / "b", FORGETS))
    assert looked_at(forgets, turns=True)["turns"].verdict == "remark"
    assert looked_at(forgets)["turns"].verdict == "agrees", "rollouts of one turn have no earlier turns"
    assert "leaves out what an earlier turn thought" in looked_at(forgets)["turns"].text


@pytest.mark.parametrize(
    ("messages", "advice"),
    [
        ([("user", "a"), ("user", "b")], "make one message of those that follow each other with the same role"),
        ([("system", "a"), ("user", "b")], "put that text (task.system) into the first question"),
        ([("assistant", "a"), ("user", "b")], "roles must alternate"),
    ],
)
def test_advice_about_refused_messages_is_true(tmp_path: Path, messages: list[tuple[str, str]], advice: str) -> None:
    encoder = ChatEncoder(save_weights(save_tokenizer(tmp_path, ALTERNATES)))
    given = [{"role": role, "content": content} for role, content in messages]
    with pytest.raises(ConfigError) as caught:
        encoder.encode_messages(given)
    assert advice in str(caught.value)
    if "make one message" in advice:
        encoder.encode_messages([{"role": "user", "content": "a\n\nb"}])
    elif "task.system" in advice:
        assert "follow each other" not in str(caught.value)
        encoder.encode_messages([{"role": "user", "content": "a\n\nb"}])
    else:
        assert "task.system" not in str(caught.value) and "make one" not in str(caught.value)


# --- two columns -------------------------------------------------------------------------------------------------------


def shown(
    directory: Path, *, special: str = "show", width: int = 80, text: str = "Be quick. <think>2+2</think> 4"
) -> str:
    encoder = ChatEncoder(directory).with_special_tokens(special)  # type: ignore[arg-type]
    _, tokens = encoder.encode_messages(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?\nThink."}]
    )
    sight = sight_of(
        encoder,
        Prompt("r/1", "2+2?\nThink.", tokens),
        encoder.encode_completion(text, True),
        system="Be brief.",
        reward="right = 1",
    )
    console = Console(width=width, record=True, force_terminal=False)
    show_preflight(console, preflight(encoder), sight)
    return console.export_text()


def test_two_columns_show_what_only_the_model_sees(tmp_path: Path) -> None:
    model = sound(tmp_path)
    text = shown(model)
    assert max(map(len, text.splitlines())) <= 80
    assert "<|im_start|>system⏎" in text and "4<|im_end|>" in text and "→ right = 1" in text
    _left, right = zip(*(line.split(" │ ") for line in text.splitlines() if " │ " in line), strict=True)
    assert "<think>" in "".join(right) and "<|im_end|>" not in "".join(right)
    hidden = "".join(line.split(" │ ")[1] for line in shown(model, special="hide").splitlines() if " │ " in line)
    assert "<think>" not in hidden and "Be quick. 2+2 4" in hidden
    assert "\x1b" not in shown(model, text="\x1b[2Jgone")


def test_parts_are_told_apart_by_who_wrote_them(tmp_path: Path) -> None:
    encoder = ChatEncoder(sound(tmp_path))
    _, tokens = encoder.encode_messages([{"role": "system", "content": "user"}, {"role": "user", "content": "e"}])
    sight = sight_of(encoder, Prompt("1", "e", tokens), encoder.encode_completion("ok", True), system="user")
    parts = [(one.text, one.kind) for one in sight.asked]
    assert ("user", "system") in parts and ("e", "user") in parts and ("<|im_start|>", "special") in parts
    assert "".join(one.text for one in sight.asked) == encoder.written(tokens)
    assert [one.kind for one in sight.answered] == ["assistant", "special"]


def test_the_command_shows_a_row_of_a_file_and_what_the_reward_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sound(tmp_path / "model")
    capsys.readouterr()
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "right.py"
    rows.write_text("\n".join(json.dumps({"prompt": f"{n}+{n}?", "answer": str(2 * n)}) for n in range(1, 9)))
    reward.write_text(
        "def right(completions, answer, **columns):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert main(["preflight", str(model), "--rows", str(rows), "--reward", f"{reward}:right"]) == 0
    output = capsys.readouterr()
    assert "→ right = 1" in output.out and "template and weights agree" in output.out and not output.err
    assert main(["preflight", str(model), "--rows", str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl" in capsys.readouterr().err


def test_it_costs_little(tmp_path: Path) -> None:
    """The files of a model are as large as they are: what is measured is that no model is loaded (`docs/preflight.md` has seconds)."""
    import subprocess
    import sys

    model = sound(tmp_path)
    script = (
        "import sys; from headrace.models.chat import ChatEncoder; from headrace.run.rehearsal.preflight import preflight; "
        f"preflight(ChatEncoder({str(model)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_the_preflight_cannot_see_ends_with_a_sentence_where_trainer_and_engine_meet(tmp_path: Path) -> None:
    """Weights that are no safetensors have no header that could be compared."""
    import torch

    model = other_head(tmp_path / "model")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert "head" not in looked_at(model)
    with pytest.raises(IdentityError, match=r"cannot hold what the trainer publishes: .*lm_head.*headrace preflight"):
        trains(tmp_path, model)
