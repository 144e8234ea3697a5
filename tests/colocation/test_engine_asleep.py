"""An engine that gives its memory back and takes it again: requests stay, spans stay true, and nothing is computed meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.core.types import Fork, Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.testing.makers import request
from support.fake_engine_model import CoreDriver, prompt
from support.few import few
from support.native_calls import drawn, greedy, make_engine, prompts, put, run, save_model, saved, step  # noqa: F401
from support.tiny_models import skip_where_inexact


def forwarded(driver: CoreDriver, since: int = 0) -> int:
    """Tokens that went through the model."""
    return sum(len(batch.tokens) for batch in driver.runner.forwarded[since:])


def wake(driver: CoreDriver, new: bool) -> None:
    """With the weights that it had, or with newer ones."""
    driver.engine.wake()
    assert not driver.engine.has_work(), "it has no weights yet"
    driver.swap() if new else driver._put(driver.version, 0)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_requests_go_on_where_they_were_and_spans_say_what_computed_their_cache(keep: bool, new: bool):
    driver = CoreDriver()
    driver.add(request("a", prompt(20), 10), request("b", prompt(9), 10))
    for _ in range(4):
        driver.step()
    slept = driver.engine.sleep(keep)
    assert driver.runner.cache is None and bool(slept.moved) == keep
    assert not driver.engine.has_work() and driver.engine.stats().version == 0
    driver.add(request("c", prompt(3), 2))  # others come and go meanwhile
    driver.engine.cancel("b")
    with pytest.raises(RuntimeError, match="has no weights"):
        driver.step()
    wake(driver, new)
    driver.run()
    for name in "ac":
        driver.check(name)
        assert driver.told[name].stop == "length"
    sampled = driver.told["a"].versions.count(0)
    assert driver.told["a"].versions == [0] * sampled + [int(new)] * (10 - sampled)
    after = int(new and not keep)  # a cache that was dropped is the newer weights' own
    assert driver.told["a"].kv_versions == [0] * sampled + [after] * (10 - sampled)
    recomputed = driver.engine.stats().recomputed_tokens
    assert recomputed == 0 if keep else recomputed >= 20


def test_it_may_begin_asleep_and_be_told_twice():
    driver = CoreDriver()
    driver.add(request("a", prompt(8), 4))
    driver.step()
    driver.engine.sleep(True)
    assert driver.engine.sleep(True).moved == driver.engine.sleep(False).moved == 0
    wake(driver, new=False)
    assert driver.engine.wake().moved == 0
    driver.run()
    driver.check("a")


def test_a_version_that_was_loaded_by_a_wake_that_was_cut_off_may_come_again_and_an_older_one_never():
    driver = CoreDriver(max_adapters=1)
    for version in (0, 1, 1):
        driver.adapters["north"] = version - 1
        driver.swap_adapter("north")
    driver._put(driver.version, 0)
    driver.run(request("a", prompt(8), 4, adapter="north"), request("b", prompt(8), 4))
    driver.check("a", adapter="north")
    driver.check("b")
    driver.adapters["north"] = -1
    with pytest.raises(AssertionError, match="versions never go back"):
        driver.swap_adapter("north")
    with pytest.raises(AssertionError, match="versions never go back"):
        driver._put(driver.version - 1, 0)


def test_those_who_are_aborted_in_their_sleep_say_so_at_once():
    driver = CoreDriver()
    driver.add(request("a", prompt(8), 20), request("b", prompt(5), 20))
    for _ in range(3):
        driver.step()
    driver.engine.sleep(True)
    driver.engine.abort()
    assert driver.engine.has_work()
    driver.step()
    assert {told.stop for told in driver.told.values()} == {"interrupted"}
    wake(driver, new=True)
    driver.run(request("c", prompt(4), 3))
    driver.check("c")


def test_nothing_is_forked_or_reused_from_a_cache_that_is_gone():
    driver = CoreDriver()
    driver.run(request("a", prompt(40), 4))
    driver.engine.sleep(True)
    wake(driver, new=False)
    with pytest.raises(ValueError, match="has made room for others"):
        driver.engine.add(Request("fork", (), Sampling(max_tokens=3), fork=Fork("a", 2)))
    before = len(driver.runner.forwarded)
    driver.run(request("again", prompt(40), 4))
    driver.check("again")
    assert forwarded(driver, before) >= 40, "the prompt is computed again"


@pytest.mark.parametrize("seed", few(range(12), keep=5))
def test_whatever_happens_between_two_naps_tokens_are_the_models(seed: int):
    """The bookkeeping is checked after every pass (`engine.check`), and every span against the entries in the cache."""
    rng, driver = random.Random(seed), CoreDriver(blocks=24, max_running=3)
    named = 0
    for _ in range(60):
        match rng.choice(["add", "step", "step", "step", "swap", "cancel", "nap", "nap"]):
            case "add":
                length, same = rng.randint(1, 60), rng.randint(0, 2)
                driver.add(request(f"r{named}", prompt(length, same), rng.randint(1, 30), seed=rng.randrange(99)))
                named += 1
            case "step":
                if driver.engine.has_work():
                    driver.step()
            case "swap":
                driver.swap()
            case "cancel":
                if open_ones := [name for name, told in driver.told.items() if not told.stop]:
                    driver.engine.cancel(gone := rng.choice(open_ones))
                    driver.told[gone].stop = "cancelled"
            case "nap":
                driver.engine.sleep(rng.random() < 0.5)
                wake(driver, new=rng.random() < 0.5)
    driver.run()
    for name, told in driver.told.items():
        assert told.stop, name
        driver.check(name)


PATHS = ("kernels", "fused", "hf")


@pytest.mark.parametrize("keep", few([True, False], keep=1))
@pytest.mark.parametrize("path", PATHS)
def test_every_runner_gives_the_same_bits_after_a_nap(path: str, keep: bool, tmp_path: Path):
    if path != "kernels":
        skip_where_inexact(torch.float32)
    directory = save_model(tmp_path, "llama", head_dim=16)  # the kernels take no smaller heads

    def answers(naps: tuple[int, ...]) -> dict[str, tuple[list[int], list[float]]]:
        engine = make_engine(directory, path=path, exact=True)
        for number, text in enumerate(prompts(40, 3, 17)):
            engine.add(drawn(str(number), text, seed=number, tokens=20))
        found: dict = {}
        for count in range(1000):
            if count in naps:
                slept = engine.sleep(keep)
                assert bool(slept.moved) == keep
                engine.wake()
                put(engine, directory, 0)
            if not engine.has_work():
                break
            step(engine, found)
        return {name: (one.tokens, one.logprobs) for name, one in found.items()}

    assert answers((2, 7, 8)) == answers(())


def test_an_engine_that_begins_asleep_takes_its_memory_when_it_wakes(saved: Callable[..., Path]):  # noqa: F811
    config = EngineConfig(dtype="float32", device="cpu", kv_gib=0.05, context_length=96)
    engine = NativeEngine(saved("llama"), config, asleep=True)
    engine.add(greedy("a", prompts(5)[0]))
    assert not engine.has_work()
    with pytest.raises(AssertionError, match="asleep"):
        put(engine, saved("llama"), 0)
    engine.wake()
    put(engine, saved("llama"), 0)
    assert len(run(engine)["a"].tokens) == 12
