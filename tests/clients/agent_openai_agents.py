"""An agent of openai-agents with a tool, over responses: the default of this framework."""

import json
import sys

import agents

given, called = json.load(sys.stdin), []
agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    called.append((a, b))
    return a + b


agent = agents.Agent(name="adds", model="policy", instructions="Use the tool.", tools=[add])
result = agents.Runner.run_sync(agent, given["prompt"])
again = agents.Runner.run_sync(agent, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
print(json.dumps({"called": len(called), "answered": again.final_output == "Yes, I am."}))
