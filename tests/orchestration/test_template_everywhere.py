"""Arguments of the chat template reach every place of a run where it is used."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.durable.journal import read_steps
from headrace.models.chat import ChatEncoder
from headrace.run.config import load_config
from headrace.run.rehearse import rehearse
from headrace.run.rehearsed import Rehearsal
from headrace.run.teaching import PlannedTeacher, _text_teacher
from headrace.testing.fake_engine import FakeEngine
from support.tiny_run import Config, tiny_config

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if mood is defined %}={{ mood }}={% endif %}{% endif %}"
)
PLAY = "async def play(agent, prompt, **columns):\n    await agent.chat(prompt)\n    return {'r': 1.0}\n"


@pytest.fixture
def moody(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model whose template has an argument."""
    copy = tmp_path / "moody"
    shutil.copytree(tiny_llama, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def rehearsed(config: Config) -> Rehearsal:
    return asyncio.run(rehearse(load_config(config)))


def shown(found: Rehearsal, section: str) -> str:
    return " ".join(text for _, text in found.sections[section])


@pytest.mark.slow
def test_prompts_of_a_run_and_of_its_evaluation_have_the_argument(moody: Path, tmp_path: Path) -> None:
    settings: Config = {"task": {"template": {"mood": "calm"}}, "train": {"steps": 1}, "eval": {"prompts": 2}}
    config = tiny_config(tmp_path, moody, **settings)
    rows = [{"prompt": f"{i}?", "chat_template_kwargs": {"mood": "glad"} if i % 2 else None} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen: list[str] = []

    def reward(prompts: Any, completions: Any, chat_template_kwargs: Any) -> list[float]:
        seen.append(str(chat_template_kwargs[0]))
        return [float(len(set(completion))) for completion in completions]

    result = headrace.train(config, reward=reward)
    encoder = ChatEncoder(moody)
    groups = [group for entry in read_steps(result.directory) for group in entry.groups]
    for group in groups:
        mood = "glad" if group.prompt.columns.get("chat_template_kwargs") else "calm"
        assert encoder.written(group.prompt.tokens).endswith(f"<assistant>={mood}=")
    assert len({str(group.prompt.columns) for group in groups}) == 2 == len(set(seen)), (
        "both kinds of rows were trained"
    )


def test_a_rehearsed_environment_and_examples_have_it(moody: Path, tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    table = {"function": f"{tmp_path / 'play.py'}:play", "workers": 1}
    config = tiny_config(tmp_path, moody, task={"template": {"mood": "calm"}}, environment=table)
    found = rehearsed(config)
    assert "<assistant>=calm=" in shown(found, "Prompts") and "<assistant>=calm=" in shown(found, "Environment")
    rows = [{"prompt": f"{i}?", "chat_template_kwargs": {"mood": "glad"}} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "<assistant>=glad=" in shown(rehearsed(config), "Environment")


def test_a_text_teacher_reads_with_it_and_with_its_own_template(moody: Path, tiny_llama: Path, tmp_path: Path) -> None:
    table: Config = {"task": {"template": {"mood": "calm"}}, "environment": {}}
    teachers = [
        {"name": "moody", "path": str(moody), "mode": "text"},
        {"name": "other", "path": str(tiny_llama), "mode": "text"},
    ]
    config = load_config(tiny_config(tmp_path, moody, **table, teachers=teachers))
    found = asyncio.run(rehearse(config))

    def front(planned: PlannedTeacher, columns: Config) -> tuple[str, str]:
        teacher = _text_teacher(planned, FakeEngine(), config.task, lambda done: True)
        assert planned.encoder is not None
        prompt = Prompt("p", "a", (1,), columns)
        written = planned.encoder.written
        begun = [{"role": "user", "content": "a"}]
        return written(teacher.encode_prompt(prompt)), written(teacher.encode_messages(begun, prompt))

    own, other = found.planned_teachers
    glad = {"chat_template_kwargs": {"mood": "glad"}}
    assert front(own, {}) == ("<user>a<end><assistant>=calm=",) * 2
    assert front(own, glad) == ("<user>a<end><assistant>=glad=",) * 2
    assert front(other, glad) == ("<user>a<end><assistant>",) * 2, "a template without the argument is no error"


def test_what_a_person_should_know_of_the_rows_is_a_note(moody: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, moody)
    rows: list[Config] = [{"prompt": f"{i}?<end>"} for i in range(60)]
    rows[0] = {"prompt": [{"role": "user", "content": "0?"}, {"role": "assistant", "content": "so"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    notes = " ".join(rehearsed(config).notes)
    assert "59 of 60 rows hold the text of special tokens (<end>)" in notes
    assert "1 of 60 prompts end with a message of the assistant (the first: 'so')" in notes
    config["task"]["template"] = {"mod": 1}
    with pytest.raises(
        ConfigError, match="task.template: mod is not an argument of the chat template.*did you mean mood?"
    ):
        rehearsed(config)
