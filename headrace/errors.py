"""What can go wrong, by who can mend it. Every message says what happened and what to do about it."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of everything headrace raises on purpose. The command line prints its message without a traceback."""


class ConfigError(HeadraceError, ValueError):
    """The user's input cannot work: unknown key, missing file, impossible pair. Raised before compute is spent."""


class IdentityError(HeadraceError):
    """The engine holds other weights than were published (C3), and refuses to serve them; or it computes another policy with them."""


class WorkerDied(HeadraceError):
    """A worker process ended without being asked to."""

    def __init__(self, who: str, how: str) -> None:
        super().__init__(f"the {who} process {how}")
        self.who, self.how = who, how


class StalledError(HeadraceError):
    """A wait passed its second deadline (C6). The message says who waited for whom, and for how long."""


class TrainingError(HeadraceError):
    """Training cannot go on: non-finite gradients several times in a row, an engine that keeps dying, ..."""


class RunPaused(TrainingError):
    """Too many rollouts failed for training to go on like this. A checkpoint was written: mend what the message names, then resume."""


class CheckpointError(HeadraceError):
    """A checkpoint could not be written or read. The message names the last good one."""


class StopTraining(Exception):
    """Raised by a function of the user's that is called after steps or evaluations: the run is left as by Ctrl-C, after the step
    that is under way and with a checkpoint. No error: the run ends as `interrupted`, and returns what it came to."""


class RolloutOver(Exception):
    """Raised into an environment that asks for a turn which its rollout cannot have. Whatever the environment does with it, the rollout
    has failed, for the reason that it carries."""


def first_error(group: BaseException) -> BaseException:
    """What a person should read of an exception group: our own error if there is one, else the first."""
    leaves = _leaves(group)
    return next((leaf for leaf in leaves if isinstance(leaf, HeadraceError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
