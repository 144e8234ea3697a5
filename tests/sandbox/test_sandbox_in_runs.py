"""The sandbox in the processes of runs: rewards, environments, what is refused at the start, and what the doctor says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_hostile import LIMITS, pytestmark  # noqa: F401

from headrace.commands.installed.doctor import sandbox_findings
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.environments.workers.environment_pool import FunctionSettings, check_function
from headrace.episodes.sandbox.config import SandboxConfig
from headrace.episodes.sandbox.isolation import KINDS, IsolationFound, isolation_problem
from headrace.episodes.sandbox.sandbox import Sandbox
from headrace.episodes.sandbox.sandbox_limits import DEFAULT, SandboxSettings
from headrace.episodes.sandbox.tool import run_python
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.extract import code_block
from headrace.episodes.scoring.reward_scorer import RewardScorer
from headrace.run.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def episode(text: str) -> Episode:
    return Episode((Turn((7,), Completion((1,), (0.0,), (VersionSpan(0, 0, 0),), "stop", text)),))


def test_the_builtin_reward_parts_the_block_of_code_in_a_worker(tmp_path):
    prompt = Prompt("train/0", "Add.", (7,), {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]})
    right, half = "```python\ndef add(a, b): return a + b\n```", "```\ndef add(a, b): return a * 2\n```\ndone"
    loops = "```python\ndef add(a, b):\n    while True: pass\n```"

    async def score():
        config = RewardConfig(function="unit_tests", extract="code_block", timeout=120)
        settings = SandboxSettings(LIMITS._replace(cpu_seconds=1))
        scorer = RewardScorer(config, log=tmp_path / "scorer.log", sandbox=settings)
        try:
            return await scorer.score(prompt, [episode(text) for text in (right, half, loops, "no code")])
        finally:
            await scorer.close()

    results = asyncio.run(score())
    assert [one.reward for one in results if isinstance(one, Scored)] == [1.0, 0.5, 0.0, 0.0]
    log = (tmp_path / "scorer.log").read_text()
    assert (
        "2 of 2 passed\n" in log
        and "1 of 2 passed; test 1: failed" in log
        and "test 1: cpu: it took more than 1 s" in log
    )


def test_the_tool_shows_what_the_program_prints():
    assert run_python("import math\nprint(math.factorial(5))") == "120\n"
    assert run_python("6 * 7") == "42\n"
    assert run_python("x = 1") == "(it printed nothing)"
    assert run_python("print(1)\n1 / 0").endswith(
        'File "solution.py", line 2, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero'
    )
    assert run_python("print(1)\nimport os; os._exit(3)") == "error: it ended with exit code 3"


def test_an_environment_that_imports_the_tool_is_checked_when_it_is_loaded(tmp_path):
    file = tmp_path / "env.py"
    file.write_text("from headrace import run_python\nasync def play(agent, prompt): return 1.0\n")

    def settings(sandbox: SandboxSettings) -> FunctionSettings:
        spec = f"{file}:play"
        return FunctionSettings(
            spec=spec, what="environment.function", library=None, seconds=9.0, tool_seconds=9.0, tool_characters=99,
            memory=0, sandbox=sandbox.as_text(),
        )  # fmt: skip

    check_function(settings(DEFAULT))
    too_little = SandboxSettings(DEFAULT.limits._replace(output=1))  # the trial cannot say what it found
    with pytest.raises(ConfigError, match="the environment runs code in a sandbox, which does not work here"):
        check_function(settings(too_little))


def test_what_is_missing_is_refused_unless_it_is_allowed_by_name():
    found = [IsolationFound(kind, kind not in ("network", "memory"), "how") for kind in KINDS]
    message = isolation_problem(found, (), "the reward unit_tests")
    assert "(network: how; memory: how)" in message and 'sandbox.allow = ["network", "memory"]' in message
    assert "memory" in isolation_problem(found, ("network",), "x")
    assert isolation_problem(found, ("network", "memory"), "x") == ""


def test_settings_travel_to_the_processes():
    given = SandboxConfig(allow=("network",), cpu_seconds=3, disk_mib=1, parallel=2).settings
    assert SandboxSettings.from_text(given.as_text()) == given
    assert SandboxConfig().settings == DEFAULT


def test_only_kinds_that_there_are_can_be_allowed():
    config = {
        "model": {"path": "m"}, "task": {"kind": "jsonl", "path": "x"}, "sandbox": {"allow": ["dns"]},
        "reward": {"function": "unit_tests"},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="sandbox.allow"):
        load_config(config)


def test_the_doctor_names_each_kind():
    found = {finding.what: finding.state for finding in sandbox_findings()}
    assert found == dict.fromkeys([*KINDS, "cpu", "disk"], "ok")


@pytest.mark.slow
def test_every_problem_of_the_recipe_is_solved_by_its_answer_and_by_nothing_else():
    rows = [json.loads(line) for line in (ROOT / "recipes" / "code" / "code.jsonl").read_text().splitlines()]
    own = Sandbox(LIMITS)
    for row in rows:
        tests, code = "\n".join(row["tests"]), code_block(row["answer"])
        assert own.test(code, tests).reason == "", row
        assert own.test(code.partition("\n")[0] + "\n    return", tests).reason == "failed", row
    assert len({row["prompt"] for row in rows}) == len(rows) == 64
    own.close()


def imported_by(specs: list[str]) -> str:
    """Whether a new process that loads these rewards says that it runs code."""
    code = (
        "import sys; from headrace.episodes.scoring.workers.reward_worker import load_functions; "
        f"load_functions({specs!r}); print('headrace.episodes.sandbox.tool' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_a_reward_that_runs_no_code_needs_no_sandbox(tmp_path):
    """A machine without isolation is no reason to refuse it, and no process examines the machine."""
    file = tmp_path / "plain.py"
    file.write_text("def plain(completions, **columns): return [0.0] * len(completions)\n")
    assert imported_by([f"{file}:plain", "reasoning_gym"]) == "False"
    assert imported_by(["unit_tests"]) == "True"
