"""What the controller holds of tokens that are being sampled, and how long a checkpoint of them holds its event loop (CPU time of its thread).

    python benchmarks/live_tokens.py [--requests 4096] [--tokens 2048]

Prints the bytes of memory a token, the time of the turn in which a checkpoint takes what there is (`TokenStore.captured`), the longest turn of the
writing (`checkpoints.AT_ONCE`), and its time in all. Beside it, in the same run, the same transcripts made into completions and encoded in one
turn, as it was until November 2026.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
import tracemalloc
from pathlib import Path

import msgspec

from headrace.core.steps import StepOutput, merged
from headrace.core.types import Completion
from headrace.engine.request_book import RequestBook
from headrace.facts.facts import Accounting
from headrace.facts.machine_mark import cpu_model
from headrace.loop.buffer import BufferState
from headrace.loop.checkpoints import ControllerState, encoded_state, write_in_pieces
from headrace.loop.partial import TokensSoFar
from headrace.testing.makers import request

ROWS, TOGETHER = 128, 6


def sampled(requests: int, tokens: int) -> RequestBook:
    """A book of requests that have got their tokens as those of engines with 128 rows do, six passes a message."""
    book, chance = RequestBook(), random.Random(0)
    for start in range(0, requests, ROWS):
        names = tuple(f"t{row // 8}/{row % 8}" for row in range(start, min(requests, start + ROWS)))
        for name in names:
            book.enter(request(name, (1, 2), 1 << 20))
        count = len(names)
        for _ in range(tokens // TOGETHER):
            passes = [
                StepOutput(
                    version=3,
                    request_ids=names,
                    tokens=tuple(chance.randrange(150_000) for _ in names),
                    logprobs=tuple(-chance.random() for _ in names),
                    kv_versions=(3,) * count,
                )
            ] * TOGETHER
            book.enter_output(msgspec.msgpack.decode(msgspec.msgpack.encode(merged(passes)), type=StepOutput))
    return book


async def longest_turn(work: asyncio.Task[None]) -> float:
    """Returns the seconds of the longest turn of the loop until the work is done."""
    longest, before = 0.0, time.thread_time()
    while not work.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


async def measure(requests: int, tokens: int) -> None:
    live = requests * (tokens // TOGETHER) * TOGETHER
    book = sampled(requests, tokens)
    buffer = BufferState(requests, (), {}, Accounting(drawn=requests))
    state = ControllerState(3, 0.0, {}, buffer, {}, 0)

    began = time.thread_time()
    begun = {name: TokensSoFar(None, transcript) for name, transcript in book.unfinished(None).items()}
    pieces, taken = encoded_state(state, begun), time.thread_time() - began
    with tempfile.TemporaryDirectory() as directory:
        began = time.thread_time()
        work = asyncio.ensure_future(write_in_pieces(Path(directory) / "state", pieces))
        longest = await longest_turn(work)
        whole = time.thread_time() - began

    began = time.thread_time()
    at_once: dict[str, Completion] = {name: one.so_far() for name, one in book.unfinished(None).items()}
    msgspec.msgpack.encode(msgspec.structs.replace(state, begun=at_once))
    before = time.thread_time() - began
    print(
        f"{live / 1e6:.1f} million live tokens of {requests} requests on {cpu_model()}: taken in {taken * 1e3:.1f} ms, "
        f"longest turn of the writing {longest * 1e3:.1f} ms, {whole:.1f} s in all; in one turn, as before: {before * 1e3:.0f} ms"
    )


async def memory(requests: int, tokens: int) -> None:
    """Measured alone: what traces the memory slows down what comes after it too."""
    tracemalloc.start()
    book = sampled(requests, tokens)
    live = sum(len(transcript.sampled) for transcript in book.unfinished(None).values())
    print(f"{tracemalloc.get_traced_memory()[0] / live:.1f} B of memory a live token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    asyncio.run(measure(given.requests, given.tokens))
    asyncio.run(memory(given.requests, given.tokens))


if __name__ == "__main__":
    main()
