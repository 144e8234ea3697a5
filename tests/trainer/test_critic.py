"""A critic in the trainer: loss and gradient of a step against the formulas in float64, and what becomes of the head in updates, checkpoints and
exports."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from test_trajectories import HEAD, LOGITS, STATES, batch_of, step_of
from transformers import AutoModelForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.types import Prompt, Scored
from headrace.trainer.config import TrainConfig
from headrace.trainer.placement.port import Single
from headrace.trainer.step.trainer import TorchTrainer
from support import plain_trainer, tiny_models

# -- a step, written down a second time -------------------------------------------------------------------------------------


def chain_of(rollout: Scored) -> list[tuple[int, float, float, int]]:
    """(token, its sampler's log-prob, its reward, its version) of a rollout, in the order in which they were sampled."""
    chain: list[tuple[int, float, float, int]] = []
    for turn, rewards in zip(rollout.episode.turns, rollout.turn_rewards, strict=True):
        done = turn.completion
        given = [0.0] * (len(done.tokens) - 1) + [sum(rewards.values())]
        chain += zip(done.tokens, done.logprobs, given, done.versions(), strict=True)
    token, logprob, reward, version = chain[-1]
    rest = rollout.reward - sum(sum(rewards.values()) for rewards in rollout.turn_rewards)
    return [*chain[:-1], (token, logprob, reward + rest, version)]


def expected(batch: Batch, algo: AlgoConfig) -> tuple[float, float, np.ndarray]:
    """(loss of the policy, loss of the values, gradient) of PPO with GAE, as the papers write them."""
    logits, states, head = (tensor.clone().requires_grad_() for tensor in (LOGITS, STATES, HEAD))
    critic, gamma = algo.critic, algo.recipe.gamma
    advantages, targets, values, logprobs, sampled, good = [], [], [], [], [], []
    for group in batch.groups:
        for rollout in group.scored:
            token, old, reward, _ = zip(*chain_of(rollout), strict=True)
            state = states[list(token)]
            through = critic.trunk or 0.0
            state = through * state + (1 - through) * state.detach()
            value = (state / state.norm(dim=1, keepdim=True) / 2 * head[:4]).sum(1) + head[4]
            v, found_by = [*value.detach().tolist(), 0.0], []
            for lam in (algo.lam, algo.lam if critic.lam is None else critic.lam):
                running, found = 0.0, []
                for t in reversed(range(len(token))):
                    running = reward[t] + gamma * v[t + 1] - v[t] + gamma * lam * running
                    found.insert(0, running)
                found_by.append(found)
            advantages += found_by[0]
            targets += [a + b for a, b in zip(found_by[1], v, strict=False)]
            values.append(value)
            logprobs.append(logits.log_softmax(0)[list(token)])
            sampled += old
            good += [sum(reward) > 0] * len(token)
    advantage = torch.tensor(advantages, dtype=torch.float64)
    advantage = (advantage - advantage.mean()) / (advantage.var() + 1e-8).sqrt()
    logprob = torch.cat(logprobs)
    ratio = (logprob - torch.tensor(sampled, dtype=torch.float32).double()).exp()  # rows travel in float32
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    of_values = (torch.cat(values) - torch.tensor(targets, dtype=torch.float64)).square().mean() / 2
    succeeded = torch.tensor(good)
    imitation = -(critic.imitation or 0.0) * logprob[succeeded].mean()
    gradient = torch.autograd.grad(policy + of_values + imitation, [logits, states, head])
    return policy.item(), of_values.item(), torch.cat([g.flatten() for g in gradient]).numpy()


@pytest.mark.parametrize("cut", [False, True], ids=["one row", "several rows"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gamma": 0.9, "lam": 0.7},
        {"lam": 0.95, "critic": {"trunk": 0.5}},
        {"lam": 0.5, "critic": {"trunk": 1.0, "lam": 1.0, "imitation": 0.3}},
    ],
    ids=["plain", "discounted", "trunk", "decoupled"],
)
def test_loss_and_gradient_are_those_of_the_papers(settings, cut):
    algo = AlgoConfig("ppo", **settings)
    batch = batch_of(algo, 5, cut=cut)
    policy, of_values, gradient = expected(batch, algo)
    assert np.abs(gradient[: len(LOGITS)]).max() > 1e-3 and np.abs(gradient[-5:]).max() > 1e-3
    for budget in (1000, 9):
        found = step_of(batch, algo, budget, Single())
        assert found[0] == pytest.approx(policy, rel=1e-6) and found[3].critic.value_loss == pytest.approx(
            of_values, rel=1e-6
        )
        np.testing.assert_allclose(found[1], gradient, rtol=2e-5, atol=1e-7)


# -- a real trainer ---------------------------------------------------------------------------------------------------------


def made(algo: AlgoConfig | None = None, model: str = "llama", **train: Any) -> TorchTrainer:
    given = {
        "device": "cpu",
        "dtype": "float32",
        "path": "torch",
        "learning_rate": 1e-3,
        "microbatch_tokens": 16,
        **train,
    }
    return TorchTrainer(tiny_models.saved(model), TrainConfig(**given), algo or AlgoConfig("ppo"), seed=0)


def batch(step: int) -> Batch:
    rows = plain_trainer.rows(random.Random(step), ((5, 3), (3, 2)))
    rows = [
        replace(row, advantages=(0.0,) * (len(row.tokens) - 1) + (float(n % 2),), turns=(0,))
        for n, row in enumerate(rows)
    ]
    return Batch(step, (Group(0, Prompt("p", "", (1,)), (), tuple(rows)),))


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.parameters()}


def head(trainer: TorchTrainer) -> torch.Tensor:
    critic = trainer._learners[""].critic
    assert critic is not None
    return torch.cat([p.detach().clone().flatten() for p in critic.parameters()])


@pytest.mark.parametrize("model", ["llama", "gemma2"], ids=["packed trees", "row by row"])
def test_a_value_is_that_of_the_state_which_predicts_the_token(model):
    """Against transformers' hidden states of each row by itself, the last token before the first sampled one included."""
    trainer, given = made(model=model), batch(0)
    critic = trainer._learners[""].critic
    assert critic is not None
    generator = torch.Generator().manual_seed(3)
    critic.weight.data.copy_(torch.randn(critic.weight.shape, generator=generator))
    critic.bias.data += 0.5
    plain = AutoModelForCausalLM.from_pretrained(tiny_models.saved(model)).base_model.eval()
    expected = []
    for row in given.rows:
        with torch.no_grad():
            states = plain(torch.tensor([row.prompt + row.tokens])).last_hidden_state[0]
        own = [states[len(row.prompt) + place - 1] for place, kept in enumerate(row.mask) if kept]
        expected.append([float(h @ critic.weight.detach() / h.norm() / len(h) ** 0.5 + 0.5) for h in own])
    plan = trainer._plans(given)[0]
    assert len(plan.packs) > 1
    for pack in plan.packs:
        with torch.no_grad():
            value = trainer._forward.logprobs(pack, 1.0, torch.float32, critic).value
        assert value is not None
        for number in pack.row.unique().tolist():
            np.testing.assert_allclose(value[pack.row == number], expected[number], rtol=1e-4, atol=1e-5)


def test_a_resumed_critic_goes_on_bit_for_bit_and_neither_export_nor_publish_knows_it(tmp_path):
    one, plain = made(), made(AlgoConfig("reinforce"))
    reports = [one.step(batch(step)) for step in range(2)]
    assert reports[0].critic.explained_variance == 0 and reports[0].critic.value_mean == 0, "it begins at 0"
    assert reports[1].critic.value_mean != 0 and reports[0].loss_tokens > 0
    one.save(tmp_path / "saved")
    one.export(tmp_path / "exported", "float32")
    other = made()
    other.restore(tmp_path / "saved")
    again, fresh = (trainer.step(batch(2)) for trainer in (one, other))
    assert repr(again.critic) == repr(fresh.critic) and again.loss == fresh.loss and again.grad_norm == fresh.grad_norm
    assert torch.equal(head(one), head(other))
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))
    assert weights(one).keys() == weights(plain).keys()
    assert not [name for name in load_file(tmp_path / "exported" / "model.safetensors") if "critic" in name]
    plain.restore(tmp_path / "saved")  # another algorithm, which has no use for the head
    plain.step(batch(2))


def test_a_checkpoint_without_a_critic_begins_one_anew_and_one_of_another_width_is_refused(tmp_path):
    plain = made(AlgoConfig("reinforce"))
    plain.step(batch(0))
    plain.save(tmp_path / "plain")
    trainer = made()
    trainer.step(batch(0))
    trainer.restore(tmp_path / "plain")
    assert not head(trainer).any() and trainer.step(batch(1)).critic.value_mean == 0
    alone = made(AlgoConfig("ppo", critic={"alone_steps": 1}))
    alone.restore(tmp_path / "plain")
    changed = []
    for step in (1, 2):
        before = weights(alone)
        alone.step(batch(step))
        changed.append(
            any(not torch.equal(old, new) for old, new in zip(before.values(), weights(alone).values(), strict=True))
        )
        alone.save(tmp_path / f"alone-{step}")
        alone.restore(tmp_path / f"alone-{step}")
    assert changed == [False, True], "its first steps are those of the critic, not of the run"
    trainer.save(tmp_path / "saved")
    file = tmp_path / "saved" / "optimizer.safetensors"
    saved = load_file(file)
    save_file(saved | {"critic/weight": torch.zeros(3)}, file)
    before = head(trainer)
    with pytest.raises(CheckpointError, match="its critic has 3 weights"):
        trainer.restore(tmp_path / "saved")
    assert torch.equal(head(trainer), before)


def test_in_its_first_steps_the_critic_is_trained_alone():
    trainer = made(AlgoConfig("ppo", critic={"alone_steps": 1}, entropy={"target": 9.0, "coef": 0.01, "change": 0.1}))
    before = weights(trainer)
    first = trainer.step(batch(0))
    entropy = trainer._learners[""].entropy
    assert entropy.now == 0.01, "the bonus does not grow while it cannot act"
    assert (first.skipped, first.version) == ("", 1) and first.grad_norm > 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(trainer).values(), strict=True))
    assert head(trainer).any()
    second = trainer.step(batch(1))
    assert entropy.now == pytest.approx(0.11)
    assert second.version == 2 and any(
        not torch.equal(a, b) for a, b in zip(before.values(), weights(trainer).values(), strict=True)
    )


def test_the_steps_of_the_critic_alone_stay_as_many_when_a_resumed_run_has_other_updates(tmp_path):
    """Two of three are done with one update each; a third with four updates is left."""
    algo = AlgoConfig("ppo", critic={"alone_steps": 3})
    one = made(algo)
    for step in range(2):
        one.step(batch(step))
    one.save(tmp_path / "saved")
    other = made(algo, epochs=4)
    other.restore(tmp_path / "saved")
    changed = []
    for step in (2, 3):
        before = weights(other)
        other.step(batch(step))
        changed.append(
            any(not torch.equal(old, new) for old, new in zip(before.values(), weights(other).values(), strict=True))
        )
    assert changed == [False, True]
    file = tmp_path / "saved" / "optimizer.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "critic/steps"}, file)
    again = made(algo)
    again.restore(tmp_path / "saved")  # of an earlier version, which went on with as many updates
    assert again._learners[""].trains_critic_alone
    again.step(batch(2))
    assert not again._learners[""].trains_critic_alone


def test_without_a_share_for_the_trunk_the_policy_is_changed_by_its_own_loss_alone():
    """Values that are all wrong by 3, a loss of 4.5, change nothing for it: advantages are whitened. With a share they do."""

    def norm(trunk: float, wrong: float) -> float:
        trainer = made(AlgoConfig("ppo", critic={"trunk": trunk}))
        critic = trainer._learners[""].critic
        assert critic is not None
        critic.weight.data += 0.5
        critic.bias.data += wrong
        return trainer.step(batch(0)).grad_norm

    assert norm(0.0, 3.0) == pytest.approx(norm(0.0, 0.0), rel=1e-4)
    assert norm(1.0, 3.0) != pytest.approx(norm(1.0, 0.0), rel=1e-3)


@pytest.mark.parametrize("train", [{"offload_optimizer": True}, {"weights": "bfloat16", "dtype": "bfloat16"}])
def test_other_optimizers_of_the_weights_leave_the_heads_alone(train, tmp_path):
    trainer = made(**train)
    trainer.step(batch(0))
    trainer.save(tmp_path / "saved")
    other = made(**train)
    other.restore(tmp_path / "saved")
    assert repr(trainer.step(batch(1)).critic) == repr(other.step(batch(1)).critic) and torch.equal(
        head(trainer), head(other)
    )


def test_a_model_that_shows_its_logits_only_is_refused():
    trainer = made(AlgoConfig("grpo"))
    trainer._forward = dataclasses.replace(trainer._forward, chunked_head=False)
    with pytest.raises(ConfigError, match="shows its logits only"):
        trainer._critic(AlgoConfig("ppo"), TrainConfig())


def test_directories_of_checkpoints_have_no_file_more(tmp_path: Path):
    trainer = made()
    trainer.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
    ]
