"""A whole run of a model that sees: rows with images, a reward that opens them, a resume, and the model that it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

import headrace
from headrace.durable.journal import read_steps
from headrace.episodes.tasks.rows import RowsTask
from headrace.models.chat import ChatEncoder
from headrace.models.images import KnownImages
from headrace.run.build import loaded_model
from headrace.run.config import load_config
from support import tiny_seeing
from support.tiny_run import tiny_config

REWARD = """
from PIL import Image

def opened(prompts, completions, image, **columns):
    sizes = [Image.open(path).size for path in image]
    assert set(sizes) == {(32, 32)}, sizes
    return [float(text.count("e")) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_a_run_with_images_is_resumed_and_leaves_a_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    config = tiny_config(
        tmp_path,
        tiny_seeing.saved(family),
        task={"images": ["image"]},
        reward={"function": f"{tmp_path / 'seeing.py'}:opened"},
        train={"steps": 2},
        engine={"context_length": 96},
    )
    (tmp_path / "seeing.py").write_text(REWARD)
    rows = []
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(tiny_seeing.picture(number).data)
        rows.append({"prompt": "many?", "image": f"{number}.png"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    headrace.train(config)
    shutil.rmtree(tmp_path / "cache")
    found = headrace.train(resume=tmp_path / "runs" / "tiny", sets=["train.steps=4"])

    assert len(found.history["step"]) == 4
    settings = load_config(config)
    directory = loaded_model(settings)
    task = RowsTask(settings.task, settings.seed, ChatEncoder(directory))
    drawn = {prompt.id: prompt for prompt in (task.draw() for _ in range(8))}
    journaled = [group for step in read_steps(tmp_path / "runs" / "tiny") for group in step.groups]
    assert len(journaled) == 16 and len({group.prompt.tokens for group in journaled}) > 4
    for group in journaled:
        assert group.prompt == drawn.get(group.prompt.id, group.prompt)
        assert all(row.prompt == group.prompt.tokens for row in group.rows)
        assert max(group.prompt.tokens) >= len(tiny_seeing.tokenizer(family))
        assert KnownImages(directory).path(Path(group.prompt.images[0]).name).read_bytes() in [
            tiny_seeing.picture(number).data for number in range(24)
        ]
    headrace.export(tmp_path / "runs" / "tiny", tmp_path / "out", "float32")
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    before, after = tiny_seeing.seeing(family).state_dict(), whole.state_dict()
    changed = {name for name in after if not after[name].equal(before[name])}
    language = ("model.text_model.", "model.language_model.", "lm_head.")
    assert changed and all(name.startswith(language) for name in changed)
