"""A run that is killed for real: the same pipeline as in `test_pipeline.py`, in a forked process that a SIGKILL ends."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.checks import RunHistory
from headrace.testing.faultsim.faults import Disk, Fault, until_done
from headrace.testing.faultsim.lives import Life

FINISHED, FAILED = 0, 9


def live(directory: Path, case: Case, number: int, kill: Fault | None) -> int:
    """Runs the `number`-th process of a run until it has finished, or until it kills itself. Its exit status, or minus the
    number of the signal."""
    pid = os.fork()
    if not pid:
        os._exit(_child(directory, case, number, kill))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _child(directory: Path, case: Case, number: int, kill: Fault | None) -> int:
    try:
        faults = [kill] if kill else []
        disk = Disk(directory, faults, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with disk.mounted() as path:
            life = Life(case, number, RunHistory(case.shape, remembers=False), disk, path)
            until_done(life.run(), disk)
        return FINISHED if life.finished else FAILED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return FAILED
