"""A step of several updates (`train.epochs`, `train.minibatches`): against PPO's procedure, written down a second time in float64, and what it leaves
in reports and versions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_critic import chain_of
from test_trajectories import HEAD, LOGITS, OTHER, STATES, Unigram, V, _wide, batch_of, head_of_algo

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import AGGREGATIONS
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Demonstration, Group, Row
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, Scored, VersionSpan
from headrace.testing.simulated_ranks import Ring
from headrace.trainer.config import TrainConfig
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import dealt_of, head_of
from headrace.trainer.packing import DealtRows
from headrace.trainer.packing.plan import plan_of
from headrace.trainer.placement.port import Single
from headrace.trainer.step.gradient import Gradient, Sums, make_updates
from headrace.trainer.step.learner import Learner, Update
from headrace.trainer.step.trainer import TorchTrainer
from support import tiny_models, trainer_calls

FOUR = TrainConfig(learning_rate=0.2, max_grad_norm=0.15, epochs=2, minibatches=2)
"""Two passes over two minibatches, of one group each. The norm is bounded in some of the updates."""


class Wide(Gradient):
    """In float64."""

    def _precision(self) -> Any:
        return nullcontext()


class Made(NamedTuple):
    logits: np.ndarray
    head: np.ndarray
    sums: Sums
    updates: Sequence[Update]
    version: int


def made(batch: Batch, algo: AlgoConfig, train: TrainConfig, placement: Any, budget: int = 1000) -> Made:
    """The step of a unigram model whose weights have version 9."""
    model, reference, critic = Unigram(LOGITS), OTHER.log_softmax(0), head_of_algo(algo, train.updates)
    learner = Learner(
        config=train,
        algo=algo,
        parameters={"logits": model.logits},
        placement=placement,
        critic=critic,
        version=batch.step,
    )
    ranks = placement.parallel.ranks
    dealing = Dealing(budget=budget, ranks=ranks, by_cost=ranks > 1, minibatches=train.minibatches)
    share = dealt_of(batch, dealing)[placement.share]
    more = {"constant": algo.length_constant, "step": batch.step}
    given = [DealtRows(one, learner.aggregation, **more) for one in share.minibatches]
    answers = [DealtRows(one, AGGREGATIONS["token_mean"], **more) for one in share.demonstrations]
    gradient = Wide(
        forward=model,  # type: ignore[arg-type]
        learner=learner,
        placement=placement,
        temperature=1.0,
        dtype=torch.float64,
        device=torch.device("cpu"),
        reference=(lambda pack, temperature: reference[pack.target]) if algo.reference_in_loss else None,  # type: ignore[arg-type]
    )
    plans = {number: _wide(plan_of(one)) for number, one in enumerate(given)}
    beside = [_wide(plan_of(one)) for one in answers]
    sums, updates = make_updates(gradient, plans, head_of(batch, train.minibatches), train.learning_rate, beside)
    head = torch.cat([p.detach().flatten() for p in critic.parameters()]) if critic else torch.zeros(0)
    return Made(model.logits.detach().numpy(), head.numpy(), sums, updates, learner.version)


# -- PPO, written down a second time ----------------------------------------------------------------------------------------


def adam(parameters: Sequence[torch.Tensor], rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=rate, betas=betas, weight_decay=0.0, foreach=False)


def columns_of(group: Group) -> Iterator[torch.Tensor]:
    """Tokens, the sampler's log-probs, advantages and lags of a group; numbers of rows travel in float32."""
    yield torch.tensor([token for row in group.rows for token in row.tokens])
    yield torch.tensor([old for row in group.rows for old in row.logprobs], dtype=torch.float32).double()
    yield torch.tensor([a for row in group.rows for a in row.advantages], dtype=torch.float32).double()
    yield torch.tensor([9.0 - version for row in group.rows for version in row.versions], dtype=torch.float64)


def old_and_weight(name: str, before: torch.Tensor, sampled: torch.Tensor, lag: torch.Tensor) -> Any:
    """What ratios are taken against, and the weight of each token's loss: both follow from the weights that the step began with."""
    if name == "grpo":
        return sampled, torch.ones_like(sampled)
    if name == "tis":
        return before, (before - sampled).exp().clamp(0, 2)
    old = sampled + torch.where(lag > 1, (lag - 1) / lag.clamp(min=1), 0.0) * (before - sampled)
    weight = (old - sampled).exp()
    return old, weight * (weight <= 5)


def surrogate(logprob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(PPO's loss of each token, the number of tokens that it stops)"""
    ratio = (logprob - old).exp()
    whole, cut = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
    return -torch.minimum(whole, cut), int((cut < whole).sum())


@pytest.mark.parametrize("name", ["grpo", "tis", "decoupled_ppo"])
def test_two_passes_over_two_minibatches_are_four_updates_of_the_paper(name):
    """With denominators of each minibatch, and old log-probs of before the first update."""
    algo = AlgoConfig(name)
    batch = batch_of(algo, 5, cut=False)
    logits = LOGITS.clone().requires_grad_()
    start, optimizer = LOGITS.log_softmax(0), adam([logits], 0.2, (0.9, 0.95))
    losses, norms, clipped = [], [], 0
    for _ in range(2):
        for group in batch.groups:
            token, sampled, advantage, lag = columns_of(group)
            old, weight = old_and_weight(name, start[token], sampled, lag)
            loss, cut = surrogate(logits.log_softmax(0)[token], old, advantage)
            (loss * weight).mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_([logits], 0.15)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss * weight).mean().item())
            clipped += cut
    found = made(batch, algo, FOUR, Single())
    np.testing.assert_allclose(found.logits, logits.detach().numpy(), rtol=1e-6, atol=1e-7)
    assert found.sums.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert [update.norm for update in found.updates] == pytest.approx(norms, rel=1e-6)
    assert min(norms) < 0.15 < max(norms) and found.sums.clipped == clipped > 0
    assert found.version == 10 and found.sums.tokens == 2 * sum(len(row.tokens) for row in batch.rows)
    same_everywhere(batch, algo, found)


def same_everywhere(batch: Batch, algo: AlgoConfig, expected: Made) -> None:
    """However the minibatches are split into microbatches, and dealt to ranks."""
    others = [made(batch, algo, FOUR, Single(), budget=12)]
    others += Ring(2).run(lambda placement: made(batch, algo, FOUR, placement, budget=12))
    for other in others:
        assert other.sums.microbatches > 4
        np.testing.assert_allclose(other.logits, expected.logits, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(other.head, expected.head, rtol=1e-7, atol=1e-10)
        assert (other.sums.clipped, other.sums.tokens) == (expected.sums.clipped, expected.sums.tokens)


def test_the_critics_values_are_those_before_the_first_update():
    """Advantages are whitened over the whole step, and each minibatch divides both losses by its own tokens."""
    algo = AlgoConfig("ppo", critic={"imitation": 0.3})
    batch = batch_of(algo, 5, cut=False)
    logits, head = LOGITS.clone().requires_grad_(), HEAD.clone().requires_grad_()
    chains = [[chain_of(rollout) for rollout in group.scored] for group in batch.groups]
    value_of = lambda token: (STATES[token] / STATES[token].norm(dim=1, keepdim=True) / 2 * head[:4]).sum(1) + head[4]  # noqa: E731
    columns = []
    for group in chains:
        token = torch.tensor([token for chain in group for token, *_ in chain])
        sampled = torch.tensor([old for chain in group for _, old, *_ in chain], dtype=torch.float32).double()
        rewards = [[reward for _, _, reward, _ in chain] for chain in group]
        returns = torch.tensor([sum(own[t:]) for own in rewards for t in range(len(own))], dtype=torch.float64)
        good = torch.tensor([sum(own) > 0 for own in rewards for _ in own])
        columns.append((token, sampled, returns, good, (returns - value_of(token)).detach()))
    raw = torch.cat([advantage for *_, advantage in columns])
    scale = (raw.var() + 1e-8).sqrt()
    optimizers = adam([logits], 0.2, (0.9, 0.95)), adam([head], algo.recipe.critic.learning_rate, (0.9, 0.999))
    for _ in range(2):
        for token, sampled, returns, good, advantage in columns:
            logprob = logits.log_softmax(0)[token]
            policy = surrogate(logprob, sampled, (advantage - raw.mean()) / scale)[0].mean()
            of_values = (value_of(token) - returns).square().mean() / 2
            (policy + of_values - 0.3 * logprob[good].mean()).backward()
            torch.nn.utils.clip_grad_norm_([logits], 0.15)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = made(batch, algo, FOUR, Single())
    np.testing.assert_allclose(found.logits, logits.detach().numpy(), rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose(found.head, head.detach().numpy(), rtol=2e-6, atol=1e-8)
    same_everywhere(batch, algo, found)


@pytest.mark.parametrize("name", ["dpo", "gspo", "m2po", "opsm", "kto"])
def test_a_minibatch_is_what_a_step_of_its_groups_would_be(name):
    """Where ratios are to the sampler: pairs, trajectories and bounds of one minibatch see nothing of another."""
    algo = AlgoConfig(name)
    batch = batch_of(algo, 3, cut=True)
    train = dataclasses.replace(FOUR, epochs=1)
    found = made(batch, algo, train, Single(), budget=12)
    first = made(replace(batch, groups=batch.groups[:1]), algo, dataclasses.replace(train, minibatches=1), Single())
    assert found.updates[0].norm == pytest.approx(first.updates[0].norm, rel=1e-7)
    assert len(found.updates) == 2 and found.updates[1].norm > 0
    if algo.recipe.loss.pairs:
        assert found.sums.pairs.pairs == sum(len(group.pairs) for group in batch.groups)


# -- given answers beside the rollouts ----------------------------------------------------------------------------------------

ANSWERS = (
    Demonstration((1, 2), (90, 91, 92)),
    Demonstration((1, 2), (93,)),
    Demonstration((3,), (94, 95)),
    Demonstration((1,), (96, 90)),
)


def of_answers(kind: str, logprob: torch.Tensor) -> torch.Tensor:
    """The loss of each token of an answer, as the papers write it."""
    p = logprob.exp()
    if kind == "phi":
        return -(p * (1 - p)).detach() * logprob
    return -p / (p + 0.2) if kind == "shaped" else -logprob


@pytest.mark.parametrize("kind", ["sft", "phi", "shaped"])
def test_given_answers_have_their_share_of_every_update(kind):
    """μ is that of the authors' schedule at step 9: 4 steps up, and 5 of 20 down. Both minibatches have two answers, with a mean of their own."""
    own = {"gamma": 0.2} if kind == "shaped" else {}
    rule = {"kind": kind, "weight": 0.5, "last_weight": 0.1, "warmup_steps": 4, "decay_steps": 20, **own}
    algo = AlgoConfig("grpo", demonstrations=rule)
    mu = (0.5 - 0.1) * 0.5 * (1 + math.cos(math.pi * (9 - 4) / 20)) + 0.1
    batch = replace(batch_of(algo, 5, cut=False), demonstrations=ANSWERS)
    logits = LOGITS.clone().requires_grad_()
    optimizer = adam([logits], 0.2, (0.9, 0.95))
    losses, said = [], []
    for _ in range(2):
        for number, group in enumerate(batch.groups):
            token, sampled, advantage, _ = columns_of(group)
            policy = surrogate(logits.log_softmax(0)[token], sampled, advantage)[0].mean()
            answers = torch.tensor([n for one in ANSWERS[2 * number : 2 * number + 2] for n in one.answer])
            logprob = logits.log_softmax(0)[answers]
            loss = (1 - mu) * policy + mu * of_answers(kind, logprob).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([logits], 0.15)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            said += logprob.tolist()
    found = made(batch, algo, FOUR, Single())
    np.testing.assert_allclose(found.logits, logits.detach().numpy(), rtol=1e-6, atol=1e-7)
    assert found.sums.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert found.sums.given == 2 * 8 and found.sums.given_share == pytest.approx(mu)
    assert found.sums.given_logprob == pytest.approx(sum(said), rel=1e-6)
    assert found.sums.tokens == 2 * sum(len(row.tokens) for row in batch.rows), "they are in no number of rollouts"
    same_everywhere(batch, algo, found)


@pytest.mark.parametrize("epochs", [1, 2])
def test_answers_that_are_compared_make_one_mean_with_the_tokens_of_the_rollouts(epochs):
    """LUFFY's loss with its denominator: all tokens of rollouts and answers, of which each has its own loss."""
    algo = AlgoConfig("luffy", demonstrations={"gamma": 0.2})
    advantages = (0.75, -0.5, 0.625, 0.125)
    answers = tuple(replace(one, advantage=a) for one, a in zip(ANSWERS, advantages, strict=True))
    batch = replace(batch_of(algo, 5, cut=False), demonstrations=answers)
    whole = dataclasses.replace(FOUR, epochs=epochs, minibatches=1)
    columns = [torch.cat(own) for own in zip(*map(tuple, map(columns_of, batch.groups)), strict=True)]
    given = torch.tensor([n for one in answers for n in one.answer])
    own = torch.tensor([one.advantage for one in answers for _ in one.answer], dtype=torch.float64)
    logits = LOGITS.clone().requires_grad_()
    optimizer = adam([logits], 0.2, (0.9, 0.95))
    losses = []
    for _ in range(epochs):
        logprob = logits.log_softmax(0)
        of_rollouts = surrogate(logprob[columns[0]], columns[1], columns[2])[0]
        p = logits.softmax(0)[given]
        loss = torch.cat([of_rollouts, -own * p / (p + 0.2)]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([logits], 0.15)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = made(batch, algo, whole, Single())
    np.testing.assert_allclose(found.logits, logits.detach().numpy(), rtol=1e-6, atol=1e-7)
    assert found.sums.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert found.sums.given_share == pytest.approx(8 / (8 + len(columns[0])))
    split = [made(batch, algo, whole, Single(), budget=12)]
    for other in [*split, *Ring(2).run(lambda placement: made(batch, algo, whole, placement, budget=12))]:
        np.testing.assert_allclose(other.logits, found.logits, rtol=1e-7, atol=1e-10)


def test_srft_imitates_answers_where_the_policy_is_sure_beside_comparing_them():
    """Eq. 8, 9 and 12 of the paper: 0.5·exp(-H) of cross-entropy, a mean over the answers alone, beside the mean over all tokens in which a good token of
    the policy's own counts 0.1·exp(H). The entropy of a unigram model is the same at every token."""
    algo, one_update = AlgoConfig("srft"), dataclasses.replace(FOUR, epochs=1, minibatches=1)
    answers = tuple(replace(one, advantage=a) for one, a in zip(ANSWERS, (0.75, -0.5, 0.625, 0.125), strict=True))
    batch = replace(batch_of(algo, 5, cut=False), demonstrations=answers)
    token, sampled, advantage, _ = (
        torch.cat(own) for own in zip(*map(tuple, map(columns_of, batch.groups)), strict=True)
    )
    given = torch.tensor([n for one in answers for n in one.answer])
    own = torch.tensor([one.advantage for one in answers for _ in one.answer], dtype=torch.float64)
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    entropy = -(log_p.exp() * log_p).sum().detach()
    of_rollouts = surrogate(log_p[token], sampled, advantage)[0]
    of_rollouts = torch.where(advantage > 0, 0.1 * entropy.exp(), 1.0) * of_rollouts
    p = log_p[given].exp()
    imitated = 0.5 * (-entropy).exp() * -log_p[given]
    loss = torch.cat([of_rollouts, -own * p / (p + 0.1)]).mean() + imitated.mean()
    loss.backward()
    for placed in [made(batch, algo, one_update, Single(), budget=budget) for budget in (1000, 12)]:
        assert placed.sums.loss == pytest.approx(loss.item(), rel=1e-6)
        assert placed.updates[0].norm == pytest.approx(float(logits.grad.norm()), rel=1e-6)
        assert placed.sums.given_share == pytest.approx(8 / (8 + len(token)))
    for placed in Ring(2).run(lambda placement: made(batch, algo, one_update, placement, budget=12)):
        assert placed.sums.loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_step_without_an_answer_to_its_questions_is_that_of_its_rollouts():
    algo, one_update = AlgoConfig("luffy"), dataclasses.replace(FOUR, epochs=1, minibatches=1)
    batch = batch_of(algo, 5, cut=False)
    found = made(batch, algo, one_update, Single())
    alone = made(batch, AlgoConfig("dr_grpo", aggregation="token_mean"), one_update, Single())
    np.testing.assert_array_equal(found.logits, alone.logits)
    assert (found.sums.given, found.sums.given_share) == (0, 0.0)


def test_the_share_of_given_answers_is_that_of_the_authors_schedule():
    rule = AlgoConfig(
        "chord", demonstrations={"weight": 0.9, "last_weight": 0.05, "warmup_steps": 10, "decay_steps": 100}
    ).recipe.demonstrations
    assert [rule.share_at(step) for step in (0, 5, 10, 60, 110, 500)] == pytest.approx(
        [0, 0.45, 0.9, 0.475, 0.05, 0.05]
    )
    assert AlgoConfig("chord").recipe.demonstrations.share_at(0) == AlgoConfig("chord").recipe.demonstrations.weight


def test_steps_of_a_critic_alone_leave_given_answers_out():
    algo = AlgoConfig("ppo", critic={"alone_steps": 1}, demonstrations={"kind": "sft"})
    batch = replace(batch_of(algo, 5, cut=False), demonstrations=ANSWERS)
    found = made(batch, algo, dataclasses.replace(FOUR, epochs=1), Single())
    assert found.sums.given == 0
    np.testing.assert_array_equal(found.logits, LOGITS.numpy())


# -- a real trainer ---------------------------------------------------------------------------------------------------------


def trainer(**train: Any) -> TorchTrainer:
    return trainer_calls.trainer(tiny_models.saved("llama"), path="torch", **train)


def weights(of: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of.parameters()}


def two_groups(second: float = 1.0) -> Batch:
    """`second`: the advantage of the second group's tokens."""
    groups = []
    for number, advantage in enumerate((1.0, second)):
        rows = [
            Row(
                (3, 4),
                (5 + number, 6 + place, 7),
                (-4.0,) * 3,
                (advantage * (1 - 2 * place),) * 3,
                (True,) * 3,
                (0,) * 3,
            )
            for place in range(2)
        ]
        groups.append(replace(trainer_calls.batch().groups[0], ticket=number, rows=tuple(rows)))
    return Batch(0, tuple(groups))


def test_a_step_of_four_updates_makes_one_version_and_is_repeated_bit_for_bit():
    one, other = trainer(epochs=2, minibatches=2), trainer(epochs=2, minibatches=2)
    report, again = one.step(two_groups()), other.step(two_groups())
    assert (report.version, report.updates, report.left_out) == (1, 4, 0) and one.version == 1
    assert report.loss_tokens == 12 == sum(lag.tokens for lag in report.lags), "each token counts once"
    assert report.forward_tokens > trainer().step(two_groups()).forward_tokens, "and is forwarded twice"
    assert {numbers.ticket for numbers in report.token_numbers or ()} == {0}, "numbers are those before any update"
    assert replace(report, seconds=0) == replace(again, seconds=0)
    found, same = weights(one), weights(other)
    assert all(torch.equal(tensor, same[name]) for name, tensor in found.items())


def test_a_step_reports_what_it_made_of_given_answers():
    algo = AlgoConfig("chord", demonstrations={"weight": 0.25})
    one = trainer_calls.trainer(tiny_models.saved("llama"), algo, path="torch")
    answers = (Demonstration((3, 4), (8, 9)), Demonstration((5,), (6,)))
    scores = [value for given in answers for value in one.score(given.tokens)[-len(given.answer) :]]
    report = one.step(replace(two_groups(), demonstrations=answers))
    assert (report.demonstration_tokens, report.demonstration_share, report.loss_tokens) == (3, 0.25, 12)
    assert report.demonstration_loss == pytest.approx(-sum(scores) / 3, rel=1e-4)


def test_what_rounding_makes_is_measured_before_the_weights_have_moved():
    """The sampler's log-probs are the trainer's own, so that any difference is that of an update."""
    one = trainer(epochs=3, learning_rate=1e-2)
    groups = []
    for group in two_groups().groups:
        tokens = [one.score((*row.prompt, *row.tokens))[1:] for row in group.rows]
        rows = tuple(replace(row, logprobs=tuple(own)) for row, own in zip(group.rows, tokens, strict=True))
        groups.append(replace(group, rows=rows))
    report = one.step(Batch(0, tuple(groups)))
    assert report.noise and report.noise.token_rms < 1e-5 and report.lags[0].gaps["max"] > 1e-2


def test_an_update_without_a_finite_gradient_is_left_out_alone():
    one = trainer(minibatches=2)
    report = one.step(two_groups(second=math.inf))
    assert (report.version, report.updates, report.left_out, report.skipped) == (1, 1, 1, "")
    assert "1 of 2 updates of step 1 was left out" in report.notice and report.skippable
    alone = trainer()
    alone.step(replace(two_groups(), groups=two_groups().groups[:1]))
    found = weights(alone)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(one).items())


def test_a_step_of_which_no_update_can_be_made_changes_nothing():
    one = trainer(epochs=2)
    before = weights(one)
    report = one.step(two_groups(second=math.inf))
    assert (report.skipped, report.version, report.updates, report.left_out) == ("nonfinite_gradient", 0, 0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(one).items())


def test_an_update_of_which_bounds_left_nothing_is_left_out_and_left_out_again():
    """Momentum alone would move the weights. A repeated step leaves it out if it was left out before (`TrainReport.skippable`)."""
    log_p = LOGITS.log_softmax(0)
    rows = tuple(
        Row((1,), (n, n + 1), tuple(log_p[[n, n + 1]].tolist()), (1.0,) * 2, (True,) * 2, (9,) * 2) for n in (4, 8)
    )
    batch = Batch(9, (replace(trainer_calls.batch().groups[0], rows=rows),))
    train = TrainConfig(learning_rate=1.0, epochs=2)
    found = made(batch, AlgoConfig(), train, Single())
    assert [update.made for update in found.updates] == [True, False] and found.updates[1].norm == 0
    assert found.version == 10
    again = made(replace(batch, skippable=False), AlgoConfig(), train, Single())
    assert [update.made for update in again.updates] == [True, True]
    assert TrainReport(9, 10, left_out=1).skippable and not TrainReport(9, 10).skippable


# -- good rollouts of earlier groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "tis", "decoupled_ppo"])
def test_good_earlier_rollouts_are_members_of_their_group(name):
    """As RLEP writes it: advantages over all rollouts of the group, new and replayed, and the ratio to the policy that sampled each token, however old."""
    algo = AlgoConfig(name)
    fresh, older = batch_of(algo, 5, cut=False), batch_of(algo, 6, cut=False)
    token_of = iter(range(V))  # of ids that the other batch may have as well
    kept = tuple(_aged(older.groups[1].scored[place], 2 + place, token_of) for place in (0, 2))
    algorithm = algorithm_of(algo, 16)
    first = algorithm.filled(replace(fresh.groups[0], rows=(), experience=kept), 1.0)
    batch = replace(fresh, groups=(first, fresh.groups[1]))
    rewards = np.array([one.reward for one in (*first.scored, *kept)])
    mixed = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    found_advantages = [row.advantages[0] for row in first.all_rows]
    np.testing.assert_allclose(found_advantages, mixed, rtol=1e-12)
    assert [row.again for row in batch.rows] == [False] * 3 + [True] * 2 + [False] * 3
    logits = LOGITS.clone().requires_grad_()
    start = LOGITS.log_softmax(0)
    losses = []
    for group in batch.groups:
        token, sampled, advantage, lag = columns_of(replace(group, rows=group.all_rows))
        old, weight = old_and_weight(name, start[token], sampled, lag)
        losses.append(surrogate(logits.log_softmax(0)[token], old, advantage)[0] * weight)
    loss = torch.cat(losses).mean()
    loss.backward()
    train = TrainConfig(learning_rate=0.2, max_grad_norm=1e9)
    made_by = [made(batch, algo, train, Single(), budget=budget) for budget in (1000, 12)]
    made_by += Ring(2).run(lambda placement: made(batch, algo, train, placement, budget=12))
    for found in made_by:
        assert found.sums.loss == pytest.approx(loss.item(), rel=1e-6)
        assert found.updates[0].norm == pytest.approx(float(logits.grad.norm()), rel=1e-6)
    again = sum(len(row.tokens) for row in first.again)
    by_lag = {stats.name: stats.tokens for stats in made_by[0].sums.diagnostics.report()}
    assert by_lag["experience"] == again and sum(by_lag.values()) == made_by[0].sums.tokens, "in no lag of the new ones"
    whole = made(batch, algo, FOUR, Single())
    alone = made(replace(batch, groups=(first,)), algo, dataclasses.replace(FOUR, epochs=1, minibatches=1), Single())
    assert whole.updates[0].norm == pytest.approx(alone.updates[0].norm, rel=1e-6), (
        "a minibatch is a group with all of its rows"
    )
    assert whole.sums.tokens == 2 * made_by[0].sums.tokens


def _aged(rollout: Scored, version: int, token_of: Iterator[int]) -> Scored:
    """The rollout, sampled by this version with other tokens."""
    turns = []
    for turn in rollout.episode.turns:
        tokens = tuple(next(token_of) for _ in turn.completion.tokens)
        logprobs = tuple(float(LOGITS.log_softmax(0)[token]) + 0.1 * (-1) ** token for token in tokens)
        turns.append(
            replace(turn, completion=Completion(tokens, logprobs, (VersionSpan(0, version, version),), "stop"))
        )
    return replace(rollout, episode=replace(rollout.episode, turns=tuple(turns)))
