"""Namespaces of Linux: a private directory whose size and number of files the kernel limits, and a network without devices.

The process that makes calls enters them once, as the root of a user namespace of its own, which needs no privileges where the kernel
allows it. Containers often do not, and Ubuntu since 24.04 does not without a profile. Then the private directory is one of the disk, and
is watched (`../private_directory.py`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.episodes.sandbox.kernel.syscalls import mount, unmount, unshare

_USER, _MOUNT, _NET, _IPC = 0x10000000, 0x00020000, 0x40000000, 0x08000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_NO_SUID, _NO_DEVICES, _NO_EXECUTION = 2, 4, 8


def enter(trial: str) -> bool:
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
