"""Rows with images: what a column may hold, what the model is shown, what the reward is given, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from headrace.algo.config import AlgoConfig
from headrace.commands.replay.bundle_replay import _cannot_train
from headrace.core.errors import ConfigError
from headrace.durable.journal import ReadyRecord
from headrace.engine.native.runners.skeleton import _build
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.rows import RowsTask, fingerprint, images_in, images_of_row, rows_of
from headrace.facts.recorder import Recorder
from headrace.models.chat import ChatEncoder
from headrace.models.images import REFUSED, TEXT_TOO, ImageFile, KnownImages, image_of, with_images
from headrace.models.lora import LoraConfig
from headrace.models.vision import _opened
from headrace.run.config import load_config
from headrace.run.rehearse import rehearse
from headrace.run.resume_rules import check_resumable, contents_of, meaning
from headrace.run.seeing import model_of
from headrace.views.report import write_report
from support import tiny_seeing
from support.fact_stream import FactStream, records_of, write_journal
from support.tiny_run import Config, tiny_config
from support.tiny_seeing import made, picture, tokenizer

PICTURES = [picture(seed) for seed in range(6)]


def url(image: ImageFile) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.data).decode()}"


def file(directory: Path, number: int) -> str:
    (directory / f"{number}.png").write_bytes(PICTURES[number].data)
    return f"{number}.png"


def rows(directory: Path) -> list[dict[str, Any]]:
    """One question for all rows. The last one shows two images, the one before none."""
    return [
        {"prompt": "many?", "image": file(directory, 0)},
        {"prompt": "many?", "image": url(PICTURES[1])},
        {"prompt": "many?", "image": {"bytes": None, "path": file(directory, 2)}},
        {"prompt": "many?", "image": []},
        {"prompt": "many?", "image": [file(directory, 3), url(PICTURES[0])]},
    ]


def written(directory: Path, given: list[dict[str, Any]]) -> TaskConfig:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    path = str(directory / "rows.jsonl")
    return TaskConfig(kind="jsonl", path=path, images=("image",), held_out=0, shuffle=False)


@pytest.fixture(scope="module")
def model() -> Path:
    return made("smolvlm", PICTURES[:4])


def task(config: TaskConfig, model: Path) -> RowsTask:
    return RowsTask(config, 0, ChatEncoder(model))


def test_an_image_is_a_path_bytes_an_entry_a_url_or_an_object(tmp_path: Path):
    name, opened = file(tmp_path, 0), Image.open(io.BytesIO(PICTURES[0].data))
    given = [name, str(tmp_path / name), PICTURES[0].data, {"bytes": PICTURES[0].data, "path": "x"}, url(PICTURES[0])]
    assert {image_of(value, tmp_path).digest for value in given} == {PICTURES[0].digest}
    again = Image.open(io.BytesIO(image_of(opened, tmp_path).data))
    assert again.tobytes() == opened.tobytes(), "an object is saved without loss"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "holds no image (null)"),
        (7, "a value of type int"),
        ("gone.png", "gone.png, which cannot be read (No such file or directory); paths are relative to the file"),
        ("data:image/png;base64,%%", "a data: URL that is not base64"),
    ],
)
def test_what_is_no_image_is_refused_with_its_place(value: Any, said: str, tmp_path: Path):
    config = written(tmp_path, [{"prompt": "many?", "image": []}, {"prompt": "many?", "image": value}])
    with pytest.raises(ConfigError) as caught:
        list(images_in(config))
    assert "rows.jsonl, row 2: the column image (task.images) " in str(caught.value) and said in str(caught.value)


def test_prompts_show_their_images_and_rewards_get_the_files(tmp_path: Path, model: Path):
    drawn = task(written(tmp_path, rows(tmp_path)), model)
    prompts = [drawn.draw() for _ in range(5)]
    known, words = KnownImages(model), tokenizer("smolvlm")
    expected = [[0], [1], [2], [], [3, 0]]
    for prompt, shown in zip(prompts, expected, strict=True):
        assert [Path(path).read_bytes() for path in prompt.images] == [PICTURES[number].data for number in shown]
        marks = "<image>" * len(shown)
        text = words(f"user: {marks}many?<end>\nassistant: ", add_special_tokens=False)["input_ids"]
        given = iter(shown)
        tokens = [
            part
            for token in text
            for part in (known.tokens(PICTURES[next(given)].digest) if token == known.placeholder else (token,))
        ]
        assert list(prompt.tokens) == tokens
    assert prompts[0].columns["image"] == prompts[0].images[0] and prompts[4].columns["image"] == list(
        prompts[4].images
    )
    assert len({prompt.tokens for prompt in prompts}) == 5
    assert "<image><image>" in ChatEncoder(model).written(prompts[0].tokens)


def test_the_text_of_a_placeholder_in_a_question_is_text(tmp_path: Path, model: Path):
    given = [{"prompt": "see <image> here", "image": file(tmp_path, 0)}]
    prompt = task(written(tmp_path, given), model).draw()
    assert KnownImages(model).placeholder not in prompt.tokens
    assert "see <image> here" in ChatEncoder(model).written(prompt.tokens)


def test_equal_questions_with_other_images_are_other_rows(tmp_path: Path, model: Path):
    config = written(tmp_path, [*rows(tmp_path), {"prompt": "many?", "image": url(PICTURES[0])}])
    held = task(dataclasses.replace(config, held_out=1), model)
    assert [prompt.images for prompt in held.held_out(1)] == [held.held_out(1)[0].images]
    assert Path(held.held_out(1)[0].images[0]).name == PICTURES[0].digest
    drawn = {held.draw().images for _ in range(4)}
    assert len(drawn) == 4 and held.held_out(1)[0].images not in drawn, "the first row shows the held-out image"


SEES: dict[str, Any] = {"type": "image", "text": None}


def said(*texts: str) -> list[dict[str, Any]]:
    """A message of the user with an image between each two texts, as Arrow writes its parts."""
    parts = [part for text in texts for part in (SEES, {"type": "text", "text": text})][1:]
    return [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]


def test_messages_show_images_where_their_parts_are(tmp_path: Path, model: Path):
    earlier = [*said("", " first"), {"role": "assistant", "content": "three"}, *said("of ", " and ", ", more?")]
    given = [
        {"prompt": said("see ", " here"), "image": file(tmp_path, 0)},
        {"prompt": earlier, "image": [file(tmp_path, 1), file(tmp_path, 2), url(PICTURES[1])]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "many?"}]}], "image": file(tmp_path, 3)},
    ]
    drawn = task(written(tmp_path, given), model)
    known, words = KnownImages(model), tokenizer("smolvlm")
    texts = (
        "user: see <image> here<end>\nassistant: ",
        "user: <image> first<end>\nassistant: three<end>\nuser: of <image> and <image>, more?<end>\nassistant: ",
        "user: <image>many?<end>\nassistant: ",
    )
    for text, shown in zip(texts, ([0], [1, 2, 1], [3]), strict=True):
        prompt, images = drawn.draw(), iter(shown)
        tokens = [
            part
            for token in words(text, add_special_tokens=False)["input_ids"]
            for part in (known.tokens(PICTURES[next(images)].digest) if token == known.placeholder else (token,))
        ]
        assert list(prompt.tokens) == tokens and len(prompt.images) == len(shown)


@pytest.mark.parametrize(
    ("prompt", "said_of_it"),
    [
        (said("one ", " two ", " three"), "has 2 parts that are images, and the columns of task.images hold 1"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
            "holds an image of its own (image); put",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], "a part of a message is of type audio"),
    ],
)
def test_parts_of_messages_that_show_nothing_are_refused(prompt: Any, said_of_it: str, tmp_path: Path, model: Path):
    config = written(tmp_path, [{"prompt": prompt, "image": file(tmp_path, 0)}])
    with pytest.raises(ConfigError) as caught:
        task(config, model)
    assert "rows.jsonl, row 1: the prompt in column prompt has " in str(caught.value) and said_of_it in str(
        caught.value
    )


def test_a_message_with_an_image_names_the_setting_that_shows_it(tmp_path: Path, model: Path):
    config = written(tmp_path, [{"prompt": said("see ", " here"), "picture": file(tmp_path, 0)}])
    with pytest.raises(ConfigError, match="set task.images to the columns with the images"):
        task(dataclasses.replace(config, images=()), model)
    shown = task(dataclasses.replace(config, images=("picture",)), model).draw()
    assert Path(shown.images[0]).name == PICTURES[0].digest


def test_an_image_that_has_changed_is_refused(tmp_path: Path, model: Path):
    config = written(tmp_path, rows(tmp_path))
    state = task(config, model).state()
    (tmp_path / "0.png").write_bytes(PICTURES[5].data)
    with pytest.raises(ConfigError, match=r"row 1: holds an image .* whose features were not computed: it has changed"):
        task(config, model)
    (tmp_path / "0.png").write_bytes(PICTURES[3].data)
    with pytest.raises(ConfigError, match="is not the one that the checkpoint was written with"):
        task(config, model).restore(state)


def test_columns_that_nobody_names_are_refused(tmp_path: Path, model: Path):
    config = written(tmp_path, [{"prompt": "many?", "image": file(tmp_path, 0), "video": "x.mp4"}])
    with pytest.raises(ConfigError, match="the column video .* video and audio are not served"):
        task(config, model)
    with pytest.raises(ConfigError, match=r'set task.images = \["image"\] if the model is to see it'):
        task(dataclasses.replace(config, images=()), model)
    with pytest.raises(
        ConfigError, match=r"row 1: the column other \(task.images\) is missing; the columns are: prompt"
    ):
        list(images_in(dataclasses.replace(config, images=("other",))))


def test_rows_from_python_hold_their_images(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [{"prompt": "many?", "image": file(tmp_path, 0)}, {"prompt": "many?", "image": PICTURES[1].data}]
    held = rows_of(given, ["image"])
    (tmp_path / "0.png").write_bytes(PICTURES[2].data)
    assert fingerprint(held) != fingerprint(rows_of(given, ["image"]))
    config = TaskConfig(kind="python", rows="x", images=("image",))
    assert [image.digest for image in images_in(config, held)] == [PICTURES[0].digest, PICTURES[1].digest]
    with pytest.raises(ConfigError, match="pass the same rows from Python again"):
        list(images_in(config))


# --- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*REFUSED, "llama", "whisper"])
def test_other_models_are_refused_by_name(kind: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match="and that is not served") as caught:
        with_images(tmp_path, lambda: PICTURES[:1], 'task.images = ["image"]')
    assert REFUSED.get(kind, f"{kind} is not among the types") in str(caught.value)
    assert with_images(tmp_path, tuple) == tmp_path, "without images it is loaded as it is"


@pytest.mark.parametrize("kind", ["paligemma"])
def test_a_model_that_transformers_calls_no_language_model_is_refused_in_one_line(kind: str):
    with pytest.raises(ConfigError, match="transformers does not build it") as caught:
        _build(transformers.AutoConfig.for_model(kind), torch.float32, None, f"model ({kind})")
    assert "\n" not in str(caught.value) and "PaliGemmaConfig" in str(caught.value) and "GPT2" not in str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_the_rehearsal_names_the_model_whose_images_are_refused(kind: str, tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"x": torch.zeros(1)}, model / "model.safetensors")
    tiny_seeing.tokenizer("smolvlm").save_pretrained(model)
    config = settings(tmp_path)
    config["model"]["path"] = str(model)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(rehearse(load_config(config)))
    assert f"({kind}), and that is not served: {REFUSED[kind]}" in str(caught.value)


@pytest.mark.parametrize("kind", ["llava", "qwen3_5"])
def test_a_model_that_sees_trains_no_adapters(kind: str):
    task = TaskConfig(kind="jsonl", path="x", images=("image",) if kind in TEXT_TOO else ())
    with pytest.raises(ConfigError, match="and no adapters: remove lora.rank"):
        model_of(str(tiny_seeing.saved(kind)), task, adapted=True)


def test_a_language_model_that_can_see_is_loaded_as_a_whole_without_images():
    path = tiny_seeing.saved("qwen3_5")
    for adapted in (False, True):
        assert model_of(str(path), TaskConfig(kind="jsonl", path="x"), adapted=adapted) == path


@pytest.mark.parametrize(
    ("kind", "shown", "sees"), [("llava", False, True), ("qwen3_5", True, True), ("qwen3_5", False, False)]
)
def test_a_bundle_of_a_model_that_sees_is_not_trained_again(kind: str, shown: bool, sees: bool, tmp_path: Path):
    group = SimpleNamespace(prompt=SimpleNamespace(images=("x",) if shown else ()))
    bundle: Any = SimpleNamespace(step=1, local=True, model="a directory", journaled=SimpleNamespace(groups=[group]))
    why = _cannot_train(bundle, tmp_path, AlgoConfig(), LoraConfig(), str(tiny_seeing.saved(kind)))
    assert why.startswith("the model sees, and a bundle holds no images") if sees else not why


def cut(image: Image.Image, kind: str) -> bytes:
    saved = io.BytesIO()
    image.save(saved, kind)
    return saved.getvalue()[:-40]


def bomb() -> bytes:
    """Some kilobytes, and 600 megabytes of pixels."""
    saved = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(saved, "PNG")
    return saved.getvalue()


BROKEN: dict[str, Callable[[], bytes]] = {
    "no image": lambda: b"no image",
    "half a JPEG": lambda: cut(Image.effect_noise((64, 64), 50), "JPEG"),
    "half a PNG": lambda: cut(Image.effect_noise((64, 64), 50), "PNG"),
    "a bomb": bomb,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_image_is_refused_with_its_row(kind: str, tmp_path: Path):
    (tmp_path / "broken.png").write_bytes(BROKEN[kind]())
    found = images_of_row(
        {"image": "broken.png"}, TaskConfig(kind="jsonl", path="x", images=("image",)), str(tmp_path), 7
    )
    with pytest.raises(ConfigError, match=r"row 7: the column image .* cannot be read as one .* remove its row"):
        made("llava", [*found["image"]])


def saved_as(kind: str, *frames: Image.Image) -> ImageFile:
    saved = io.BytesIO()
    frames[0].save(saved, kind, save_all=len(frames) > 1, append_images=frames[1:])
    return ImageFile(saved.getvalue(), where="rows.jsonl, row 7")


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I", "TIFF"), ("F", "TIFF")])
def test_an_image_that_would_be_seen_as_white_or_black_is_refused(mode: str, kind: str):
    with pytest.raises(ConfigError, match=r"row 7 holds .* more than eight bits a channel .*; save it with eight bits"):
        made("llava", [saved_as(kind, Image.new(mode, (8, 8)))])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_a_photograph_is_upright_however_it_is_given(kind: str, tmp_path: Path):
    """One that Pillow had opened lost the side that is up: the model saw it lie."""
    saved, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # Orientation: turned by a quarter (EXIF 2.3, 4.6.4)
    Image.open(io.BytesIO(PICTURES[0].data)).convert("RGB").crop((0, 0, 5, 9)).save(saved, kind, exif=exif)
    given = [saved.getvalue(), Image.open(io.BytesIO(saved.getvalue()))]
    seen = []
    for number, value in enumerate(given):
        (tmp_path / str(number)).write_bytes(image_of(value, tmp_path).data)
        seen.append(_opened(tmp_path / str(number), "row 1"))
    assert seen[0].size == seen[1].size == (9, 5) and seen[0].tobytes() == seen[1].tobytes()


def test_an_image_of_pillow_is_seen_in_any_mode_of_eight_bits(tmp_path: Path):
    drawn = Image.open(io.BytesIO(PICTURES[0].data)).convert("RGB")
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV"):
        image = drawn.convert(mode)
        (tmp_path / mode).write_bytes(image_of(image, tmp_path).data)
        assert _opened(tmp_path / mode, "").tobytes() == image.convert("RGB").tobytes(), mode
    with pytest.raises(ConfigError, match=r"more than eight bits a channel \(F\)"):
        image_of(drawn.convert("F"), tmp_path)


def test_frames_that_the_model_does_not_see_are_said(capsys: pytest.CaptureFixture[str]):
    made("llava", [saved_as("GIF", *(Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")))])
    assert "row 7 holds an image of 3 frames: the model sees the first one alone" in capsys.readouterr().out


def test_a_template_that_marks_no_places_is_refused(tmp_path: Path, model: Path):
    encoder = ChatEncoder(model)
    encoder._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="marks 0 places for 1 images"):
        RowsTask(written(tmp_path, rows(tmp_path)[:1]), 0, encoder).draw()


@pytest.mark.slow  # two processes that load torch
def test_the_order_of_images_gives_their_numbers_and_equal_ones_have_one(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    path = tiny_seeing.saved("llava")
    first = with_images(path, lambda: [PICTURES[0], PICTURES[1], PICTURES[0]])
    (first / "kept").touch()
    assert with_images(path, lambda: PICTURES[:2]) == first and (first / "kept").exists(), "it is made once"
    second = with_images(path, lambda: [PICTURES[1], PICTURES[0]])
    assert KnownImages(first).tokens(PICTURES[0].digest) == KnownImages(second).tokens(PICTURES[1].digest)
    assert (first / "model.safetensors").samefile(second / "model.safetensors"), "the language part is kept once"
    changing = iter([PICTURES[:1], PICTURES[1:2]])
    with pytest.raises(ConfigError, match="has changed while it was read"):
        with_images(path, lambda: next(changing))


# --- settings ----------------------------------------------------------------------------------------------------------


def settings(directory: Path, **tables: Any) -> Config:
    given = rows(directory)
    config = tiny_config(directory, tiny_seeing.saved("smolvlm"), **tables)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    config["task"] = {"images": ["image"], "held_out": 0, **config["task"], **tables.get("task", {})}
    return config


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("engine.kind", "vllm", 'set engine.kind = "native"'),
        ("engine.path", "kernels", "remove engine.path and engine.weights"),
        ("lora.rank", 4, "lora.rank trains something else"),
        ("train.parity", "bitwise", 'set it to "off"'),
        ("train.offload_optimizer", True, "remove train.weights and train.offload_optimizer"),
        ("environment.kind", "reasoning_gym", "or set environment.function, whose messages and tools show them"),
        ("warm_start.path", "rows.jsonl", "warm_start.path trains something else"),
        ("demonstrations.path", "rows.jsonl", "demonstrations.path trains something else"),
        ("task.chat", False, "set task.chat = true and task.examples = 0"),
        ("task.images", ["prompt"], "or that of the prompt; name each once"),
        (
            "reward.judges",
            [{"name": "style", "url": "http://judge/v1", "model": "m", "criterion": "short"}],
            "the judge style reads text alone: it would judge what it does not see",
        ),
        ("orchestration.kind", "ray", "orchestration brings workers of others"),
    ],
)
def test_settings_that_images_exclude_are_refused_with_their_remedy(
    setting: str, value: Any, said: str, tmp_path: Path
):
    section, _, name = setting.partition(".")
    with pytest.raises(ConfigError) as caught:
        load_config(settings(tmp_path, **{section: {name: value}}))
    assert said in str(caught.value)
    load_config(settings(tmp_path))


def test_a_run_is_not_resumed_with_other_images(tmp_path: Path):
    config = load_config(settings(tmp_path))
    before = meaning(config, contents_of(config))
    check_resumable(before, meaning(config, contents_of(config)))
    (tmp_path / "0.png").write_bytes(PICTURES[5].data)
    with pytest.raises(ConfigError, match="task.images have changed"):
        check_resumable(before, meaning(config, contents_of(config)))


# --- the report --------------------------------------------------------------------------------------------------------


def test_the_report_shows_the_images_of_a_rollout(tmp_path: Path):
    (tmp_path / "shown").write_bytes(PICTURES[0].data)
    (tmp_path / "text").write_text("<b>no image</b>")
    facts = list(FactStream(steps=3).facts())
    images = tuple(str(tmp_path / name) for name in ("shown", "text", "gone"))
    records = [with_pictures(record, images) for record in records_of(facts)]
    recorder = Recorder(tmp_path)
    for fact in facts:
        recorder.record(fact)
    recorder.close()
    write_journal(tmp_path, records)
    html = write_report(tmp_path).read_text()
    assert f'<img src="{url(PICTURES[0])}"' in html
    assert ">image text</span>" in html and ">image gone</span>" in html and "<b>no image</b>" not in html


def with_pictures(record: Any, images: tuple[str, ...]) -> Any:
    if not isinstance(record, ReadyRecord):
        return record
    prompt = msgspec.structs.replace(record.group.prompt, images=images)
    return msgspec.structs.replace(record, group=msgspec.structs.replace(record.group, prompt=prompt))
