"""Unmodified clients against `headrace serve`, doing what their users do: chats, streams, tools whose results are sent back, structured answers,
mistakes, patience and its end. Each is a program beside this file that checks what it gets.

The packages of the `dev` extra have them in this interpreter. The others are in .venv-clients (`make clients-setup`), or at
$HEADRACE_CLIENTS; without it their tests are skipped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from talking_engine import talking_engine

from headrace.web.limits import ServerLimits
from support.few import few
from support.served import faked
from support.tool_chats import HERMES, save_tokenizer

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("HEADRACE_CLIENTS") or HERE.parents[1] / ".venv-clients")
PYTHON, PACKAGES, NODE = CLIENTS / "bin/python", CLIENTS / "node_modules", shutil.which("node")
LONGEST = 900
AT_ONCE = 4
"""Requests for which the server has room: clients fill it."""

with_python = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no clients in {CLIENTS}: make clients-setup"),
]
with_node = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (NODE and PACKAGES.exists()), reason=f"no node, or no clients in {PACKAGES}: make clients-setup"
    ),
]


def played(command: list[str], tmp_path: Path) -> dict[str, str]:
    """Runs a client and returns what it prints: how its structured answers were."""

    async def go() -> bytes:
        model, limits = save_tokenizer(tmp_path / "model", HERMES), ServerLimits(requests=AT_ONCE)
        environment = {**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        async with asyncio.timeout(LONGEST), faked(model, talking_engine(), limits) as (client, serving):
            words = [*command, client.url]
            done = await asyncio.to_thread(
                subprocess.run, words, env=environment, stdout=subprocess.PIPE, cwd=tmp_path, timeout=LONGEST
            )
            assert done.returncode == 0, "its output is above"
            assert serving.under_way == 0, "everything was released"
            return done.stdout

    found: dict[str, str] = json.loads(asyncio.run(go()).splitlines()[-1])
    assert set(found.values()) == {"served"}, found
    return found


@pytest.mark.parametrize("name", few(["openai", "anthropic", "pydantic_ai"], keep=1))
def test_a_client_of_this_interpreter(name: str, tmp_path: Path) -> None:
    played([sys.executable, str(HERE / f"with_{name}.py")], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=with_python)
        for name in ("openai", "litellm", "langchain", "instructor", "openai_agents")
    ],
)
def test_a_client_for_python(name: str, tmp_path: Path) -> None:
    played([str(PYTHON), str(HERE / f"with_{name}.py")], tmp_path)


def node_program(name: str, place: Path) -> list[str]:
    """The command of a program for Node, which looks for packages beside its file."""
    for file in HERE.glob("*.mjs"):
        shutil.copy(file, place)
    (place / "node_modules").symlink_to(PACKAGES)
    return [str(NODE), str(place / name)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=with_node) for name in ("openai", "ai_sdk")])
def test_a_client_for_node(name: str, tmp_path: Path) -> None:
    played(node_program(f"with_{name}.mjs", tmp_path), tmp_path)
