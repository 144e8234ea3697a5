"""The reason why a server ended, from its log: the exception that ended it may stand hundreds of lines above the last one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LENGTH = 300
"""Characters of a reason at most."""

_SPEAKER = re.compile(r"\((?P<who>[\w ]+ pid=\d+)\) ?")
_STAMP = re.compile(r"(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
"""The beginnings of vLLM's lines: the process, and the level, the time and the place in its source. A line may lack either."""
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_IN_GROUP = re.compile(r"\s+\| ?")
"""The beginning of each line in a group of exceptions."""
_EXCEPTION = re.compile(r"(?![A-Z]+:)[A-Za-z_][\w.]*(?:: .*)?$")
"""The last line of a traceback; not `INFO: ...`, which another thread may write between its lines."""
_FURTHER = "For further information visit"
_ARGUMENTS = re.compile(r"\S+: error: ")
"""A complaint of argparse about arguments, which has no traceback."""
_WORKS = "Avg generation throughput:"
"""vLLM writes this every ten seconds in which it has worked. What went wrong before such a line did not end it."""

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_IGNORED = "Exception ignored in"
_POINTS_ELSEWHERE = re.compile(
    r"EngineDeadError|(?:Engine core|WorkerProc) initialization failed|for the root cause|died unexpectedly|CancelledError|KeyboardInterrupt"
    r"|SystemExit|BrokenPipeError|ConnectionResetError|EOFError"
)
"""Exceptions in processes that lost another one, or were asked to end."""
_ANSWERED = "RequestValidationError"
"""The answer to a request without its fields, which a run sends to see whether the route is there."""
_NOTICES = re.compile(
    r"nanobind: |See https://nanobind| - leaked | - \.\.\. skipped|INFO\b|\w*Warning: |warnings\.warn|\S+:\d+: \w*Warning"
    r"|.*resource_tracker|Exception ignored|\s*$"
)
"""Lines that say nothing of the end of a process, though they may be its last."""


_NOT_LOADED = re.compile(
    r"\] (?:(?P<kind>\w+): Failed to load weights|Following weights were not loaded from checkpoint: (?P<names>.*))"
)
"""vLLM's warnings of an update that it has not applied as a whole (vLLM 0.32, `model_loader/reload/`). It answers with success all the same."""


def not_loaded(text: str) -> frozenset[str]:
    """Returns what vLLM warns of in this part of its log that it has not loaded: classes of modules, and names of parameters."""
    found: set[str] = set()
    for match in _NOT_LOADED.finditer(_COLOURS.sub("", text)):
        found.update([match["kind"]] if match["kind"] else re.findall(r"'([^']+)'", match["names"]))
    return frozenset(found)


@dataclass(frozen=True)
class _Line:
    who: str
    """The process that wrote it, where it says so."""
    level: str
    text: str


@dataclass
class _Traceback:
    """A traceback as far as it was read."""

    chained: bool
    """Whether its exception was raised while that of the one before was handled."""
    ignored: bool
    words: list[str] = field(default_factory=list)
    """Its exception, and the indented lines behind it, which belong to its message."""
    ended: bool = False

    def read(self, text: str) -> None:
        inside = text.startswith((" ", "\t"))
        if not self.words and not inside and _EXCEPTION.match(text):
            self.words.append(_short_name(text))
        elif self.words and not inside:
            self.ended = True
        elif self.words and not self.ended and not text.strip().startswith(_FURTHER):
            self.words.append(text.strip())


def raised(log: str) -> str:
    """Returns the exception that ended a server, or what it said of its arguments; empty if the log has neither.

    It is that of the first traceback which does not point to another process. Of exceptions that were raised while others were handled
    it is the last, which was written for the user."""
    lines = [_read(line) for line in log.rpartition(_WORKS)[2].splitlines()]
    for chain in _chains(lines):
        own = [one for one in chain if not _POINTS_ELSEWHERE.search(one) and _ANSWERED not in one]
        if own:
            return _cut(own[-1])
    return _cut(next((line.text for line in lines if _ARGUMENTS.match(line.text)), ""))


def last_line(log: str) -> str:
    """Returns the last line that is no notice; empty if there is none."""
    lines = [_read(line) for line in log.splitlines()]
    told = [line.text for line in lines if line.level in ("", "ERROR", "CRITICAL") and not _NOTICES.match(line.text)]
    return _cut(told[-1] if told else "")


def _read(line: str) -> _Line:
    rest, who, level = _COLOURS.sub("", line), "", ""
    if found := _SPEAKER.match(rest):
        who, rest = found["who"], rest[found.end() :]
    if found := _STAMP.match(rest):
        level, rest = found["level"], rest[found.end() :]
    if found := _IN_GROUP.match(rest):
        rest = rest[found.end() :]
    return _Line(who, level, rest.rstrip())


def _chains(lines: list[_Line]) -> Iterator[list[str]]:
    """Yields the exception of each traceback, with those that were raised while it was handled, in the order of their beginnings. Processes
    write at the same time, so each is read for itself."""
    begun: list[list[_Traceback]] = []
    open_by: dict[str, list[_Traceback]] = {}
    before: dict[str, str] = {}
    """The last line of each process that was not empty."""
    for line in lines:
        said = before.get(line.who, "")
        if line.text.strip() == _TRACEBACK:
            one = _Traceback(chained=said.startswith(_CHAINED), ignored=said.startswith(_IGNORED))
            if not (one.chained and line.who in open_by):
                begun.append([])
                open_by[line.who] = begun[-1]
            open_by[line.who].append(one)
        elif line.who in open_by:
            open_by[line.who][-1].read(line.text)
        if line.text:
            before[line.who] = line.text
    for chain in begun:
        yield [" ".join(one.words) for one in chain if one.words and not one.ignored]


def _short_name(exception: str) -> str:
    """The exception without the modules of its class: `a.b.Error: c` is `Error: c`."""
    name, colon, rest = exception.partition(":")
    return name.rpartition(".")[2] + colon + rest


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."
