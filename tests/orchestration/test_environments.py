"""Rollouts are episodes that an environment plays: turns, limits, failures, rewards; and two turns all the way to a training step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Failure
from headrace.core.errors import ConfigError, WorkerDied
from headrace.core.protocols import Agent, EnvironmentKind, Limits
from headrace.core.types import Completion, Episode, Prompt, RolloutKey, Scored, Turn, VersionSpan
from headrace.durable.journal import read_steps
from headrace.episodes.environments.config import EnvironmentConfig, turn_problems
from headrace.episodes.environments.kinds import ENVIRONMENTS, OwnKind, environment_kind
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.episodes import name_of_turn, roll_out, with_rewards
from headrace.episodes.rollout_session import Played, TurnAsked
from headrace.facts.facts import GroupEnded, Warned
from headrace.loop.checkpoints import load_controller
from headrace.loop.world import virtual_time
from headrace.run.config import check, load_config
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_environments import scripted
from headrace.trainer.config import TrainConfig
from headrace.trainer.packing import StepRows, pack_rows
from headrace.trainer.step.trainer import TorchTrainer
from support.fake_world import FakeWorld

PROMPT = Prompt("p", "?", (1, 2))
TWO = Limits(turns=2)


def completion(*tokens: int, **rest: Any) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), rest.pop("stop", "stop"), **rest)


class Answers:
    """An engine that says 50 to the first turn, 51 to the second, and so on, after `seconds`."""

    def __init__(self, seconds: float = 0.0, last: Completion | Exception | None = None) -> None:
        """`last`: what comes of the second turn."""
        self.asked: list[TurnAsked] = []
        self._seconds, self._last = seconds, last

    async def __call__(self, asked: TurnAsked) -> Completion:
        self.asked.append(asked)
        await asyncio.sleep(self._seconds)
        if asked.turn and isinstance(self._last, Exception):
            raise self._last
        return self._last if asked.turn and self._last else completion(50 + asked.turn)


class Playing:
    """An environment that is one function."""

    def __init__(self, play: Callable[[Agent], Awaitable[Any]]) -> None:
        self.play = play


def played(
    play: Callable[[Agent], Awaitable[Any]], ask: Answers | None = None, limits: Limits = TWO
) -> Played | Failure:
    kind = EnvironmentKind(lambda prompt, seed: Playing(play), limits, "replayed")

    async def one() -> Played | Failure:
        (result,) = await roll_out(kind, PROMPT, [0], ask=ask or Answers(), decode=lambda tokens: f"said {tokens}")
        return result

    result: list[Played | Failure] = []

    async def main() -> None:
        result.append(await one())

    virtual_time.run(main())
    return result[0]


async def two_turns(agent: Agent) -> Mapping[str, float]:
    await agent.turn(PROMPT.tokens)
    await agent.turn((7, 8))
    return {"won": 1}


# --- one rollout -------------------------------------------------------------------------------------------------------


def test_a_single_turn_is_one_completion_of_the_prompt() -> None:
    ask, found = Answers(), []

    async def main() -> None:
        found.extend(await roll_out(SINGLE_TURN, PROMPT, [5, 6], ask=ask, decode=str))

    virtual_time.run(main())
    assert ask.asked == [TurnAsked(0, 0, (1, 2)), TurnAsked(1, 0, (1, 2))]
    assert found == [Played(Episode((Turn((1, 2), completion(50, text="(50,)")),)), {})] * 2


def test_a_later_turn_is_sampled_after_all_that_precedes_it() -> None:
    ask = Answers()
    found = played(two_turns, ask)
    assert [one.context for one in ask.asked] == [(1, 2), (1, 2, 50, 7, 8)]
    assert isinstance(found, Played) and found.rewards == {"won": 1.0}
    first, second = found.episode.turns
    assert (first.context, first.parents, first.completion.text) == ((1, 2), (), "said (50,)")
    assert (second.context, second.parents, second.completion.tokens) == ((7, 8), (0,), (51,))


def test_an_episode_that_takes_too_long_is_cut_off_at_its_next_turn() -> None:
    """Turns take 2 s and tools 3: after 7 s a third turn would begin, and the limit is 6. Sampling counts, unlike for `seconds`."""
    limits = Limits(turns=9, seconds=100.0, whole=6.0)

    async def play(agent: Agent) -> Mapping[str, float]:
        await agent.turn(PROMPT.tokens)
        while not agent.cut_off(1):
            await asyncio.sleep(3)
            if agent.cut_off(1):
                break
            await agent.turn((7,))
        return {"turns": 1.0}

    found = played(play, Answers(2.0), limits)
    assert isinstance(found, Played) and found.episode.cut == "seconds" and found.episode.truncated
    assert len(found.episode.turns) == 2 and found.between == pytest.approx(3.0) and found.rewards == {"turns": 1.0}
    assert [end - found.times[0][0] for pair in found.times for end in pair] == [0.0, 2.0, 5.0, 7.0]


def test_the_key_of_a_turn_says_what_it_was_sampled_after() -> None:
    def key(turn: int, *context: int) -> str:
        return str(name_of_turn(3, PROMPT, TurnAsked(1, turn, context), "math"))

    assert key(0, 1, 2) == "math:t3/1", "as in runs from before there were environments"
    later, other = key(1, 1, 2, 50, 7, 8), key(1, 1, 2, 50, 7, 9)
    assert later == "math:t3/1.1~7a6b623d43a43a51" and later != other
    assert RolloutKey.read(later) == RolloutKey(3, 1, 1, "math", "7a6b623d43a43a51")
    assert key(0, 9) != key(0, 1, 2), "an environment may change the prompt"


@pytest.mark.parametrize(
    ("result", "reason", "words"),
    [
        (None, "environment_reward", "NoneType"),
        ({"won": math.nan}, "environment_reward", "won is nan"),
        ({"won": "yes"}, "environment_reward", "won is 'yes'"),
        ({"won": math.inf}, "environment_reward", "won is inf"),
    ],
)
def test_rewards_that_are_none_are_a_failure_and_never_a_zero(result: Any, reason: str, words: str) -> None:
    async def play(agent: Agent) -> Any:
        await agent.turn((1, 2))
        return result

    found = played(play)
    assert isinstance(found, Failure) and found.reason == reason and words in found.detail


def test_an_environment_that_asks_for_nothing_has_failed() -> None:
    async def play(agent: Agent) -> Any:
        return {}

    assert played(play) == Failure("environment_turns", "ended without asking for a turn")


@pytest.mark.parametrize("error", [KeyError("no such tool"), SystemExit(3)], ids=repr)
def test_what_an_environment_raises_is_data(error: BaseException) -> None:
    async def play(agent: Agent) -> Any:
        await agent.turn((1, 2))
        raise error

    found = played(play)
    assert isinstance(found, Failure) and found.reason == "environment_raised"
    assert type(error).__name__ in found.detail and "raise error" in found.traceback


@pytest.mark.parametrize(
    ("last", "failure"),
    [
        (ValueError("too long"), Failure("request_refused", "too long")),
        (completion(stop="error", error="out of memory"), Failure("engine_error", "out of memory")),
    ],
)
def test_an_environment_cannot_hide_that_a_turn_failed(last: Any, failure: Failure) -> None:
    async def play(agent: Agent) -> Any:
        try:
            await two_turns(agent)
        except Exception:
            return {"won": 1.0}

    assert played(play, Answers(last=last)) == failure


def test_nor_that_the_engine_is_lost() -> None:
    async def play(agent: Agent) -> Any:
        try:
            return await two_turns(agent)
        except Exception:
            return {}

    with pytest.raises(WorkerDied):
        played(play, Answers(last=WorkerDied("engine", "was killed")))


def test_more_turns_than_the_limit_are_a_failure() -> None:
    found = played(two_turns, limits=Limits(turns=1))
    assert found == Failure("environment_turns", "asked for more turns than its limit of 1")


def test_two_turns_at_once_are_refused() -> None:
    async def play(agent: Agent) -> Any:
        await asyncio.gather(agent.turn((1, 2)), agent.turn((1, 2)))

    found = played(play)
    assert isinstance(found, Failure) and "one turn at a time" in found.detail


@pytest.mark.parametrize(("thinks", "samples", "fails"), [(0.6, 9.0, False), (1.1, 0.0, True)])
def test_the_limit_of_seconds_is_of_the_environment_s_own_time(thinks: float, samples: float, fails: bool) -> None:
    async def play(agent: Agent) -> Any:
        await agent.turn((1, 2))
        await asyncio.sleep(thinks)
        await agent.turn(())
        await asyncio.sleep(0.3)
        return {}

    found = played(play, Answers(samples), Limits(turns=2, seconds=1.0))
    assert isinstance(found, Failure) == fails
    if isinstance(found, Failure):
        assert found == Failure("environment_timeout", "took more than 1 s between its turns")


def test_its_rewards_are_added_by_name() -> None:
    one = Scored(Episode((Turn((1,), completion(5)),)), 2.0, {"exact": 2.0})
    won = Played(one.episode, {"won": 0.5, "speed": -1.0})
    (both,) = with_rewards([one], [won])
    assert isinstance(both, Scored) and both.reward == 1.5
    assert both.rewards == {"exact": 2.0, "won": 0.5, "speed": -1.0}
    assert with_rewards([one], [Played(one.episode, {})]) == [one]
    (same,) = with_rewards([one], [Played(one.episode, {"exact": 1.0})])
    assert isinstance(same, Failure) and same.reason == "environment_reward" and "both give exact" in same.detail


# --- two turns through the pipeline --------------------------------------------------------------------------------------


def requests_of(*worlds: FakeWorld) -> set[tuple[int, ...]]:
    """The prompts of all requests."""
    return {request.prompt for world in worlds for request in world.engine.requests}


def check_rows(world: FakeWorld, *others: FakeWorld) -> int:
    """C5: each row has all turns of its episode, nothing but what was sampled in its loss. Returns the number of rows."""
    rows, asked = 0, requests_of(world, *others)
    for batch in world.trainer.batches:
        for group in batch.groups:
            for row, rollout in zip(group.rows, group.scored, strict=True):
                first, second = rollout.episode.turns
                said, answer, more = first.completion.tokens, second.context, second.completion.tokens
                assert row.prompt == group.prompt.tokens and row.tokens == said + answer + more
                assert row.mask == (True,) * len(said) + (False,) * len(answer) + (True,) * len(more)
                assert row.prompt + said + answer in asked, (
                    "a turn was sampled after other tokens than those of its row"
                )
                assert list(row.versions) == sorted(row.versions), "C4"
                assert rollout.rewards["scripted"] == 0.5 and rollout.reward == rollout.rewards["fake"] + 0.5
                rows += 1
    return rows


def test_two_turns_are_one_row_in_training_journal_and_packing(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, environment=scripted(2, seconds=0.05), steps=4)
    virtual_time.run(world.run())
    assert check_rows(world) == 4 * 3 * 2
    requests = [request for request in world.engine.requests if request.id.startswith("t")]
    assert len({request.sampling.seed for request in requests}) == len(requests), (
        "each turn has random numbers of its own"
    )
    ended = world.facts.of(GroupEnded)
    sampled = {
        group.ticket: [rollout.episode.sampled for rollout in group.scored]
        for b in world.trainer.batches
        for group in b.groups
    }
    assert all(list(fact.lengths) == sampled[fact.ticket] for fact in ended if fact.ticket in sampled)
    assert not any(fact.lost_tokens for fact in ended)
    plan, algorithm = world.plan, world.parts.algorithm
    again = [plan.batch_again(step, algorithm) for step in read_steps(tmp_path)]
    assert [batch.groups for batch in again] == [batch.groups for batch in world.trainer.batches], "C8"
    packed = pack_rows(
        StepRows(again[0].rows, lambda counts, constant: [1.0] * len(counts), constant=1, budget=10_000, step=0)
    )
    targets = sorted(token for pack in packed.packs for token in pack.target.tolist())
    sampled_tokens = sorted(t for row in again[0].rows for t, kept in zip(row.tokens, row.mask, strict=True) if kept)
    assert targets == sampled_tokens and len(targets) < sum(len(row.tokens) for row in again[0].rows)


def test_a_killed_run_goes_on_in_the_turn_that_it_was_in(tmp_path: Path) -> None:
    def world() -> FakeWorld:
        return FakeWorld(
            tmp_path, steps=20, engine=FakeEngine(seconds_per_token=0.3), environment=scripted(2, seconds=0.4)
        )

    first = world()
    virtual_time.run(first.run(interrupt_after=8.0))
    begun = load_controller(first.checkpoints.all()[-1]).begun
    keys = {name: key for name in begun if (key := RolloutKey.read(name))}
    over = {name for name, one in begun.items() if one.stop != "interrupted"}
    halfway = {name: one for name, one in begun.items() if keys[name].turn == 1 and one.stop == "interrupted"}
    assert halfway and any(keys[name].turn == 0 for name in over), (
        "nothing was in its second turn: choose another moment"
    )
    second = world()
    virtual_time.run(second.run(resume=True))
    asked = {request.id: request for request in second.engine.requests}
    assert not over & set(asked), "what was over is sampled again"
    assert all(asked[name].prefix == one.tokens for name, one in halfway.items())
    assert not any(fact.lost_tokens for fact in second.facts.of(GroupEnded))
    assert check_rows(second, first) == len(second.trainer.batches) * 3 * 2 and second.trainer.version == 20
    assert not second.parts.interrupts.tokens.so_far(), "what was sampled is kept for nobody"


@pytest.mark.parametrize("resumes", ["restarted", "replayed"])
def test_where_the_environment_goes_another_way_its_old_turns_are_lost_and_counted(
    tmp_path: Path, resumes: Any
) -> None:
    def world(life: int) -> FakeWorld:
        kind = scripted(2, seconds=0.4, reply=lambda done, seed: (90 + life,), resumes=resumes)
        return FakeWorld(tmp_path, steps=20, engine=FakeEngine(seconds_per_token=0.3), environment=kind)

    first = world(1)
    virtual_time.run(first.run(interrupt_after=8.0))
    begun = load_controller(first.checkpoints.all()[-1]).begun
    keys = {name: key for name in begun if (key := RolloutKey.read(name))}
    vain = sum(len(one.tokens) for name, one in begun.items() if keys[name].turn == 1)
    assert vain, "nothing was in its second turn: choose another moment"
    second = world(2)
    virtual_time.run(second.run(resume=True))
    ended = second.facts.of(GroupEnded)
    assert sum(fact.lost_tokens for fact in ended) == vain
    assert {request.id for request in second.engine.requests}.isdisjoint(name for name in begun if keys[name].turn == 1)
    assert check_rows(second, first), "C5"
    messages = [fact.message for fact in second.facts.of(Warned) if "declares resumes" in fact.message]
    assert len(messages) == (resumes == "replayed"), "one that says it can be replayed is warned of, once"


def test_an_exported_state_is_what_the_episode_goes_on_from(tmp_path: Path) -> None:
    """Its replies differ between processes: one that was given before the kill comes from its notes, in checkpoint and pass log."""

    def world(life: int) -> FakeWorld:
        kind = scripted(3, seconds=0.4, reply=lambda done, seed: (90 + life,), resumes="exported")
        return FakeWorld(tmp_path, steps=20, engine=FakeEngine(seconds_per_token=0.3), environment=kind)

    first = world(1)
    virtual_time.run(first.run(interrupt_after=8.0))
    state = load_controller(first.checkpoints.all()[-1])
    assert state.notes, "no rollout was behind its first turn: choose another moment"
    tickets = {key.ticket for name in state.notes if (key := RolloutKey.read(name))}
    second = world(2)
    virtual_time.run(second.run(resume=True))
    assert not any(fact.lost_tokens for fact in second.facts.of(GroupEnded))
    groups = [group for batch in second.trainer.batches for group in batch.groups]
    said = [
        turn.context
        for group in groups
        if group.ticket in tickets
        for rollout in group.scored
        for turn in rollout.episode.turns[1:]
    ]
    assert said.count((91,)) >= sum(map(len, state.notes.values())) and (92,) in said
    assert not second.parts.notebook.state(range(1000)), "notes are kept for nobody"


def test_held_out_prompts_are_played_too(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, steps=2, environment=scripted(2), evaluate_every=1)
    virtual_time.run(world.run())
    held_out = [request for request in world.engine.requests if request.id.startswith("eval")]
    assert len(held_out) == 2 * 2 * 2, "prompts, samples, turns"
    assert len({request.id for request in held_out}) == 8 and len({request.sampling.seed for request in held_out}) == 8


def test_environments_that_fail_stop_the_run_with_the_remedy(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, environment=scripted(2, limits=Limits(turns=1)))
    with pytest.raises(Exception, match=r"environment_turns.*raise its limit of turns, then resume"):
        virtual_time.run(world.run())


# --- the trainer -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=1, max_position_embeddings=64, **sizes))
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def test_a_step_over_two_turns_has_only_sampled_tokens_in_its_loss_and_replays_bit_for_bit(
    tmp_path: Path, model_dir: Path
) -> None:
    """Against torch, row by row: on policy, where every ratio is 1, the gradient is that of -A log p, whatever the surrogate."""
    world = FakeWorld(tmp_path, environment=scripted(2), steps=1)
    virtual_time.run(world.run())
    (step,) = read_steps(tmp_path)
    algo = AlgoConfig(name="reinforce", aggregation="token_mean")
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total, count, groups = torch.zeros(()), 0, []
    for group in step.groups:
        rows = []
        for row in algorithm_of(algo, 8).rows(group.prompt, group.scored):
            tokens, sampled = torch.tensor(row.prompt + row.tokens), torch.tensor(row.mask)
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
            own = logprobs[len(row.prompt) - 1 :]
            rows.append(replace(row, logprobs=tuple(own.tolist())))
            total = total - (own[sampled] * torch.tensor(row.advantages)[sampled]).sum()
            count += int(sampled.sum())
        groups.append(replace(group, rows=tuple(rows)))
    batch = Batch(0, tuple(groups))

    def trained() -> Any:
        config = TrainConfig(device="cpu", dtype="float32", learning_rate=1e-2)
        return TorchTrainer(model_dir, config, algo, seed=0).step(batch)

    report, again = trained(), trained()
    assert (report.loss, report.grad_norm) == (again.loss, again.grad_norm), "C8"
    (total / count).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert report.loss_tokens == count and report.grad_norm == pytest.approx(norm.item(), rel=1e-3)


# --- settings ----------------------------------------------------------------------------------------------------------------


def test_only_kinds_that_work_are_accepted() -> None:
    assert environment_kind("single_turn").limits.turns == 1
    with pytest.raises(ConfigError, match=r'environment.kind = "chess" is not one of the environments: single_turn'):
        load_config({**MINIMAL, "environment": {"kind": "chess"}})
    assert load_config(MINIMAL).environment == EnvironmentConfig(kind="single_turn")


TWO = OwnKind("headrace.testing.fake_environments:TWO_TURNS", "two turns")
MINIMAL = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows.jsonl"}, "reward": {"function": "a.py:f"}}


def test_a_loss_that_divides_by_the_longest_completion_is_refused_where_there_are_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not list(turn_problems(1, length="dr_grpo")) and not list(turn_problems(3, length=""))
    monkeypatch.setitem(ENVIRONMENTS, "two", TWO)
    config = {**MINIMAL, "environment": {"kind": "two"}, "algo": {"name": "dr_grpo"}}
    with pytest.raises(ConfigError, match="the environment has up to 2 turns, and dr_grpo divides"):
        load_config(config)
    assert not check(load_config({**config, "algo": {"name": "grpo"}}))


def test_the_longest_rollout_has_all_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "two", TWO)
    rollout = {"rollout": {"max_tokens": 24}}
    assert load_config({**MINIMAL, **rollout}).longest_rollout == 24
    assert load_config({**MINIMAL, **rollout, "environment": {"kind": "two"}}).longest_rollout == 48
