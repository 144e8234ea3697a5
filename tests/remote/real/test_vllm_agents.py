"""An agent that is a program of its own is trained against the real vLLM as against the native engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from real_vllm import MARKS, config_for, save_model

import headrace
from headrace.durable.journal import read_steps
from headrace.facts.facts import GroupEnded, IdentityChecked, RunEnded
from support.server_processes import servers
from support.tiny_run import of

pytestmark = MARKS

AGENT = """
import json, os, sys
from urllib.request import Request, urlopen

given = json.load(sys.stdin)

def ask(talk):
    body = json.dumps({"model": "policy", "messages": talk}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

talk = [{"role": "user", "content": given["prompt"]}]
talk += [ask(talk), {"role": "user", "content": "more?"}]
text = ask(talk)["content"]
print(text.count("e") / max(len(text), 1))
"""
STEPS = 3


@pytest.mark.parametrize("engine", [{"kind": "native", "context_length": 128, "dtype": "float32"}, {}])
def test_an_agent_is_trained(
    engine: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> None:
    model = save_model(tmp_path_factory.mktemp("qwen2-64"), tiny_tokenizer)
    (tmp_path / "agent.py").write_text(AGENT)
    environment = {"kind": "process", "command": [sys.executable, str(tmp_path / "agent.py")]}
    tables = {"environment": environment, "reward": {"function": ""}, "rollout": {"group_size": 4, "max_tokens": 16}}
    config = config_for(tmp_path, model, train={"steps": STEPS, "learning_rate": 1e-3}, **tables)
    headrace.train({**config, "engine": engine} if engine else config)
    run = tmp_path / "runs" / "tiny"
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0, ended.accounting
    steps = list(read_steps(run))
    scored = [rollout for step in steps for group in step.groups for rollout in group.scored]
    assert len(steps) == STEPS and {len(rollout.episode.turns) for rollout in scored} == {2}
    assert not any(fact.failures for fact in of(run, GroupEnded)) and all(
        probe.ok for probe in of(run, IdentityChecked)
    )
    assert not servers()
