"""Takes from a new process, before it runs code, all descriptors and rights that it does not need. Nothing here can be undone."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.episodes.sandbox.kernel import seccomp, syscalls
from headrace.episodes.sandbox.kernel.seccomp import hand_over
from headrace.episodes.sandbox.kernel.syscalls import drop_capabilities, end_with_parent
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits

CHANNEL = 3
"""The descriptor that is left beside the three standard ones."""
_GATE = 4
"""The one that is closed before code runs (`../kernel/seccomp.py`)."""
_OPEN_FILES, _PENDING_SIGNALS = 64, 64


def take_descriptors(given: Sequence[int], gate: int) -> None:
    """Closes all but the four that are given, which become 0, 1, 2 and the channel, and the gate's."""
    for place, moved in enumerate([os.dup2(descriptor, 64 + place) for place, descriptor in enumerate((*given, gate))]):
        os.dup2(moved, place)
    os.closerange(_GATE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(private: str, limits: SandboxLimits, parent: int) -> None:
    """Confines this process to `private` and to its limits. `parent`: its end ends this process too.

    What the machine lacks is left out here: `isolation.py` finds it out by trial, and a run is refused."""
    linux = sys.platform == "linux"
    if linux:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    os.chdir(private)
    os.environ.update(HOME=private, TMPDIR=private)
    _limit(limits)
    if linux:
        drop_capabilities()
        if syscalls.landlock_version():
            syscalls.restrict_files(private)
    hand_over(seccomp.install() if seccomp.known() else -1, _GATE)


def _limit(limits: SandboxLimits) -> None:
    space = _address_space() + limits.memory
    wanted = {
        # The hard limit is the same: it sends SIGKILL, while the soft one's SIGXCPU could be caught.
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_AS: space,
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if linux_only := getattr(resource, "RLIMIT_SIGPENDING", None):
        wanted[linux_only] = _PENDING_SIGNALS  # all processes of the user share what there is
    if not seccomp.known():  # counts all processes of the user, so that this one can make none; root is exempt
        wanted[resource.RLIMIT_NPROC] = 0
    for kind, value in wanted.items():
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):  # a system that does not know it; the trial finds out
            continue


def _address_space() -> int:
    """Bytes that this process has mapped already; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
