"""docs/python.md, word for word, in a real Jupyter kernel; and that kernel's stop button."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import launcher
from nbclient import NotebookClient

from support.runs import preloaded_python
from support.tiny_run import tiny_config, when_step

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


class Watched(NotebookClient):
    """Keeps what was shown in place of a display, which the notebook itself forgets."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            shown.append((cell_index, msg["content"]["data"].get("text/html", "")))
        return super().process_message(msg, cell, cell_index)


shown: list[tuple[int, str]] = []


def execute(
    cells: list[str], folder: Path, meanwhile: Callable[[Watched], threading.Thread] | None = None
) -> list[Any]:
    """The cells with their outputs. Raises where one of them raises."""
    shown.clear()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / ".ipython")}
    client = Watched(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel(env=environment):
        beside = meanwhile(client) if meanwhile else None
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        if beside:
            beside.join()
    return notebook.cells


def texts(cell: Any) -> str:
    """What a cell printed and returned."""
    outputs = [one.get("text", "") + one.get("data", {}).get("text/plain", "") for one in cell["outputs"]]
    return "\n".join(outputs)


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is forked with its libraries loaded, and has a directory of its own."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / ".runtime"))
    monkeypatch.setattr(launcher, "Popen", preloaded_python.Program)


@pytest.mark.slow
def test_the_page_in_a_kernel_word_for_word(tmp_path, tiny_llama):
    model = tmp_path / "smollm2-135m-instruct"  # a directory of a known model's name stands for it
    shutil.copytree(tiny_llama, model)
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 2048}))
    page = blocks(ROOT / "docs" / "python.md")
    checks = [
        "assert run.reason == 'finished' and run.step == 20 and run.history['step'] == list(range(1, 21))",
        "assert [one.step for one in evaluations] == run.held_out['step'] == [0, 10, 20]",
        "assert measured.step == 20 and measured.prompts == 8",
        "import os; assert os.path.exists('sums-model/model.safetensors') and run.report.exists()",
    ]
    cells = execute([*page, *checks], tmp_path)
    trained = next(index for index, cell in enumerate(page) if "headrace.train(" in cell)
    live = [html for index, html in shown if index == trained and "headrace" in html and "<pre" in html]
    assert any("loading the model" in html for html in live)
    assert any(re.search(r"step \d+/20", html) for html in live), "the view moved while the run went on"
    last = cells[trained]["outputs"][-1]["data"]
    assert "<iframe" in last["text/html"] and "finished at step 20 of 20" in last["text/plain"]


@pytest.mark.slow
def test_the_stop_button_writes_a_checkpoint_and_returns(tmp_path, tiny_llama):
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 100_000}, observe={"terminal": "auto"})
    (tmp_path / "config.json").write_text(json.dumps(config))

    def stop(client: Watched) -> threading.Thread:
        group = os.getpgid(client.km.provisioner.pid)  # type: ignore[attr-defined, union-attr]
        assert group != os.getpgrp()
        return when_step(tmp_path / "runs" / "tiny", 2, lambda: os.killpg(group, signal.SIGINT))

    train = "import headrace, json\nrun = headrace.train(json.load(open('config.json')))\nrun.reason, run.step, len(run.history['step'])"
    again = "1 + 1"  # the kernel lives on
    cells = execute([train, again], tmp_path, stop)
    reason, step, rows = eval(texts(cells[0]).strip().splitlines()[-1])
    assert reason == "interrupted" and 2 <= step == rows < 100_000
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / f"step-{step:06d}").is_dir()
    assert texts(cells[1]).strip() == "2"
