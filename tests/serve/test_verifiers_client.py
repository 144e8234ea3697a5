"""The train client of `verifiers` (0.4) against `headrace serve`: tokens in, tokens out, log-probs, and errors that it reads."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from served import faked
from tool_chats import TEMPLATES, save_tokenizer, tokens_of

from headrace.engine.fake import FakeEngine
from headrace.serve.serving import Serving

pytest.importorskip("verifiers.v1.clients.train", reason="verifiers is not installed")

LONGEST = 300
ASKING = {"model": "tiny", "messages": [{"role": "user", "content": "How are you?"}]}


@pytest.mark.slow  # importing it takes 4 s of CPU time
def test_a_turn_is_what_was_sampled(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path, TEMPLATES["hermes"])
    engine = FakeEngine(
        seconds_per_token=0.001, script=lambda request: tokens_of("Fine.<|im_end|>"), context_length=100
    )

    async def go() -> None:
        async with asyncio.timeout(LONGEST), faked(model, engine) as (client, serving):
            await talk(client.url, model, serving)

    asyncio.run(go())


async def talk(url: str, model: Path, serving: Serving) -> None:
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.errors import ProviderError
    from verifiers.v1.types import SamplingConfig

    os.environ["HEADRACE_TEST_KEY"] = "none"
    config: Any = TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="HEADRACE_TEST_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=str(model),
    )
    trainer = TrainClient(config)
    sampling = SamplingConfig(temperature=1.0, max_tokens=8, cache_salt="7")
    answer = await trainer.get_response(ChatDialect(), ASKING, sampling, session_id="s")
    assert answer.message.content == "Fine." and answer.finish_reason == "stop" and answer.tokens
    assert (
        answer.tokens.completion_ids == tokens_of("Fine.<|im_end|>") and answer.tokens.completion_logprobs == [-1.0] * 6
    )
    assert list(answer.tokens.prompt_ids) == list(serving.encoder.encode_messages(ASKING["messages"])[1])  # type: ignore[arg-type]
    with pytest.raises(ProviderError, match="context length") as overlong:
        long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 200}]}
        await trainer.get_response(ChatDialect(), long, sampling)
    assert overlong.value.status_code == 400, "from the model's length, which /v1/models names"
    with pytest.raises(ProviderError, match="frequency_penalty is not served"):
        await trainer.get_response(ChatDialect(), ASKING, SamplingConfig(max_tokens=8, frequency_penalty=1.0))
    await trainer.close()
