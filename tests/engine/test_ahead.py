"""Passes that are asked for before the tokens of the one before are known: what is told is what the present order tells, bit for bit.

`test_engine_property.py` has them among all that can happen to an engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.core.types import Request, Sampling
from headrace.engine.native.sampler import PendingDraw
from support.fake_engine_model import CoreDriver, prompt

NAMES = [f"r{number}" for number in range(9)]


def requests() -> list[Request]:
    """Greedy and drawn, with filters and masks, that end by an end of sequence, a stop token, or their limit."""
    made = []
    for number, name in enumerate(NAMES):
        sampling = Sampling(
            max_tokens=(1, 2, 30, 50, 70)[number % 5],
            temperature=(1.0, 0.7, 0.0)[number % 3],
            top_p=(1.0, 0.8, 1.0, 0.5)[number % 4],
            top_k=(0, 0, 5)[number % 3],
            seed=number,
            ignore_eos=number % 2 == 0,
            stop_token_ids=(17,) if number % 4 == 1 else (),
        )
        made.append(Request(name, prompt(5 + 9 * (number % 3), number), sampling, return_mask=number % 2 == 1))
    return made


def told(ahead: bool, **config: Any) -> tuple[dict[str, Any], CoreDriver]:
    driver = CoreDriver(ends=(3,), max_running=4, **config)
    driver.runner.feeds = ahead
    found = driver.run(*requests())
    masks: dict[str, list[bytes]] = {name: [] for name in NAMES}
    for output in found[NAMES[0]].output:
        for detail in output.details:
            masks[detail.request_id].append(detail.mask)
    answers = {
        name: (one.tokens, one.logprobs, one.versions, one.kv_versions, one.stop, masks[name])
        for name, one in found.items()
    }
    return answers, driver


@pytest.mark.parametrize("blocks", [64, 9], ids=["room", "pushed out"])
def test_answers_are_those_of_the_present_order_bit_for_bit(blocks: int):
    (ahead, driver), (before, slow) = told(True, blocks=blocks), told(False, blocks=blocks)
    assert ahead == before and any(masks for *_, masks in ahead.values())
    assert driver.runner.fed > 20 and slow.runner.fed == 0
    assert driver.engine.stats().sampled_tokens == slow.engine.stats().sampled_tokens
    assert {stop for *_, stop, _ in ahead.values()} == {"stop", "length"}


def test_the_next_pass_is_under_way_when_tokens_are_told_and_new_weights_forget_it():
    driver = CoreDriver()
    driver.runner.feeds = True
    driver.add(Request("a", prompt(5), Sampling(max_tokens=20, ignore_eos=True)))
    driver.step()  # the prompt: the host draws its token at once
    driver.step()
    assert len(driver.told["a"].tokens) == 2 and len(driver.runner.forwarded) == 3
    driver.step()
    assert len(driver.told["a"].tokens) == 3 and len(driver.runner.forwarded) == 4
    driver.swap()
    driver.step()
    assert driver.told["a"].versions == [0, 0, 0, 1] and len(driver.runner.forwarded) == 6
    driver.run()
    driver.check("a")
    assert len(driver.told["a"].tokens) == 20 and len(driver.runner.forwarded) == 21  # one was in vain


def test_a_token_behind_an_end_is_never_told():
    driver = CoreDriver(ends=range(20))
    driver.runner.feeds = True
    found = driver.run(*(Request(f"{n}", prompt(6, n), Sampling(max_tokens=50, seed=n)) for n in range(4)))
    for name, one in found.items():
        assert one.stop == "stop" and one.tokens[-1] < 20 <= min(one.tokens[:-1], default=20)
        driver.check(name)
    forwarded = sum(len(batch.tokens) for batch in driver.runner.forwarded)
    assert forwarded > driver.engine.stats().sampled_tokens + driver.engine.stats().prompt_tokens - 4  # some in vain


def test_whoever_waits_for_a_free_row_is_let_in():
    driver = CoreDriver(max_running=2)
    driver.runner.feeds = True
    driver.add(*(Request(f"{n}", prompt(6, n), Sampling(max_tokens=40, seed=n, ignore_eos=True)) for n in range(1)))
    for _ in range(4):
        driver.step()
    driver.add(Request("late", prompt(6, 9), Sampling(max_tokens=3, ignore_eos=True)))
    for _ in range(5):
        driver.step()
    assert driver.told["late"].stop == "length"


class Misfed(PendingDraw):
    """A draw whose tokens on the device are not the right ones, as where filters kept more than was looked at."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tokens = (self.tokens + 1) % 40

    def result(self) -> Any:
        return super().result()[0], False


def test_a_pass_that_was_fed_wrong_tokens_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    expected, _ = told(False)
    monkeypatch.setattr("headrace.engine.native.ahead.PendingDraw", Misfed)
    found, driver = told(True)
    assert found == expected and driver.runner.fed > 20


@pytest.mark.parametrize("more", [{"top_logprobs": 2}, {"logit_bias": ((7, 1.0),)}], ids=str)
def test_rows_for_which_the_host_decides_are_not_drawn_ahead(more: dict[str, Any]):
    asked = {name: value for name, value in more.items() if name == "top_logprobs"}
    sampling = Sampling(max_tokens=9, ignore_eos=True, **{k: v for k, v in more.items() if k not in asked})
    driver = CoreDriver()
    driver.runner.feeds = True
    driver.run(Request("a", prompt(5), sampling, **asked))
    assert driver.runner.fed == 0 and len(driver.told["a"].tokens) == 9


def test_a_poisoned_row_ends_alone():
    driver = CoreDriver()
    driver.runner.feeds = True
    driver.swap(poisoned=True)
    texts = [prompt(5), (*prompt(5, 1), 39)]
    found = driver.run(
        *(Request(f"{n}", text, Sampling(max_tokens=9, ignore_eos=True)) for n, text in enumerate(texts))
    )
    assert found["1"].stop == "error" and "non-finite logits at version 1" in found["1"].error
    assert found["0"].stop in ("length", "error") and np.isfinite(found["0"].logprobs).all()
