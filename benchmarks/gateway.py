"""What a call through the gateway costs the controller, in CPU time: HTTP, JSON, the chat template, tokens, the tree.

The engine answers at once with 32 tokens, and the client is another process. A call continues the one before it, up to `--turns`. With
`--context` the conversation has about that many tokens before the calls that count, in `--messages` messages.

    python benchmarks/gateway.py [--model DIRECTORY] [--rollouts 100] [--turns 4] [--context 32000 --messages 64]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

from headrace.core.protocols import Limits
from headrace.core.types import Completion, Prompt, VersionSpan
from headrace.episodes.environments.agents.served_rollouts import talks_of
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.episodes import Played
from headrace.episodes.rollout_session import RolloutSession, TurnAsked
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.web.limits import ServerLimits

CLIENT = """
import http.client, json, sys, urllib.parse
for url in sys.stdin:
    at = urllib.parse.urlsplit(url.strip())
    line = http.client.HTTPConnection(at.hostname, at.port)
    messages = int(sys.argv[3])
    said = "What is the sum of 12 and 30? " * (int(sys.argv[2]) // (11 * messages) if messages else 0)
    talk = [{"role": ("user", "assistant")[number % 2], "content": f"{number}: {said}"} for number in range(messages)]
    for turn in range(int(sys.argv[1])):
        talk.append({"role": "user", "content": "What is the sum of 12 and 30, and why do you think so?"})
        body = json.dumps({"model": "m", "messages": talk})
        line.request("POST", at.path + "/v1/chat/completions", body, {"Content-Type": "application/json"})
        talk.append(json.load(line.getresponse())["choices"][0]["message"])
    print("done", flush=True)
"""


async def measure(model: str, rollouts: int, turns: int, context: int, messages: int) -> None:
    encoder = ChatEncoder(resolve_model(model))
    tokens = encoder.encode_completion("The sum of 12 and 30 is 42, " * 4, True)[:32]
    done = Completion(tokens, (-0.5,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")
    gateway = Gateway(encoder, (), {}, ServerLimits())
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *map(str, (turns, context, messages)), stdin=pipe, stdout=pipe
    )

    async def ask(asked: TurnAsked) -> Completion:
        return done

    class Environment:
        def __init__(self, prompt: Prompt, seed: int) -> None:
            pass

        async def play(self, agent: Any) -> Mapping[str, float]:
            assert client.stdin and client.stdout
            rollout = await gateway.open(talks_of(agent, encoder, stops=()))
            client.stdin.write(f"{gateway.url(rollout)}\n".encode())
            await client.stdout.readline()
            await gateway.shut(rollout)
            return {}

    async def play(count: int) -> float:
        began = time.process_time()
        for number in range(count):
            session = RolloutSession(number, ask, encoder.decode, limits=Limits(turns=turns))
            played = await session.play(Environment, Prompt("p", "?", (1,)), 0)
            assert isinstance(played, Played) and len(played.episode.turns) == turns, played
            lengths.append(sum(len(turn.context) + len(turn.completion.tokens) for turn in played.episode.turns))
        return (time.process_time() - began) / (count * turns)

    lengths: list[int] = []
    await play(min(10, rollouts))
    rounds = sorted([await play(rollouts // 5) for _ in range(5)])
    print(
        f"{1000 * rounds[2]:.2f} ms of CPU time a call (median of 5 rounds; {1000 * rounds[0]:.2f} to {1000 * rounds[4]:.2f}), "
        f"{lengths[-1]} tokens at the end"
    )
    client.stdin.close()  # type: ignore[union-attr]
    await client.wait()
    await gateway.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--messages", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.model, arguments.rollouts, arguments.turns, arguments.context, arguments.messages))
