"""The exceptions, by who can fix the cause. Every message says what happened and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headrace.core.printing import printable


class HeadraceError(Exception):
    """The base of all exceptions that headrace raises on purpose. The command line prints the message without a traceback. Messages quote
    texts of users; where the interpreter prints one, a terminal obeys nothing in it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(HeadraceError, ValueError):
    """The user's input cannot work: unknown key, missing file, impossible pair. It is raised before compute is spent."""


class IdentityError(HeadraceError):
    """The engine holds other weights than were published, and refuses to serve them, or it computes another policy with them (C3)."""


class WorkerDied(HeadraceError):
    """A worker process ended without being asked to."""

    def __init__(self, who: str, how: str) -> None:
        super().__init__(f"the {who} process {how}")
        self.who, self.how = who, how


class UnexpectedError(HeadraceError):
    """A worker has failed in a way that nobody foresaw. The message is its traceback, for a log and no client."""

    @property
    def headline(self) -> str:
        """The exception, without where it was raised."""
        return str(self).strip().rpartition("\n")[2]


class RankUnreachable(HeadraceError):
    """A rank of the trainer does not reach another one, which has died or lost its network."""


class PoisonedRequest(HeadraceError):
    """A request was given up: process after process died while it worked on the request's ticket (`engine.ticket_deaths`)."""


class StalledError(HeadraceError):
    """A wait passed its second deadline (C6). The message says who waited for what, and for how long."""


class TrainingError(HeadraceError):
    """Training cannot continue: several non-finite gradients in a row, an engine that keeps dying, ..."""


class RunPaused(TrainingError):
    """Too many rollouts failed. A checkpoint was written: fix what the message names, then resume the run."""


class CheckpointError(HeadraceError):
    """A checkpoint could not be written or read. The message names the last good one."""


class StopTraining(Exception):
    """Raised by the user's `on_step` or `on_evaluation`. The run ends as with Ctrl-C: after the current step, with a checkpoint. This is no
    error: `train` returns the result, with `reason` "interrupted"."""


class RolloutOver(Exception):
    """Raised into an environment that asks for a turn which its rollout cannot have. Whatever the environment does with it, the rollout
    has failed, for the reason that it carries."""


class RolloutFailed(Exception):
    """Raised by an environment whose rollout has failed for a reason that it knows: the fields of `batches.Failure`."""

    def __init__(self, reason: str, detail: str, traceback: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail, self.traceback = reason, detail, traceback


def encodable(text: str) -> str:
    """Returns the text with half characters (lone surrogates) written as `\\ud800`: UTF-8 cannot hold them, and so neither can a journal, a
    frame or a terminal."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def first_error(group: BaseException) -> BaseException:
    """The exception of a group that the user should read: the first of our own, else the first of all."""
    leaves = _leaves(group)
    return next((leaf for leaf in leaves if isinstance(leaf, HeadraceError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `; did you mean x?` with names that are similar; empty if none is."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
