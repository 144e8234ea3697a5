"""A worker that offers itself to a run: it finds the controller, and ends with a sentence."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from headrace.core.errors import ConfigError
from headrace.core.printing import say
from headrace.processes.joining.dial import RunOver, dial
from headrace.processes.joining.greeting import (
    ADDRESS,
    AGAIN,
    CA,
    LEAVING,
    MODEL,
    PATIENCE,
    TOKEN,
    Agreed,
    DoctorAnswer,
    DoctorQuestion,
    Kind,
    Terms,
)
from headrace.processes.wire import WorkerEnd

LOST, REFUSED, NOBODY = 1, 2, 3
"""Exit codes: the connection broke, so that it may be worth trying again; the run does not take this worker as it is; nobody was there for all
of its patience (only if it is started again and again)."""

RETRY = 1.0
"""Seconds between two attempts to reach the controller."""


def offer(
    address: str,
    kind: Kind,
    seated: Callable[[str], None],
    *,
    agree: Callable[[Terms, str], Agreed],
    examine: Callable[[DoctorQuestion], DoctorAnswer] | None = None,
) -> WorkerEnd:
    """Returns when this worker has a seat; `seated` is called with its session. `agree`: answers the terms of a run, given this machine's directory
    of the model; `examine`: answers the questions of `headrace doctor`. It tries for some time to reach the controller, which may not have started yet."""
    token, ca, model, here, again = (os.environ.pop(name, "") for name in (TOKEN, CA, MODEL, ADDRESS, AGAIN))
    deadline = time.monotonic() + float(os.environ.pop(PATIENCE, "0"))
    while True:
        try:
            end = dial(
                address,
                kind,
                token,
                ca=ca,
                address_here=here,
                agree=lambda terms: agree(terms, model),
                seated=seated,
                examine=examine,
            )
            say(f"{kind} of the run at {address}")
            return end
        except RunOver as over:
            _end(0, str(over))
        except ConfigError as error:
            _end(REFUSED, str(error))
        except OSError as error:
            if time.monotonic() > deadline:
                _end(NOBODY if again else LOST, f"the controller at {address} cannot be reached: {error}")
            time.sleep(RETRY)


def leave_when_asked(end: WorkerEnd) -> None:
    """Gives the seat back at SIGTERM, such as the notice of a spot machine. The run goes on elsewhere from all tokens that it has, and releases this
    worker. A second SIGTERM ends it at once."""
    asked = threading.Event()

    def ask(*given: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asked.set()

    def tell() -> None:
        asked.wait()
        say("SIGTERM: giving the seat back")
        end.push(LEAVING, None)

    signal.signal(signal.SIGTERM, ask)
    threading.Thread(target=tell, daemon=True).start()


def released() -> None:
    _end(0, "the run needs this worker no more")


def refuse(why: str) -> None:
    """This worker does not fit the run any more."""
    _end(REFUSED, why)


def left_alone() -> None:
    _end(LOST, "the connection to the controller has ended")


def _end(code: int, why: str) -> None:
    """Ends the process from any of its threads."""
    say(why)
    os._exit(code)
