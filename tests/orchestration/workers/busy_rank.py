"""A rank that decodes shares of a step in its main thread for some seconds, and says when it is done: `busy_rank.py FD SECONDS BEAT`."""

from __future__ import annotations

import socket
import sys
import threading
import time

import numpy as np

from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt
from headrace.processes.wire import WorkerEnd
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import received, shares_of


def batch_of(rows: int, tokens: int) -> Batch:
    """Rows with 16 tokens of a prompt of their own."""
    completion = tuple(range(tokens))
    made = tuple(
        Row((number,) * 16, completion, (-0.5,) * tokens, (0.5,) * tokens, (True,) * tokens, (0,) * tokens)
        for number in range(rows)
    )
    return Batch(0, (Group(0, Prompt("p", "", (1,)), (), made),))


def main() -> None:
    descriptor, seconds, beat = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    end = WorkerEnd(socket.socket(fileno=descriptor))
    threading.Thread(target=end.beat, args=(beat,), daemon=True).start()
    frame = end.receive()
    assert frame
    end.reply(frame, None)
    (share,) = shares_of(batch_of(rows=64, tokens=8192), Dealing(budget=16384))
    blocks = list(share.blocks())
    until, decoded = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        given = received(share.head, blocks)
        decoded += sum(int(np.sum(roots[0].source.loss >= 0)) for roots in given.minibatches[0].microbatches)
    end.push("decoded", decoded)
    threading.Event().wait()


if __name__ == "__main__":
    main()
