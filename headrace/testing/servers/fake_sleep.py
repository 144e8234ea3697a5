"""The sleep of vLLM 0.32, over an engine of headrace: the states of its memory and what depends on them, without any memory.

As in `v1/engine/core.py` and `v1/executor/abstract.py`: falling asleep pauses the scheduler and clears the caches, a part of the memory may be taken
back alone, and the scheduler goes on as soon as all of it is there, whatever the weights hold. A server that was started without the mode
goes through the same states, and frees nothing.
"""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.serve.serving import Serving
from headrace.web.errors import Refused
from headrace.web.sending import json_response

TAGS = ("weights", "kv_cache")


class FakeSleep:
    def __init__(self, serving: Serving, enabled: bool) -> None:
        """`enabled`: `--enable-sleep-mode`."""
        self._serving, self.enabled = serving, enabled
        self.told: list[str] = []
        """The changes that were asked for, for tests to look at."""
        self._asleep: set[str] = set()
        self._discarded = False
        """Whether the weights are those that level 2 left: any bytes."""
        self.no_room = False
        """Whether somebody else has the memory that it would take back."""

    async def sleep(self, request: HttpRequest) -> Response:
        given = request.query_params
        level, mode = given.get("level", "1"), given.get("mode", "abort")
        if set(given) - {"level", "mode"} or level not in ("0", "1", "2") or mode not in ("abort", "wait", "keep"):
            raise Refused(400, f"/sleep takes level (0, 1 or 2) and mode (abort, wait or keep): {given}")
        self.told.append(f"sleep {level}")
        await self._serving.pause(mode)
        if level != "0" and "weights" not in self._asleep:  # else "Executor is already sleeping."
            self._discarded = self._discarded or level == "2"
            self._asleep = set(TAGS)
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: HttpRequest) -> Response:
        tags = request.query_params.getlist("tags")
        self.told.append(" ".join(["wake", *tags]))
        if self.no_room and self._asleep:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145")
        if self._asleep.issuperset(tags):  # else "Tag ... is not in sleeping tags"
            self._asleep -= set(tags or TAGS)
        if not self._asleep:
            await self._serving.resume()
        return json_response({"status": "sleeping" if self._asleep else "awake", "tags": tags or None})

    async def is_sleeping(self, request: HttpRequest) -> Response:
        return json_response({"is_sleeping": bool(self._asleep or self._serving.paused)})

    def check_memory(self) -> None:
        """Raises where weights are written to memory that is not there: vLLM's process ends of it."""
        if "weights" in self._asleep:
            raise Refused(400, "weights are loaded while their memory is given back")

    def loaded(self) -> None:
        self._discarded = False

    def check_weights(self) -> None:
        """Raises where weights that were discarded would sample: vLLM returns tokens of whatever bytes are there. A request of a server that sleeps
        waits there, and a client of ours sends none."""
        if self._asleep or self._discarded:
            raise Refused(400, "a request reaches weights that are asleep, or were discarded and not loaded again")
