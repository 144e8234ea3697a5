"""What the controller holds of tokens that are being sampled, and of those of completions, and how long a checkpoint of them holds its event loop (CPU
time of its thread).

    python benchmarks/live_tokens.py [--requests 4096] [--tokens 2048]

Prints the bytes of memory a token, the time of the turn in which a checkpoint takes what there is (`TokenStore.captured`), the longest turn of the
writing (`checkpoints.AT_ONCE`), and its time in all. A hundred million live tokens take 3 GB here: --requests 12208 --tokens 8192.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
import tracemalloc
from array import array
from pathlib import Path

import msgspec

from headrace.core.steps import LabelledRows, StepOutput, TokenRuns, encoded
from headrace.engine.request_book import RequestBook
from headrace.facts.facts import Accounting
from headrace.loop.buffer import BufferState
from headrace.loop.checkpoints import ControllerState, encoded_state, write_in_pieces
from headrace.loop.partial import TokenStore
from headrace.native.arithmetic import cpu_model
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request

ROWS, TOGETHER = 128, 6


def sampled(requests: int, tokens: int) -> RequestBook:
    """A book of requests that have got their tokens as those of engines with 128 rows do, six passes a message."""
    book, chance = RequestBook(), random.Random(0)
    for start in range(0, requests, ROWS):
        names = tuple(f"t{row // 8}/{row % 8}" for row in range(start, min(requests, start + ROWS)))
        for name in names:
            book.enter(request(name, (1, 2), 1 << 20))
        rows = encoded(LabelledRows(names, (3,) * len(names), (3,) * len(names)))
        places = len(names) * TOGETHER
        drawn = array("i", (chance.randrange(150_000) for _ in range(places)))
        logprobs = array("d", (-chance.random() for _ in range(places)))
        runs = TokenRuns(rows, TOGETHER, drawn.tobytes(), logprobs.tobytes())
        message = msgspec.msgpack.encode(StepOutput(3, runs=runs))
        for _ in range(tokens // TOGETHER):
            book.enter_output(msgspec.msgpack.decode(message, type=StepOutput))
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
    book, engine = sampled(requests, tokens), FakeEngine()
    engine.unfinished = book.unfinished  # type: ignore[assignment]
    buffer = BufferState(requests, (), {}, Accounting(drawn=requests))
    state = ControllerState(3, 0.0, {}, buffer, {}, 0)

    store = TokenStore(engine)
    store.asked = {name: asyncio.get_running_loop().create_future() for name in book.ids}
    gc.collect()
    began = time.thread_time()
    begun = store.captured(book.ids)
    pieces, taken = encoded_state(state, begun), time.thread_time() - began
    with tempfile.TemporaryDirectory() as directory:
        began = time.thread_time()
        work = asyncio.ensure_future(write_in_pieces(Path(directory) / "state", pieces))
        longest = await longest_turn(work)
        whole = time.thread_time() - began

    print(
        f"{live / 1e6:.1f} million live tokens of {requests} requests on {cpu_model()}: taken in {taken * 1e3:.1f} ms, "
        f"longest turn of the writing {longest * 1e3:.1f} ms, {whole:.1f} s in all"
    )


async def memory(requests: int, tokens: int) -> None:
    """Measured alone: what traces the memory slows down what comes after it too."""
    tracemalloc.start()
    book = sampled(requests, tokens)
    unfinished = book.unfinished(None).values()
    live, held = sum(so_far.count for so_far in unfinished), tracemalloc.get_traced_memory()[0]
    completions = [so_far.completion() for so_far in unfinished]
    each = (tracemalloc.get_traced_memory()[0] - held) / live
    print(f"{held / live:.1f} B of memory a live token, {each:.1f} B one of {len(completions)} completions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    asyncio.run(measure(given.requests, given.tokens))
    asyncio.run(memory(given.requests, given.tokens))


if __name__ == "__main__":
    main()
