"""CPU time of the controller's loop for a pass of an engine, by the passes that a message brings (`run/worker/engine_loop.py`). One run, one
thread; the channel, the pass log and the books of requests are those of a run: one book for one engine, two for a fleet of them.

    python benchmarks/pass_messages.py --rows 128 --passes 600
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from headrace.core.steps import StepOutput, merged
from headrace.durable.pass_log import PassLog
from headrace.engine.request_book import RequestBook
from headrace.processes.wire import Channel, Frame, pack, pack_payload, unpack
from headrace.testing.makers import request

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The log is written there: how fast a disk is, is another question."""


async def measure(rows: int, passes: int, together: int, fleet: bool) -> float:
    """Returns the seconds of the loop's thread for each pass."""
    names = tuple(f"t{1000 + row // 8}/{row % 8}" for row in range(rows))
    book, log, read, done = RequestBook(), PassLog(Path(tempfile.mkdtemp(dir=MEMORY)), 0, print), 0, asyncio.Event()
    of_fleet = RequestBook()
    for name in names:
        book.enter(request(name, (1, 2), 1 << 20))
        of_fleet.enter(request(name, (1, 2), 1 << 20))

    def in_fleet(output: StepOutput) -> None:
        """The fleet's part (`engine/fleet/dispatch.py`): whom it concerns, the log, and its own book."""
        assert all(version >= 3 for _, version in output.versions_of_requests()) and {*output.requests} <= known
        of_fleet.publish(output)
        of_fleet.enter_output(output)

    known = set(names)
    (of_fleet if fleet else book).listen(log.write)
    if fleet:
        book.listen(in_fleet)

    def heard(method: str, payload: msgspec.Raw) -> None:
        nonlocal read
        output = unpack(payload, StepOutput)
        book.publish(output)
        book.enter_output(output)
        read += output.token_count // rows
        if read == passes:
            done.set()

    chance = random.Random(0)
    outputs = [
        StepOutput(
            version=3,
            request_ids=names,
            tokens=tuple(chance.randrange(150_000) for _ in names),
            logprobs=tuple(-chance.random() for _ in names),
            kv_versions=(3,) * rows,
        )
        for _ in range(passes)
    ]
    groups = [merged(outputs[start : start + together]) for start in range(0, passes, together)]
    frames = [pack(Frame(0, "output", pack_payload(group), number=number)) for number, group in enumerate(groups)]
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
    for fleet in (False, True):
        alone = min(asyncio.run(measure(given.rows, given.passes, 1, fleet)) for _ in range(3))
        for together in (1, 3, 6):
            spent = min(asyncio.run(measure(given.rows, given.passes, together, fleet)) for _ in range(3))
            print(
                f"{'fleet' if fleet else 'engine'}, {given.rows} rows, {together} passes a message: {spent * 1e6:.0f} us a pass, "
                f"{alone / spent:.2f} times as many; {0.5 / (64 * spent):.0f} engines of 64 passes a second on half a core"
            )


if __name__ == "__main__":
    main()
