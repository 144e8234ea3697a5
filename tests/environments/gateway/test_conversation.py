"""Chat to tokens and back, over real forms of chat templates: the tokens that were sampled are the tokens that are trained (C5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.training_rows import rows_of
from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.protocols import Limits
from headrace.core.types import Completion, Prompt, Scored
from headrace.episodes.environments.conversation import Conversation, TurnStream, with_tools
from headrace.episodes.environments.workers.episode_frames import ChatReply
from headrace.episodes.episodes import Played
from headrace.episodes.rollout_session import RolloutSession
from headrace.loop.world import virtual_time
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.gateway.written_turns import Model, check_rows, encoder_of

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
    },
}
TRIMS = tool_chats.PLAIN.replace("message.content", "message.content | trim")
"""Writes earlier replies without the white space around them."""
DROPS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('=')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops what earlier replies have before `=`, as some templates drop the thinking of earlier turns."""
ALTERNATES = (
    (
        "<s>{% set state = namespace(last='') %}{% for message in messages %}"
        "{% if message.role == 'tool' and state.last != 'call' %}{{ raise_exception('a result without a call') }}{% endif %}"
        "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% elif message.role == 'tool' %}(={{ message.content }})"
        "{% elif message.tool_calls is defined %}[TOOL_CALLS]{{ message.tool_calls[0].function.name }}[ARGS]"
        "{{ message.tool_calls[0].function.arguments | tojson }}<|im_end|>{% else %}{{ message.content }}<|im_end|>{% endif %}"
        "{% set state.last = 'call' if message.tool_calls is defined else message.role %}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    )
    .replace("<s>{% set", "<s>{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% set")
    .replace("{% if tools %}{{ tools[0].function.name }}{% endif %}", "")
)
"""Mistral's manner: no result of a tool without a message that has the call."""
Talk = Callable[[Conversation, int, ChatReply | None], Sequence[Mapping[str, Any]] | None]


class Pieces(TurnStream):
    """Reads each token as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def heard(self, token: int, logprob: float) -> None:
        super().heard(token, logprob)
        self.text += self.new().text

    def all_of(self, done: Completion) -> str:
        return self.text + self.rest(done).text


def talked(
    model: Model,
    talk: Talk,
    *,
    tools: Sequence[Any] | None = (TOOL,),
    place: Any = "template",
    limits: Limits | None = None,
) -> Played | Failure:
    class Environment:
        def __init__(self, prompt: Prompt, seed: int) -> None:
            pass

        async def play(self, agent: Any) -> Mapping[str, float]:
            conversation = Conversation(agent, model.encoder, system="", tools=place)
            reply, number = None, 0
            while messages := talk(conversation, number, reply):
                stream = Pieces()
                reply = await conversation.say(messages, tools if number == 0 else None, 0, stream)
                if not reply.over:
                    assert conversation.last and stream.all_of(conversation.last) == reply.text
                number += 1
            return {"won": 1.0}

    result: list[Played | Failure] = []

    async def main() -> None:
        session = RolloutSession(0, model, model.encoder.decode, limits=limits or Limits(turns=9))
        result.append(await session.play(Environment, Prompt("p", "?", (1,)), 0))

    virtual_time.run(main())
    return result[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def result_of(reply: ChatReply, text: str = "12") -> dict[str, str]:
    return {"role": "tool", "content": text, "tool_call_id": reply.calls[0].id, "name": "add"}


CALLS = {
    "hermes": '<tool_call>{"name": "add",  "arguments": {"a":1}}</tool_call><|im_end|>',
    "mistral-list": '[TOOL_CALLS] [{"name": "add",  "arguments": {"a":1}}]</s>',
    "mistral-named": '[TOOL_CALLS]add[ARGS]{"a":1}</s>',
    "llama3": '{"name": "add",  "parameters": {"a":1}}<|eot_id|>',
    "gemma": "<|tool_call>call: add{a: 1}<tool_call|><|im_end|>",
    "function-gemma": "<start_function_call>call: add{a: 1}<end_function_call><|im_end|>",
}


@pytest.mark.parametrize("family", CALLS)
def test_a_call_and_its_result_extend_the_sampled_tokens(family: str, tmp_path: Path) -> None:
    """The call has white space that no template would write: the model's own tokens stay."""
    encoder = encoder_of(tmp_path, tool_chats.TEMPLATES[family])
    end = next(one for one in ("<|im_end|>", "<|eot_id|>", "</s>") if CALLS[family].endswith(one))
    model = Model(encoder, [CALLS[family], "is 12" + end])
    turns: list[Any] = [lambda reply: [user("1 and 11?")], lambda reply: [result_of(reply)], lambda reply: None]
    found = talked(model, lambda _, number, reply: turns[number](reply))
    assert isinstance(found, Played), found
    first, second = found.episode.turns
    assert first.reply["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert second.parents == (0,) and second.reply == {"role": "assistant", "content": "is 12"}
    assert second.messages[0]["content"] == "12" and "12" in encoder.written(second.context)
    check_rows(found, model)
    (row,) = [row for _, row in rows_of(Prompt("p", "?", (1,)), Scored(found.episode, 1.0, {}), 0.5)]
    text = encoder.written((*row.prompt, *row.tokens))
    told = [user("1 and 11?"), {"role": "assistant", "content": CALLS[family].removesuffix(end)}]
    if family != "mistral-list":  # which has no end of turn behind a message with a call as its text
        rendered, _ = encoder.encode_messages([*told, *second.messages], [TOOL])
        assert text == rendered + "is 12" + end, "the model sees what the template writes"


def test_a_template_that_insists_on_calls_is_given_them(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, ALTERNATES)
    call = '[TOOL_CALLS]add[ARGS]{ "a":1}<|im_end|>'
    model = Model(encoder, [call, "is<|im_end|>", call, "12<|im_end|>"])
    turns: list[Any] = [
        lambda reply: [user("1?")],
        lambda reply: [result_of(reply)],
        lambda reply: [user("more")],
        lambda reply: [result_of(reply, "3")],
        lambda reply: None,
    ]
    found = talked(model, lambda _, number, reply: turns[number](reply))
    assert isinstance(found, Played), found
    assert [turn.parents for turn in found.episode.turns] == [(), (0,), (1,), (2,)]
    check_rows(found, model)
    path = (*model.asked[-1].context, *model.sampled[-1].tokens)
    assert (
        encoder.written(path)
        == f"<s>[add][INST]1?[/INST]{call}(=12)is<|im_end|>[INST]more[/INST]{call}(=3)12<|im_end|>"
    )


@pytest.mark.parametrize("reply", ["I thin", "I <|python_tag|>"])
def test_a_reply_that_was_cut_off_is_closed_by_the_template(reply: str, tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, tool_chats.PLAIN)
    model = Model(encoder, [reply, "yes<|im_end|>"])
    found = talked(model, lambda _, number, reply: [user("so?")] if number < 2 else None, tools=None)
    assert isinstance(found, Played) and found.episode.turns[1].parents == (0,)
    assert encoder.written(found.episode.turns[1].context).startswith("<|im_end|>\n<|im_start|>user\nso?<|im_end|>")
    check_rows(found, model)


@pytest.mark.parametrize(("template", "reply"), [(TRIMS, " 12 <|im_end|>"), (DROPS, "a+b=12<|im_end|>")])
def test_where_the_template_rewrites_history_a_path_begins_and_nothing_is_trained_twice(
    template: str, reply: str, tmp_path: Path
) -> None:
    encoder = encoder_of(tmp_path, template)
    model = Model(encoder, [reply, reply, "12<|im_end|>"])
    found = talked(model, lambda _, number, said: [user("so?")] if number < 3 else None, tools=None)
    assert isinstance(found, Played)
    assert [turn.parents for turn in found.episode.turns] == [(), (), ()]
    assert [turn.rewrites for turn in found.episode.turns] == [(), (0,), (1,)], "whose conversation each goes on with"
    second = encoder.written(model.asked[1].context)
    assert "assistant\n12<|im_end|>" in second and reply not in second, "the model sees what the template writes"
    check_rows(found, model)


WORDS = st.sampled_from(
    [" ", "\n", "to", "ol", "a", "=", "12", "add", "<tool_call>", '{"name": "add"', "}", "</tool_call>"]
)
REPLIES = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(list(CALLS.values())), st.lists(WORDS, max_size=6).map("".join)), st.booleans()
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatEncoder]:
    directory = tmp_path_factory.mktemp("templates")
    templates = {**tool_chats.TEMPLATES, "trims": TRIMS, "drops": DROPS, "alternates": ALTERNATES}
    return {name: encoder_of(directory / name, template) for name, template in templates.items()}


@settings(max_examples=80)
@given(
    family=st.sampled_from([*tool_chats.TEMPLATES, "trims", "drops", "alternates"]),
    replies=REPLIES,
    seed=st.integers(0, 99),
)
def test_what_was_sampled_is_what_is_trained(
    encoders: dict[str, ChatEncoder], family: str, replies: list[tuple[str, bool]], seed: int
) -> None:
    """Whatever the model writes, and whatever the template makes of it: tokens, log-probs, versions and masks are the sampler's."""
    encoder, has_tools = encoders[family], family not in ("trims", "drops")
    says = [text.removesuffix("<|im_end|>") + "<|im_end|>" * ends for text, ends in replies]
    model = Model(encoder, [text or "a" for text in says], seed)

    def talk(_: Conversation, number: int, reply: ChatReply | None) -> Sequence[Mapping[str, Any]] | None:
        if number == len(says):
            return None
        good = [call for call in reply.calls if not call.problem] if reply else []
        return [result_of(reply)] if reply and good and len(good) == len(reply.calls) == 1 else [user("go on")]

    found = talked(model, talk, tools=[TOOL] if has_tools else None)
    assert isinstance(found, Played), found
    check_rows(found, model)
    assert len(found.episode.turns) == len(says)


def test_at_a_limit_the_reply_says_so_and_the_episode_is_cut_off(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, tool_chats.PLAIN)
    overs: list[str] = []

    def talk(_: Conversation, number: int, reply: ChatReply | None) -> Sequence[Mapping[str, Any]] | None:
        if reply is not None:
            overs.append(reply.over)
        return None if reply and reply.over else [user("so?")]

    model = Model(encoder, ["a<|im_end|>"] * 9)
    found = talked(model, talk, tools=None, limits=Limits(turns=3))
    assert isinstance(found, Played) and found.episode.cut == "turns" and overs == ["", "", "", "turns"]
    assert found.episode.truncated and len(found.episode.turns) == 3 and found.rewards == {"won": 1.0}
    rows = [row for _, row in rows_of(Prompt("p", "?", (1,)), Scored(found.episode, 1.0, {}), 0.5, "mask")]
    assert not any(any(row.mask) for row in rows), "algo.overlong = mask leaves out what was cut off"
    model = Model(encoder, ["a<|im_end|>"] * 9)
    found = talked(model, talk, tools=None, limits=Limits(turns=9, tokens=100))
    assert isinstance(found, Played) and found.episode.cut == "tokens"
    assert len(model.asked[-1].context) <= 100 and 1 <= len(found.episode.turns) < 9


def test_a_template_without_tools_is_refused_with_the_remedy_which_works(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, tool_chats.PLAIN)
    model = Model(encoder, [CALLS["hermes"], "12<|im_end|>"])
    turns: list[Any] = [lambda reply: [user("1 and 11?")], lambda reply: [result_of(reply)], lambda reply: None]
    found = talked(model, lambda _, number, reply: turns[number](reply))
    assert isinstance(found, Failure) and 'environment.tools = "hermes"' in found.detail
    found = talked(model, lambda _, number, reply: turns[number](reply), place="hermes")
    assert isinstance(found, Played), found
    assert '"name": "add"' in encoder.written(model.asked[0].context)
    assert found.episode.turns[0].reply["tool_calls"] and found.episode.turns[1].parents == (0,)
    check_rows(found, model)


def test_tools_join_the_system_message() -> None:
    (first, second) = with_tools([{"role": "system", "content": "Be brief."}, user("?")], [TOOL])
    assert first["content"].startswith("Be brief.\n\n") and '"add"' in first["content"] and second == user("?")


def test_a_malformed_call_is_kept_with_its_reason(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, tool_chats.HERMES)
    model = Model(encoder, ['<tool_call>{"name": add}</tool_call><|im_end|>'])
    replies: list[ChatReply] = []

    def talk(_: Conversation, number: int, reply: ChatReply | None) -> Sequence[Mapping[str, Any]] | None:
        replies.extend([reply] if reply else [])
        return None if number else [user("?")]

    found = talked(model, talk)
    assert isinstance(found, Played) and "tool_calls" not in found.episode.turns[0].reply
    (call,) = replies[0].calls
    assert call.problem and call.arguments == '<tool_call>{"name": add}</tool_call>'


def test_what_the_template_refuses_is_said(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, "{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match="no"):
        encoder.encode_messages([user("?")])
    assert isinstance(talked(Model(encoder, []), lambda *_: [user("?")], tools=None), Failure)
