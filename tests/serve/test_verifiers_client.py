"""The train client of `verifiers` (0.4) against `headrace serve`: tokens in, tokens out, log-probs, and errors that it reads.

It brings many packages that headrace does not need, so it runs in an interpreter of its own: that of .venv-verifiers (`make verifiers-setup`), or
$HEADRACE_VERIFIERS_PYTHON. Without one the test is skipped."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.fake_engine import FakeEngine
from support.served import faked
from support.tool_chats import TEMPLATES, save_tokenizer, tokens_of

PYTHON = os.environ.get("HEADRACE_VERIFIERS_PYTHON") or str(Path(__file__).parents[2] / ".venv-verifiers/bin/python")
LONGEST = 300
ASKING = [{"role": "user", "content": "How are you?"}]

CLIENT = """
import asyncio, json, os, sys

from renderers.configs import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

url, model, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
os.environ["KEY"] = "none"
renderer = DefaultRendererConfig()
client = TrainClient(
    TrainClientConfig(base_url=url, api_key_var="KEY", renderer=renderer, renderer_model_name=model)
)


async def ask(messages, **sampling):
    body = {"model": "tiny", "messages": messages}
    try:
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=8, **sampling), session_id="s")
    except ProviderError as error:
        return {"status": error.status_code, "error": str(error)}
    tokens = answer.tokens
    return {
        "content": answer.message.content,
        "finish_reason": answer.finish_reason,
        "prompt_ids": list(tokens.prompt_ids),
        "completion_ids": list(tokens.completion_ids),
        "logprobs": list(tokens.completion_logprobs),
    }


async def main():
    found = [await ask(messages, **sampling) for messages, sampling in asked]
    await client.close()
    print(json.dumps(found))


asyncio.run(main())
"""


@pytest.mark.slow  # importing it takes 4 s of CPU time
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no verifiers in {PYTHON}: make verifiers-setup")
def test_a_turn_is_what_was_sampled(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path, TEMPLATES["hermes"])
    engine = FakeEngine(
        seconds_per_token=0.001, script=lambda request: tokens_of("Fine.<|im_end|>"), context_length=100
    )
    asked = [
        (ASKING, {"temperature": 1.0, "cache_salt": "7"}),
        ([{"role": "user", "content": "x" * 200}], {}),
        (ASKING, {"frequency_penalty": 1.0}),
    ]

    async def go() -> tuple[list[Any], Any]:
        async with asyncio.timeout(LONGEST), faked(model, engine) as (client, serving):
            words = [PYTHON, "-c", CLIENT, f"{client.url}/v1", str(model), json.dumps(asked)]
            environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
            done = await asyncio.to_thread(
                subprocess.run, words, env=environment, stdout=subprocess.PIPE, check=True, timeout=LONGEST
            )
            return json.loads(done.stdout.splitlines()[-1]), serving.encoder.encode_messages(ASKING)[1]

    (answer, overlong, penalised), prompt = asyncio.run(go())
    assert answer["content"] == "Fine." and answer["finish_reason"] == "stop"
    assert answer["completion_ids"] == tokens_of("Fine.<|im_end|>") and answer["logprobs"] == [-1.0] * 6
    assert answer["prompt_ids"] == list(prompt)
    assert overlong["status"] == 400 and "context length" in overlong["error"], "/v1/models names the model's length"
    assert "frequency_penalty is not served" in penalised["error"]
