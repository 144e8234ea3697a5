"""`/v1/completions` of the gateway, driven by the official client: texts and tokens continue what was sampled (C5)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from headrace.core.protocols import Limits
from headrace.episodes.environments.gateway.format_routes import DEFAULT
from headrace.episodes.rollout_session import Played
from support import tool_chats
from support.gateway.gateway_agent import Asks, parents, played, user
from support.gateway.written_turns import Model, check_rows, encoder_of


async def complete(asks: Asks, prompt: Any, **more: Any) -> Any:
    return await asks.client.completions.create(model="davinci", prompt=prompt, **more)


def test_a_text_that_goes_on_extends_the_sampled_tokens(tmp_path: Path) -> None:
    """The model cuts "tool" into other tokens than the tokenizer would."""
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["a tool", "ll add", "so"])

    async def case(asks: Asks) -> None:
        first = await complete(asks, "I am ")
        assert first.choices[0].text == "a tool" and first.choices[0].finish_reason == "length"
        assert first.usage.prompt_tokens == len(model.asked[0].context) and first.model == "davinci"
        assert first.usage.completion_tokens == len(model.sampled[0].tokens) and first.object == "text_completion"
        text = "I am a tool, and "
        second = await complete(asks, text, max_tokens=7)
        assert second.usage.prompt_tokens == len(model.asked[1].context)
        await complete(asks, [text + second.choices[0].text])

    found = played(model, case)
    assert parents(found) == [(), (0,), (1,)] and [one.most for one in model.asked] == [DEFAULT, 7, DEFAULT]
    assert isinstance(found, Played) and found.episode.turns[2].context == (), "nothing but the text was sent"
    assert model.encoder.written(model.asked[2].context) == "I am a tool, and ll add"
    check_rows(found, model)


def test_a_text_behind_the_end_of_a_completion_begins_a_path_with_the_same_tokens(tmp_path: Path) -> None:
    """The client did not keep the token that ended the completion, so the model must not see it either."""
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["a tool<|im_end|>", "yes<|im_end|>"])

    async def case(asks: Asks) -> None:
        assert (await complete(asks, "I am ")).choices[0].finish_reason == "stop"
        await complete(asks, "I am a tool, ")

    found = played(model, case)
    assert parents(found) == [(), ()]
    first = (*model.asked[0].context, *model.sampled[0].tokens[:-1])
    assert model.asked[1].context[: len(first)] == first
    assert model.encoder.written(model.asked[1].context) == "I am a tool, "
    check_rows(found, model)


def test_equal_prompts_at_once_are_paths_of_their_own_and_an_edited_text_is_too(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["b", "c", "d", "e"])

    async def case(asks: Asks) -> None:
        await asyncio.gather(complete(asks, "a"), complete(asks, "a"))
        await complete(asks, "aX")
        await asks.said(user("a"))

    found = played(model, case)
    assert parents(found) == [(), (), (), ()]
    check_rows(found, model)


def test_tokens_go_on_exactly(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>", "on", "off"])

    async def case(asks: Asks) -> None:
        prompt = [5, 6, 7]
        first = await complete(asks, prompt, logprobs=0)
        logprobs = first.choices[0].logprobs
        assert logprobs.token_logprobs == list(model.sampled[0].logprobs) and logprobs.top_logprobs is None
        assert "".join(logprobs.tokens) == "so<|im_end|>"
        await complete(asks, [[*prompt, *model.sampled[0].tokens, 8]])
        await complete(asks, [5, 6])

    found = played(model, case)
    assert parents(found) == [(), (0,), ()] and isinstance(found, Played)
    assert [turn.context for turn in found.episode.turns] == [(5, 6, 7), (8,), (5, 6)]
    check_rows(found, model)


def test_the_text_ends_before_a_stop_string_and_goes_on_behind_it(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["Look it up.\nSeen:", "so"])

    async def case(asks: Asks) -> None:
        text = (await complete(asks, "Q: ?\n", stop="Seen:")).choices[0].text
        assert text == "Look it up.\n"
        await complete(asks, f"Q: ?\n{text}Seen: 42\n", stop=["Seen:"])

    found = played(model, case, stop=["Seen:"])
    assert parents(found) == [(), (0,)], "the agent writes the stop string itself, as agents do"
    check_rows(found, model)


def test_a_stream_has_the_places_of_its_tokens(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["a tool, and more"])

    async def case(asks: Asks) -> None:
        text, tokens, places = "", [], []
        options: Any = {"include_usage": True}
        async for chunk in await complete(asks, "I am ", stream=True, logprobs=0, stream_options=options):
            for choice in chunk.choices:
                text += choice.text
                tokens += choice.logprobs.tokens if choice.logprobs else []
                places += choice.logprobs.text_offset if choice.logprobs else []
        assert text == "".join(tokens) == model.says[0] and chunk.usage.completion_tokens == len(tokens)
        assert [text[place : place + len(token)] for place, token in zip(places, tokens, strict=True)] == tokens

    played(model, case)


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), [])
    refused: list[tuple[Any, str]] = [
        ({"prompt": ["a", "b"]}, "send a request for each"),
        ({"prompt": []}, "send a request for each"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"logprobs": 2}, "0 asks for the log-probs of the sampled tokens"),
        ({"best_of": 3}, "best_of is not served"),
        ({"echo": True}, "echo is not served; leave it out: an answer has only what was sampled"),
        ({"suffix": "."}, "suffix is not served"),
        ({"n": 2}, "send as many requests"),
        ({"seed": 1}, "seed is not served"),
        ({"stop": "x"}, "set rollout.stop = ['x']"),
        ({"max_tokens": 0}, "asks for nothing"),
    ]

    async def case(asks: Asks) -> None:
        for more, words in refused:
            with pytest.raises(openai.BadRequestError) as error:
                await complete(asks, **{"prompt": "a", **more})
            assert words in str(error.value)

    played(model, case)
    assert not model.asked


def test_at_a_limit_the_text_is_empty(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so"])

    async def case(asks: Asks) -> None:
        await complete(asks, "a")
        reply = (await complete(asks, "a")).choices[0]
        assert (reply.text, reply.finish_reason) == ("", "length")

    found = played(model, case, limits=Limits(turns=1))
    assert isinstance(found, Played) and found.episode.cut == "turns"


async def generate(asks: Asks, tokens: list[int], status: int = 200, **sampling: Any) -> Any:
    body = {"model": "policy", "token_ids": tokens, "sampling_params": {"logprobs": 1, **sampling}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{asks.url}/inference/v1/generate", json=body) as answer,
    ):
        said = await answer.json()
        assert answer.status == status, said
        return said


def test_tokens_that_a_client_renders_by_itself_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    """The route of verifiers' train client, with all fields that it sends. A turn that begins with the earlier tokens extends them."""
    encoder = encoder_of(tmp_path, tool_chats.PLAIN)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    model = Model(encoder, ["tool<|im_end|>", "on", "off"])
    always = {"stop_token_ids": [8], "skip_special_tokens": False, "temperature": 1.0, "max_tokens": 9}

    async def case(asks: Asks) -> None:
        asks.gateway.ends = encoder.end_tokens
        answer = await generate(asks, [5, 6], **always)
        (choice,) = answer["choices"]
        first = model.sampled[0]
        assert choice["token_ids"] == list(first.tokens) and choice["finish_reason"] == "stop"
        assert [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]] == [
            (f"token_id:{token}", logprob) for token, logprob in zip(first.tokens, first.logprobs, strict=True)
        ]
        behind = [5, 6, *choice["token_ids"], 9]
        answer = await generate(asks, behind, routed_experts_prompt_start=2, **always)
        assert answer["choices"][0]["finish_reason"] == "length"
        await generate(asks, [5, 6], **always)
        for sampling, words in (
            ({"stop_token_ids": [3]}, "the token 3 does not end a completion of this model"),
            ({"logprobs": 2}, "logprobs is not served here"),
            ({"n": 2}, "n is not served"),
            ({"seed": 1}, "seed is not served"),
        ):
            assert words in (await generate(asks, [5], 400, **sampling))["error"]["message"]

    found = played(model, case)
    assert parents(found) == [(), (0,), ()]
    assert isinstance(found, Played) and found.episode.turns[1].context == (9,)
    check_rows(found, model)
