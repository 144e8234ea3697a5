"""CPU time of the controller's loop for a pass of an engine, by the passes that a message brings (`run/worker/engine_loop.py`). One run, one
thread; the channel, the log's listener and the book of requests are those of a run.

    python benchmarks/pass_messages.py --rows 128 --passes 600
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import threading
import time

import msgspec

from headrace.core.steps import StepOutput
from headrace.engine.request_book import RequestBook
from headrace.processes.wire import Channel, Frame, pack, pack_payload, unpack
from headrace.testing.makers import request


async def measure(rows: int, passes: int, together: int) -> float:
    """Returns the seconds of the loop's thread for each pass."""
    names = tuple(f"t{1000 + row // 8}/{row % 8}" for row in range(rows))
    book, read, done = RequestBook(), 0, asyncio.Event()
    for name in names:
        book.enter(request(name, (1, 2), 1 << 20))

    def enter(output: msgspec.Raw) -> None:
        nonlocal read
        book.publish(bytes(output))
        book.enter_output(unpack(output, StepOutput))
        read += 1
        if read == passes:
            done.set()

    def heard(method: str, payload: msgspec.Raw) -> None:
        for output in unpack(payload, list[msgspec.Raw]) if method == "outputs" else [payload]:
            enter(output)

    chance = random.Random(0)
    outputs = [
        pack_payload(
            StepOutput(
                3,
                names,
                tuple(chance.randrange(150_000) for _ in names),
                tuple(-chance.random() for _ in names),
                (3,) * rows,
            )
        )
        for _ in range(passes)
    ]
    groups = [outputs[start : start + together] for start in range(0, passes, together)]
    frames = [
        pack(
            Frame(
                0,
                "output" if together == 1 else "outputs",
                group[0] if together == 1 else pack_payload(group),
                number=n,
            )
        )
        for n, group in enumerate(groups)
    ]
    ours, theirs = socket.socketpair()
    channel = Channel("engine", heard, print)
    channel.open(*await asyncio.open_connection(sock=ours, limit=1 << 24))

    def send() -> None:
        for frame in frames:
            theirs.sendall(frame)
            time.sleep(0.002 * together)

    started = time.thread_time()
    thread = threading.Thread(target=send)
    thread.start()
    await done.wait()
    spent = time.thread_time() - started
    thread.join()
    await channel.close()
    theirs.close()
    return spent / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--passes", type=int, default=600)
    given = parser.parse_args()
    alone = min(asyncio.run(measure(given.rows, given.passes, 1)) for _ in range(3))
    for together in (1, 3, 6):
        spent = min(asyncio.run(measure(given.rows, given.passes, together)) for _ in range(3))
        engines = 0.5 / (64 * spent)
        print(
            f"{given.rows} rows, {together} passes a message: {spent * 1e6:.0f} us a pass, {alone / spent:.2f} times as many; "
            f"{engines:.0f} engines of 64 passes a second on half a core"
        )


if __name__ == "__main__":
    main()
