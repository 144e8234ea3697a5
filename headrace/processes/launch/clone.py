"""A fork whose child belongs to the caller's parent: `clone(CLONE_PARENT)` of Linux.

`os.fork` would make the child a child of the process that forks. Its exit status, and the signal that Linux sends when a parent ends
(`processes/health/orphans.py`), would then depend on that process: killing it would end all workers. With CLONE_PARENT the worker is
a child of the controller, exactly as if the controller had started it.

Python and glibc have no function for it, so the system call is made directly, between Python's own hooks. The hooks of `pthread_atfork`
do not run: they repair locks and thread pools, and a process with a single thread has none to repair.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40

_CALLS = {"x86_64": (56, 3), "aarch64": (220, 4)}
"""The number of the system call, and the position of its argument `child_tid` after the flags (clone(2), C library/kernel differences)."""


def can_fork_for_parent() -> bool:
    """Returns whether this system has the call, and pidfds, which the controller waits with."""
    return sys.platform == "linux" and platform.machine() in _CALLS and hasattr(os, "pidfd_open")


def fork_for_parent() -> int:
    """Returns the child's process id, and 0 in the child. The caller has a single thread. Raises OSError."""
    number, position = _CALLS[platform.machine()]
    python = ctypes.pythonapi
    libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the child needs it
    libc.syscall.restype = ctypes.c_long
    libc.syscall.argtypes = [ctypes.c_long] * 6
    arguments = [number, _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD, 0, 0, 0, 0]
    arguments[1 + position] = _address_of_tid(libc)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(*arguments))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    return pid


def _address_of_tid(libc: ctypes.PyDLL) -> int:
    """Returns the place where glibc keeps the id of this thread. The kernel writes the child's there; with the parent's, calls such as
    `pthread_setaffinity_np` would reach the wrong process. Raises OSError on kernels that do not say."""
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) or not address.value:
        raise OSError(error := ctypes.get_errno(), f"the address of the thread's id is unknown: {os.strerror(error)}")
    if ctypes.c_int.from_address(address.value).value != os.getpid():
        raise OSError(0, "the address of the thread's id is wrong")
    return address.value
