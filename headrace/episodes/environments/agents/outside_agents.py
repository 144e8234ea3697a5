"""The other side of `environment.kind = "gateway"`: takes rollouts of a run, on any machine, and plays each with a command.

The command is one that `environment.kind = "process"` could start: it is given the same, and its last line is its reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from headrace.core.errors import HeadraceError, RolloutFailed
from headrace.episodes.environments.agents.agent_process import (
    AgentProcess,
    Reaper,
    agent_variables,
    code_of,
    printed_reward,
)
from headrace.processes.joining.same_model import changed_code
from headrace.settings.paths import command_paths

WAIT = 25.0
"""Seconds for which the run is asked to wait for a rollout, before it is asked again."""
ALIVE = 20.0
"""Seconds between two looks at whether the run still wants a rollout whose command has not ended."""
TIMEOUT = 60.0
PATIENCE, AGAIN = 30.0, 0.5
"""Seconds for which a run that does not answer is asked again, and between two times: a connection may break, and the run goes on."""
ENDED = (401, 409)
"""Statuses of an end that comes once more."""
PASSING = (429, 500, 502, 503, 504)
"""Statuses of a run, or of a proxy before it, that may be others soon."""
_open = build_opener(ProxyHandler({})).open
"""Opens a URL directly: the user's proxies need not reach the run."""


class Answered(NamedTuple):
    status: int
    body: Any
    """None if there is none."""


def _ask(url: str, body: Mapping[str, Any] | None = None) -> Answered:
    """Posts the body, or gets the URL. Raises OSError if nobody is there."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with _open(Request(url, data, {"Content-Type": "application/json"}), timeout=TIMEOUT) as answer:
            said = answer.read()
            return Answered(answer.status, json.loads(said) if said else None)
    except HTTPError as error:
        return Answered(error.code, error.read().decode(errors="replace"))
    except (HTTPException, ValueError) as error:
        raise OSError(f"the connection broke, or somebody else answered: {error!r}") from None


def _was_refused(error: OSError) -> bool:
    """Whether nobody listened there, so that nothing has arrived."""
    return isinstance(error, URLError) and isinstance(error.reason, ConnectionRefusedError)


class OutsideAgents:
    def __init__(
        self,
        address: str,
        command: Sequence[str],
        at_once: int,
        say: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:
        """`address`: that of the run's gateway. `say`: receives a line for each rollout that has ended. `patience`: in seconds."""
        self._address, self._at_once, self._said, self._patience = address.rstrip("/"), at_once, say, patience
        self.why = ""
        """The reason why there are no more rollouts."""
        self._command = command_paths(command, Path.cwd())  # each process runs in a directory of its own
        self._code = code_of(self._command)
        self._reaper = Reaper()
        self._threads = ThreadPoolExecutor(max_workers=2 * at_once)

    async def play(self) -> int:
        """Plays rollouts until the run answers no more, and returns their number. Raises HeadraceError if there is no run at the address."""
        first = await self._take(patience=0.0)
        if isinstance(first, str):
            raise HeadraceError(f"{self._address.rsplit('/', 1)[0]} hands out no rollouts: {first}")
        try:
            return sum(await asyncio.gather(*(self._plays(first if n == 0 else None) for n in range(self._at_once))))
        finally:
            self._reaper.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _plays(self, lease: Mapping[str, Any] | None) -> int:
        count = 0
        while True:
            if lease is not None:
                await self._play(lease)
                count += 1
            taken = await self._take(self._patience)
            if isinstance(taken, str):
                self.why = taken
                return count
            lease = taken

    async def _take(self, patience: float) -> Mapping[str, Any] | str | None:
        """Returns a rollout; None if there was none for a while; the reason why there are no more."""
        try:
            answer = await self._surely(f"{self._address}/next", {"wait": WAIT}, patience)
        except OSError as error:
            return str(error)
        if answer.status in (200, 204):
            lease: Mapping[str, Any] | None = answer.body
            return lease
        return f"status {answer.status}: {answer.body}"

    async def _play(self, lease: Mapping[str, Any]) -> None:
        if problem := changed_code(self._code):
            refused = {"failed": f"its process was not started: {problem}"}
            self._said(f"{lease['id']}: {json.dumps(refused)}{await self._delivered(lease['end'], refused)}")
            return
        given = {name: lease[name] for name in ("prompt", "columns", "seed")}
        process = await AgentProcess.start(
            self._command,
            agent_variables(lease["environment"]),
            given=json.dumps(given).encode() + b"\n",
            directory="",
            reaper=self._reaper,
        )
        try:
            code = await self._ended(process, lease)
            end = None if code is None else self._end(process, code, lease["judged"])
        finally:
            await process.end(None)
        if end is None:
            self._said(f"{lease['id']}: the run has given it up")
            return
        self._said(f"{lease['id']}: {json.dumps(end)}{await self._delivered(lease['end'], end)}")

    async def _delivered(self, url: str, end: Mapping[str, Any]) -> str:
        """Returns what became of the end, if it did not arrive."""
        try:
            answer = await self._surely(url, end, self._patience)
        except OSError as error:
            return f" did not arrive: {error}"
        return "" if answer.status == 200 else f" came too late: {answer.body}"

    async def _ended(self, process: AgentProcess, lease: Mapping[str, Any]) -> int | None:
        """Returns the exit code; None if the run has given the rollout up before."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not (await asyncio.wait({ended}, timeout=ALIVE))[0]:
                with contextlib.suppress(OSError):
                    if (await self._asked(f"{lease['environment']['OPENAI_BASE_URL']}/models")).status == 401:
                        return None
            return ended.result()
        finally:
            ended.cancel()

    @staticmethod
    def _end(process: AgentProcess, code: int, judged: bool) -> Mapping[str, Any]:
        if code:
            return {"failed": f"its process {process.how(code)}"}
        try:
            return {} if judged else {"rewards": printed_reward(process.output)}
        except RolloutFailed as error:
            return {"failed": error.detail}

    async def _surely(self, url: str, body: Mapping[str, Any], patience: float) -> Answered:
        """Asks again for so many seconds. Raises OSError where nobody answers. What arrived although its answer was lost arrives again."""
        clock = asyncio.get_running_loop().time
        until, lost = clock() + patience, False
        while True:
            try:
                answer = await self._asked(url, body)
                if lost and answer.status in ENDED:
                    return Answered(
                        200, answer.body
                    )  # as far as anybody can tell, what is over was ended by what got no answer
                if answer.status not in PASSING or clock() >= until:
                    return answer
            except OSError as error:
                if clock() >= until:
                    raise
                lost = lost or not _was_refused(error)
            await asyncio.sleep(AGAIN)

    async def _asked(self, url: str, body: Mapping[str, Any] | None = None) -> Answered:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(_ask, url, body))
