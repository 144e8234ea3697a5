"""A kind of task is its file and one entry: one that is planted is in settings, docs and refusals, and is drawn from, without another edit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PLANTED = """
import json, sys, types
from pathlib import Path

sys.path.insert(0, {docs!r})
from headrace.episodes.tasks import task_kinds

task_kinds.TASK_KINDS |= {{
    "riddles": task_kinds.TaskKind(
        opens="riddles:Riddles", own=("name",), needs=("name", "the sphinx"), about="what a sphinx asks", library="Thebes"
    ),
    "pages": task_kinds.TaskKind(opens="riddles:Riddles", own=("path",), needs=("path", "a book"), reads="riddles:pages", endings=(".book",)),
}}

from headrace.episodes.tasks.seeds import SeedsTask

class Riddles(SeedsTask):
    def remarks(self):
        return ["a sphinx asks them"]

sys.modules["riddles"] = types.ModuleType("riddles")
sys.modules["riddles"].Riddles = Riddles
sys.modules["riddles"].pages = lambda path: [{{"prompt": "who?"}}]
from headrace.commands.publishing.model_card import _data
from headrace.core.errors import ConfigError
from headrace.episodes.tasks.demonstrations import WarmStartConfig
from headrace.episodes.tasks.read import kind_of, read_rows
from headrace.run.build import build_task
from headrace.run.config import load_config
from headrace.models.chat import ChatEncoder
import make_settings

def load(**task):
    return load_config({{"model": {{"path": {model!r}}}, "task": {{"kind": "riddles"}} | task}})

def refused(**task):
    try:
        load(**task)
    except ConfigError as error:
        return str(error)
    return ""

config = load(name="thebes")
task = build_task(config.task, ChatEncoder(Path({model!r})), 0)
print(json.dumps({{
    "docs": make_settings.reference(),
    "unknown": refused(kind="songs"),
    "needs": refused(),
    "foreign": refused(name="thebes", path="x.jsonl"),
    "others": refused(kind="seeds", name="thebes"),
    "drawn": [task.draw().id, task.remarks()],
    "rows": read_rows("pages", {model!r}),
    "card": _data(config.task),
    "named": kind_of("a.book"),
    "answers": WarmStartConfig(path="a.book", kind="pages").kind,
}}))
"""


def test_a_planted_kind_is_known_everywhere_and_drawn_from(tiny_llama: Path) -> None:
    script = PLANTED.format(docs=str(ROOT / "docs"), model=str(tiny_llama))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "riddles: what a sphinx asks." in found["docs"] and '`"riddles"`' in found["docs"]
    assert "'riddles'" in found["unknown"]
    assert "task.name is missing: task.kind = riddles needs the sphinx" in found["needs"]
    assert "task.path means nothing to task.kind = riddles" in found["foreign"]
    assert "task.name means nothing to task.kind = seeds" in found["others"]
    assert found["drawn"] == ["train/0", ["a sphinx asks them"]]
    assert found["rows"] == [{"prompt": "who?"}] and found["card"] == "`thebes` of Thebes"
    assert found["named"] == found["answers"] == "pages"
