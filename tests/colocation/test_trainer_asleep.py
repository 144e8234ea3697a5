"""A trainer that gives its memory back between two steps computes what it would have computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.few import few
from support.trainer_calls import batch, model_dir, trainer  # noqa: F401

WAYS: dict[str, dict[str, Any]] = {
    "torch": {"path": "torch"},
    "kernels": {"path": "auto"},
    "bfloat16": {"path": "auto", "dtype": "bfloat16"},
    "low": {"path": "torch", "dtype": "bfloat16", "weights": "bfloat16"},
    "offloaded": {"path": "torch", "offload_optimizer": True},
}


@pytest.mark.parametrize("way", few(WAYS, keep=2))
def test_steps_and_checkpoints_are_those_of_a_trainer_that_never_sleeps(
    way: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
):
    found = []
    for naps in (False, True):
        made = trainer(model_dir("llama"), **WAYS[way])

        def nap(made: Any = made, naps: bool = naps) -> None:
            if naps:
                made.sleep()
                assert made.sleep().seconds == 0
                made.wake()

        nap()
        reports = [made.step(batch(0, 0))]
        nap()
        if naps:
            made.sleep()
        made.save(tmp_path / str(naps))  # asleep or not
        made.wake()
        reports.append(made.step(batch(1, 1)))
        nap()
        made.restore(tmp_path / str(naps))
        reports.append(made.step(batch(1, 1)))
        numbers = [(report.loss, report.grad_norm, report.kl) for report in reports]
        found.append((numbers, made.score([5, 9, 3, 7]), [tensor.clone() for _, tensor in made.parameters()]))
    (numbers, scores, weights), (others, other_scores, other_weights) = found
    assert numbers == others and scores == other_scores
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))


def test_it_computes_nothing_in_its_sleep_and_publishes_what_it_has(model_dir: Callable[[str], Path]):  # noqa: F811
    made = trainer(model_dir("llama"))
    before = [tensor.clone() for _, tensor in made.parameters()]
    made.sleep()
    for work in (lambda: made.step(batch(0, 0)), lambda: made.score([1, 2, 3])):
        with pytest.raises(AssertionError, match="asleep"):
            work()
    assert all(torch.equal(one, other) for one, (_, other) in zip(before, made.parameters(), strict=True))
