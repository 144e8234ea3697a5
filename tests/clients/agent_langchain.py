"""An agent of LangChain with a tool."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

given, called = json.load(sys.stdin), []


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    called.append((a, b))
    return a + b


model = ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"])
agent = create_agent(model, tools=[add], system_prompt="Use the tool.")
talk = agent.invoke({"messages": [("user", given["prompt"])]})["messages"]
talk = agent.invoke({"messages": [*talk, ("user", "Sure?")]})["messages"]
print(json.dumps({"called": len(called), "answered": talk[-1].content == "Yes, I am."}))
