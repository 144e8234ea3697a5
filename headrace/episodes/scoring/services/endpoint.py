"""One URL that gives scores: requests side by side, attempts with pauses between them, a deadline, and a reason for what failed.

A request may be repeated: it carries an `Idempotency-Key`, a digest of what is asked, so that a server that has answered already can
answer the same again.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import xxhash

from headrace.core.batches import Failure
from headrace.core.rewards import named_twice
from headrace.episodes.scoring.job import Effort, ScoringJob, Values, offered, read_values
from headrace.episodes.scoring.services.config import EndpointConfig, ServiceConfig
from headrace.web.limits import raise_open_files

if TYPE_CHECKING:
    import aiohttp


# --- One attempt to reach a server
# A JSON body is posted, an answer comes back, or none does.


LARGEST = 16 << 20
"""Bytes of an answer. More can be no list of scores, and would fill the controller's memory."""
CONNECT = 10.0
"""Seconds in which a connection must be made."""


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Names without regard to case."""
    body: bytes


class NoAnswer(Exception):
    """No answer of an endpoint came back, or not all of it. `late`: there was a connection, and the time was over."""

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Poster(Protocol):
    """The client of all services of a run. Its fake is `fake_service.ScriptedPost`."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> HttpAnswer:
        """Raises NoAnswer if no whole answer has come within `seconds`."""

    async def close(self) -> None: ...


class HttpPoster:
    """Protocol `Poster`, with aiohttp. Its connections belong to the event loop that the first attempt is made in."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> HttpAnswer:
        import aiohttp

        try:
            async with (
                asyncio.timeout(seconds),
                # A redirect is not followed: the token would go to a place that nobody named.
                self._open().post(url, data=body, headers=dict(headers), allow_redirects=False) as answer,
            ):
                found = bytearray()
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > LARGEST:
                        raise NoAnswer(f"{url} answers with more than {LARGEST >> 20} MiB")
                return HttpAnswer(answer.status, answer.headers, bytes(found))
        except TimeoutError:
            raise NoAnswer(f"{url} did not answer within {seconds:g} s", late=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{url}: {error or repr(error)}") from None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # Each endpoint limits its own requests; a limit here would silently make one scorer wait for another.
            raise_open_files()
            # Each request has a connection of its own: on one that is used again, a second answer to an earlier request is read as that to the next.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=True)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


# --- endpoint ------------------------------------------------------------


T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts: doubled after each. A server may ask for more."""
_PASSING = (408, 409, 425, 429)
"""Refusals that a later attempt may not meet, beside all of 5xx."""
_REFUSED = {
    401: "; name its token in token_file or token_env",
    403: "; name its token in token_file or token_env",
    404: "; correct the url",
    405: "; correct the url: it must take POST",
}


class BadAnswer(Exception):
    """An answer that is none, or holds no scores. `final`: asking again gives the same."""

    def __init__(self, reason: str, message: str, *, final: bool = False, wait: float = 0.0) -> None:
        """`wait`: the seconds that the server asks to wait."""
        super().__init__(message)
        self.reason, self.final, self.wait = reason, final, wait


class Endpoint:
    def __init__(self, config: EndpointConfig, path: str, poster: Poster) -> None:
        """`path` follows the config's url. Raises ConfigError if the token cannot be had."""
        self._config, self._url, self._poster = config, config.url + path, poster
        token = config.token()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._slots = asyncio.Semaphore(config.concurrency)

    async def ask(self, body: Any, read: Callable[[Any], T], effort: Effort) -> T | Failure:
        """Returns what `read` makes of the JSON of the first usable answer. `read` raises BadAnswer for one that is not."""
        packed, loop = msgspec.json.encode(body), asyncio.get_running_loop()
        asked = loop.time()
        async with self._slots:  # waiting here does not count towards the deadline
            effort.waited += loop.time() - asked
            return await self._attempts(packed, read, effort)

    async def _attempts(self, body: bytes, read: Callable[[Any], T], effort: Effort) -> T | Failure:
        key = xxhash.xxh3_64_hexdigest(body)
        headers = {**self._headers, "Idempotency-Key": key}
        clock, number = asyncio.get_running_loop().time, 0
        left = (
            self._config.deadline
        )  # counted down, so that the time in which this process was stopped (Ctrl-Z) is no part of it
        while True:
            number += 1
            effort.attempts += 1
            effort.retries += number > 1
            seconds, began = min(self._config.timeout, left), clock()
            try:
                return read(_json_of(await self._poster.post(self._url, body, headers, seconds), self._url))
            except NoAnswer as error:
                bad = BadAnswer("reward_timeout" if error.late else "reward_unreachable", str(error))
            except BadAnswer as error:
                bad = error
            left -= min(clock() - began, seconds)
            pause = max(_pause(key, number), bad.wait)
            if bad.final or number > self._config.retries:
                return Failure(bad.reason, f"{bad} (attempt {number})" if number > 1 else str(bad))
            if pause >= left:
                message = f"no usable answer within {self._config.deadline:g} s (deadline), after {number} attempts; the last: {bad}"
                return Failure("reward_timeout", message)
            await asyncio.sleep(pause)
            left -= pause


def _pause(key: str, number: int) -> float:
    """Seconds after attempt `number`: half of it, and up to half more by chance, so that many requests do not come back together.
    The chance is a digest: a run that is repeated waits as long."""
    whole = min(FIRST_PAUSE * 2 ** (number - 1), LONGEST_PAUSE)
    chance = xxhash.xxh3_64_intdigest(f"{key}/{number}".encode()) / 2**64
    return whole * (0.5 + 0.5 * chance)


def _json_of(answer: HttpAnswer, url: str) -> Any:
    """Raises BadAnswer for another status than 200, and for what is no JSON."""
    if answer.status != 200:
        raise _refusal(answer, url)
    try:
        found = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadAnswer("reward_bad_answer", f"{url} answers with what is not JSON: {_shown(answer.body)}") from None
    if twice := named_twice(answer.body):
        raise BadAnswer("reward_bad_answer", f"{url} answers with two values of {twice!r:.60}: {_shown(answer.body)}")
    return found


def _refusal(answer: HttpAnswer, url: str) -> BadAnswer:
    status, message = answer.status, f"{url} answers {answer.status}: {_shown(answer.body)}"
    if 300 <= status < 400:
        place = answer.headers.get("Location", "another place")
        return BadAnswer("reward_refused", f"{url} redirects to {place}; set url to that", final=True)
    if status in _PASSING or status >= 500:
        return BadAnswer("reward_unreachable", message, wait=_retry_after(answer.headers.get("Retry-After", "")))
    return BadAnswer("reward_refused", f"{message}{_REFUSED.get(status, '')}", final=True)


def _retry_after(value: str) -> float:
    """Reads seconds, or a date (RFC 9110, section 10.2.3); 0 for anything else."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _shown(body: bytes) -> str:
    text = " ".join(body[:400].decode(errors="replace").split())
    return repr(text if len(text) <= 120 else text[:117] + "...")


# --- A service that gives rewards
# The body that it is sent, and how its answer is read (docs/scoring.md).


class HttpService:
    """One request for each group. Its answer is `{"scores": [...]}`, in the order of the completions."""

    def __init__(self, config: ServiceConfig, poster: Poster) -> None:
        self._config, self._endpoint = config, Endpoint(config, "", poster)

    async def call(self, job: ScoringJob, effort: Effort) -> Values:
        body = {"scorer": self._config.name, **offered(job)}
        values = await self._endpoint.ask(body, lambda answer: _scores(answer, job), effort)
        return [values] * len(job.completions) if isinstance(values, Failure) else values


def _scores(answer: Any, job: ScoringJob) -> Values:
    """Raises BadAnswer unless every completion has a score (a number, or one for each segment), or an error of its own."""
    if not isinstance(answer, dict) or "scores" not in answer:
        raise BadAnswer("reward_bad_answer", f'the answer has no "scores": {answer!r:.120}')
    scores = answer["scores"]
    given = [_one(value) for value in scores] if isinstance(scores, list) else scores
    values = read_values(given, len(job.completions), [len(segment) for segment in job.segments])
    for value in values:
        if isinstance(value, Failure) and value.reason != "reward_failed":
            raise BadAnswer(value.reason, value.detail)
    return values


def _one(value: Any) -> Any:
    """A service may refuse single completions: `{"error": "why"}` in place of a score. It is data, and not asked for again."""
    if isinstance(value, dict) and value.keys() == {"error"}:
        return Failure("reward_failed", str(value["error"])[:300])
    return value
