"""The unit of sequences is a trajectory: in how many rows, microbatches and ranks it lies changes neither the loss nor the gradient.

The policy is a unigram model in float64, whose log-probs do not depend on the context: what is left is what the trainer does with them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import AGGREGATIONS, EntropyFactor, objective_of, reach_of
from headrace.algo.recipes import RECIPES
from headrace.algo.training_rows import algorithm_of, trajectories_of
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.testing.simulated_ranks import Ring
from headrace.trainer.dealing.share import head_of
from headrace.trainer.forward.forward import TokenScores
from headrace.trainer.packing import Pack, StepRows, pack_rows
from headrace.trainer.placement.port import Single
from headrace.trainer.step.gradient import Gradient
from headrace.trainer.step.value_head import ValueHead
from headrace.trainer.step.whole_step import pairs_of
from support.few import few
from support.trainer_calls import own_plan

V = 120
"""More than the tokens of a batch, which are all different: a selection may not have to choose between equal ones."""
LOGITS, OTHER = torch.tensor(np.random.default_rng(0).normal(0, 1, (2, V)))
STATES = torch.tensor(np.random.default_rng(1).normal(0, 1, (V, 4)))
HEAD = torch.tensor([0.8, -1.1, 0.4, 0.3, 0.2], dtype=torch.float64)
"""Weights and bias of a value head."""


class Unigram:
    """The `Forward` of a model that has one logit, and one hidden state, for every token."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.states = torch.nn.Parameter(logits.clone()), torch.nn.Parameter(STATES.clone())

    def logprobs(
        self, pack: Pack, temperature: float, dtype: torch.dtype, critic: Any = None, lesson: Any = None
    ) -> TokenScores:
        log_p = self.logits.log_softmax(0)
        entropy = -(log_p.exp() * log_p).sum().expand(len(pack.target))
        top = None if pack.top_ids is None else log_p[pack.top_ids]
        value = critic(self.states[pack.target]) if critic else None
        return TokenScores(log_p[pack.target], entropy, top, value=value)


def head_of_algo(algo: AlgoConfig, updates: int = 1) -> ValueHead | None:
    if not algo.has_critic:
        return None
    head = ValueHead(4, algo, torch.device("cpu"), updates)
    head.weight.data, head.bias.data = HEAD[:4].clone(), HEAD[4:].clone()
    return head


def step_of(batch: Batch, algo: AlgoConfig, budget: int, placement: Any) -> tuple[float, np.ndarray, int, Any]:
    """(loss, gradient of logits, states and value head, microbatches of this rank, its report's sums)"""
    model, reference = Unigram(LOGITS), OTHER.log_softmax(0)
    critic = head_of_algo(algo)
    trained = [model.logits, *([model.states, *critic.parameters()] if critic else [])]
    learner = SimpleNamespace(
        algo=algo,
        objective=objective_of(algo),
        reach=reach_of(algo),
        entropy=EntropyFactor(algo.recipe.entropy),
        parameters={"logits": model.logits},
        critic=critic,
        trained=trained,
        version=9,
    )
    rows = StepRows(
        batch.rows,
        AGGREGATIONS[algo.recipe.aggregation],
        constant=algo.length_constant,
        budget=budget,
        step=batch.step,
        trajectories=trajectories_of(batch.groups),
    )
    gradient = Gradient(
        forward=model,  # type: ignore[arg-type]
        learner=learner,  # type: ignore[arg-type]
        placement=placement,
        temperature=1.0,
        dtype=torch.float64,
        device=torch.device("cpu"),
        reference=(lambda pack, temperature: reference[pack.target]) if algo.reference_in_loss else None,  # type: ignore[arg-type]
        pairs=pairs_of(head_of(batch)) if algo.recipe.loss.pairs else None,
    )
    gradient._precision = nullcontext  # type: ignore[method-assign]
    plan = own_plan(rows, placement)
    sums = gradient.fill(_wide(plan))
    found = [torch.zeros_like(p) if p.grad is None else placement.whole(p.grad) for p in trained]
    return sums.loss, torch.cat([gradient.flatten() for gradient in found]).numpy().copy(), len(plan.packs), sums


def _wide(plan: Any) -> Any:
    """The plan with float64 columns: float32 would hide differences of a rounding."""
    import dataclasses

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    packs = [
        dataclasses.replace(pack, **{f.name: wide(getattr(pack, f.name)) for f in dataclasses.fields(pack)})
        for pack in plan.packs
    ]
    return dataclasses.replace(plan, packs=tuple(packs))


# -- a batch, and the same with its rollouts cut into rows --------------------------------------------------------------------


def batch_of(algo: AlgoConfig, seed: int, cut: bool) -> Batch:
    """Two groups of three rollouts. Every rollout has two to four turns, which lie on one path; or, if `cut`, on one path each, as after a
    template that rewrites history. The sampled tokens and their advantages are the same."""
    rng, groups = random.Random(seed), []
    ids = rng.sample(range(V), V)
    for ticket in range(2):
        prompt, scored = Prompt(f"p{ticket}", "", (1, 2, 3)), []
        for place in range(3):
            completions = [_completion(rng, ids) for _ in range(rng.randint(2, 4))]
            turns = [
                Turn(
                    prompt.tokens if cut or not number else (),
                    completion,
                    parents=(number - 1,) if number and not cut else (),
                    state=f"before {number}",
                )
                for number, completion in enumerate(completions)
            ]
            reward = (1.0, 0.0, 0.5)[place] + ticket
            given = tuple({"turn": 0.25 * number - 0.25} for number in range(len(turns)))
            scored.append(Scored(Episode(tuple(turns)), reward, {"exact": reward}, turn_rewards=given))
        algorithm = algorithm_of(algo, 16)
        rows, pairs = algorithm.rows(prompt, scored), algorithm.pairs(scored)
        groups.append(Group(ticket, prompt, tuple(scored), rows, pairs=pairs))
    return Batch(9, algorithm_of(algo, 16).assemble(tuple(groups)))


def _completion(rng: random.Random, ids: list[int]) -> Completion:
    """Takes its tokens from `ids`."""
    tokens = tuple(ids.pop() for _ in range(rng.randint(1, 4)))
    noise = rng.choice(
        [0.05, 0.3]
    )  # a product of ratios shall stay inside its bounds in some sequences, and leave them in others
    logprobs = tuple(float(LOGITS.log_softmax(0)[token]) + rng.gauss(0, noise) for token in tokens)
    return Completion(tokens, logprobs, (VersionSpan(0, rng.choice([7, 8, 9]), 7),), "stop")


NAMES = sorted(name for name, recipe in RECIPES.items() if recipe.distill.kind == "none")
ALGORITHMS = [
    *(AlgoConfig(name).with_length(16) for name in NAMES),
    AlgoConfig("gspo", denominator="kept", correction={"opsm": 0.1}, kl={"coef": 0.1}),
    AlgoConfig("topr", correction={"veto": 0.6, "opsm": 0.05}, aggregation="token_sum", denominator="kept").with_length(
        16
    ),
    AlgoConfig("grpo", old="trainer", correction={"mode": "mask", "level": "geometric", "low": 0.5, "high": 1.5}),
    AlgoConfig("gspo", entropy={"coef": 0.3}, denominator="kept", correction={"opsm": 0.05}),
    AlgoConfig("grpo", entropy={"coef": 0.3}, select={"kind": "entropy"}),
    AlgoConfig("clip_cov", select={"fraction": 0.2}, denominator="kept", aggregation="seq_mean_token_mean"),
    AlgoConfig("second_moment", loss="ppo_clip", select={"tau": 0.1}, lag={"kind": "trim", "maximum": 1}),
    AlgoConfig("ppo", gamma=0.9, lam=0.8, critic={"trunk": 0.3}, loss="gspo", aggregation="seq_mean_token_mean"),
    AlgoConfig(
        "ppo", critic={"trunk": 1.0, "imitation": 0.2, "lam": 0.9}, correction={"opsm": 0.05}, denominator="kept"
    ),
    AlgoConfig("vapo", critic={"alone_steps": 0, "trunk": 0.1}),
]


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-9, atol=1e-12)
    assert one[3].idle == other[3].idle and one[3].clipped == other[3].clipped
    assert one[3].pairs == pytest.approx(other[3].pairs)
    numbers = [found[3].critic and astuple(found[3].critic) for found in (one, other)]
    assert numbers[0] == pytest.approx(numbers[1])


@pytest.mark.parametrize(
    "algo", few(ALGORITHMS, keep=7), ids=lambda algo: f"{algo.name}-{algo.denominator}-{algo.recipe.aggregation}"
)
def test_rows_microbatches_and_ranks_change_neither_loss_nor_gradient(algo):
    whole, pieces = batch_of(algo, 3, cut=False), batch_of(algo, 3, cut=True)
    assert len(pieces.rows) > len(whole.rows) == 6
    expected = step_of(whole, algo, 1000, Single())
    assert np.abs(expected[1]).max() > 1e-4 and expected[2] == 1
    assert (expected[3].critic is not None) == algo.has_critic
    for batch, budget in ((whole, 12), (pieces, 1000), (pieces, 8)):
        found = step_of(batch, algo, budget, Single())
        assert (found[2] > 1) == (budget < 1000)
        same(found, expected)
    for found in Ring(2).run(lambda placement: step_of(pieces, algo, 8, placement)):
        same(found, expected)


@given(st.integers(0, 10**6), st.integers(6, 40), st.sampled_from(ALGORITHMS))
@settings(max_examples=40)
def test_no_batch_and_no_budget_changes_the_step(seed, budget, algo):
    expected = step_of(batch_of(algo, seed, cut=False), algo, 1000, Single())
    same(step_of(batch_of(algo, seed, cut=True), algo, budget, Single()), expected)


def test_two_rollouts_of_equal_lengths_weigh_the_same_in_whatever_rows():
    """12 tokens in one row, and 12 in three: as sequences of their own, these would weigh three quarters of the loss under gspo."""
    rows = [Row((1, 2), tuple(range(n)), (-1.0,) * n, (1.0,) * n, (True,) * n, (9,) * n) for n in (12, 5, 4, 3)]
    named = tuple(replace(row, trajectories=(int(number > 0),)) for number, row in enumerate(rows))
    for aggregation, shares in (("seq_mean_token_mean", (0.5, 0.5)), ("seq_mean_token_sum", (6.0, 6.0))):
        given = StepRows(
            named,
            AGGREGATIONS[aggregation],
            constant=0,
            budget=1000,
            step=9,
            trajectories=trajectories_of([_group(named)]),
        )
        (pack,) = pack_rows(given).packs
        assert pack.weight[pack.row == 0].sum() == pytest.approx(shares[0])
        assert pack.weight[pack.row > 0].sum() == pytest.approx(shares[1])


def _group(rows: Sequence[Row]) -> Group:
    return Group(0, Prompt("p", "", (1, 2)), (), tuple(rows))


def test_rows_of_earlier_versions_are_trajectories_by_themselves():
    """A run that is done again computes what it did."""
    rows = [Row((1,), (2, 3), (-1.0,) * 2, (1.0,) * 2, (True,) * 2, (0,) * 2)] * 3
    assert trajectories_of([_group(rows), _group(rows[:2])]) == [(0,), (1,), (2,), (3,), (4,)]


def test_agents_of_one_rollout_are_trajectories_of_their_own_in_a_row_too():
    """The second agent goes on with the tokens of the first, so that both lie on one path."""
    done = [Completion((n, n), (-1.0,) * 2, (VersionSpan(0, 0, 0),), "stop") for n in (5, 6, 7)]
    turns = [Turn((1, 2), done[0], agent="a"), Turn((9,), done[1], (0,), agent="b"), Turn((), done[2], (1,), agent="a")]
    other = Turn((1, 2), done[0], agent="a")
    scored = [Scored(Episode(tuple(turns)), 1.0, {}), Scored(Episode((other,)), 0.0, {})]
    rows = algorithm_of(AlgoConfig(), 16).rows(Prompt("p", "", (1, 2)), scored)
    assert [row.trajectories for row in rows] == [(0, 0, 1, 1, 1, 0, 0), (2,)]
    group = Group(0, Prompt("p", "", (1, 2)), tuple(scored), rows)
    given = StepRows(
        rows, AGGREGATIONS["seq_mean_token_sum"], constant=0, budget=99, step=0, trajectories=trajectories_of([group])
    )
    (pack,) = pack_rows(given).packs
    assert pack.trajectory[pack.row == 0].tolist() == [0, 0, 1, 1, 0, 0] and pack.trajectory[
        pack.row == 1
    ].tolist() == [2, 2]
    assert pack.weight.unique().tolist() == pytest.approx([1 / 3])
    for name in ("simpo", "kto"):
        whole = algorithm_of(AlgoConfig(name), 16).rows(Prompt("p", "", (1, 2)), scored)
        assert [row.trajectories for row in whole] == [(0,), (1,)], "what is preferred, or right, is a whole rollout"
