"""Linux's system calls without a wrapper in Python 3.11, and what isolates by them: Landlock and namespaces. Nothing here is called on another system."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


# --- Landlock: files (landlock(7), Linux 5.13 and later) --------------------------------------------------------------


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
def landlock_version() -> int:
    """Returns the version of the kernel's interface; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return system_call(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict_files(private: str) -> None:
    """Leaves this process the files that Python needs, and `private`. Raises OSError if the kernel refuses."""
    handled = _RIGHTS[max(known for known in _RIGHTS if known <= landlock_version())]
    nets, scopes = (_TCP if landlock_version() >= 4 else 0), (_SCOPES if landlock_version() >= 6 else 0)
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


# --- Namespaces: a private directory of limited size, and no network --------------------------------------------------


_USER, _MOUNT, _NET, _IPC = 0x10000000, 0x00020000, 0x40000000, 0x08000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_NO_SUID, _NO_DEVICES, _NO_EXECUTION = 2, 4, 8


def enter_namespaces(trial: str) -> bool:
    """Returns whether this process now has namespaces of its own and may mount a directory at `trial`. It has one thread."""
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    try:
        unshare(_USER | _MOUNT | _NET | _IPC)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        mount(None, "/", _PRIVATE | _RECURSIVE)
        mount_private(trial, 1 << 20, 16)
        unmount(trial)
    except OSError:
        return False
    return True


def mount_private(target: str, size: int, files: int) -> None:
    """Mounts an empty directory in memory that holds `size` bytes and `files` files at most."""
    mount(b"tmpfs", target, _NO_SUID | _NO_DEVICES | _NO_EXECUTION, f"size={size},nr_inodes={files + 1},mode=700")
