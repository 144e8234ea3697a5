"""The client `anthropic` for Python, as people use it."""

import asyncio
import threading

import anthropic
from client_side import (
    LONG,
    PERSON,
    SETTINGS,
    STORY,
    URL,
    WEATHER,
    counted,
    done,
    get_weather,
    if_served,
    is_freed,
    refused,
    until,
)
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOL = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


class Person(BaseModel):
    name: str
    age: int


def asking(text):
    return [{"role": "user", "content": text}]


def messages():
    settings = {"stop_sequences": ["q", "zz"], "extra_body": {"temperature": 0.5, "top_p": 0.9}}
    answer = client.messages.create(model="tiny", max_tokens=90, messages=asking(SETTINGS), **settings)
    assert answer.content[0].text.endswith(" 0.5 0.9 90 2"), answer
    talk = asking(WEATHER)
    answer = client.messages.create(model="tiny", max_tokens=200, system="Be kind.", messages=talk, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]
    talk += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    answer = client.messages.create(model="tiny", max_tokens=200, messages=talk, tools=[TOOL])
    assert answer.content[0].text == "It rains." and answer.usage.output_tokens == len("It rains.") + 1
    counted_tokens = client.messages.count_tokens(model="tiny", messages=asking("Hello"))
    assert counted_tokens.input_tokens == 24
    with client.messages.stream(model="tiny", max_tokens=200, messages=asking("Hello")) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text == "Good day."
    with client.messages.stream(model="tiny", max_tokens=200, messages=asking(WEATHER), tools=[TOOL]) as stream:
        text, call = stream.get_final_message().content
    assert (text.text, call.input) == ("Let me see.", {"place": "Paris"})
    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=200, messages=asking(WEATHER), tools=[anthropic.beta_tool(get_weather)]
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]


def structured():
    ann = Person(name="Ann", age=30)
    forced = {"type": "tool", "name": "get_weather"}
    ask = client.messages
    more = {"model": "tiny", "max_tokens": 200}
    return {
        "parsed": if_served(
            lambda: ask.parse(messages=asking(PERSON), output_format=Person, **more).parsed_output, ann
        ),
        "forced": if_served(
            lambda: ask.create(messages=asking(WEATHER), tools=[TOOL], tool_choice=forced, **more).content[-1].input,
            {"place": "Paris"},
        ),
    }


def errors():
    def ask(**more):
        client.messages.create(**{"model": "tiny", "max_tokens": 20, "messages": asking("Hello"), **more})

    refused("there is no model claude", lambda: ask(model="claude"), anthropic.NotFoundError)
    refused("shorten", lambda: ask(messages=asking(LONG)), anthropic.BadRequestError)
    refused("leaves room for", lambda: ask(max_tokens=900_000, stream=True), anthropic.BadRequestError)


def patience():
    ask = {"model": "tiny", "max_tokens": 100_000, "messages": asking(STORY)}
    refused("timed out", lambda: client.with_options(timeout=1.0).messages.create(**ask), anthropic.APITimeoutError)
    is_freed()
    with client.messages.stream(**ask) as stream:
        next(stream.text_stream)
    is_freed()
    streams = [client.messages.create(**ask, stream=True) for _ in range(4)]
    found = []
    patient = client.with_options(max_retries=1000)
    hello = {**ask, "max_tokens": 200, "messages": asking("Hello")}
    asks = threading.Thread(target=lambda: found.append(patient.messages.create(**hello)))
    refusals = counted("requests_refused_total")
    asks.start()
    until(lambda: counted("requests_refused_total") > refusals)
    for stream in streams:
        stream.close()
    asks.join()
    assert found[0].content[0].text == "Good day."


async def at_once():
    several = anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
    asks = [several.messages.create(model="tiny", max_tokens=200, messages=asking("Hello")) for _ in range(3)]
    assert {one.content[0].text for one in await asyncio.gather(*asks)} == {"Good day."}


messages()
found = structured()
errors()
patience()
asyncio.run(at_once())
done(**found)
