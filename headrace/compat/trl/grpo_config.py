"""GRPOConfig with TRL's names and defaults, for machines without TRL, and how a given one is compared with its defaults."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterator
from functools import partial
from typing import Any

from headrace.compat.trl.fields import FIELDS, Fate

GRPOConfig: Any = dataclasses.make_dataclass(
    "GRPOConfig",
    [
        (
            name,
            Any,
            dataclasses.field(default_factory=partial(copy.copy, rule.default), kw_only=name != "output_dir"),
        )
        for name, rule in sorted(FIELDS.items(), key=lambda pair: pair[0] != "output_dir")
    ],
    namespace={
        "__doc__": "The fields of TRL's GRPOConfig, with its defaults (`fields.py`). TRL's own may be given instead."
    },
)
GRPOConfig.__module__ = __name__  # a process that unpickles one looks here


def value_of(args: Any, name: str) -> Any:
    """Returns a field as a plain value: transformers turns names into enums."""
    value = getattr(args, name, FIELDS[name].default)
    return value.value if isinstance(value, enum.Enum) else value


def changed(args: Any, fate: Fate) -> Iterator[str]:
    """Yields the fields of a fate whose value is not the default. TRL's own config fills in many fields when it is made: so it is compared
    with another one that was given nothing."""
    plain = _plain(args)
    derived = ("generation_batch_size", "steps_per_generation", "run_name", "output_dir", "logging_dir")
    for name, rule in FIELDS.items():
        if rule.fate == fate and name not in derived and value_of(args, name) != value_of(plain, name):
            yield name


def _plain(args: Any) -> Any:
    """Returns a config that was given nothing. Where there is no GPU, transformers makes none with bf16 unless `use_cpu` is given."""
    return type(args)(use_cpu=True, bf16=args.bf16)


def unknown(args: Any) -> list[str]:
    """Returns fields that this table does not have: those of a later TRL, if they were changed."""
    plain = _plain(args)
    names = [field.name for field in dataclasses.fields(args) if field.name not in FIELDS and field.init]
    return [name for name in names if getattr(args, name) != getattr(plain, name)]
