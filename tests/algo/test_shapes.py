"""The check of shapes (`support/shapes.py`), on functions with a wrong shape in them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from headrace.algo.policy.clipped import PPOClip
from headrace.algo.policy.tokens import Tokens, ratio_of
from headrace.algo.tinker import LOSSES
from support.shapes import checked


def means(values: Float[Tensor, "M k"]) -> Float[Tensor, " M"]:
    return values.mean(dim=0)  # the wrong dimension


class Both(NamedTuple):
    logprob: Float[Tensor, " M"]
    old: Float[Tensor, " M"]


def test_a_result_of_a_wrong_shape_is_caught_where_sizes_differ() -> None:
    with checked([means]):
        means(torch.ones(3, 3))
        with pytest.raises(TypeCheckError):
            means(torch.ones(3, 2))
    assert means(torch.ones(3, 2)).shape == (2,)  # as it was


def test_two_sizes_under_one_name_are_caught() -> None:
    with checked([Both.__new__]), pytest.raises(TypeCheckError):
        Both(torch.ones(3), old=torch.ones(1))
    with pytest.raises(TypeCheckError):
        ratio_of(torch.ones(3), torch.ones(1))  # it would broadcast
    with pytest.raises(TypeCheckError):
        ratio_of(torch.ones(3), torch.ones(3, dtype=torch.int64))


def test_methods_named_tuples_and_tables_are_checked() -> None:
    column = torch.ones(3)
    tokens = Tokens(column, column, column, sequence=torch.zeros(3, dtype=torch.int64), lag=column)
    with pytest.raises(TypeCheckError):
        Tokens(column, column, column, sequence=column, lag=column)
    assert PPOClip()(tokens, column).loss.shape == (3,)
    with pytest.raises(TypeCheckError):
        PPOClip()(tokens, torch.ones(3, 1))
    with pytest.raises(TypeCheckError):
        LOSSES["cross_entropy"].value(torch.ones(3), {"weights": torch.ones(3, 1)}, {})
