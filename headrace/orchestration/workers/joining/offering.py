"""A worker that offers itself to a run: it finds the controller, and ends with a sentence, or offers itself again."""

from __future__ import annotations

import os
import sys
import time

from headrace.errors import ConfigError
from headrace.orchestration.workers.joining.dial import RunOver, dial
from headrace.orchestration.workers.joining.greeting import ADDRESS, AGAIN, CA, MODEL, PATIENCE, TOKEN, Kind
from headrace.orchestration.workers.joining.same_model import agree
from headrace.orchestration.workers.wire import WorkerEnd

LOST, REFUSED = 1, 2
"""Exit codes: the connection broke, so that it may be worth trying again; the run does not take this worker as it is."""

RETRY = 1.0
"""Seconds between two attempts to reach the controller."""

_again: dict[str, str] = {}
"""The environment with which this process begins anew when its run has ended; empty if it ends then."""


def offer(address: str, kind: Kind) -> WorkerEnd:
    """Returns when this worker has a seat. It tries for some time to reach the controller, which may not have started yet."""
    if AGAIN in os.environ:
        _again.update(os.environ)
    token, ca, model, here = (os.environ.pop(name, "") for name in (TOKEN, CA, MODEL, ADDRESS))
    deadline = time.monotonic() + float(os.environ.pop(PATIENCE, "0"))
    while True:
        try:
            end = dial(address, kind, token, ca=ca, address_here=here, agree=lambda terms: agree(terms, model))
            print(f"headrace: {kind} of the run at {address}", file=sys.stderr, flush=True)
            return end
        except RunOver as over:
            _end(0, str(over))
        except ConfigError as error:
            _again.clear()
            _end(REFUSED, str(error))
        except OSError as error:
            if time.monotonic() > deadline:
                _again.clear()
                _end(LOST, f"the controller at {address} cannot be reached: {error}")
            time.sleep(RETRY)


def released() -> None:
    _end(0, "the run needs this worker no more")


def left_alone() -> None:
    _end(LOST, "the connection to the controller has ended")


def _end(code: int, why: str) -> None:
    """Ends the process from any of its threads, or begins it anew: what libraries hold of a run (process groups, devices) ends with it."""
    print(f"headrace: {why}", file=sys.stderr, flush=True)
    if _again:
        os.execve(sys.executable, sys.orig_argv, _again)
    os._exit(code)
