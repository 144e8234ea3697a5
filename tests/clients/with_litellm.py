"""LiteLLM in front of the server, as a library: chats, streams, tools, responses, Anthropic's messages."""

import asyncio
import json

import litellm
from client_side import (
    LONG,
    PERSON,
    SETTINGS,
    STORY,
    URL,
    WEATHER,
    done,
    get_weather,
    if_served,
    is_freed,
    refused,
)
from pydantic import BaseModel

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": PLACE}}
litellm.telemetry = False


class Person(BaseModel):
    name: str
    age: int


def asking(text):
    return [{"role": "user", "content": text}]


def ask(text, model="hosted_vllm/tiny", **more):
    messages = asking(text) if isinstance(text, str) else text
    return litellm.completion(
        model=model, api_base=f"{URL}/v1", api_key="none", messages=messages, num_retries=0, **more
    )


def chats(kind):
    settings = {"seed": 5, "temperature": 0.5, "top_p": 0.9, "max_tokens": 90, "stop": ["q", "zz"]}
    assert ask(SETTINGS, kind, **settings).choices[0].message.content == "5 0.5 0.9 90 2"
    talk = asking(WEATHER)
    answer = ask(talk, kind, tools=[TOOL], tool_choice="auto")
    talk.append(answer.choices[0].message)
    for call in answer.choices[0].message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        talk.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    answer = ask(talk, kind, tools=[TOOL])
    assert answer.choices[0].message.content == "It rains." and answer.usage.completion_tokens == 10
    chunks = list(ask("Hello", kind, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Good day."
    whole = litellm.stream_chunk_builder(list(ask(WEATHER, kind, tools=[TOOL], stream=True)), messages=talk)
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"place": "Paris"}'


def other_routes():
    more = {"api_base": f"{URL}/v1", "api_key": "none"}
    assert litellm.responses(model="openai/tiny", input="Hello", **more).output_text == "Good day."
    assert (
        litellm.text_completion(model="text-completion-openai/tiny", prompt="Hello", **more).choices[0].text
        == "Good day."
    )
    answer = litellm.completion(
        model="anthropic/tiny", api_base=URL, api_key="none", messages=asking(WEATHER), tools=[TOOL], max_tokens=200
    )
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"place": "Paris"}'


def structured():
    def parsed(kind):
        return Person.model_validate_json(ask(PERSON, kind, response_format=Person).choices[0].message.content)

    ann = Person(name="Ann", age=30)
    return {kind: if_served(lambda kind=kind: parsed(kind), ann) for kind in ("openai/tiny", "hosted_vllm/tiny")}


def errors():
    refused("there is no model gpt-5", lambda: ask("Hello", "openai/gpt-5"), litellm.NotFoundError)
    refused("shorten", lambda: ask(LONG), litellm.ContextWindowExceededError)
    refused("", lambda: ask(STORY, timeout=1.0), litellm.Timeout)
    is_freed()


async def leaves():
    stream = await litellm.acompletion(
        model="openai/tiny", api_base=f"{URL}/v1", api_key="none", messages=asking(STORY), stream=True
    )
    await anext(aiter(stream))
    await stream.aclose()
    await asyncio.to_thread(is_freed)


for kind in ("openai/tiny", "hosted_vllm/tiny"):
    chats(kind)
other_routes()
found = structured()
errors()
asyncio.run(leaves())
done(**found)
