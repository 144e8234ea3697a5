"""The engine on a pretended CUDA device: no call mixes devices, and its tokens and log-probs are those of the CPU.

CUDA graphs are captured by the real device only (`make device`), so the engine is `exact` here, which decodes without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretend_cuda import DEVICE, FREE, TOTAL, OnDevice, PretendedCuda, pretended_cuda

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import Core, NativeEngine
from headrace.engine.native.draws import DrawDetails
from headrace.engine.native.model_loading import _sizes, read_model
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.sampler import PendingDraw
from headrace.engine.sizes import CONTEXT, ON_CPU, RESERVED, Sizes
from headrace.native.uploads import uploaded_together
from support.few import few
from support.native_calls import Answer, drawn, greedy, make_engine, prompts, put, run, saved, score, step  # noqa: F401
from support.sampling import random_logits, same
from support.tiny_models import MODELS


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    yield from pretended_cuda(monkeypatch)


def answers(directory: Path, newer: Path, device: str) -> tuple[dict[str, Answer], tuple[float, ...]]:
    """Greedy and drawn, longer than a chunk, with new weights in the middle; then the log-probs of a text."""
    engine = make_engine(directory, device=device, path="fused", exact=True, max_running=3)
    first, second, third = prompts(40, 3, 17)
    found = run(engine, [greedy("a", first), drawn("b", second, 7, top_p=0.8, top_k=20, temperature=0.9)])
    engine.add(drawn("c", third, 8, min_p=0.05))
    engine.step()
    put(engine, newer, 1)
    return run(engine, answers=found), score(engine, first)


@pytest.mark.parametrize("name", few(MODELS, keep=1))
def test_tokens_and_log_probs_are_those_of_the_cpu(name: str, saved: Callable[..., Path], cuda: PretendedCuda):  # noqa: F811
    on_gpu, scored = answers(saved(name), saved(name, 1), "cuda")
    assert cuda.calls > 100
    on_cpu, expected = answers(saved(name), saved(name, 1), "cpu")
    assert {key: one.tokens for key, one in on_gpu.items()} == {key: one.tokens for key, one in on_cpu.items()}
    for key, one in on_gpu.items():  # filters sum weights in float64, in another order than the CPU's
        assert one.logprobs == pytest.approx(on_cpu[key].logprobs, rel=1e-14), key
    assert on_gpu["a"].logprobs == on_cpu["a"].logprobs
    assert scored == expected


@pytest.mark.parametrize("keep", few([True, False], keep=1))
def test_asleep_it_has_nothing_on_the_device_and_requests_go_on(
    keep: bool,
    saved: Callable[..., Path],  # noqa: F811
    cuda: PretendedCuda,
):
    def found(naps: bool) -> dict[str, Answer]:
        engine = make_engine(saved("llama"), device="cuda", path="fused", exact=True)
        for name, text in zip("ab", prompts(40, 17), strict=True):
            engine.add(drawn(name, text, 7))
        answers: dict[str, Answer] = {}
        for _ in range(5):
            step(engine, answers)
        if naps:
            cache = engine._runner._cache
            assert isinstance(cache._data, OnDevice) and bool(engine.sleep(keep).moved) == keep
            assert not cache._data.numel() and engine._runner._decoder is None
            engine.wake()
            put(engine, saved("llama"), 0)
            assert isinstance(cache._data, OnDevice)
        return run(engine, answers=answers)

    slept, awake = found(True), found(False)
    assert {name: (one.tokens, one.logprobs) for name, one in slept.items()} == {
        name: (one.tokens, one.logprobs) for name, one in awake.items()
    }


def test_arrays_of_one_upload_are_themselves_whatever_lies_before_them(cuda: PretendedCuda):
    wide, narrow = np.arange(7, dtype=np.int64) - 3, np.arange(15, dtype=np.int32).reshape(5, 3)
    arrays = (narrow[:, :1], np.zeros((0, 2), np.int32), wide, narrow.T, np.array([True, False, True]))
    there = uploaded_together(arrays, DEVICE)
    assert all(isinstance(tensor, OnDevice) for tensor in there)
    assert len({tensor.untyped_storage().data_ptr() for tensor in there if tensor.numel()}) == 1
    for tensor, array in zip(there, arrays, strict=True):
        assert torch.equal(tensor.cpu(), torch.from_numpy(np.ascontiguousarray(array)))


def test_its_sizes_follow_from_what_is_free_of_the_device(saved: Callable[..., Path], cuda: PretendedCuda):  # noqa: F811
    directory = saved("llama")

    def sizes(asleep: bool = False, **settings: object):
        config = EngineConfig(path="fused", exact=True, context_length=200, **{"device": "cuda", **settings})  # type: ignore[arg-type]
        return read_model(directory, config, asleep).sizes

    alone, in_turns = sizes(max_running=1024), sizes(asleep=True, max_running=1024)
    assert alone is not None and in_turns is not None and alone.prefill_chunk == 8192
    assert ON_CPU.kv_gib <= alone.kv_gib <= (FREE - RESERVED * TOTAL - CONTEXT) / (1 << 30)
    assert in_turns.kv_gib <= (TOTAL - RESERVED * TOTAL - CONTEXT) / (1 << 30)
    assert sizes(kv_gib=0.05, max_running=3, prefill_chunk=7) == (0.05, 3, 7)
    assert sizes(kv_gib=0.05).kv_gib == 0.05 and sizes(device="cpu") == ON_CPU
    engine = NativeEngine(
        directory, EngineConfig(path="fused", exact=True, context_length=200, device="cuda"), asleep=True
    )
    assert engine.capabilities.rows == 1024 and engine.capabilities.kv_tokens >= 1024 * 100


def test_a_device_without_room_for_one_sequence_is_refused_with_a_context_that_fits(cuda: PretendedCuda):
    """A model of 1.3 GiB, of whose cache a block takes a quarter of a GiB."""
    matrices = {f"up {layer}": (8192, 4096) for layer in range(20)}
    model = SimpleNamespace(shapes={"embed": (1000, 1024), **matrices}, vocabulary=1000)
    runner = SimpleNamespace(block_nbytes=1 << 28)

    def sizes(context: int) -> Sizes:
        return _sizes(model, runner, EngineConfig(device="cuda"), context, asleep=False)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="not one sequence of engine.context_length = 999") as refused:
        sizes(999)
    shorter = int(str(refused.value).rpartition("= ")[2])
    assert 0 < shorter < 999 and sizes(shorter).kv_gib * 4 >= shorter / 32
    runner.block_nbytes = 1 << 32
    with pytest.raises(ConfigError, match="End what else uses the GPU$"):
        sizes(999)


@pytest.mark.parametrize("masked", [False, True])
def test_a_draw_is_one_upload_and_one_copy_back_and_another_for_masks(masked: bool, cuda: PretendedCuda):
    logits = random_logits(6, 900).to(DEVICE)
    settings = same(6, top_p=[1.0, 0.9, 1.0, 0.5, 1.0, 1.0], top_k=[0, 0, 5, 0, 0, 0], temperature=[1, 1, 1, 0.7, 0, 1])
    cuda.crossings.clear()
    wanted = DrawDetails(masks=np.full(6, masked), tops=np.zeros(6, np.int64))
    found, _ = PendingDraw(logits, settings, wanted).result()
    assert cuda.crossings == ["up", "down", *["down"] * masked] and found.finite.all()


def test_tokens_go_from_pass_to_pass_on_the_device(
    saved: Callable[..., Path],  # noqa: F811
    cuda: PretendedCuda,
    monkeypatch: pytest.MonkeyPatch,
):
    """Captures are the real device's: here each pass runs in the buffers of one."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def answers(ahead: bool) -> tuple[dict[str, tuple[object, ...]], int]:
        config = EngineConfig(
            device="cuda",
            path="fused",
            dtype="float32",
            kv_gib=0.05,
            max_running=3,
            context_length=128,
            prefill_chunk=16,
        )
        model = read_model(saved("llama"), config)
        assert isinstance(model.runner, FusedRunner) and model.runner.feeds
        model.runner.replay_with(None)
        model.runner.feeds = ahead
        fed, forward = [], model.runner.forward
        model.runner.forward = lambda batch: fed.append(batch.fed is not None) or forward(batch)  # type: ignore[func-returns-value, method-assign]
        engine = Core(model, config)
        put(engine, saved("llama"), 0)
        first, second, third = prompts(40, 3, 17)
        asked = [greedy("a", first), drawn("b", second, 7, top_p=0.8, top_k=20), drawn("c", third, 8, min_p=0.05)]
        found = run(engine, asked)
        return {name: (one.tokens, one.logprobs) for name, one in found.items()}, sum(fed)

    (ahead, fed), (before, none) = answers(True), answers(False)
    assert ahead == before and fed > 5 and none == 0
