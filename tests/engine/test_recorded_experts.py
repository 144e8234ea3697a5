"""Experts that transformers' own layers choose, recorded while the engine samples: those of a plain forward pass over the same text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.core.types import Fork, Request, Sampling
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.own_cache import OwnCacheRunner
from headrace.testing.small_models import VOCABULARY, small_model
from support.few import few
from support.native_calls import Answer, make_engine, put, run, step
from support.tiny_models import RunnerDriver, parameters, reference, skeleton

TYPES = ["qwen3_next", "gpt_oss", "glm4_moe"]
"""Recurrent layers, which take a prompt in one piece when its end is there; a cache of windows; our attention in transformers' layers."""


@cache
def model_of(name: str, seed: int = 0) -> Any:
    return small_model(name, seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made: dict[tuple[str, int], Path] = {}

    def get(name: str, seed: int = 0) -> Path:
        if (name, seed) not in made:
            made[name, seed] = tmp_path_factory.mktemp(name)
            model_of(name, seed).save_pretrained(made[name, seed])
            (made[name, seed] / "chat_template.jinja").write_text("{{ messages }}")
        return made[name, seed]

    return get


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return tuple(torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist())


def asked(name: str, prompt: Sequence[int], tokens: int = 6, **more: Any) -> Request:
    sampling = Sampling(max_tokens=tokens, seed=len(name), ignore_eos=True)
    return Request(name, tuple(prompt), sampling, return_routing=True, **more)


@torch.no_grad()
def chosen(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """[T, layers, k] sorted: what the experts of each layer are called with."""
    used: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1]))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(used, 1).sort(-1).values.numpy()


def recorded(answer: Answer) -> np.ndarray:
    assert answer.routing is not None
    trace = answer.routing
    return np.sort(np.frombuffer(trace.experts, np.uint8).reshape(-1, trace.layers, trace.k), -1)


def assert_recorded(model: Any, prompt: Sequence[int], answer: Answer) -> None:
    wanted = chosen(model, [*prompt, *answer.tokens][:-1])
    assert (recorded(answer) == wanted).all(), np.argwhere((recorded(answer) != wanted).any((1, 2)))


def engine_of(directory: Path, **settings: Any) -> NativeEngine:
    return make_engine(directory, routing=True, **{"path": "cache", **settings})


@pytest.mark.parametrize("name", few(TYPES, keep=1))
def test_siblings_turns_and_forks_have_the_experts_of_a_plain_pass(name, saved):
    engine, model = engine_of(saved(name), context_length=128), model_of(name)
    prompt, other = text(40), text(21)
    prompts = {"a": prompt, "bb": prompt, "ccc": other}
    answers = run(engine, [asked(key, prompt) for key, prompt in prompts.items()])
    prompts["next"] = (*prompt, *answers["a"].tokens, 9)
    prompts["again"] = prompt
    run(engine, [asked("next", prompts["next"]), asked("again", prompt)], answers)
    for key, begin in prompts.items():
        assert_recorded(model, begin, answers[key])
    run(engine, [asked("fork", (), fork=Fork("next", 3))], answers)
    assert_recorded(model, (*prompts["next"], *answers["next"].tokens[:3]), answers["fork"])


def test_tokens_that_wait_for_the_end_of_their_prompt_are_recorded_though_another_has_their_state():
    runner = OwnCacheRunner(skeleton("qwen3_next"), 256, dtype=torch.float32, device=torch.device("cpu"))
    assert runner.experts == (2, 2), "found before there are weights"
    ours, tokens = RunnerDriver(runner, parameters("qwen3_next")), text(8)
    one, other = ours.sequence(tokens), ours.sequence(tokens)
    ours.step([(one, 8), (other, 7)], rows=[7], routing=True)  # leaves the state of seven tokens
    out = ours.step([(other, 1)], routing=True)
    assert out.routed.tolist() == [[other.blocks[0], place] for place in range(8)]
    assert (np.sort(out.routing, -1) == chosen(reference("qwen3_next"), tokens)).all()


def test_what_is_computed_again_under_new_weights_has_their_choice(saved):
    name = "qwen3_next"
    engine, answers = engine_of(saved(name)), {}
    engine.add(asked("r", text(20), 10))
    while len(answers.get("r", Answer()).tokens) < 4:
        step(engine, answers)
    engine.sleep(keep=True)
    engine.wake()
    put(engine, saved(name, 1), 1)
    run(engine, (), answers)
    assert_recorded(model_of(name, 1), text(20), answers["r"])


def test_a_choice_that_cannot_be_recorded_is_refused_with_the_remedy(saved):
    directory = saved("jetmoe")
    with pytest.raises(
        ConfigError, match=r"own cache jetmoe cannot be recorded: .* set it and rollout.keep_routing to"
    ):
        engine_of(directory)
    run(make_engine(directory, routing=False), [Request("r", text(9), Sampling(max_tokens=2, ignore_eos=True))])
