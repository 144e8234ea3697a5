"""Landlock: a process gives up all files but some, for good. Linux 5.13 and later, without privileges (landlock(7)).

Read access is left to Python, its packages and the system's libraries; the private directory can be written. Nothing else can be opened:
no home, no directory of the run, no /proc. What Landlock does not cover: whether a path exists and what `stat` says about it.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from functools import cache

from headrace.episodes.sandbox.kernel.syscalls import no_new_privileges, system_call

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Version of the interface -> all rights to files that it knows."""
_TCP, _SCOPES = 0b11, 0b11
"""Rights since version 4: binding and connecting TCP sockets; scopes since version 6: abstract sockets of, and signals to, processes outside."""

SYSTEM = (
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@cache
def version() -> int:
    """Returns the version of the kernel's interface; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return system_call(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(private: str) -> None:
    """Leaves this process the files that Python needs, and `private`. Raises OSError if the kernel refuses."""
    handled = _RIGHTS[max(known for known in _RIGHTS if known <= version())]
    nets, scopes = (_TCP if version() >= 4 else 0), (_SCOPES if version() >= 6 else 0)
    ruleset = system_call(_CREATE, struct.pack("=QQQ", handled, nets, scopes), 24, 0)
    allowed = [(path, _READ | _LIST | _EXECUTE) for path in (*_python(), *SYSTEM)]
    allowed += [(path, _READ | _WRITE) for path in DEVICES]
    allowed += [(private, handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_FIFO | _MAKE_BLOCK | _DEVICE))]
    for path, rights in allowed:
        _allow(ruleset, path, rights & handled)
    no_new_privileges()
    system_call(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _python() -> Iterator[str]:
    """The interpreter, its library and its packages. Not the whole prefix, which may be a home or /usr, and no other directory that a
    package of the user has added to `sys.path`."""
    packages = ("/site-packages", "/dist-packages")
    kept = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)) or path.endswith(packages)]
    yield from dict.fromkeys([*kept, os.path.join(sys.base_prefix, "lib"), os.path.join(sys.prefix, "lib")])


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # this system has no such path
        return
    try:
        if not os.path.isdir(path):
            rights &= _READ | _WRITE | _EXECUTE | _TRUNCATE
        system_call(_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0)  # LANDLOCK_RULE_PATH_BENEATH
    finally:
        os.close(place)
