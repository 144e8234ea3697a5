"""pydantic-ai: an agent with a tool over chats and responses, streamed and whole, and typed answers."""

import asyncio

from client_side import CALLED, LONG, PERSON, URL, WEATHER, done, get_weather, if_served, refused
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
LOOSE = {"instructions": "Use the tool.", "tools": [Tool(get_weather, strict=False)]}


class Person(BaseModel):
    name: str
    age: int


async def streamed(model):
    async with Agent(model, **LOOSE).run_stream(WEATHER) as answer:
        assert await answer.get_output() == "It rains."


ann, found = Person(name="Ann", age=30), {}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model, name = kind("tiny", provider=provider), kind.__name__
    agent = Agent(model, **LOOSE)
    result = agent.run_sync(WEATHER)
    assert result.output == "It rains." and result.usage.output_tokens > 10, result
    assert agent.run_sync("Hello", message_history=result.all_messages()).output == "Good day."
    asyncio.run(streamed(model))
    strict = Agent(model, tools=[get_weather])
    found[name] = if_served(lambda strict=strict: strict.run_sync(WEATHER).output, "It rains.")
    for output in (ToolOutput, NativeOutput, PromptedOutput):
        typed = Agent(model, output_type=output(Person), retries=0)
        found[f"{name} {output.__name__}"] = if_served(lambda typed=typed: typed.run_sync(PERSON).output, ann)
    refused("there is no model gpt-5", lambda kind=kind: Agent(kind("gpt-5", provider=provider)).run_sync("Hello"))
    refused("shorten", lambda agent=agent: agent.run_sync(LONG))
assert len(CALLED) >= 4
done(**found)
