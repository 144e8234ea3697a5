"""What a run needs of an engine and an engine lacks is refused at the start, one sentence for each thing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities
from headrace.run.config import RunConfig, load_config
from headrace.run.needs import ASKED_BY_NOBODY, NEEDS, check_needs, check_teacher, lacking
from headrace.testing.fake_engine import FakeEngine

ASKS: dict[str, list[str]] = {
    "stop_strings": ["rollout.stop=['END']"],
    "masks": ["rollout.top_p=0.9"],
    "constraints": ["rollout.constraint.regex='[0-9]+'"],
    "routing": ["rollout.keep_routing=true"],
    "adapters": ["lora.rank=4"],
    "streamed": ["partial.mode=stream"],
    "spans": [],
    "prompt_logprobs": [],
    "arithmetic": ["train.parity=bitwise"],
    "exact": ["engine.exact=true"],
}
"""Settings that need each thing. Without any a run swaps weights in flight, and is probed."""

PLAIN = ["partial.mode=drain", "watch.identity_every=0"]
"""Settings of a run that needs nothing."""


def config(tmp_path: Path, *sets: str) -> RunConfig:
    base: dict[str, Any] = {"name": "x", "out": str(tmp_path), "model": {"path": "smollm2-135m-instruct"}}
    base["task"] = {"kind": "reasoning_gym", "name": "chain_sum"}
    return load_config({**base, "reward": {"function": "reasoning_gym"}}, sets)


def everything() -> Capabilities:
    return msgspec.structs.replace(
        FakeEngine().capabilities, routing=True, constraints=True, arithmetic="llama bfloat16 AMX"
    )


def without(name: str) -> Capabilities:
    value = getattr(everything(), name)
    return msgspec.structs.replace(everything(), **{name: type(value)()})


def test_every_capability_is_asked_for_or_known_not_to_be() -> None:
    fields = set(Capabilities.__struct_fields__)
    assert set(NEEDS) == set(ASKS) and fields == set(NEEDS) | set(ASKED_BY_NOBODY)


@pytest.mark.parametrize("name", NEEDS)
def test_a_run_is_refused_by_an_engine_that_lacks_what_it_asks_for(name: str, tmp_path: Path) -> None:
    asking = config(tmp_path, *ASKS[name])
    check_needs(everything(), asking)
    (problem,) = lacking(without(name), asking)
    assert problem.startswith(f"this engine (fake) cannot {NEEDS[name].cannot}; ")
    with pytest.raises(ConfigError, match="this engine"):
        check_needs(without(name), asking)


def test_a_run_that_asks_for_nothing_runs_on_an_engine_that_can_nothing(tmp_path: Path) -> None:
    check_needs(Capabilities(1024, "bare"), config(tmp_path, *PLAIN))


def test_all_that_is_lacking_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_needs(Capabilities(1024, "bare"), config(tmp_path, "rollout.top_k=5"))
    assert len(str(caught.value).splitlines()) == 3, "masks, spans, log-probs of given tokens"


def test_several_adapters_need_as_much_room(tmp_path: Path) -> None:
    one = config(tmp_path, "lora.rank=4")
    two = dataclasses.replace(one, adapters=(_adapter("north"), _adapter("south")))
    narrow = msgspec.structs.replace(everything(), adapters=1)
    check_needs(narrow, one)
    with pytest.raises(ConfigError, match="as many LoRA adapters"):
        check_needs(narrow, two)


def _adapter(name: str) -> Any:
    from headrace.models.lora import AdapterConfig

    return AdapterConfig(name=name)


def test_a_teacher_must_be_able_to_tell_what_it_thinks() -> None:
    check_teacher("teacher math", everything(), 8)
    check_teacher("teacher math", without("top_logprobs"), 0)
    with pytest.raises(ConfigError, match=r"teacher math \(fake\) cannot return the log-probs of given tokens"):
        check_teacher("teacher math", without("prompt_logprobs"), 0)
    with pytest.raises(ConfigError, match='algo.distill.kind = .*choose "sampled"'):
        check_teacher("teacher math", without("top_logprobs"), 8)
