"""Environments of Atropos: which rollout a request belongs to, and what becomes of the groups that they post."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from atropos_client import GROUP, Env, played

from headrace.core.batches import Failure
from headrace.core.errors import RolloutFailed
from headrace.episodes.environments.atropos.atropos_environment import NAME
from headrace.episodes.environments.atropos.open_rollouts import OpenRollouts
from headrace.episodes.rollout_session import Played, TurnAsked
from support.gateway.gateway_agent import user

PROMPT = (7, 8, 9)


def distinct(ticket: int, asked: TurnAsked) -> str:
    return f"to{ticket}{asked.rollout}{asked.turn}<|im_end|>"


def rewards(found: list[Played | Failure]) -> list[float | str]:
    return [one.rewards[NAME] if isinstance(one, Played) else one.reason for one in found]


def test_a_posted_group_scores_the_rollouts_that_were_sampled(tmp_path: Path) -> None:
    """What is trained are the tokens, log-probs and versions of the rollout; the post adds a score, whatever the order of its sequences."""

    async def case(env: Env) -> None:
        first, second = await env.generate(PROMPT)
        assert await env.post([second, first], len(PROMPT), [0.25, 1.0]) == (
            200,
            {"status": "received", "groups_processed": 1, "scored": 2, "failed": 0, "unknown": 0},
        )

    ((one, two),), policy = played(tmp_path, case, distinct)
    assert rewards([one, two]) == [1.0, 0.25]
    for found, (_, asked, done) in zip([one, two], policy.sampled, strict=True):
        assert isinstance(found, Played)
        (turn,) = found.episode.turns
        assert turn.context == PROMPT == asked.context
        assert (turn.completion.tokens, turn.completion.logprobs) == (done.tokens, done.logprobs)
        assert turn.completion.spans == done.spans


def test_tickets_are_begun_in_their_order_and_requests_wait_for_one(tmp_path: Path) -> None:
    """A third group is not sampled until a ticket is drawn for it (C1): here there are two."""

    async def case(env: Env) -> None:
        groups = [await env.generate((*PROMPT, number)) for number in (10, 11)]
        waiting = asyncio.ensure_future(env.generate((*PROMPT, 12)))
        for number, group in enumerate(groups):
            assert (await env.post(group, len(PROMPT) + 1, [number, number + 0.5]))[0] == 200
        assert not waiting.done()
        waiting.cancel()

    tickets, policy = played(tmp_path, case, distinct, tickets=2)
    assert [rewards(ticket) for ticket in tickets] == [[0.0, 0.5], [1.0, 1.5]]
    assert [(ticket, asked.context[-1]) for ticket, asked, _ in policy.sampled] == [(0, 10)] * GROUP + [(1, 11)] * GROUP


def test_requests_of_one_completion_fill_a_ticket(tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        sequences = [*await env.generate(PROMPT, n=1), *await env.generate(PROMPT, n=1)]
        await env.post(sequences, len(PROMPT), [0, 1])

    (found,), _ = played(tmp_path, case, distinct)
    assert rewards(found) == [0.0, 1.0]


def test_equal_sequences_belong_to_the_ticket_of_their_group(tmp_path: Path) -> None:
    """Both tickets have sampled the same tokens once; the other sequence says which of them is meant."""

    def says(ticket: int, asked: TurnAsked) -> str:
        return "1<|im_end|>" if asked.rollout == 0 else f"{ticket}2<|im_end|>"

    async def case(env: Env) -> None:
        first, second = await env.generate(PROMPT), await env.generate(PROMPT)
        assert first[0] == second[0]
        await env.post(second, len(PROMPT), [3, 4])
        await env.post(first, len(PROMPT), [1, 2])

    tickets, _ = played(tmp_path, case, says, tickets=2)
    assert [rewards(ticket) for ticket in tickets] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_prompt_that_continues_a_rollout_is_its_next_turn(tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        longer = [
            (await env.generate((*one, 20 + place), n=1))[0] for place, one in enumerate(await env.generate(PROMPT))
        ]
        turns = [one[len(PROMPT) :].index(20 + place) for place, one in enumerate(longer)]
        masks = [
            [-100 if at < len(PROMPT) or at == len(PROMPT) + turn else token for at, token in enumerate(one)]
            for one, turn in zip(longer, turns, strict=True)
        ]
        await env.post(longer, 0, [0, 1], masks=masks)

    (found,), policy = played(tmp_path, case, distinct)
    assert rewards(found) == [0.0, 1.0]
    for place, one in enumerate(found):
        assert isinstance(one, Played)
        assert [(turn.context, turn.parents) for turn in one.episode.turns] == [(PROMPT, ()), ((20 + place,), (0,))]
    assert len(policy.sampled) == 2 * GROUP


@pytest.mark.parametrize("texts", [False, True], ids=["chats", "texts"])
def test_rollouts_with_equal_first_turns_each_get_their_next_one(texts: bool, tmp_path: Path) -> None:
    """Their second turns are asked for one after the other, so that the first rollout is idle again when the other's comes."""

    def says(ticket: int, asked: TurnAsked) -> str:
        return "1" if asked.turn == 0 else f"to{asked.rollout}<|im_end|>"

    async def asked(env: Env, before: str | None, count: int) -> list[str]:
        if texts:
            body = {"prompt": "hello" if before is None else f"hello{before}more", "n": count}
            status, answer = await env.ask("POST", "v1/completions", body)
            assert status == 200, answer
            return [choice["text"] for choice in answer["choices"]]
        talk = [] if before is None else [{"role": "assistant", "content": before}, user("more")]
        return await env.chat(user("hello"), *talk, n=count)

    async def case(env: Env) -> None:
        first = await asked(env, None, GROUP)
        assert first == ["1"] * GROUP
        assert [(await asked(env, one, 1))[0] for one in first] == ["to0", "to1"]
        await env.post([], 0, [])

    _, policy = played(tmp_path, case, says, seconds=0.5)
    assert [(asked.rollout, asked.turn) for _, asked, _ in policy.sampled] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_alternatives_of_a_later_turn_are_refused(tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        sequences = await env.generate(PROMPT)
        body = {"prompt": {"prompt_token_ids": [*sequences[0], 20]}, "n": 2}
        status, answer = await env.ask("POST", "generate", body)
        assert status == 400 and "alternatives, of which one can be posted" in answer["error"]["message"]
        await env.post(sequences, len(PROMPT), [0, 1])

    (found,), _ = played(tmp_path, case, distinct)
    assert rewards(found) == [0.0, 1.0]


def test_messages_that_are_tokenised_again_are_found_by_their_text(tmp_path: Path) -> None:
    """The environment posts other tokens for the same text, with the end of the turn behind it; the sampled ones are trained."""

    async def case(env: Env) -> None:
        assert await env.chat(user("hello")) == ["to000", "to010"]
        sequences, masks = [], []
        for said in ("to000", "to010"):
            text, _ = env.encoder.encode_messages([user("hello")])
            before = env.encoder.encode_text(text)
            reply = env.encoder.encode_completion(f"{said}<|im_end|>\n", False)
            sequences.append((*before, *reply))
            masks.append([-100] * len(before) + list(reply))
        assert (await env.post(sequences, 0, [0, 1], masks=masks))[0] == 200

    (found,), policy = played(tmp_path, case, distinct)
    assert rewards(found) == [0.0, 1.0]
    assert [one.episode.turns[0].completion.tokens for one in found if isinstance(one, Played)] == [
        done.tokens for _, _, done in policy.sampled
    ]


def test_a_mask_of_messages_that_are_tokenised_again_is_looked_at_too(tmp_path: Path) -> None:
    """It leaves out the first of two replies, and both were sampled."""

    async def case(env: Env) -> None:
        talk = [user("hello")]
        said = await env.chat(*talk)
        for number, text in enumerate(said):
            await env.chat(*talk, {"role": "assistant", "content": text}, user(f"go on {number}"), n=1)
        sequences, masks = [], []
        for number, text in enumerate(said):
            more = [*talk, {"role": "assistant", "content": text}, user(f"go on {number}")]
            before = env.encoder.encode_text(env.encoder.encode_messages(more)[0])
            reply = env.encoder.encode_completion(f"to0{number}1<|im_end|>\n", False)
            sequences.append((*before, *reply))
            masks.append([-100] * len(before) + list(reply))
        assert (await env.post(sequences, 0, [0, 1], masks=masks))[0] == 422

    (found,), _ = played(tmp_path, case, distinct)
    assert all(isinstance(one, Failure) and "a turn is trained as a whole" in one.detail for one in found), found


def test_sequences_of_unknown_age_are_refused(tmp_path: Path) -> None:
    """The tokens of one sequence were not sampled here. The rollout in whose place it stands has failed, and the other one is scored."""

    async def case(env: Env) -> None:
        first, _ = await env.generate(PROMPT)
        assert (await env.post([(1, 2, 3, 4)] * GROUP, 2, [0, 1]))[0] == 422
        for none in (-5, 1 << 40, 1 << 70):
            status, answer = await env.post([(none, 2)] * GROUP, 1, [0, 1])
            assert status == 400 and "Expected `int`" in answer["error"]["message"]
        status, answer = await env.post([first, (*PROMPT, 30, 31)], len(PROMPT), [1, 0])
        assert (status, answer["scored"], answer["failed"], answer["unknown"]) == (200, 1, 1, 1)
        assert (await env.post([first], len(PROMPT), [1]))[0] == 422, "it is over"

    (found,), _ = played(tmp_path, case, distinct)
    assert rewards(found) == [1.0, "environment_reward"]
    assert isinstance(found[1], Failure) and "of unknown age" in found[1].detail
    assert "2 of its 2 sequences are of unknown age" in (tmp_path / "environment.log").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scores": [float("nan"), 1]}, "body is not what this route takes"),
        ({"masks": [[-100] * 3, [-100] * 3]}, "numbers of its mask for"),
        ({"masks": "none"}, "its mask leaves out all of it"),
        ({"masks": "last"}, "a turn is trained as a whole"),
        ({"advantages": [[1.0], [1.0]]}, "advantages are given"),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, "overrides are given"),
        ({"scores": [1]}, "2 sequences, 2 masks and 1 scores are not a group"),
    ],
)
def test_what_cannot_be_trained_is_a_failure_with_its_reason(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        sequences = await env.generate(PROMPT)
        if more.get("masks") in ("none", "last"):
            kept = 0 if more["masks"] == "none" else 1
            more["masks"] = [
                [-100] * (len(sequence) - kept) + list(sequence[len(sequence) - kept :]) for sequence in sequences
            ]
        status, answer = await env.post(sequences, len(PROMPT), more.pop("scores", [0, 1]), **more)
        assert status == (400 if "route" in words else 422)
        if status == 400:
            assert words in answer["error"]["message"]
            await env.post(sequences, len(PROMPT), [0, 1])

    (found,), _ = played(tmp_path, case, distinct)
    if "route" in words:
        assert rewards(found) == [0.0, 1.0]
    else:
        assert [one.reason for one in found if isinstance(one, Failure)] == ["environment_reward"] * GROUP
        assert all(isinstance(one, Failure) and words in one.detail for one in found)


class Held(asyncio.Event):
    """Counts the turns that it holds back."""

    turns = 0

    async def wait(self) -> Literal[True]:
        self.turns += 1
        return await super().wait()


def test_an_environment_that_leaves_in_the_middle_of_a_turn_fails_its_rollouts(tmp_path: Path) -> None:
    hold = Held()

    async def case(env: Env) -> None:
        asking = asyncio.ensure_future(env.generate(PROMPT))
        while hold.turns < GROUP:
            await asyncio.sleep(0.01)
        asking.cancel()

    (found,), _ = played(tmp_path, case, distinct, hold=lambda: hold)
    assert rewards(found) == ["agent_failed"] * GROUP


def test_rollouts_that_were_not_asked_for_end_with_the_others(tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        sequences = await env.generate(PROMPT, n=1)
        await env.post(sequences, len(PROMPT), [1])

    (found,), _ = played(tmp_path, case, distinct)
    assert rewards(found) == [1.0, "environment_turns"]
    assert isinstance(found[1], Failure) and "asked for 1 of the 2 rollouts" in found[1].detail


def test_a_group_that_is_never_posted_fails(tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        await env.generate(PROMPT)

    (found,), _ = played(tmp_path, case, distinct, seconds=0.5)
    assert rewards(found) == ["not_posted"] * GROUP
    assert isinstance(found[0], Failure) and "ensure_scores_are_not_same" in found[0].detail


def test_the_trajectory_api_answers_as_environments_expect(tmp_path: Path) -> None:
    async def case(env: Env) -> None:
        registration = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "min_batch_allocation": None}
        status, answer = await env.ask("POST", "register-env", {**registration, "group_size": 3})
        assert status == 200 and "set --env.group_size 2" in answer["status"]
        assert (await env.ask("POST", "register-env", {**registration, "group_size": 2}))[1] == {
            "status": "success",
            "env_id": 0,
            "wandb_name": "sums_0",
            "checkpoint_dir": "",
            "starting_step": 0,
            "checkpoint_interval": -1,
            "num_steps": 9,
        }
        assert (await env.ask("GET", "info"))[1] == {"batch_size": 4, "max_token_len": 901}
        assert (await env.ask("GET", "wandb_info"))[1] == {"group": "tiny", "project": "headrace"}
        assert (await env.ask("GET", "health"))[0] == 200
        assert (await env.ask("GET", "v1/models"))[1]["data"][0]["id"] == "policy"
        await env.ask("POST", "register-env", {**registration, "group_size": 2, "weight": 3.0})
        told = (await env.ask("GET", "status-env", {"env_id": 0}))[1]
        assert (told["env_weight"], told["queue_size"], told["max_group_size"]) == (0.25, 0, 2)
        assert (await env.ask("POST", "disconnect-env", {"env_id": 1}))[1] == {"status": "success"}
        assert (await env.ask("GET", "status-env", {"env_id": 0}))[1]["env_weight"] == 1.0
        assert (await env.ask("GET", "status-env", {"env_id": 7}))[1]["env_weight"] == 1.0, "of an earlier process"
        status, answer = await env.ask("GET", "batch")
        assert status == 404 and "POST /scored_data" in answer["error"]["message"]
        assert (await env.ask("POST", "generate", {"prompt": {"prompt_token_ids": [1]}, "n": 3}))[0] == 400
        stranger = Env(env.address[:-1], env.session, env.encoder)
        assert (await stranger.ask("GET", "status-env", {"env_id": 0}))[0] == 401
        await env.post(await env.generate(PROMPT), len(PROMPT), [0, 1])
        last = await env.generate((*PROMPT, 4))
        assert (await env.ask("GET", "status"))[1] == {"current_step": 1, "queue_size": 0}, "the newest version so far"
        await env.post(last, len(PROMPT) + 1, [0, 1])

    tickets, _ = played(tmp_path, case, distinct, tickets=2)
    assert [rewards(ticket) for ticket in tickets] == [[0.0, 1.0]] * 2


def test_a_request_that_leaves_in_the_moment_in_which_it_gets_rollouts_gives_them_up() -> None:
    async def main() -> None:
        rollouts = OpenRollouts(1)
        asking = asyncio.ensure_future(rollouts.take(b"a", 1))
        await asyncio.sleep(0)
        with rollouts.offered(cast(Any, None), "train/0") as one:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert isinstance(one.ended.exception(), RolloutFailed)

    asyncio.run(main())
