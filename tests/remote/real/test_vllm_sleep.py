"""The real vLLM 0.32 on the CPU through the states of its sleep. There its workers keep their memory (`v1/worker/cpu_worker.py`), and it refuses
`--enable-sleep-mode`; its routes, its scheduler, its caches and its labels do as on a GPU."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from real_vllm import MARKS, changed, config_for, reference, save_model, server_of, updates

from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Request, Sampling
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import ServerFacts
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.engine.remote.sleeping_server import SleepingServer
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.tokenizer import end_tokens
from headrace.run import starting
from headrace.run.config import load_config

pytestmark = MARKS

LENGTH = 100
PROMPT = (1, 7, 8)


class OnACpu(VllmDialect):
    """Takes a server for one that gives memory back."""

    def _met(self, facts: ServerFacts) -> str:
        return super()._met(replace(facts, sleeps=True))


def test_requests_go_on_through_turns(tiny_tokenizer: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tiny_tokenizer)
    models = [model, changed(model, tmp_path / "1")]
    config = load_config(config_for(tmp_path, model))

    async def case() -> list[Completion]:
        facts, clock = FactList(), asyncio.get_running_loop().time
        host = server_of(config, model, tmp_path, starting.transport_of(config, tmp_path))
        connection = Connection(host.url, host.token)
        engine = SleepingServer(
            connection,
            OnACpu(end_tokens(model), 1),
            keeps_base=False,
            patience=600.0,
            max_deaths=1,
            telemetry=Telemetry(facts.record, clock, Waits(facts.record, clock, 1000.0, 2000.0)),
            host=host,
        )

        async def sleeps() -> bool:
            return bool((await connection.get("/is_sleeping", 60))["is_sleeping"])

        first, second = updates(models)
        try:
            await engine.open()
            assert await sleeps()
            await engine.wake(True)
            assert await sleeps(), "a part of its memory is not enough"
            await engine.load(first)
            assert not await sleeps()
            drawn = Sampling(max_tokens=LENGTH, ignore_eos=True)
            asking = [asyncio.ensure_future(engine.generate(Request(f"{n}", PROMPT, drawn))) for n in range(6)]
            for came in (second, None):
                had = sum(len(found.tokens) for found in engine.unfinished().values())
                while sum(len(found.tokens) for found in engine.unfinished().values()) < had + 30:
                    await asyncio.sleep(0.005)
                await engine.sleep(False)
                assert await sleeps()
                await engine.wake(came is not None)
                if came:
                    await engine.load(came)
                assert not await sleeps()
            return await asyncio.gather(*asking)
        finally:
            await engine.close()

    for completion in asyncio.run(case()):
        assert [span.version for span in completion.spans] == [0, 1] and len(completion.tokens) == LENGTH
        at = completion.spans[1].start
        of_both = [reference(one, PROMPT, completion) for one in models]
        assert completion.logprobs[:at] == pytest.approx(of_both[0][:at], abs=2e-4)
        assert completion.logprobs[at:] == pytest.approx(of_both[1][at:], abs=2e-4)
        assert completion.logprobs[at:] != pytest.approx(of_both[0][at:], abs=2e-3)


def test_a_build_for_cpus_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tiny_tokenizer)
    config = load_config(config_for(tmp_path, model, orchestration={"placement": "shared"}))
    with pytest.raises(ConfigError, match="vLLM for CPUs .* has no sleep mode"):
        server_of(config, model, tmp_path, starting.transport_of(config, tmp_path), sleeps=True)
