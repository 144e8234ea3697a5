"""Alternatives from a turn: who is compared with whom, what is sampled and run once, and the same gradient as without sharing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Failure, Row
from headrace.core.errors import ConfigError
from headrace.core.protocols import EnvironmentKind
from headrace.core.types import Branch, Completion, Episode, Prompt, Scored, TeacherTrace, Turn, VersionSpan
from headrace.durable.journal import read_steps
from headrace.episodes.episodes import as_trees, roll_out, with_rewards
from headrace.episodes.rollout import ForksConfig, RolloutConfig, as_tree, fork_problem, path_to, pivot_of
from headrace.episodes.rollout_session import Played, TurnAsked
from headrace.facts.facts import GroupEnded
from headrace.loop.checkpoints import load_controller
from headrace.loop.world import virtual_time
from headrace.run.config import load_config
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_environments import scripted
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer
from support.fake_world import FakeWorld

PROMPT = Prompt("p", "?", (1, 2))


def done(*tokens: int, logprob: float = -1.0, **rest: Any) -> Completion:
    return Completion(tokens, (logprob,) * len(tokens), (VersionSpan(0, 0, 0),), rest.pop("stop", "stop"), **rest)


def episode(*tokens: int, cut: str = "") -> Episode:
    """Turns of one token each, with 7 between them."""
    turns = [Turn((7,) if i else PROMPT.tokens, done(token), (i - 1,) if i else ()) for i, token in enumerate(tokens)]
    return Episode(tuple(turns), cut)


def scored(reward: float, *tokens: int, cut: str = "") -> Scored:
    return Scored(episode(*tokens, cut=cut), reward, {"right": reward})


# --- the tree --------------------------------------------------------------------------------------------------------------


def test_rollouts_that_share_their_begin_are_one_episode() -> None:
    tree = as_tree([scored(1.0, 10, 11, 12), scored(0.0, 10, 21), scored(0.5, 10, 31, 32)], pivot=1)
    assert [turn.completion.tokens for turn in tree.episode.turns] == [(10,), (11,), (12,), (21,), (31,), (32,)]
    assert [turn.parents for turn in tree.episode.turns] == [(), (0,), (1,), (0,), (0,), (4,)]
    assert tree.branches == (
        Branch(1, 3, 1.0, {"right": 1.0}),
        Branch(3, 4, 0.0, {"right": 0.0}),
        Branch(4, 6, 0.5, {"right": 0.5}),
    )
    assert tree.reward == 0.5 and tree.rewards == {"right": 0.5} and tree.episode.sampled == 6
    assert as_tree([scored(1.0, 10, 11)], 1) == scored(1.0, 10, 11), "one without alternatives does not branch"


def test_every_turn_of_a_tree_keeps_what_it_was_given() -> None:
    """Its rewards, the scores of the teacher and those of the reference: of the branch that it is on, not of another one."""

    def given(first: float, *tokens: int) -> Scored:
        """Turn n of a leaf has n more than its first turn; what is shared is the same in all leaves."""
        values = [0.0, *(first + n for n in range(len(tokens) - 1))]
        return replace(
            scored(first, *tokens),
            turn_rewards=tuple({"step": value} for value in values),
            teachers=tuple(TeacherTrace("t", (int(value),), (-value,)) for value in values),
            references=tuple((-value / 2,) for value in values),
        )

    leaves = [given(10.0, 1, 11, 12), given(20.0, 1, 21), given(30.0, 1, 31, 32)]
    tree, values = as_tree(leaves, pivot=1), [0.0, 10.0, 11.0, 20.0, 30.0, 31.0]
    assert [turn_reward["step"] for turn_reward in tree.turn_rewards] == values
    assert [(teacher.versions, teacher.logprobs) for teacher in tree.teachers] == [
        ((int(value),), (-value,)) for value in values
    ]
    assert list(tree.references) == [(-value / 2,) for value in values]
    plain = as_tree([replace(leaf, turn_rewards=(), teachers=(), references=()) for leaf in leaves], pivot=1)
    assert (plain.turn_rewards, plain.teachers, plain.references) == ((), (), ())
    some = as_tree([replace(leaves[0], turn_rewards=()), *leaves[1:]], pivot=1)
    assert some.turn_rewards == ({}, {}, {}, *({"step": value} for value in values[3:])), "a branch without rewards"


def rows_of(*trees: Scored, **algo: Any) -> tuple[Row, ...]:
    return algorithm_of(AlgoConfig(name="dr_grpo", **algo), 8).rows(PROMPT, trees)


def test_the_turns_of_a_fork_are_compared_with_each_other_and_those_before_it_with_other_rollouts() -> None:
    """By hand: the first tree has the mean 0.5, the second 1.0, so their first turns have -0.25 and 0.25. Behind the fork of the first,
    1 and 0 have 0.5 and -0.5; behind that of the second, both are 1."""
    first = as_tree([scored(1.0, 10, 11, 12), scored(0.0, 10, 21)], 1)
    second = as_tree([scored(1.0, 40, 41), scored(1.0, 40, 51)], 1)
    rows = rows_of(first, second)
    assert [row.tokens for row in rows] == [(10, 7, 11, 7, 12), (10, 7, 21), (40, 7, 41), (40, 7, 51)]
    assert [row.mask for row in rows] == [
        (True, False, True, False, True),
        (False, False, True),
        (True, False, True),
        (False, False, True),
    ], "a turn that is shared is trained once"
    assert rows[0].advantages[0] == -0.25 and rows[0].advantages[2] == rows[0].advantages[4] == 0.5
    assert rows[1].advantages[2] == -0.5 and rows[2].advantages[0] == 0.25
    assert rows[2].advantages[2] == rows[3].advantages[2] == 0.0


def test_the_length_penalty_of_branches_is_that_of_their_paths() -> None:
    """By hand: the mean reward is 1 and a rollout has at most 8 tokens, so a sampled token costs 1/16. The paths of the first tree have 3 and 2
    of them, 2.5 on average, and the other rollout has 1."""
    tree = as_tree([scored(1.0, 10, 11, 12), scored(1.0, 10, 21)], 1)
    first, second, alone = rows_of(tree, scored(1.0, 40), length_penalty=0.5)
    assert alone.advantages[0] == pytest.approx((2.5 - 1) / 16 / 2) == -first.advantages[0]
    assert first.advantages[2] == first.advantages[4] == pytest.approx(-1 / 16 / 2)
    assert second.advantages[2] == pytest.approx(1 / 16 / 2)
    solved, failed = as_tree([scored(1.0, 10, 11), scored(1.0, 10, 21, 22)], 1), scored(-1.0, 40)
    assert [row.advantages[2] for row in rows_of(solved, failed, length_penalty=0.5)[:2]] == [0.0, 0.0], (
        "the group's mean is 0"
    )


def test_a_branch_that_was_cut_off_is_masked_alone() -> None:
    tree = as_tree([scored(1.0, 10, 11, cut="turns"), scored(0.0, 10, 21)], 1)
    assert tree.episode.cut == ""
    masks = [row.mask for row in rows_of(tree, scored(0.2, 40), overlong="mask")]
    assert masks == [(True, False, False), (False, False, True), (True,)]
    assert all(any(row.mask) for row in rows_of(tree, scored(0.2, 40)))
    both = as_tree([scored(1.0, 10, 11, cut="turns"), scored(0.0, 10, 21, cut="turns")], 1)
    assert not any(any(row.mask) for row in rows_of(both, overlong="mask"))


def test_the_pivot() -> None:
    one = Episode(
        (Turn((1,), done(5, logprob=-0.1)), Turn((7,), done(6, logprob=-2.0), (0,)), Turn((7,), done(8), (1,)))
    )
    chosen = {turn: pivot_of(one, ForksConfig(alternatives=1, turn=turn), 3) for turn in ("first", "last", "entropy")}  # type: ignore[arg-type]
    assert chosen == {"first": 0, "last": 2, "entropy": 1}
    random = {pivot_of(one, ForksConfig(alternatives=1), seed) for seed in range(30)}
    assert random == {0, 1, 2}


# --- playing ---------------------------------------------------------------------------------------------------------------


class Numbers:
    """An engine whose answers are numbered in the order in which they are asked for."""

    def __init__(self) -> None:
        self.asked: list[TurnAsked] = []

    async def __call__(self, asked: TurnAsked) -> Completion:
        self.asked.append(asked)
        number = len(self.asked)
        await asyncio.sleep(0.1)
        return done(100 + number)


def tools() -> tuple[EnvironmentKind, list[int]]:
    """Rollouts of three turns whose tools say something else every time, and how often they were asked."""
    calls: list[int] = []

    def reply(_: Completion, seed: int) -> Sequence[int]:
        calls.append(seed)
        return (50 + len(calls),)

    return scripted(3, reply=reply, resumes="exported"), calls


def played(kind: EnvironmentKind, ask: Any, forks: ForksConfig, rollouts: int = 1) -> list[Played | Failure]:
    found: list[Played | Failure] = []

    async def main() -> None:
        found.extend(await roll_out(kind, PROMPT, list(range(rollouts)), ask=ask, decode=str, forks=forks))

    virtual_time.run(main())
    return found


@pytest.mark.parametrize(("turn", "pivot", "asked", "called"), [("first", 0, 9, 6), ("last", 2, 5, 2)])
def test_alternatives_go_on_from_the_fork(turn: Any, pivot: int, asked: int, called: int) -> None:
    (kind, calls), engine = tools(), Numbers()
    found = played(kind, engine, ForksConfig(alternatives=2, turn=turn))
    assert all(isinstance(one, Played) and (one.rollout, one.pivot) == (0, pivot) for one in found)
    assert len(engine.asked) == asked and len(calls) == called, "turns and tools before the fork are not repeated"
    episodes = [one.episode for one in found if isinstance(one, Played)]
    assert all(one.turns[:pivot] == episodes[0].turns[:pivot] and len(one.turns) == 3 for one in episodes)
    assert len({one.turns[pivot].completion.tokens for one in episodes}) == 3
    assert {one.rollout for one in engine.asked} == {0, 1, 2} and {one.turn for one in engine.asked[3:]} == set(
        range(pivot, 3)
    )
    for one in engine.asked[3:]:
        assert one.context[: len(path_to(episodes[0], pivot))] == path_to(episodes[0], pivot)


def test_alternatives_that_fail_leave_their_tree() -> None:
    class Fails(Numbers):
        async def __call__(self, asked: TurnAsked) -> Completion:
            if asked.rollout == 3:
                raise ValueError("no room")
            return await super().__call__(asked)

    (kind, _), forks = tools(), ForksConfig(alternatives=2, turn="last")
    found = played(kind, Fails(), forks, rollouts=2)
    assert [getattr(one, "rollout", None) for one in found] == [0, 0, None, 1, 1, 1]
    whole = [one for one in found if isinstance(one, Played)]
    judged: list[Scored | Failure] = [Scored(one.episode, float(i), {"right": float(i)}) for i, one in enumerate(whole)]
    judged[2] = Failure("reward_raised")
    trees = as_trees(with_rewards(judged, whole), whole)
    first, second, failure = trees
    assert isinstance(first, Scored) and isinstance(second, Scored) and isinstance(failure, Failure)
    assert len(first.branches) == 2 and len(second.branches) == 2 and len(second.episode.turns) == 4


def world(directory: Path, life: int, **more: Any) -> FakeWorld:
    kind = scripted(3, seconds=0.4, reply=lambda _, seed: (90 + life,), resumes="exported")
    rollout = RolloutConfig(group_size=2, max_tokens=8, forks=ForksConfig(alternatives=2, turn="last"))
    return FakeWorld(directory, environment=kind, rollout=rollout, **more)


def check(rollout: Scored) -> None:
    turns = rollout.episode.turns
    assert [turn.parents for turn in turns] == [(), (0,), (1,), (1,), (1,)]
    assert [(branch.first, branch.end) for branch in rollout.branches] == [(2, 3), (3, 4), (4, 5)]
    assert rollout.reward == pytest.approx(sum(branch.reward for branch in rollout.branches) / 3)


def test_a_run_trains_trees_and_goes_on_in_them(tmp_path: Path) -> None:
    first = world(tmp_path, 1, steps=20, engine=FakeEngine(seconds_per_token=0.3))
    virtual_time.run(first.run(interrupt_after=14.0))
    state = load_controller(first.checkpoints.all()[-1])
    assert any(name.partition("/")[2][:1] in "2345" for name in state.begun), (
        "no alternative had begun: choose another moment"
    )
    second = world(tmp_path, 2, steps=20, engine=FakeEngine(seconds_per_token=0.3))
    virtual_time.run(second.run(resume=True))
    groups = [group for batch in (*first.trainer.batches, *second.trainer.batches) for group in batch.groups]
    for group in groups:
        assert len(group.scored) == 2 and len(group.rows) == 6
        for rollout in group.scored:
            check(rollout)
        sampled = sum(rollout.episode.sampled for rollout in group.scored)
        assert sum(sum(row.mask) for row in group.rows) == sampled, "each sampled token is trained once"
    assert second.trainer.version == 20 and not any(fact.lost_tokens for fact in second.facts.of(GroupEnded))
    seeds = [request.sampling.seed for request in first.engine.requests if request.id.startswith("t")]
    assert len(set(seeds)) == len(seeds), "each alternative has random numbers of its own"
    steps = list(read_steps(tmp_path))
    again = [second.plan.batch_again(step, second.parts.algorithm) for step in steps]
    assert [batch.groups for batch in again] == [
        batch.groups for batch in (*first.trainer.batches, *second.trainer.batches)
    ], "C8"


# --- the trainer -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=1, max_position_embeddings=64, **sizes))
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def test_the_gradient_of_a_tree_is_that_of_its_rows_and_its_begin_is_forwarded_once(
    tmp_path: Path, model_dir: Path
) -> None:
    """Against torch, row by row without sharing: on policy the gradient is that of -A log p."""
    one = world(tmp_path, 1, steps=1)
    virtual_time.run(one.run())
    (step,) = read_steps(tmp_path)
    algo = AlgoConfig(name="reinforce", aggregation="token_mean")
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total, count, groups, whole = torch.zeros(()), 0, [], 0
    for group in step.groups:
        rows = []
        for row in group.rows:
            tokens, sampled = torch.tensor(row.prompt + row.tokens), torch.tensor(row.mask)
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
            own = logprobs[len(row.prompt) - 1 :]
            rows.append(replace(row, logprobs=tuple(own.tolist())))
            total = total - (own[sampled] * torch.tensor(row.advantages)[sampled]).sum()
            count, whole = count + int(sampled.sum()), whole + len(tokens)
        groups.append(replace(group, rows=tuple(rows)))
    config = TrainConfig(device="cpu", dtype="float32", learning_rate=1e-2)
    report = TorchTrainer(model_dir, config, algo, seed=0).step(Batch(0, tuple(groups)))
    (total / count).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert report.loss_tokens == count and report.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    assert report.forward_tokens < 0.7 * whole, "turns before a fork are forwarded once"


# --- settings ----------------------------------------------------------------------------------------------------------------

MINIMAL = {
    "model": {"path": "m"},
    "task": {"kind": "jsonl", "path": "rows.jsonl"},
    "reward": {"function": "a.py:f"},
    "environment": {"function": "env.py:Play"},
    "rollout": {"forks": {"alternatives": 3}},
}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"environment": {}}, "the environment has one"),
        ({"algo": {"credit": "turn"}}, 'algo.credit = "turn"'),
        ({"algo": {"kl": {"coef": 0.1, "place": "reward"}}}, 'set algo.kl.place = "loss"'),
        ({"algo": {"name": "reinforce++"}}, "choose another algo.name"),
    ],
)
def test_what_cannot_branch_is_refused(tables: dict[str, Any], words: str) -> None:
    load_config(MINIMAL)
    with pytest.raises(ConfigError, match=words):
        load_config({**MINIMAL, **tables})


def test_an_environment_that_does_not_export_its_state_cannot_branch() -> None:
    forks = ForksConfig(alternatives=3)
    for resumes in ("replayed", "restarted"):
        problem = fork_problem(forks, scripted(3, resumes=resumes), "environment.function", "write a class")  # type: ignore[arg-type]
        assert "environment.function cannot go on from there: write a class, or set" in problem
    assert not fork_problem(forks, scripted(3, resumes="exported"), "", "")
    assert not fork_problem(ForksConfig(), scripted(3), "", "")
