"""The client `openai` for Python, as people use it."""

import asyncio
import json
import threading

import openai
from client_side import (
    CALLED,
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

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": PLACE}}


class Person(BaseModel):
    name: str
    age: int


def asking(text):
    return [{"role": "user", "content": text}]


def chats():
    settings = {"seed": 5, "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 90, "stop": ["q", "zz"]}
    answer = client.chat.completions.create(model="tiny", messages=asking(SETTINGS), **settings)
    assert answer.choices[0].message.content == "5 0.5 0.9 90 2", answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len("5 0.5 0.9 90 2") + 1
    talk = asking(WEATHER)
    answer = client.chat.completions.create(model="tiny", messages=talk, tools=[TOOL], tool_choice="auto")
    message = answer.choices[0].message
    talk.append(message)
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model="tiny", messages=talk, tools=[TOOL])
    assert answer.choices[0].message.content == "It rains." and len(CALLED) == 1
    with client.chat.completions.stream(model="tiny", messages=asking("Hello")) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content == "Good day."
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=asking("Hello"), stream=True, stream_options=usage)
    )
    assert chunks[-1].usage.completion_tokens == 10 and not chunks[-1].choices


def responses():
    answer = client.responses.create(model="tiny", input="Hello", instructions="Be kind.")
    assert answer.output_text == "Good day." and answer.usage.output_tokens == 10
    again = client.responses.create(model="tiny", input=WEATHER, previous_response_id=answer.id)
    assert again.usage.input_tokens > answer.usage.total_tokens
    tool = {"type": "function", **TOOL["function"], "strict": None}
    talk = asking(WEATHER)
    answer = client.responses.create(model="tiny", input=talk, tools=[tool])
    talk += answer.output
    for item in answer.output:
        if item.type == "function_call":
            output = get_weather(**json.loads(item.arguments))
            talk.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    assert client.responses.create(model="tiny", input=talk, tools=[tool]).output_text == "It rains."
    with client.responses.stream(model="tiny", input="Hello") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "Good day."
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def structured():
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    ask = client.chat.completions.parse

    def parsed(**more):
        return ask(model="tiny", **more).choices[0].message

    ann = Person(name="Ann", age=30)
    forced = {"type": "function", "function": {"name": "get_weather"}}
    return {
        "chat": if_served(lambda: parsed(messages=asking(PERSON), response_format=Person).parsed, ann),
        "response": if_served(
            lambda: client.responses.parse(model="tiny", input=PERSON, text_format=Person).output_parsed, ann
        ),
        "strict": if_served(
            lambda: parsed(messages=asking(WEATHER), tools=[strict]).tool_calls[0].function.parsed_arguments,
            {"place": "Paris"},
        ),
        "forced": if_served(
            lambda: (
                client.chat.completions.create(model="tiny", messages=asking(WEATHER), tools=[TOOL], tool_choice=forced)
                .choices[0]
                .message.tool_calls[0]
                .function.name
            ),
            "get_weather",
        ),
    }


def errors():
    ask = client.chat.completions.create
    refused("there is no model gpt-5", lambda: ask(model="gpt-5", messages=asking("Hello")), openai.NotFoundError)
    refused("shorten", lambda: ask(model="tiny", messages=asking(LONG)), openai.BadRequestError)
    refused("shorten", lambda: client.responses.create(model="tiny", input=LONG), openai.BadRequestError)


def patience():
    """A client that gives up, one that leaves its stream, and one that asks again where there was no room."""
    refused(
        "timed out",
        lambda: client.with_options(timeout=1.0).responses.create(model="tiny", input=STORY),
        openai.APITimeoutError,
    )
    is_freed()
    with client.chat.completions.create(model="tiny", messages=asking(STORY), stream=True) as stream:
        next(iter(stream))
    is_freed()
    streams = [client.chat.completions.create(model="tiny", messages=asking(STORY), stream=True) for _ in range(4)]
    found = []
    patient = client.with_options(max_retries=1000)
    asks = threading.Thread(
        target=lambda: found.append(patient.chat.completions.create(model="tiny", messages=asking("Hello")))
    )
    refusals = counted("requests_refused_total")
    asks.start()
    until(lambda: counted("requests_refused_total") > refusals)
    for stream in streams:
        stream.close()
    asks.join()
    assert found[0].choices[0].message.content == "Good day."


async def at_once():
    several = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    asks = [several.chat.completions.create(model="tiny", messages=asking("Hello")) for _ in range(3)]
    assert {one.choices[0].message.content for one in await asyncio.gather(*asks)} == {"Good day."}
    task = asyncio.ensure_future(several.chat.completions.create(model="tiny", messages=asking(STORY)))
    while not counted("requests_running"):
        await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(is_freed)


chats()
responses()
found = structured()
asyncio.run(at_once())
patience()
errors()
done(**found)
