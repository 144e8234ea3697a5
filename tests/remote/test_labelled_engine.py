"""What vLLM's dialect and SGLang's have in common, against a fake of each: labels, new processes, weights that are not loaded, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError, HeadraceError, IdentityError
from headrace.engine.remote.connection import Unreachable
from headrace.engine.remote.dialect import UNLABELLED
from headrace.engine.remote.remote_engine import RemoteEngine
from support.labelled_engine import SGLANG, VLLM, Kind, request, so_far, until, update

both = pytest.mark.parametrize("kind", [pytest.param(VLLM, id="vllm"), pytest.param(SGLANG, id="sglang")])


@both
def test_a_label_that_somebody_else_sets_ends_the_run(kind: Kind[Any], tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        asking = asyncio.ensure_future(engine.generate(request("a")))
        await until(lambda: so_far(engine, "a") > 3)
        server.label = "of another run"
        for one in (asking, engine.watch()):
            with pytest.raises(IdentityError, match="labelled of another run"):
                await one

    kind.run(tiny_tokenizer, tmp_path, case, speed=0.01)


@both
def test_a_label_that_somebody_else_sets_is_noticed_while_nothing_runs(
    kind: Kind[Any], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        server.label = "of another run"
        with pytest.raises(IdentityError, match="labelled of another run"):
            await engine.watch()

    kind.run(tiny_tokenizer, tmp_path, case)


@both
def test_a_new_process_is_met_once_and_before_it_is_given_a_label(
    kind: Kind[Any], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """However many requests look when the one before has ended, and though an update was under way."""

    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        dialect, connection = engine._dialect, engine._connection
        server.label = UNLABELLED
        with pytest.raises(Unreachable, match="it was started anew"):
            await dialect.load(connection, update(directory, 1), 60)
        states = await asyncio.gather(*(dialect.look(connection, 60) for _ in range(5)))
        assert len({state.boot for state in states}) == 1 and server.label.endswith("-2-none")
        await engine.load(update(directory, 1))
        assert "-2-v1-" in server.label

    kind.run(tiny_tokenizer, tmp_path, case)


@both
def test_weights_that_cannot_be_loaded_end_the_run(kind: Kind[Any], tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        server.faults.add("load_fails")
        with pytest.raises(ConfigError, match="could not load version 1"):
            await engine.load(update(directory, 1))

    kind.run(tiny_tokenizer, tmp_path, case)


@both
def test_weights_that_are_live_are_not_read_again_and_after_a_broken_update_none_are(
    kind: Kind[Any], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        async def fingerprints() -> dict[str, str]:
            return (await engine._dialect.look(engine._connection, 60)).fingerprints

        for _ in range(2):
            await engine.load(update(directory, 1))
        assert server.reloads == 2 and await fingerprints() == {"": "fake-2"}
        server.faults.add("load_fails")
        with pytest.raises(ConfigError):
            await engine.load(update(directory, 2))
        assert await fingerprints() == {}, "whoever comes back from this is given its weights"
        server.faults.clear()
        await engine.load(update(directory, 2))
        assert await fingerprints() == {"": "fake-3"} and not server.serving.paused

    kind.run(tiny_tokenizer, tmp_path, case)


@both
def test_it_is_busy_while_it_has_requests_of_the_run(kind: Kind[Any], tiny_tokenizer: Path, tmp_path: Path) -> None:
    """These servers do not report for how long they have worked, and an idle share of 100 % would be wrong."""

    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        async def busy() -> float:
            return (await engine.stats()).busy_seconds

        assert await busy() == 0
        asking = [asyncio.ensure_future(engine.generate(request(name))) for name in "ab"]
        await until(lambda: min(so_far(engine, name) for name in "ab") > 3)
        assert (before := await busy()) > 0
        await asyncio.gather(*asking)
        after = await busy()
        assert before < after == await busy()

    kind.run(tiny_tokenizer, tmp_path, case, speed=0.01)


@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [
        (VLLM, {"absent": ["dev"]}, "VLLM_SERVER_DEV_MODE=1"),
        (VLLM, {"absent": ["scale_out"]}, "--enable-scale-out"),
        (VLLM, {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        (VLLM, {"api_key": "secret"}, "engine.token_file"),
        (SGLANG, {"dtype": "auto"}, "--dtype bfloat16"),
        (SGLANG, {"incremental_streaming_output": False}, "--incremental-streaming-output"),
        (SGLANG, {"max_loras_per_batch": "many", "enable_lora": True}, "does not describe itself as SGLang"),
        (SGLANG, {"api_key": "0123456789abcdef"}, "engine.token_file"),
    ],
)
def test_a_server_without_what_a_run_needs_is_refused(
    kind: Kind[Any], how: dict[str, Any], words: str, tiny_tokenizer: Path
) -> None:
    async def go() -> None:
        async with asyncio.timeout(100), kind.served(tiny_tokenizer, **how) as (url, _):
            engine = kind.engine_at(url)
            try:
                with pytest.raises(HeadraceError, match=words):
                    await engine.open()
            finally:
                await engine.close()

    asyncio.run(go())
