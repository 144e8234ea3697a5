"""CPU time of the controller's loop for a pass of an engine, by the passes that a message brings (`run/worker/engine_loop.py`) and the engines
that send. The channels, the pass log and the books of requests are those of a run: one book for one engine, and one more for a fleet
(`engine/fleet/dispatch.py`). Another process sends, as fast as the loop reads: at that load a loop finds several messages whenever it looks.

    python benchmarks/pass_messages.py --rows 128 --passes 4800 [--ends 2048]

`--ends N`: a request ends after about N tokens, and another takes its row: the rows of an engine change with each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import tempfile
import time
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from headrace.core.steps import Finished, LabelledRows, StepOutput, TokenRuns, encoded
from headrace.durable.pass_log import PassLog
from headrace.engine.fleet.dispatch import Requests
from headrace.engine.fleet.member import Attempt, Member
from headrace.engine.request_book import Pending, RequestBook
from headrace.processes.wire import Channel, Frame, pack, pack_payload, unpack
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The log is written there: how fast a disk is, is another question."""


def messages(engine: int, rows: int, passes: int, together: int, ends: int) -> list[StepOutput]:
    """Those of one engine. Where a request ends, the message is sent, and another one begins in its row."""
    chance, numbers = random.Random(engine), count()
    names = [f"t{1000 * engine + row // 8}/{row % 8}" for row in range(rows)]
    tokens = array("i", (chance.randrange(150_000) for _ in range(rows * together)))
    logprobs = array("d", (-chance.random() for _ in range(rows * together)))
    made, left = list[StepOutput](), passes
    while left > 0:
        size = min(left, together)
        finished: tuple[Finished, ...] = ()
        if ends and (until := int(chance.expovariate(rows / ends))) < size:
            size, gone = max(1, until), chance.randrange(rows)
            finished = (Finished(names[gone], "length"),)
        labels = encoded(LabelledRows(tuple(names), (3,) * rows, (3,) * rows))
        runs = TokenRuns(labels, size, tokens[: rows * size].tobytes(), logprobs[: rows * size].tobytes())
        made.append(StepOutput(3, finished=finished, runs=runs))
        left -= size
        if finished:
            names[gone] = f"t{1000 * engine + 500 + next(numbers)}/0"
    return made


class Controller:
    """What a run has of one engine, or of a member of a fleet."""

    def __init__(self, log: PassLog, fleet: Requests | None, member: Member | None, names: list[str]) -> None:
        self._book, self._fleet, self._member = RequestBook(), fleet, member
        self._pending = dict[str, Pending]()
        self._book.listen(log.write if fleet is None or member is None else lambda output: fleet.heard(member, output))
        for name in names:
            self._enter(name)

    def _enter(self, name: str) -> None:
        asked = request(name, (1, 2), 1 << 20)
        self._pending[name] = self._book.enter(asked)
        if self._fleet and self._member:
            pending = self._pending[name] = self._fleet.book.enter(asked)
            self._member.attempts[name] = Attempt(pending=pending, member=self._member, floor=3, group=0, had=0)

    def heard(self, output: StepOutput, following: Callable[[], str]) -> None:
        self._book.publish(output)
        self._book.enter_output(output)
        for end in output.finished:
            self._pending.pop(end.request_id).so_far()
            self._book.leave(end.request_id)
            if self._fleet and self._member:
                self._fleet.book.leave(end.request_id)
                del self._member.attempts[end.request_id]
                self._member.known_rows = b""
            self._enter(following())


async def measure(engines: int, rows: int, passes: int, together: int, fleet: bool, ends: int) -> tuple[float, int]:
    """Returns the seconds of the loop's thread for each pass, and the bytes of the messages."""
    log, read, done = PassLog(Path(tempfile.mkdtemp(dir=MEMORY)), 0, print), 0, asyncio.Event()
    members = [Member(name=str(engine), engine=FakeEngine()) for engine in range(engines)]
    of_fleet = Requests(members, lambda member, why: print(why), print) if fleet else None
    if of_fleet:
        of_fleet.book.listen(log.write)
    each = passes // engines
    sent = [messages(engine, rows, each, together, ends) for engine in range(engines)]
    frames = [[pack(Frame(0, "output", pack_payload(one), number=i)) for i, one in enumerate(made)] for made in sent]
    ours, theirs = zip(*(socket.socketpair() for _ in range(engines)), strict=True)
    channels = []
    for engine in range(engines):
        names = list(sent[engine][0].requests)
        controller = Controller(log, of_fleet, members[engine], names)
        numbers = count()

        def heard(
            _: str, payload: msgspec.Raw, to: Controller = controller, of: int = engine, next_one: count[int] = numbers
        ) -> None:
            nonlocal read
            output = unpack(payload, StepOutput)
            to.heard(output, lambda: f"t{1000 * of + 500 + next(next_one)}/0")
            read += output.token_count // rows
            if read == each * engines:
                done.set()

        channel = Channel("engine", heard, print)
        channel.open(*await asyncio.open_connection(sock=ours[engine], limit=1 << 24))
        channels.append(channel)
    if not (child := os.fork()):
        for turn in range(max(map(len, frames))):
            for made, end in zip(frames, theirs, strict=True):
                if turn < len(made):
                    end.sendall(made[turn])
        os._exit(0)
    started = time.thread_time()
    await done.wait()
    spent = time.thread_time() - started
    os.waitpid(child, 0)  # noqa: ASYNC222 (it has ended)
    for channel in channels:
        await channel.close()
    return spent / (each * engines), sum(len(frame) for made in frames for frame in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--passes", type=int, default=4800)
    parser.add_argument("--ends", type=int, default=0)
    given = parser.parse_args()
    for fleet, engines in ((False, 1), (True, 2), (True, 32)):
        for together in (1, 6):
            found = [
                asyncio.run(measure(engines, given.rows, given.passes, together, fleet, given.ends)) for _ in range(3)
            ]
            spent, size = min(found)
            print(
                f"{engines} {'of a fleet' if fleet else 'engine'}, {given.rows} rows, {together} passes a message: {spent * 1e6:.1f} us a pass, "
                f"{size / given.passes / given.rows:.1f} B a token; {0.5 / (64 * spent):.0f} engines of 64 passes a second on half a core"
            )


if __name__ == "__main__":
    main()
