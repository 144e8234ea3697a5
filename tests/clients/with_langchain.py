"""LangChain: chat models, tools, structured output, and an agent."""

import asyncio

from client_side import (
    CALLED,
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
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def model(**more):
    return ChatOpenAI(**{"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, **more})


def chats():
    asked = model(seed=5, temperature=0.5, top_p=0.9, max_tokens=90, stop=["q", "zz"]).invoke(SETTINGS)
    assert asked.content == "5 0.5 0.9 90 2", asked
    assert asked.usage_metadata["output_tokens"] == 15 and asked.response_metadata["finish_reason"] == "stop"
    pieces = list(model(stream_usage=True).stream("Hello"))
    assert "".join(piece.content for piece in pieces) == "Good day."
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == 10
    assert [one.content for one in model().batch(["Hello"] * 2)] == ["Good day."] * 2
    assert model(use_responses_api=True).invoke("Hello").text == "Good day."
    assert OpenAI(model="tiny", base_url=f"{URL}/v1", api_key="none").invoke("Hello") == "Good day."


def tools():
    weather = tool(get_weather)
    for more in ({}, {"use_responses_api": True}):
        bound, talk = model(**more).bind_tools([weather]), [HumanMessage(WEATHER)]
        talk.append(bound.invoke(talk))
        talk += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in talk[-1].tool_calls]
        assert len(talk) == 3 and bound.invoke(talk).text == "It rains.", talk
        whole = None
        for piece in bound.stream([HumanMessage(WEATHER)]):
            whole = piece if whole is None else whole + piece
        assert whole.tool_calls[0]["args"] == {"place": "Paris"}
    agent = create_agent(model(), tools=[weather], system_prompt="Use the tool.")
    assert agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].content == "It rains."
    assert len(CALLED) == 3


def structured():
    ann = Person(name="Ann", age=30)
    kinds = ("json_schema", "function_calling", "json_mode")
    ask = {kind: model().with_structured_output(Person, method=kind) for kind in kinds}
    return {kind: if_served(lambda kind=kind: ask[kind].invoke(f"{PERSON} Answer in JSON."), ann) for kind in kinds}


def errors():
    refused("there is no model gpt-5", lambda: model(model="gpt-5").invoke("Hello"))
    refused("shorten", lambda: model().invoke(LONG))
    refused("timed out", lambda: model(timeout=1.0).invoke(STORY))
    is_freed()


async def leaves():
    async for _ in model().astream(STORY):
        break
    await asyncio.to_thread(is_freed)


chats()
tools()
found = structured()
errors()
asyncio.run(leaves())
done(**found)
