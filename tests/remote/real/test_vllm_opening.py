"""The real vLLM 0.32 on the CPU, whose worker opens the trainer's memory by headrace's transfer engine, over the CPU's stand-in for that of a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from real_vllm import MARKS, changed, config_for, reference, save_model, server_of
from test_vllm_transfer import with_headrace
from transformers import AutoModelForCausalLM

from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Request, Sampling
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.tokenizer import end_tokens
from headrace.run.config import load_config
from headrace.trainer.model.causal_lm import tied_names
from headrace.weight_sync.cuda_ipc import CudaIpc
from headrace.weight_sync.packed import lay_out

pytestmark = MARKS

LENGTH = 100
PROMPT = (1, 7, 8)


def test_versions_from_memory_that_is_opened(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """The first slot is written to again while vLLM serves what it has copied from it."""
    model = save_model(tmp_path / "model", tiny_tokenizer)
    models = [model, changed(model, tmp_path / "1"), changed(model, tmp_path / "2", seed=2)]
    tables = config_for(tmp_path, model, weight_sync={"kind": "http"})
    tables["engine"] |= {"python": str(with_headrace(tmp_path))}
    config = load_config(tables)
    trained = [AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in models]
    manifest = lay_out(trained[0].named_parameters(), torch.float32, tied_names(trained[0]))

    async def case() -> list[Completion]:
        facts, clock = FactList(), asyncio.get_running_loop().time
        way = CudaIpc("cpu")
        host = server_of(config, model, tmp_path, way)
        sender = way.sender({"": manifest})
        engine = RemoteEngine(
            Connection(host.url, host.token),
            VllmDialect(end_tokens(model), 1, way.access),
            patience=600.0,
            max_deaths=1,
            telemetry=Telemetry(facts.record, clock, Waits(facts.record, clock, 1000.0, 2000.0)),
            host=host,
        )
        try:
            await engine.open()
            asked: list[asyncio.Future[Completion]] = []
            had = dict[str, int]()

            def waits() -> bool:
                """Whether a completion has fewer than ten tokens of the last version."""
                found = {name: len(one.tokens) for name, one in engine.unfinished().items()}
                few = len(found) < len(asked) or any(count < had.get(name, 0) + 10 for name, count in found.items())
                return few and not any(one.done() for one in asked)

            for version, one in enumerate(trained):
                while waits():
                    await asyncio.sleep(0.005)
                update = sender.send(version, one.named_parameters())
                if version == 1:
                    buffer, _ = sender._slots[""][1]
                    buffer.views["model.norm.weight"].view(torch.uint8)[0] ^= 1
                    with pytest.raises(ConfigError, match="published with fingerprint|could not load version 1"):
                        await engine.load(update)
                    buffer.views["model.norm.weight"].view(torch.uint8)[0] ^= 1
                await engine.load(update)
                had = {name: len(found.tokens) for name, found in engine.unfinished().items()}
                if not asked:
                    drawn = Sampling(max_tokens=LENGTH, ignore_eos=True)
                    asked = [asyncio.ensure_future(engine.generate(Request(f"{n}", PROMPT, drawn))) for n in range(4)]
            return await asyncio.gather(*asked)
        finally:
            await engine.close()

    for completion in asyncio.run(case()):
        assert [span.version for span in completion.spans] == [0, 1, 2] and len(completion.tokens) == LENGTH
        starts = [span.start for span in completion.spans] + [LENGTH]
        for span, end in zip(completion.spans, starts[1:], strict=True):
            expected = reference(models[span.version], PROMPT, completion)
            assert completion.logprobs[span.start : end] == pytest.approx(expected[span.start : end], abs=2e-4)
