"""Losses of preferences through the trainer: the gradient of whole pairs, however the step is split."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from headrace.algo import recipes
from headrace.algo.advantages import GroupRewards
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import objective_of
from headrace.algo.policy.pairs import CPO, DPO, KTO, ORPO, IdentityPreference, PairLoss, Side, SimPO
from headrace.algo.policy.tokens import Tokens
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Group
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.testing.simulated_ranks import Ring
from headrace.trainer.config import TrainConfig
from headrace.trainer.dealing.share import head_of
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.whole_step import numbers_of, pairs_of
from support.few import few
from support.trainer_calls import V, model_dir, near  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
Array = np.ndarray
NAMES = ("dpo", "ipo_pairs", "simpo", "cpo", "orpo")


# -- the formulas, in float64 numpy ------------------------------------------------------------------------------------------


def by_formula(loss: PairLoss, chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array) -> float:
    """The loss of one pair from the log-probs of its tokens, as the papers write it."""
    if isinstance(loss, SimPO):
        x = loss.pair_beta * (chosen.mean() - rejected.mean()) - loss.pair_margin
        return math.log1p(math.exp(-x))
    if isinstance(loss, CPO):
        won = 1 / (1 + math.exp(-loss.pair_beta * (chosen.sum() - rejected.sum())))
        return -math.log(won) - loss.pair_nll * chosen.mean()
    if isinstance(loss, ORPO):
        p, q = math.exp(chosen.mean()), math.exp(rejected.mean())
        odds = (p / (1 - p)) / (q / (1 - q))
        return -math.log(p) - loss.pair_beta * math.log(odds / (1 + odds))  # σ(log x) = x / (1 + x)
    h = (chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum())
    if isinstance(loss, DPO):
        right, wrong = (-math.log(1 / (1 + math.exp(-sign * loss.pair_beta * h))) for sign in (1, -1))
        if loss.pair_flips:
            right = ((1 - loss.pair_flips) * right - loss.pair_flips * wrong) / (1 - 2 * loss.pair_flips)
        else:
            right = (1 - loss.pair_smoothing) * right + loss.pair_smoothing * wrong
        return right - loss.pair_nll * chosen.mean()
    return (h - 1 / (2 * loss.pair_beta)) ** 2


LOSSES = [
    DPO(pair_beta=0.3),
    IdentityPreference(pair_beta=0.2),
    SimPO(pair_beta=2.5, pair_margin=0.7),
    DPO(pair_beta=0.4, pair_smoothing=0.2),
    DPO(pair_beta=0.4, pair_flips=0.15, pair_nll=0.7),
    CPO(pair_beta=0.3, pair_nll=0.6),
    ORPO(pair_beta=0.5),
]
LENGTHS = (3, 1, 4, 2, 5)


def test_every_loss_of_pairs_has_a_formula() -> None:
    assert {loss.name for loss in LOSSES} == set(NAMES) == {name for name, loss in recipes.LOSSES.items() if loss.pairs}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_slope_of_every_token_is_the_derivative_of_the_mean_over_pairs(loss):
    """By finite differences of the formula. The third rollout has two rows."""
    rng = np.random.default_rng(3)
    row = np.repeat(np.arange(5), LENGTHS)
    rollouts = np.array([0, 1, 2, 2, 3])[row]  # rows 2 and 3 are one rollout
    pairs = ((0, 1), (0, 3), (2, 3), (3, 1))
    logprob, reference = -rng.exponential(1.0, len(row)), -rng.exponential(1.0, len(row))

    def value(logprob: Array) -> float:
        of = lambda values, number: values[rollouts == number]  # noqa: E731
        every = [by_formula(loss, of(logprob, c), of(logprob, r), of(reference, c), of(reference, r)) for c, r in pairs]
        return float(np.mean(every))

    tokens = tokens_of(logprob, rollouts, reference, pairs)
    result = loss(tokens, tokens.sampled)
    (slope,) = torch.autograd.grad(result.loss.sum(), tokens.logprob)
    expected = [(value(logprob + e) - value(logprob - e)) / 2e-6 for e in 1e-6 * np.eye(len(row))]
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-9)
    assert result.loss.detach().sum().item() == pytest.approx(value(logprob))
    numbers = numbers_of(loss, tokens)
    assert numbers.pairs == 4 and 0 <= numbers.agreed <= 1


def tokens_of(logprob: Array, rollouts: Array, reference: Array | None, pairs: Sequence[tuple[int, int]]) -> Tokens:
    given = torch.tensor(logprob).double().requires_grad_()
    none = torch.zeros(len(logprob)).double()
    chosen, rejected = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    referred = None if reference is None else torch.tensor(reference)
    return Tokens(given, none, none, torch.tensor(rollouts), none, reference=referred, pairs=(chosen, rejected))


def test_wrong_preferences_are_answered_by_a_target_or_by_weights_that_cancel_them() -> None:
    """With ε = 0.2, conservative DPO stops where σ(β·h) = 0.8, and the mean of the robust loss over flips is the loss without them."""
    h, one = torch.tensor([math.log(4)], dtype=torch.float64, requires_grad=True), torch.ones(1).double()
    reach = lambda loss, h: loss.of_pairs(Side(h, 0 * one, one), Side(0 * one, 0 * one, one))  # noqa: E731
    (slope,) = torch.autograd.grad(reach(DPO(pair_beta=1.0, pair_smoothing=0.2), h).sum(), h)
    assert slope.item() == pytest.approx(0.0, abs=1e-12)
    robust, plain = DPO(pair_beta=1.0, pair_flips=0.2), DPO(pair_beta=1.0)
    assert (0.8 * reach(robust, h) + 0.2 * reach(robust, -h)).item() == pytest.approx(reach(plain, h).item())


def test_a_rollout_without_tokens_takes_its_pairs_out_of_the_mean():
    logprob, rollouts = np.array([-1.0, -2.0]), np.array([0, 1])  # nothing of rollout 2
    slopes = []
    for pairs in (((0, 1), (0, 2)), ((0, 1),)):
        tokens = tokens_of(logprob, rollouts, None, pairs)
        assert numbers_of(SimPO(), tokens).pairs == 1
        slopes += torch.autograd.grad(SimPO()(tokens, tokens.sampled).loss.sum(), tokens.logprob)
    torch.testing.assert_close(*slopes)
    nothing = tokens_of(logprob[:1], rollouts[:1], None, ((0, 1),))
    assert numbers_of(SimPO(), nothing).pairs == 0 and not SimPO()(nothing, nothing.sampled).loss.any()


# -- through the trainer -----------------------------------------------------------------------------------------------------


def completion(rng: random.Random, count: int) -> Completion:
    tokens, logprobs = (tuple(draw() for _ in range(count)) for draw in (lambda: rng.randrange(V), lambda: -3.0))
    return Completion(tokens, logprobs, (VersionSpan(0, 0, 0),), "stop")


def groups(algo: AlgoConfig, seed: int = 0) -> tuple[Group, ...]:
    """Three prompts; one rollout has two paths."""
    rng, made, algorithm = random.Random(seed), [], algorithm_of(algo, 8)
    for ticket, rewards in enumerate([(1.0, 0.0, 0.5), (0.0, 1.0), (1.0, 1.0, 0.0, 0.0)]):
        prompt = Prompt(f"p{ticket}", "", tuple(rng.randrange(V) for _ in range(4 + ticket)))
        scored = []
        for place, reward in enumerate(rewards):
            turns = (Turn(prompt.tokens, completion(rng, rng.randint(1, 6))),)
            if (ticket, place) == (1, 1):
                branches = (Turn((5, 6), completion(rng, n), parents=(0,)) for n in (3, 2))
                turns = (*turns, *branches)
            scored.append(Scored(Episode(turns), reward, {"exact": reward}))
        rows, pairs = algorithm.rows(prompt, scored), algorithm.pairs(scored)
        made.append(Group(ticket, prompt, tuple(scored), rows, pairs=pairs))
    return tuple(made)


def make(directory: Path, algo: AlgoConfig, placement: Any = None, budget: int = 1000) -> TorchTrainer:
    config = TrainConfig(dtype="float32", path="torch", learning_rate=0.02, device="cpu", microbatch_tokens=budget)
    return TorchTrainer(directory, config, algo, seed=0, placement=placement)


def gradient_after_a_step(trainer: TorchTrainer) -> tuple[float, dict[str, torch.Tensor], int, Any]:
    """The policy is then not the reference any more."""
    algo = trainer._learners[""].algo
    trainer.step(Batch(0, groups(algo, seed=1)))
    given = Batch(1, groups(algo))
    plan = trainer._plans(given)[0]
    sums = trainer._gradient(1.0, pairs=pairs_of(head_of(given))).fill(plan)
    found = {
        name: trainer._placement.whole(p.grad) for name, p in trainer._model.named_parameters() if p.grad is not None
    }
    return sums.loss, found, len(plan.packs), sums.pairs


def plain(
    directory: Path, trainer: TorchTrainer, given: Batch, loss: PairLoss
) -> tuple[float, dict[str, torch.Tensor]]:
    """Each row by itself through Hugging Face's own model, in float64, and the formulas over its sums."""
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()  # noqa: E731
    policy, reference = load(), load()
    policy.load_state_dict({name: p.detach().double() for name, p in trainer._model.state_dict().items()})

    def likelihood(model: Any, row: Any) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([row.prompt + row.tokens])).logits[0]
        logp = torch.log_softmax(logits, -1)
        kept = [t for t, sampled in enumerate(row.mask) if sampled]
        return torch.stack([logp[len(row.prompt) + t - 1, row.tokens[t]] for t in kept])

    losses = []
    for group in given.groups:
        rows = iter(group.rows)
        sides = []
        for scored in group.scored:
            paths = 1 if len(scored.episode.turns) == 1 else 2
            mine = [row for row in (next(rows) for _ in range(paths)) if any(row.mask)]
            if mine:
                sides.append([torch.cat([likelihood(model, row) for row in mine]) for model in (policy, reference)])
            else:
                sides.append([])
        for c, r in group.pairs:
            (chosen, ref_chosen), (rejected, ref_rejected) = sides[c], sides[r]
            if isinstance(loss, SimPO):
                x = loss.pair_beta * (chosen.mean() - rejected.mean()) - loss.pair_margin
                losses.append(-torch.nn.functional.logsigmoid(x))
                continue
            if isinstance(loss, CPO):
                won = torch.nn.functional.logsigmoid(loss.pair_beta * (chosen.sum() - rejected.sum()))
                losses.append(-won - loss.pair_nll * chosen.mean())
                continue
            if isinstance(loss, ORPO):
                odds = [(one.mean() - torch.log(1 - one.mean().exp())) for one in (chosen, rejected)]
                losses.append(-chosen.mean() - loss.pair_beta * torch.nn.functional.logsigmoid(odds[0] - odds[1]))
                continue
            h = chosen.sum() - ref_chosen.sum() - rejected.sum() + ref_rejected.sum()
            if isinstance(loss, DPO):
                losses.append(-torch.nn.functional.logsigmoid(loss.pair_beta * h))
            else:
                losses.append((h - 1 / (2 * loss.pair_beta)) ** 2)
    total = torch.stack(losses).mean()
    total.backward()
    return total.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", few(NAMES, keep=2))
def test_the_gradient_is_that_of_the_pairs_however_the_step_is_split(name, model_dir):  # noqa: F811
    directory, algo = model_dir("llama"), AlgoConfig(name)
    first = make(directory, algo)
    loss, whole, packs, numbers = gradient_after_a_step(first)
    pair_loss = algo.recipe.loss
    assert isinstance(pair_loss, PairLoss) and packs == 1
    expected_loss, expected = plain(directory, first, Batch(1, groups(algo)), pair_loss)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    near(whole, expected, 2e-4)
    # the first step is split too, so that weights differ in the last digits before the second
    split_loss, split, packs, again = gradient_after_a_step(make(directory, algo, budget=6))
    assert packs > 3 and split_loss == pytest.approx(loss, rel=1e-4) and again.pairs == numbers.pairs
    near(split, whole, 1e-3)


@pytest.mark.parametrize("budget", [6, 1000])
def test_ranks_have_the_gradient_of_one_device(budget, model_dir):  # noqa: F811
    """Pairs lie on both ranks; a rank whose only microbatch is empty takes part all the same."""
    directory, algo = model_dir("llama"), AlgoConfig("dpo")
    loss, expected, _, numbers = gradient_after_a_step(make(directory, algo))
    on = lambda placement: gradient_after_a_step(make(directory, algo, placement, budget))  # noqa: E731
    for one_loss, found, _, mine in Ring(2).run(on):
        assert one_loss == pytest.approx(loss, rel=1e-4)
        assert mine.pairs == numbers.pairs and mine.margin == pytest.approx(numbers.margin, rel=1e-3, abs=1e-5)
        near(found, expected, 1e-3)


def test_at_the_reference_every_margin_is_zero_and_the_loss_is_log_two(model_dir):  # noqa: F811
    algo = AlgoConfig("dpo")
    one = make(model_dir("llama"), algo)
    report = one.step(Batch(0, groups(algo)))
    assert report.loss == pytest.approx(math.log(2), rel=1e-5)
    assert (report.pairs, report.pair_margin) == (2 + 1 + 1 + 4, pytest.approx(0.0, abs=1e-4))
    for step in range(1, 6):
        report = one.step(Batch(step, groups(algo)))
    assert report.pairs_agreed == 1.0 and report.pair_margin > 1 and report.loss < 0.6


def test_a_pair_shares_its_prompt(model_dir):  # noqa: F811
    """The prompt of a group is forwarded once for all of its pairs."""
    algo = AlgoConfig("dpo")
    given = Batch(0, groups(algo))
    plan = make(model_dir("llama"), algo)._plans(given)[0]
    rows = [row for row in given.rows if any(row.mask)]
    assert sum(len(pack.tokens) for pack in plan.packs) <= sum(len(row.tokens) for row in rows) + 4 + 5 + 6


# -- a user's own loss of pairs --------------------------------------------------------------------------------------------------


def own_loss(tmp_path: Path, body: str, **more: Any) -> AlgoConfig:
    (tmp_path / "mine.py").write_text(f"import torch\nfrom torch.nn.functional import softplus\n\n{body}\n")
    return AlgoConfig("dpo", loss=f"{tmp_path / 'mine.py'}:loss", **more)


OWN = "def loss(chosen, rejected):\n    return softplus(-0.1 * (chosen.gain - rejected.gain))"


def test_a_users_loss_of_pairs_is_used_like_one_of_the_table(model_dir, tmp_path):  # noqa: F811
    algo = own_loss(tmp_path, OWN)
    assert algo.reference_in_loss and isinstance(algo.recipe.loss, PairLoss)
    split = lambda algo: gradient_after_a_step(make(model_dir("llama"), algo, budget=20))  # noqa: E731
    loss, expected, packs, numbers = split(AlgoConfig("dpo"))
    own, found, _, again = split(algo)
    assert packs > 1 and own == pytest.approx(loss, rel=1e-6) and again == numbers
    near(found, expected, 1e-6)


def test_the_example_of_the_page_is_the_loss_that_it_names(tmp_path):
    (example,) = re.findall(
        r"```python\n([^`]*def loss\(chosen[^`]*)```", (ROOT / "docs" / "algorithms.md").read_text()
    )
    tokens = tokens_of(np.array([-1.0, -2.0, -3.0, -0.5]), np.array([0, 0, 1, 1]), np.zeros(4), ((1, 0),))
    found = objective_of(own_loss(tmp_path, example))(tokens).loss.sum()
    simpo = SimPO(pair_beta=2.0, pair_margin=1.0)(tokens, tokens.sampled).loss.sum()
    assert found.item() == pytest.approx(simpo.item() + (3.0 + 0.5) / 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "def loss(chosen, rejected):\n    return chosen.gain.mean()",
            "for 2 pairs; return a tensor of shape \\(2,\\), one loss a pair",
        ),
        ("def loss(chosen, rejected):\n    return 0.5", "returned a float"),
        (
            "def loss(chosen, rejected):\n    return chosen.gain.detach()",
            "compute it from chosen.logprob and rejected.logprob",
        ),
        ("def loss(chosen, rejected):\n    return chosen.gain / (chosen.tokens - 1)", "not finite"),
    ],
)
def test_a_users_wrong_result_for_pairs_is_refused_at_the_first_call(tmp_path, body, words):
    tokens = tokens_of(np.array([-1.0, -2.0, -3.0]), np.arange(3), np.zeros(3), ((0, 1), (0, 2)))
    with pytest.raises(ConfigError, match=words):
        objective_of(own_loss(tmp_path, body))(tokens)


def test_a_users_loss_of_pairs_is_not_called_without_pairs(tmp_path):
    objective = objective_of(own_loss(tmp_path, "def loss(chosen, rejected):\n    return chosen.gain / 0"))
    tokens = tokens_of(np.array([-1.0]), np.arange(1), np.zeros(1), ((0, 1),))
    assert objective(tokens).loss.tolist() == [0.0]


def test_a_users_loss_of_pairs_that_takes_one_argument_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="loss cannot be called with two arguments"):
        objective_of(own_loss(tmp_path, "def loss(tokens): ..."))
    with pytest.raises(ValueError, match="use algo.name = dpo, and remove what replaces them"):
        own_loss(tmp_path, OWN, aggregation="token_mean")
    with pytest.raises(ValueError, match="pair_beta has no meaning"):
        own_loss(tmp_path, OWN, pair_beta=0.2)


# -- which pairs there are ---------------------------------------------------------------------------------------------------


def scored_of(*rewards: float, cut: tuple[int, ...] = ()) -> list[Scored]:
    rng = random.Random(0)
    made = []
    for place, reward in enumerate(rewards):
        done = completion(rng, 3)
        done = replace(done, stop="length") if place in cut else done
        made.append(Scored(Episode((Turn((1, 2), done),)), reward, {"r": reward}))
    return made


PROMPT = Prompt("p", "", (1, 2))


@pytest.mark.parametrize(
    ("advantage", "rewards", "pairs", "balance"),
    [
        ("every_pair", (1.0, 0.0, 1.0), [(0, 1), (2, 1)], [1, -2, 1]),
        ("every_pair", (0.2, 0.5, 0.9), [(1, 0), (2, 0), (2, 1)], [-2, 0, 2]),
        ("best_against_worst", (0.2, 0.5, 0.9), [(2, 0)], [-1, 0, 1]),
        ("best_against_worst", (1.0, 1.0, 0.0, 0.0), [(0, 2)], [1, 0, -1, 0]),
        ("every_pair", (0.1 + 0.2, 0.3), [], [0, 0]),
        ("best_against_worst", (1.0, 1.0), [], [0, 0]),
    ],
)
def test_pairs_come_from_rewards(advantage, rewards, pairs, balance):
    algorithm = algorithm_of(AlgoConfig("dpo", advantage=advantage), 8)
    scored = scored_of(*rewards)
    rows = algorithm.rows(PROMPT, scored)
    assert list(algorithm.pairs(scored)) == pairs
    assert [row.advantages[0] for row in rows] == balance
    involved = {place for pair in pairs for place in pair}
    assert [any(row.mask) for row in rows] == [not pairs or place in involved for place in range(len(rewards))]
    assert algorithm.barren(rows) == ("" if pairs else "no_contrast")


def test_a_rollout_that_was_cut_off_is_in_no_pair_if_such_are_not_trained():
    scored = scored_of(1.0, 0.0, 0.5, cut=(1,))
    assert list(algorithm_of(AlgoConfig("dpo"), 8).pairs(scored)) == [(0, 1), (0, 2), (2, 1)]
    masking = algorithm_of(AlgoConfig("dpo", overlong="mask"), 8)
    assert list(masking.pairs(scored)) == [(0, 2)]
    assert [any(row.mask) for row in masking.rows(PROMPT, scored)] == [True, False, True]


def test_other_algorithms_have_no_pairs():
    assert algorithm_of(AlgoConfig(), 8).pairs(scored_of(1.0, 0.0)) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "grpo", "advantage": "every_pair"}, "about pairs of rollouts"),
        ({"name": "grpo", "aggregation": "pair_mean"}, "about pairs of rollouts"),
        ({"name": "grpo", "loss": "dpo"}, "algo.name = dpo"),
        ({"name": "dpo", "advantage": "group_norm"}, "every_pair or best_against_worst"),
        ({"name": "dpo", "aggregation": "token_mean"}, "algo.aggregation = pair_mean"),
        ({"name": "dpo", "kl": {"coef": 0.1}}, "algo.kl.coef"),
        ({"name": "simpo", "correction": {"mode": "truncate"}}, "algo.correction"),
        ({"name": "simpo", "correction": {"opsm": 0.1}}, "algo.correction"),
        ({"name": "dpo", "lag": {"kind": "exponential"}}, "algo.lag"),
        ({"name": "dpo", "select": {"kind": "second_moment"}}, "algo.select"),
        ({"name": "dpo", "distill": {"kind": "sampled"}}, "algo.distill"),
        ({"name": "dpo", "old": "trainer"}, "algo.old"),
        ({"name": "dpo", "credit": "turn"}, "algo.credit"),
        ({"name": "dpo", "denominator": "kept"}, "algo.denominator"),
        ({"name": "dpo", "pair_margin": 1.0}, "pair_margin has no meaning"),
        ({"name": "grpo", "pair_beta": 1.0}, "pair_beta has no meaning"),
        ({"name": "dpo", "pair_beta": 0.0}, "greater than 0"),
        ({"name": "kto", "correction": {"mode": "truncate"}}, "algo.correction"),
        ({"name": "kto", "credit": "turn"}, "algo.credit"),
        ({"name": "kto", "aggregation": "token_mean"}, "use algo.name = kto"),
        ({"name": "grpo", "loss": "kto"}, "use algo.name = kto"),
        ({"name": "kto", "advantage": "every_pair"}, "about pairs of rollouts"),
        ({"name": "kto", "advantage": "gae"}, "remove algo.advantage"),
        ({"name": "kto", "advantage": "return_to_go"}, "remove algo.advantage"),
        ({"name": "dpo", "pair_smoothing": 0.1, "pair_flips": 0.1}, "remove one of them"),
        ({"name": "orpo", "pair_nll": 0.5}, "pair_nll has no meaning"),
        ({"name": "dpo", "pair_flips": 0.5}, "less than 0.5"),
    ],
)
def test_what_has_no_meaning_with_pairs_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        AlgoConfig(**given)


def test_kto_learns_from_groups_of_one_and_from_rewards_that_are_all_alike(model_dir):  # noqa: F811
    """At the reference its loss is a half of every rollout; then what is right gains on it, and what is wrong loses."""
    algo = AlgoConfig("kto", pair_beta=1.0)
    algorithm, made, rng = algorithm_of(algo, 8), [], random.Random(0)
    for ticket, reward in enumerate((1.0, 0.0, 0.0)):
        prompt = Prompt(f"p{ticket}", "", (1, 2, 3 + ticket))
        scored = Scored(Episode((Turn(prompt.tokens, completion(rng, 2 + ticket)),)), reward, {"r": reward})
        rows = algorithm.rows(prompt, [scored])
        assert not algorithm.barren(rows)
        made.append(Group(ticket, prompt, (scored,), rows))
    one = make(model_dir("llama"), algo, budget=4)
    reports = [one.step(Batch(step, tuple(made))) for step in range(4)]
    assert reports[0].microbatches > 1 and reports[0].loss == pytest.approx(0.5, rel=1e-5)
    assert all(not report.skipped for report in reports) and reports[-1].loss < 0.45


def test_rewards_that_cancel_do_not_make_a_rollout_right():
    """0.1 + 0.2 - 0.3 is 5.6e-17. Both losses and choices of right rollouts would take it for a success."""
    rest = 0.1 + 0.2 - 0.3
    assert rest > 0 and GroupRewards((rest, 1.0, 0.0, rest), (1, 9, 1, 1)).chosen("cleanest", 2) == [0, 1]
    one = torch.zeros(2, dtype=torch.float64)
    given = Tokens(one, one, torch.tensor([rest, 1.0]), torch.arange(2), one, reference=one)
    assert KTO(undesirable_weight=3.0)(given, one).loss.tolist() == [1.5, 0.5]


def test_a_loss_of_pairs_says_whether_it_needs_a_reference():
    assert AlgoConfig("kto").reference_in_loss
    assert AlgoConfig("dpo").reference_in_loss and AlgoConfig("ipo_pairs").reference_in_loss
    assert not any(AlgoConfig(name).reference_in_loss for name in ("simpo", "cpo", "orpo"))
    assert AlgoConfig("dpo").min_rollouts == 2
