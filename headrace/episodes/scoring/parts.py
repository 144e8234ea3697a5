"""One part of a reward: a function, a service or a judge, with its name and weight."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from headrace.core.batches import Failure
from headrace.core.errors import HeadraceError
from headrace.core.types import Episode, Prompt, Struct
from headrace.durable.atomic_files import AppendFile, read_lines, replace_file
from headrace.durable.journal import Damage
from headrace.episodes.scoring.extract import Extractor, Form, segmented
from headrace.episodes.scoring.job import Ask, Effort, ScoringJob, Values, transcript_of
from headrace.facts.facts import ScorerAsked
from headrace.facts.telemetry import Telemetry

# --- `scores.jsonl`
# The scores of services and judges, as they come, so that a run that is killed does not ask (and pay) for them again.
#
# One JSON line per record, `{"sum": checksum, "record": {...}}`. A line that has changed would give a group another reward, so it is not used.
#
# A group with several scorers may wait for one of them for minutes after the others have answered. Once all have, the group is in the journal
# and its records here are of no use: they are removed when the file has grown.


SCORES = "scores.jsonl"
LARGEST = 4 << 20
"""Bytes after which the file is written anew with the newest records."""
NEWEST = 1024
"""Records that it keeps then: more than the scorers of all groups in flight have."""


class ScoreRecord(Struct, frozen=True):
    """The scores that one scorer gave a group."""

    key: str
    """A digest of the scorer and of all that it was asked."""
    values: list[float | tuple[float, ...] | Failure | None]


_HEAD = re.compile(rb'\{"sum":"([0-9a-f]{16})","record":')
_decode = msgspec.json.Decoder(ScoreRecord).decode


def _line(record: ScoreRecord) -> bytes:
    body = msgspec.json.encode(record)
    return b'{"sum":"%s","record":%s}' % (_sum(body), body)


def _read(line: bytes) -> ScoreRecord | None:
    """Returns None if the line is not as it was written."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}"):
        return None
    body = line[head.end() : -1]
    try:
        return _decode(body) if head[1] == _sum(body) else None
    except msgspec.MsgspecError:
        return None


def _sum(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode()


class ScoreLog:
    """Records nothing before `open`, so that a run that is refused until then leaves its directory as it was."""

    def __init__(self, marks: dict[str, Any]) -> None:
        """`marks`: the settings of each scorer, by its name. Scores given under others are not used."""
        self._marks = dict(marks)
        self._records: dict[str, ScoreRecord] = {}
        self._earlier: dict[str, ScoreRecord] = {}
        """Records of an earlier process. Each is used once: what comes again is asked again."""
        self._path: Path | None = None
        self._warn: Callable[[str], None] = lambda message: None
        self._file: AppendFile | None = None
        self._size = 0

    def open(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Reads what an earlier process of the run recorded, and warns of damaged lines, which are removed. If the disk cannot be written, it
        warns, and records no more."""
        self._path, self._warn = run_dir / SCORES, warn
        damage = Damage()
        for number, line in enumerate(read_lines(self._path), 1):
            if record := _read(line):
                self._records[record.key] = self._earlier[record.key] = record
            else:
                damage.add(f"line {number}", "is damaged")
        if damage:
            warn(f"{self._path}: {damage}: these scores are not used; their groups are scored again")
        self._guarded(self._write_anew)

    def find(self, scorer: str, job: ScoringJob) -> Values | None:
        """Returns the scores that an earlier process recorded; None if there are none."""
        record = self._earlier.pop(self._key(scorer, job), None)
        return record.values if record else None

    def keep(self, scorer: str, job: ScoringJob, values: Values) -> None:
        """Records scores. If one of them failed, the group is asked about again after a kill."""
        if self._file is None or any(isinstance(value, Failure) for value in values):
            return
        record = ScoreRecord(self._key(scorer, job), values)
        self._records.pop(record.key, None)  # the newest is the last
        self._records[record.key] = record
        line = _line(record)
        self._guarded(lambda: self._append(line))

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        self._size += len(line) + 1
        if self._size > LARGEST:
            self._write_anew()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except HeadraceError as error:
            self.close()
            self._warn(
                f"{error}: scores of services and judges are not recorded any more, so a run that is killed asks for them again"
            )

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _write_anew(self) -> None:
        assert self._path is not None
        self.close()
        self._records = dict(list(self._records.items())[-NEWEST:])
        lines = b"".join(_line(record) + b"\n" for record in self._records.values())
        if lines or self._path.exists():
            replace_file(self._path, lines, flush=False)
        self._file, self._size = AppendFile(self._path), len(lines)

    def _key(self, scorer: str, job: ScoringJob) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode((scorer, self._marks.get(scorer, ""), job)))


# --- Comparisons of two completions become rewards
# The share of the others that a completion is better than.
#
# Every two completions of a group are compared once. Which of them stands first is drawn from a digest of what is compared, so that the
# preference of a judge for the first or the second place falls on all alike, and a comparison that is repeated is the same comparison.


Pair = tuple[int, int]
"""The numbers of two completions: the first and the second place."""


def shuffled_by(key: str, items: Sequence[Any]) -> list[Any]:
    """Returns the items in an order that depends on `key` and their number alone."""
    return [item for _, item in sorted((_digest(f"{key}/{place}"), item) for place, item in enumerate(items))]


def key_of(job: ScoringJob) -> str:
    """Returns a digest of what is judged."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode((job.prompt, job.completions)))


def pairs_of(job: ScoringJob) -> list[Pair]:
    """Returns every two completions with different texts, each pair in the order in which it is compared."""
    key, texts = key_of(job), job.completions
    both = [(i, j) for i, j in itertools.combinations(range(len(texts)), 2) if texts[i] != texts[j]]
    return [(i, j) if _digest(f"{key}/{i}/{j}") & 1 else (j, i) for i, j in both]


def win_rates(count: int, pairs: Sequence[Pair], values: Values) -> Values:
    """Returns each completion's share of its comparisons with all others that it won; a tie counts half, and so does an equal text, which
    is not compared. `values`: 1 where the first of a pair is better, 0 where the second is, 0.5 for a tie. A comparison that failed fails both.
    """
    if count < 2:
        return [
            Failure("nothing_to_compare", "the group has one completion to compare, because the others failed")
        ] * count
    won = [0.5 * (count - 1)] * count  # as if all were ties
    failed: dict[int, Failure] = {}
    for (first, second), value in zip(pairs, values, strict=True):
        if not isinstance(value, float) or not 0 <= value <= 1:
            why = value if isinstance(value, Failure) else Failure("reward_out_of_range", _out_of_range(value))
            failed |= {first: why, second: why}
            continue
        won[first] += value - 0.5
        won[second] += 0.5 - value
    return [failed.get(i, won[i] / (count - 1)) for i in range(count)]


def compared(ask: Ask) -> Ask:
    """Makes rewards out of comparisons. `ask` gets a job with `rivals`."""

    async def call(job: ScoringJob, effort: Effort) -> Values:
        pairs = pairs_of(job)
        values: Values = []
        if pairs:
            values = await ask(of_pairs(job, pairs), effort)
        return win_rates(len(job.completions), pairs, values)

    return call


def of_pairs(job: ScoringJob, pairs: Sequence[Pair]) -> ScoringJob:
    """Returns the job of the comparisons."""
    first, second = (tuple(job.completions[pair[place]] for pair in pairs) for place in (0, 1))
    return msgspec.structs.replace(job, completions=first, rivals=second, completion_tokens=(), transcripts=())


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _out_of_range(value: Any) -> str:
    return f"a comparison gave {value!r:.60}; it gives 1 if the first is better, 0 if the second is, and 0.5 for a tie"


# --- part ------------------------------------------------------------


Begun = Callable[[Episode], bool]
"""Whether the last completion of an episode begins within the model's thinking, which its template has opened."""


def _never(episode: Episode) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    name: str
    weight: float
    ask: Ask
    extract: Extractor = Extractor()
    segments: str = ""
    """The text that ends a step, if each step gets a score; else empty."""
    form: Form = "sum"
    what: str = "function"
    """`function`, `service` or `judge`, for messages."""
    kept: bool = False
    """Whether its scores are recorded, so that a resumed run does not ask for them again."""

    def job(self, prompt: Prompt, episodes: Sequence[Episode], begun: Begun = _never) -> ScoringJob:
        talks = tuple(transcript_of(episode) for episode in episodes)
        steps = [segmented(episode, self.segments) for episode in episodes] if self.segments else []
        return ScoringJob(
            prompt=prompt.text,
            completions=tuple(self.extract(episode.last, begun(episode)) for episode in episodes),
            completion_tokens=tuple(episode.last.tokens for episode in episodes),
            columns=prompt.columns,
            chat=prompt.chat,
            transcripts=talks if any(talks) else (),
            segments=tuple(tuple(step for turn in turns for step in turn) for turns in steps),
        )


class PartCaller:
    """Calls the parts of a run: names the wait, records what it took, and keeps the scores that cost something."""

    def __init__(self, telemetry: Telemetry | None = None, log: ScoreLog | None = None, begun: Begun = _never) -> None:
        self._telemetry, self._log, self._begun = telemetry, log, begun

    async def call(self, part: RewardPart, prompt: Prompt, episodes: Sequence[Episode]) -> Values:
        job = part.job(prompt, episodes, self._begun)
        log = self._log if part.kept else None
        if log and (known := log.find(part.name, job)) is not None:
            return known
        values = await self._timed(part, job)
        if log:
            log.keep(part.name, job, values)
        return values

    def close(self) -> None:
        if self._log:
            self._log.close()

    async def _timed(self, part: RewardPart, job: ScoringJob) -> Values:
        telemetry, effort = self._telemetry, Effort()
        if telemetry is None:
            return await part.ask(job, effort)
        began = telemetry.clock()
        async with AsyncExitStack() as stack:
            if part.what != "function":  # a function has a deadline of its own, and its calls are many and short
                await stack.enter_async_context(telemetry.waits.named("scoring", f"the {part.what} {part.name}"))
            values = await part.ask(job, effort)
        telemetry.record(_fact(telemetry.clock(), part, values, effort, began))
        return values


def _fact(now: float, part: RewardPart, values: Values, effort: Effort, began: float) -> ScorerAsked:
    return ScorerAsked(
        t=now,
        scorer=part.name,
        what=part.what,
        completions=len(values),
        seconds=now - began,
        waited=effort.waited,
        attempts=effort.attempts,
        retries=effort.retries,
        tokens=effort.tokens,
        failures=dict(Counter(value.reason for value in values if isinstance(value, Failure))),
    )
