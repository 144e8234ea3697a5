"""The agent of agent.toml: it asks for a sum, up to three times until the reply is a number, and prints what the reply is worth.

It talks to whatever serves OpenAI's API at OPENAI_BASE_URL. The `openai` package does the same, and takes a second to import.
"""

import json
import os
import re
import sys
from urllib.request import Request, urlopen


def ask(talk):
    body = json.dumps({"model": "policy", "messages": talk}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


given = json.load(sys.stdin)
talk = [{"role": "user", "content": given["prompt"]}]
for attempt in (1, 2, 3):
    reply = ask(talk)
    text = reply["content"].strip()
    number = re.fullmatch(r"-?\d+", text) is not None
    right = (text == given["columns"]["answer"]) / attempt
    if number:
        break
    talk += [reply, {"role": "user", "content": "Answer with the number alone."}]
print(json.dumps({"right": right, "number": 0.2 * number}))
