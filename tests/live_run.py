"""What tests do to a run that is under way, from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def when_step(directory: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Does something from outside as soon as the metrics show that step."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            metrics = directory / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count('"StepTrained"') >= step:
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread
