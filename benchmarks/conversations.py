"""Rollouts of several turns over a KV cache that does not hold all of them: tokens forwarded and CPU time, with and without the gate of first turns.

    python benchmarks/conversations.py [--shares 0.6 0.4] [--conversations 12] [--turns 6]

A turn adds 64 tokens and samples 8, four sequences run at once, and the next turn is asked for at once. `--shares`: part of all tokens that
the cache holds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

import torch

from headrace.core.types import Completion, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.loop.openings import CacheSize, Openings
from headrace.models.resolve import resolve_model

ADDED, SAMPLED, RUNNING = 64, 8, 4


class Served:
    """An engine whose steps are made in the event loop."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._tokens: dict[str, list[int]] = {}
        self._done: dict[str, asyncio.Future[Completion]] = {}

    async def generate(self, request: Request) -> Completion:
        self._engine.add(request)
        self._tokens[request.id], self._done[request.id] = [], asyncio.get_running_loop().create_future()
        return await self._done[request.id]

    async def serve(self) -> None:
        while True:
            if self._engine.has_work():
                output = self._engine.step()
                for name, token in zip(output.request_ids, output.tokens, strict=True):
                    self._tokens[name].append(token)
                for finished in output.finished:
                    tokens = tuple(self._tokens[finished.request_id])
                    self._done[finished.request_id].set_result(Completion(tokens, (0.0,) * len(tokens), (), "length"))
            await asyncio.sleep(0)


async def conversation(number: int, turns: int, gate: Openings, served: Served) -> None:
    rng, history = random.Random(number), []
    for turn in range(turns):
        history += [rng.randrange(100, 40_000) for _ in range(ADDED)]
        sampling = Sampling(max_tokens=SAMPLED, ignore_eos=True, seed=100 * number + turn)
        async with gate.turn((number, 0), prompt=0, context=len(history), most=SAMPLED) as done:
            completion = await served.generate(Request(f"{number}.{turn}", tuple(history), sampling))
            done(completion)
        history += completion.tokens
    gate.close((number, 0))


async def play(engine: NativeEngine, gate: Openings, conversations: int, turns: int) -> None:
    served = Served(engine)
    serving = asyncio.ensure_future(served.serve())
    await asyncio.gather(*(conversation(number, turns, gate, served) for number in range(conversations)))
    serving.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.6, 0.4])
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Path(resolve_model("smollm2-135m-instruct"))
    parameters = parameters_from_dir(model, torch.bfloat16)
    longest = options.turns * (ADDED + SAMPLED)
    print("| cache, of all tokens | gate | forwarded | cached | CPU s |\n|---|---|---|---|---|")
    for share in options.shares:
        for gated in (False, True):
            tokens = int(options.conversations * longest * share)
            config = EngineConfig(
                device="cpu",
                dtype="bfloat16",
                kv_gib=tokens * 23_040 / 2**30,
                max_running=RUNNING,
                context_length=longest,
            )
            engine = NativeEngine(model, config)
            update = WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0)
            engine.swap(engine.prepare(update, parameters))
            size = CacheSize(tokens=engine.capabilities.kv_tokens if gated else 0, rows=RUNNING, longest=longest)
            started = time.process_time()
            asyncio.run(play(engine, Openings(size), options.conversations, options.turns))
            seconds, stats = time.process_time() - started, engine.stats()
            print(
                f"| {share:.0%} | {'yes' if gated else 'no'} | {stats.prompt_tokens:,} | {stats.prefix_hit_rate:.0%} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
