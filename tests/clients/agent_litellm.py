"""An agent that calls its model through LiteLLM."""

import json
import os
import sys

import litellm

given, called = json.load(sys.stdin), []
NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds two numbers", "parameters": PARAMETERS}}


def asked(talk):
    answer = litellm.completion(
        model="openai/policy", api_base=os.environ["OPENAI_BASE_URL"], messages=talk, tools=[TOOL], max_tokens=500
    )
    return answer.choices[0].message


talk = [{"role": "user", "content": given["prompt"]}]
while calls := (message := asked(talk)).tool_calls:
    talk.append(message)
    for call in calls:
        arguments = json.loads(call.function.arguments)
        called.append(arguments)
        talk.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))})
talk += [message, {"role": "user", "content": "Sure?"}]
print(json.dumps({"called": len(called), "answered": asked(talk).content == "Yes, I am."}))
