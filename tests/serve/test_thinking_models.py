"""A model whose template tells thinking from answers: what the official clients read, whole and in pieces, and what they send back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from test_openai_client import ASKING, WEATHER, prompt_of, run, saying
from test_shared_formats import FUNCTION, TOOL, anthropic_of, openai_of

from headrace.serve.serving import Serving
from headrace.web.errors import Refused
from headrace.web.formats.responses import messages_of_input
from support.tool_chats import PLAIN, TEMPLATES, tokens_of

_SHOWN = (
    "{% if message.reasoning_content is defined %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
THINKING = TEMPLATES["hermes"].replace("'\\n' + message.content }}", "'\\n' }}" + _SHOWN + "{{ message.content }}")
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Templates in the manner of Qwen 3, and of those that begin the thinking themselves."""
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Paris"}}</tool_call>'
SAID = f"hm <tool_call>\n</think>\n\nLet me see.\n{CALL}"
BEGIN = "<think>\n"
assert _SHOWN in THINKING and OPENED != THINKING

BOTH = pytest.mark.parametrize(("template", "begin"), [(THINKING, BEGIN), (OPENED, "")], ids=["by itself", "opened"])


@BOTH
def test_a_chat_has_the_thinking_apart_and_takes_it_back(tmp_path: Path, template: str, begin: str) -> None:
    async def case(url: str, serving: Serving) -> None:
        more: Any = {"model": "tiny", "tools": [WEATHER]}
        create = openai_of(url).chat.completions.create
        whole = await create(messages=ASKING, **more)
        message: Any = whole.choices[0].message
        assert (message.content, message.reasoning_content) == ("Let me see.", "hm <tool_call>")
        assert [tool_call.function.arguments for tool_call in message.tool_calls] == ['{"place": "Paris"}']
        assert whole.usage and whole.usage.completion_tokens_details
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(
            tokens_of(begin + "hm <tool_call>\n</think>")
        )
        reasoning = text = ""
        async for chunk in await create(messages=ASKING, stream=True, **more):
            delta: Any = chunk.choices[0].delta
            assert not (text and getattr(delta, "reasoning_content", None)), "thinking comes first"
            reasoning += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
        assert (reasoning, text, chunk.choices[0].finish_reason) == (
            message.reasoning_content,
            message.content,
            "tool_calls",
        )
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        last = await create(messages=[*ASKING, message.model_dump(exclude_none=True), result], **more)
        assert "<think>\nhm <tool_call>\n</think>\n\nLet me see." in prompt_of(serving, 2)
        assert last.choices[0].message.content == "It rains."
        cut = await create(messages=ASKING, max_tokens=len(tokens_of(begin + "hm")), **more)
        assert (cut.choices[0].message.content, cut.choices[0].message.reasoning_content) == (None, "hm")  # type: ignore[attr-defined]

    run(template, tmp_path, saying(begin + SAID, begin + SAID, begin + "\n</think>\n\nIt rains.", begin + SAID), case)


@BOTH
def test_a_response_has_a_reasoning_item_and_takes_it_back(tmp_path: Path, template: str, begin: str) -> None:
    async def case(url: str, serving: Serving) -> None:
        more: Any = {"model": "tiny", "tools": [FUNCTION]}
        client = openai_of(url)
        first = await client.responses.create(input="?", **more)
        thought, said, call = first.output
        assert (thought.type, thought.content[0].text, said.content[0].text) == (
            "reasoning",
            "hm <tool_call>",
            "Let me see.",
        )  # type: ignore[union-attr]
        assert first.usage and first.usage.output_tokens_details.reasoning_tokens > len("hm <tool_call>")
        kinds = []
        async with client.responses.stream(input="?", **more) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_response()
        assert [one.type for one in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[0].content[0].text == "hm <tool_call>" and final.output_text == "Let me see."
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items: Any = [{"role": "user", "content": "?"}, *first.output, result]
        await client.responses.create(input=items, **more)
        await client.responses.create(input=[result], previous_response_id=first.id, **more)
        assert prompt_of(serving, 2) == prompt_of(serving, 3)
        assert "<think>\nhm <tool_call>\n</think>\n\nLet me see." in prompt_of(serving, 2)

    run(template, tmp_path, saying(begin + SAID, begin + SAID), case)


@BOTH
def test_a_message_has_a_thinking_block_and_takes_it_back(tmp_path: Path, template: str, begin: str) -> None:
    async def case(url: str, serving: Serving) -> None:
        more: Any = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}
        create = anthropic_of(url).messages.create
        first: Any = await create(messages=ASKING, **more)
        assert [one.type for one in first.content] == ["thinking", "text", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("hm <tool_call>", "Let me see.")
        async with anthropic_of(url).messages.stream(messages=ASKING, **more) as stream:
            final: Any = await stream.get_final_message()
        assert [one.model_dump(exclude={"id"}) for one in final.content] == [
            one.model_dump(exclude={"id"}) for one in first.content
        ]
        result: Any = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "rain"}
        talk: Any = [*ASKING, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await create(messages=talk, **more)
        assert "<think>\nhm <tool_call>\n</think>\n\nLet me see." in prompt_of(serving, 2)

    run(template, tmp_path, saying(begin + SAID, begin + SAID), case)


def test_a_reasoning_item_belongs_to_what_comes_behind_it_and_to_nothing_else() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    said = {"role": "assistant", "content": "It rains."}
    found = messages_of_input([said, thought("a"), thought("b"), call, result, said])
    assert [(message.role, message.reasoning_content) for message in found] == [
        ("assistant", None),
        ("assistant", "ab"),
        ("tool", None),
        ("assistant", None),
    ]
    for items in ([thought("a")], [thought("a"), {"role": "user", "content": "?"}], [thought("a"), result]):
        with pytest.raises(Refused, match="no message or call of the assistant behind it"):
            messages_of_input(items)


def test_an_answer_that_continues_a_begin_is_read_from_there(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        async def ask(content: str) -> tuple[Any, Any]:
            talk: Any = [*ASKING, {"role": "assistant", "content": content}]
            more: Any = {"extra_body": {"continue_final_message": True}}
            message: Any = (
                (await openai_of(url).chat.completions.create(model="tiny", messages=talk, **more)).choices[0].message
            )
            return message.content, getattr(message, "reasoning_content", None)

        assert await ask("<think>so") == ("12", " it is")
        assert await ask("<think>so</think>It") == (" it is</think>\n\n12", None)

    run(THINKING, tmp_path, saying(" it is</think>\n\n12", " it is</think>\n\n12"), case)


def test_a_question_about_the_mark_is_no_thought(tmp_path: Path) -> None:
    """With real tokens a short question stands among the last of the prompt; here each character is one."""
    short = "{# </think> #}{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"

    async def case(url: str, serving: Serving) -> None:
        asked: Any = [{"role": "user", "content": "<think>"}]
        answer = await openai_of(url).chat.completions.create(model="tiny", messages=asked)
        message: Any = answer.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == ("a mark", None)

    run(short, tmp_path, saying("a mark"), case)


def test_a_model_whose_template_knows_no_thinking_says_what_it_writes(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        answer = await openai_of(url).chat.completions.create(model="tiny", messages=ASKING)
        message: Any = answer.choices[0].message
        assert message.content == "<think>a</think>b" and not hasattr(message, "reasoning_content")
        with pytest.raises(openai.BadRequestError, match="separate_reasoning is not served"):
            await openai_of(url).chat.completions.create(
                model="tiny", messages=ASKING, extra_body={"separate_reasoning": False}
            )

    run(PLAIN, tmp_path, saying("<think>a</think>b"), case)
