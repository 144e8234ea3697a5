"""Every setting refuses numbers that no machine calculates with: what is drawn here are the settings, so that a new one is held to it too."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.run.config import RunConfig, load_config
from headrace.settings.strict import LONGEST_NAME, STRICT
from headrace.trainer.config import learning_rate, rate_remarks

GOOD: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"kind": "jsonl", "path": "rows.jsonl", "held_out": 64},
    "reward": {"function": "reasoning_gym"},
}


def alternatives(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        for one in typing.get_args(hint):
            yield from alternatives(one)
    else:
        yield hint


def leaves(kind: type, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], type]]:
    """Every place of a number in a tree of settings, with its type."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        for hint in alternatives(hints[field.name]):
            yield from _within(hint, (*path, field.name))


def _within(hint: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], type]]:
    if hint in (int, float):
        yield path, hint
    elif dataclasses.is_dataclass(hint):
        yield from leaves(typing.cast(type, hint), path)
    elif typing.get_origin(hint) is tuple:
        for inner in alternatives(typing.get_args(hint)[0]):
            yield from _within(inner, (*path, 0))
    elif typing.get_origin(hint) is dict:
        for inner in alternatives(typing.get_args(hint)[1]):
            yield from _within(inner, (*path, "key"))


def tables(kind: type) -> Iterator[type]:
    yield kind
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        for hint in alternatives(hints[field.name]):
            inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
            if dataclasses.is_dataclass(inner):
                yield from tables(typing.cast(type, inner))


LEAVES = sorted(set(leaves(RunConfig)), key=str)


def tree(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return typing.cast(dict[str, Any], value)


def named(path: tuple[str | int, ...]) -> str:
    return "".join("[0]" if part == 0 else f".{part}" for part in path).lstrip(".")


def complaints(path: tuple[str | int, ...], value: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_config({**GOOD, **tree(path, value)})
    return str(refused.value).splitlines()


def test_the_settings_are_found() -> None:
    found = dict(LEAVES)
    assert len(LEAVES) > 120
    for name in (
        "train.learning_rate",
        "rollout.temperature",
        "lora.alpha",
        "algo.kl.coef",
        "reward.functions[0].weight",
        "teachers[0].decay",
    ):
        assert any(named(path) == name and kind is float for path, kind in LEAVES), name
    assert found["train", "steps"] is int and found["rollout", "group_size"] is int


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_float_is_infinite_or_none_at_all(value: float) -> None:
    for path in [path for path, kind in LEAVES if kind is float]:
        mine = [line for line in complaints(path, value) if line.startswith(f"{named(path)} = ")]
        assert mine and "expected" in mine[0], (named(path), mine)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("train", "learning_rate"),
        ("rollout", "temperature"),
        ("lora", "alpha"),
        ("algo", "length_penalty"),
        ("algo.kl", "coef"),
        ("watch", "stop_after"),
    ],
)
def test_a_float_that_is_infinite_to_tensors_is_refused(section: str, name: str) -> None:
    path = (*section.split("."), name)
    assert complaints(path, 1e300) == [
        f"{section}.{name} = 1e+300 does not fit: expected a number of at most 3.4e+38 in size, the largest float of 32 bits"
    ]


@pytest.mark.parametrize("value", [10**30, -(10**30), 1 << 63, 10**400])
def test_no_integer_has_more_bits_than_the_machine(value: int) -> None:
    for path, _ in LEAVES:
        (mine,) = complaints(path, value)
        assert (
            mine
            == f"{named(path)} = an integer of {value.bit_length()} bits does not fit: expected one of 64 bits, which is at most 9223372036854775807"
        )


def test_every_table_has_the_common_rules() -> None:
    for kind in set(tables(RunConfig)):
        rules = typing.cast(Any, kind).__pydantic_config__
        assert {name: rules.get(name) for name in STRICT} == STRICT, kind


def test_a_file_and_a_set_with_too_many_digits_are_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[train]\nsteps = 1" + "0" * 5000)
    with pytest.raises(ConfigError, match=r"a\.toml holds an integer of more than \d+ digits"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"--set train\.steps=1.*holds an integer of more than \d+ digits"):
        load_config(GOOD, ["train.steps=1" + "0" * 5000])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rollout": {"stop": [""]}},
            "rollout.stop holds an empty string, with which every completion would end at its first token; remove it",
        ),
        ({"rollout": {"stop": ["e", ""]}}, "rollout.stop holds an empty string"),
        (
            {"name": "a" * 400},
            f'name = "{"a" * 20}..." has 400 characters, and names a directory and other files; use at most {LONGEST_NAME}',
        ),
        ({"adapters": [{"name": "a" * 400}]}, f"expected a text with at most {LONGEST_NAME} characters"),
        ({"teachers": [{"name": "a" * 400, "path": "m"}]}, f"expected a text with at most {LONGEST_NAME} characters"),
    ],
)
def test_empty_stops_and_long_names_are_refused(settings: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({**GOOD, **settings})
    assert words in str(refused.value)


def test_a_file_with_a_long_name_gives_a_run_a_shorter_one(tmp_path: Path) -> None:
    path = tmp_path / f"{'a' * 200}.toml"
    path.write_text(
        "\n".join(
            f"{section}.{name} = {json.dumps(value)}"
            for section, table in GOOD.items()
            for name, value in table.items()
        )
    )
    assert load_config(path).name == "a" * LONGEST_NAME


@pytest.mark.parametrize(
    ("rate", "rank", "remarks"), [(1e-3, 0, 0), (1.1e-3, 0, 1), (1e5, 0, 1), (1e-2, 8, 0), (0.011, 8, 1), (1e-5, 0, 0)]
)
def test_a_high_learning_rate_is_remarked_on_and_not_refused(rate: float, rank: int, remarks: int) -> None:
    config = load_config({**GOOD, "train": {"learning_rate": rate}, "lora": {"rank": rank}})
    found = list(rate_remarks(config.train, config.lora))
    assert len(found) == remarks
    assert all(
        one.startswith(f"train.learning_rate = {rate:g} for {'an adapter' if rank else 'all weights'}: above")
        for one in found
    )


@pytest.mark.parametrize(
    ("steps", "warmup", "rises"), [(3, 5, 2), (3, 3, 2), (3, 2, 2), (2, 5, 1), (1, 5, 0), (60, 5, 5)]
)
def test_a_warm_up_that_is_longer_than_the_run_is_shortened_and_remarked_on(
    steps: int, warmup: int, rises: int
) -> None:
    config = load_config({**GOOD, "train": {"steps": steps, "warmup_steps": warmup, "learning_rate": 1e-5}})
    remarks = list(rate_remarks(config.train, config.lora))
    assert learning_rate(steps - 1, config.train) == pytest.approx(1e-5), "the last step has the full rate"
    assert all(learning_rate(step, config.train) < 1e-5 for step in range(rises - 1))
    said = f"rises for {rises} step instead" if rises == 1 else f"rises for {rises} steps instead"
    assert [said in remark for remark in remarks] == [True] * (rises < warmup)
