"""The contender's end of engine.py: loads an engine once, then runs every load that comes in on stdin. Standard library only.

One JSON line in: a `Load`. One JSON line out: a `Done`, or {"error": ...}. What libraries print goes to stderr, the log.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from engine_loads import Load


@dataclass(frozen=True)
class Done:
    seconds: float
    """Seconds from the first request added to the last one finished."""
    tokens: int
    """Sampled tokens."""
    logprob: float | None = None
    """Mean log-prob of the sampled tokens. It agrees between contenders that sample from the same distribution."""
    notes: dict[str, str] = field(default_factory=dict)


Run = Callable[[Load], Done]


def done(load: Load, seconds: float, logprobs: Sequence[Sequence[float]], **notes: str) -> Done:
    """Makes the result. `logprobs`: for every request, those of its sampled tokens. Refuses a run in which a token is
    missing."""
    lengths, wanted = sorted(map(len, logprobs)), sorted(ask.tokens for ask in load.asks)
    if lengths != wanted:
        raise RuntimeError(
            f"{sum(lengths)} tokens of {len(lengths)} requests, {sum(wanted)} of {len(wanted)} were asked for"
        )
    mean = sum(map(sum, logprobs)) / load.tokens
    if not math.isfinite(mean):
        raise RuntimeError("a log-prob is not finite")
    return Done(seconds, load.tokens, mean, notes)


def serve(start: Callable[[list[str]], Run]) -> None:
    """Serves loads. `start` gets the command line's arguments and returns the function that runs one load."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began = time.perf_counter()
    run = start(sys.argv[1:])
    print(json.dumps({"start_seconds": time.perf_counter() - began}), file=channel)
    for line in sys.stdin:
        try:
            said = asdict(run(Load.from_json(line)))
        except Exception as error:  # one load that an engine cannot do does not take the others from it
            traceback.print_exc()
            said = {
                "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            }
        print(json.dumps(said), file=channel)
