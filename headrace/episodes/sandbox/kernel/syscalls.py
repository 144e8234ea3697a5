"""Linux's system calls without a wrapper in Python 3.11. Nothing here is called on another system."""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""

_c = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Integers are passed as 64 bits, bytes as a pointer to them. Raises OSError."""
    given = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    return checked(_c.syscall(ctypes.c_long(number), *given))


def end_with_parent(signum: int) -> None:
    checked(_c.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0))


def no_new_privileges() -> None:
    """No program that this process starts has more rights than it, set-user-id ones included. Filters need it (seccomp(2))."""
    checked(_c.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITIES, 0)
    checked(_c.capset(header, struct.pack("=6I", *[0] * 6)))


def unshare(flags: int) -> None:
    checked(_c.unshare(flags))


def mount(kind: bytes | None, target: str, flags: int, data: str = "") -> None:
    checked(_c.mount(kind or b"none", os.fsencode(target), kind, ctypes.c_ulong(flags), data.encode() or None))


def unmount(target: str) -> None:
    """The files vanish when the last process that uses one has ended."""
    checked(_c.umount2(os.fsencode(target), 2))  # MNT_DETACH
