"""The nine contracts, C1 to C9, each with literal values: what headrace promises in every run (`docs/design-notes.md`).

Read this file first. Every test is a small story of real parts over the fakes that ship, in virtual time where time matters. The same
contracts are held against thousands of random schedules in `orchestration/test_pipeline.py`, and against faults of every kind in
`simulate/test_dst.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import AGGREGATIONS
from headrace.algo.training_rows import algorithm_of
from headrace.core.errors import IdentityError, StalledError
from headrace.durable.journal import read_steps
from headrace.episodes.rollout import RolloutConfig
from headrace.facts.facts import Accounting
from headrace.facts.waits import Waits
from headrace.loop.buffer import Buffer
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.makers import completion, group, prompt, request, row, scored
from headrace.trainer.packing import StepRows, pack_rows
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.shared_memory import SharedMemory
from support.fake_engine_model import CoreDriver
from support.fake_world import PATIENT, FakeWorld


def whole(group: Any) -> Any:
    """A judge for `Buffer.take`: nothing is too old to be trained."""
    return group


# --- C1: no token in the loss is older than `max_lag` optimizer steps ------------------------------------------------------


def test_c1_a_slot_is_free_only_when_the_weights_that_its_group_trained_are_live():
    buffer = Buffer(StalenessConfig(groups_per_step=2, max_lag=1), groups_wanted=100)

    async def story() -> None:
        for ticket in (0, 1, 2, 3):  # (max_lag + 1) · groups_per_step slots
            assert await buffer.draw() == ticket
            buffer.start(ticket, prompt(ticket))
        fifth = asyncio.ensure_future(buffer.draw())
        for ticket in (1, 0):
            buffer.put(group(ticket, row([5])))
        taken = await buffer.take(2, whole)
        assert [one.ticket for one in taken] == [0, 1], "in the order of admission"
        buffer.trained([0, 1], version=1)
        await asyncio.sleep(60)
        assert not fifth.done() and buffer.outstanding == 4, "the engine still samples with version 0"
        buffer.release(version=1)
        await asyncio.sleep(0)
        assert fifth.result() == 4 and buffer.outstanding == 2

    virtual_time.run(story())


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_c1_the_bound_is_reached_and_never_passed(tmp_path: Path, max_lag: int):
    world = FakeWorld(tmp_path, StalenessConfig(groups_per_step=2, max_lag=max_lag), steps=20)
    world.engine.seconds_per_token, world.trainer.seconds_per_step = 0.001, 1.0
    virtual_time.run(world.run())
    assert max(world.trained_lags()) == max_lag


# --- C2: every ticket has one place or one named end ------------------------------------------------------------------------


def test_c2_tickets_drawn_are_trained_dropped_failed_or_in_the_pipeline():
    buffer = Buffer(StalenessConfig(groups_per_step=1, max_lag=9), groups_wanted=100)
    for ticket in range(5):
        buffer.start(ticket, prompt(ticket))
    buffer.put(group(0, row([5])))
    buffer.take_again([0])
    buffer.trained([0], version=1)
    buffer.end(1, "dropped", "no_contrast")
    buffer.end(2, "failed", "reward_raised")
    buffer.put(group(3, row([5])))
    counted = buffer.accounting()
    assert counted == Accounting(
        drawn=5, trained=1, dropped={"no_contrast": 1}, failed={"reward_raised": 1}, in_pipeline=2
    )
    assert counted.balance() == 0


def test_c2_a_rollout_that_fails_is_data_with_a_reason_and_never_a_reward_of_zero(tmp_path: Path):
    def reward(prompt: Any, episode: Any) -> float:
        if len(episode.last.tokens) > 4:
            raise KeyError("answer")
        return 2.0 + len(episode.last.tokens)

    engine = FakeEngine(length=lambda rng: rng.randint(1, 8))
    four = RolloutConfig(group_size=4, max_tokens=8)
    world = FakeWorld(tmp_path, engine=engine, scorer=FakeScorer(reward=reward), rollout=four, watch=PATIENT)
    virtual_time.run(world.run())
    trained = [one for batch in world.trainer.batches for one in batch.groups]
    reasons = {failure.reason for one in trained for failure in one.failures}
    assert reasons == {"reward_raised"}
    assert min(member.reward for one in trained for member in one.scored) >= 3.0


# --- C3: only the weights that were published are served ---------------------------------------------------------------------


def test_c3_the_fingerprint_of_what_was_received_is_that_of_what_was_sent():
    weights = [("w", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))]
    manifests = {"": lay_out(weights, torch.float32)}
    memory = SharedMemory.open()
    try:
        sender, receiver = memory.sender(manifests), memory.receiver(manifests)
        update = sender.send(1, weights)
        of_bytes = "tree-9fe2e231f070d184b435ecf9c18214fb"
        assert update.fingerprint == of_bytes, "xxh3-128 of names, shapes, dtypes and the hashes of blocks of bytes"
        received = receiver.receive(update)
        assert received["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
        received["w"][0, 0] = 1.5  # one number is torn
        with pytest.raises(IdentityError, match="version 1"):
            receiver.receive(update)
    finally:
        memory.close()


# --- C4: every token has one version, and versions never decrease --------------------------------------------------------------


def test_c4_a_swap_between_two_forward_passes_shows_in_the_versions():
    driver = CoreDriver()
    driver.add(request("a", range(1, 6), tokens=5))
    for _ in range(2):
        driver.step()
    driver.swap()
    driver.run()
    assert driver.told["a"].versions == [0, 0, 1, 1, 1]
    assert driver.told["a"].kv_versions == [0, 0, 0, 0, 0], "keys and values of the prompt are of version 0"
    driver.check("a")  # each token is what the model of its version says


# --- C5: tokens in, tokens out ----------------------------------------------------------------------------------------------------


def test_c5_what_was_sampled_is_what_is_trained_whatever_its_text_says():
    sampled = [completion([7, 8, 9], version=3), completion([7, 4])]
    algorithm = algorithm_of(AlgoConfig(name="dr_grpo"), 8)
    rows = algorithm.rows(prompt(0, [1, 2]), [scored(sampled[0], reward=1.0), scored(sampled[1], reward=0.0)])
    assert [one.prompt for one in rows] == [(1, 2), (1, 2)]
    assert [one.tokens for one in rows] == [(7, 8, 9), (7, 4)]
    assert [one.logprobs for one in rows] == [(-1.0, -1.0, -1.0), (-1.0, -1.0)]
    assert [one.versions for one in rows] == [(3, 3, 3), (0, 0)]
    assert [one.advantages for one in rows] == [(0.5, 0.5, 0.5), (-0.5, -0.5)]


def test_c5_no_text_is_tokenised_again_on_the_way(tmp_path: Path):
    world = FakeWorld(tmp_path, decode=lambda tokens: "not what was sampled", steps=1)
    virtual_time.run(world.run())
    (batch,) = world.trainer.batches
    pairs = [pair for one in batch.groups for pair in zip(one.rows, one.scored, strict=True)]
    assert all(row.tokens == member.episode.last.tokens for row, member in pairs) and len(pairs) == 6
    assert {member.episode.last.text for _, member in pairs} == {"not what was sampled"}


# --- C6: nothing hangs in silence -------------------------------------------------------------------------------------------------


def test_c6_a_wait_is_reported_at_its_first_deadline_and_stops_the_run_at_its_second():
    facts: list[Any] = []

    async def story() -> float:
        clock = asyncio.get_running_loop().time
        waits = Waits(facts.append, clock, warn_after=30, stop_after=60)
        with pytest.raises(StalledError, match="stopped: trainer has waited 60 s for 8 scored groups"):
            async with waits.named("trainer", "8 scored groups"):
                await asyncio.sleep(1e9)
        return clock()

    assert virtual_time.run(story()) == 60
    warned, waited = facts
    assert warned.t == 30 and warned.message.startswith("trainer has waited 30 s for 8 scored groups")
    assert (waited.owner, waited.what, waited.seconds) == ("trainer", "8 scored groups", 60)


# --- C7: killed anywhere and started again, no prompt is lost or trained twice ------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.35, 1.0, 2.2])
def test_c7_a_run_that_was_killed_trains_every_prompt_once(tmp_path: Path, seconds: float):
    first = FakeWorld(tmp_path, steps=6, checkpoint_every=2, engine=FakeEngine(seconds_per_token=0.1))

    async def killed() -> None:
        running = asyncio.ensure_future(first.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.wait([running])

    virtual_time.run(killed())
    second = FakeWorld(tmp_path, steps=6, checkpoint_every=2, engine=FakeEngine(seconds_per_token=0.1))
    virtual_time.run(second.run(resume=True))
    trained = [one.prompt.id for step in read_steps(tmp_path) for one in step.groups]
    assert trained == [f"train/{number}" for number in range(18)], "6 steps of 3 prompts, each once and in order"
    assert second.trainer.version == 6 and second.buffer.accounting().balance() == 0


# --- C8: a step can be done again from the journal ------------------------------------------------------------------------------------


def test_c8_the_journal_gives_every_batch_again_as_the_trainer_got_it(tmp_path: Path):
    """Tokens, versions, log-probs, advantages, order: all. `commands/test_replay.py` compares the gradients, bit for bit."""
    world = FakeWorld(tmp_path, steps=4, algo=AlgoConfig(name="reinforce++_baseline"))
    virtual_time.run(world.run())
    again = [world.plan.batch_again(step, world.parts.algorithm) for step in read_steps(tmp_path)]
    assert again == world.trainer.batches and len(again) == 4


# --- C9: a loss is normalised over the whole optimizer step ---------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "packs"), [(100, 1), (5, 2)])
def test_c9_a_token_weighs_the_same_in_whichever_microbatch_it_is(budget: int, packs: int):
    """One row of one token and one of three: each token weighs 1/4, and not 1/2 and 1/6 as in a mean of two means."""
    rows = [row([5], prompt=(1, 2)), row([6, 7, 8], prompt=(3, 4))]
    plan = pack_rows(StepRows(rows, AGGREGATIONS["token_mean"], constant=8, budget=budget, step=0))
    assert len(plan.packs) == packs
    assert torch.cat([pack.weight for pack in plan.packs]).tolist() == [0.25, 0.25, 0.25, 0.25]
