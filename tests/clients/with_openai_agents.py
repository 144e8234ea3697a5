"""openai-agents: an agent with a tool over chats and over responses, streamed and whole, and a typed answer."""

import asyncio

import agents
import openai
from client_side import CALLED, LONG, PERSON, URL, WEATHER, done, get_weather, if_served, refused
from pydantic import BaseModel

agents.set_tracing_disabled(True)
USAGE = agents.ModelSettings(include_usage=True)


class Person(BaseModel):
    name: str
    age: int


def asked(model, text=WEATHER, strict=False, **more):
    """Runs an agent in an event loop of its own, with a client of its own, and returns its answer."""

    async def go():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
            tools = [] if more else [agents.function_tool(get_weather, strict_mode=strict)]
            agent = agents.Agent(
                name="weather",
                instructions="Use the tool.",
                model=model(model="tiny", openai_client=client),
                tools=tools,
                model_settings=USAGE,
                **more,
            )
            run = agents.Runner.run_streamed(agent, text)
            async for _ in run.stream_events():
                pass
            whole = await agents.Runner.run(agent, text)
            assert run.final_output == whole.final_output
            told = [one.context_wrapper.usage for one in (run, whole)]
            assert told[0].output_tokens == told[1].output_tokens > 10, told
            return whole.final_output

    return asyncio.run(go())


ann, found = Person(name="Ann", age=30), {}
for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    name = kind.__name__
    assert asked(kind) == "It rains."
    found[name] = if_served(lambda kind=kind: asked(kind, strict=True), "It rains.")
    found[f"{name} typed"] = if_served(lambda kind=kind: asked(kind, PERSON, output_type=Person), ann)
    refused("shorten", lambda kind=kind: asked(kind, LONG))
assert len(CALLED) >= 4
done(**found)
