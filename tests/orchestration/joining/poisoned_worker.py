"""A worker whose engine ends it at every request of ticket 3, in place of `headrace worker`: the arguments are those of the worker's program."""

from __future__ import annotations

import os
import signal
from typing import Any

from headrace.core.types import Request, RolloutKey
from headrace.engine.kinds import core_class
from headrace.run.worker.worker import main

Native: Any = core_class("native")
add = Native.add


def poisoned(self: Any, request: Request) -> None:
    if (key := RolloutKey.read(request.id)) and key.ticket == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, request)


if __name__ == "__main__":
    Native.add = poisoned
    main()
