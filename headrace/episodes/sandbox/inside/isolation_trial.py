"""The program of a trial (`../isolation.py`): attempts what code of a model must not be able to do, and prints what it could, a list for each kind.

It is run in the sandbox as a text, as such code is, and imports nothing of headrace. Standard input has `Targets`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import TypedDict


class Targets(TypedDict):
    """The things that it attacks, which belong to the process that makes the trial, and the limits that it must meet."""

    outside: str
    """A file."""
    inbox: str
    """A socket that receives datagrams."""
    victim: int
    """A process."""
    memory: int
    """Bytes beyond the limit."""
    threads: int
    cpu_seconds: int


_MODE, _TIMES = 0o600, (0, 0)
_STACK = 1 << 17
"""Bytes of a thread's stack, so that the limit of memory is not met first."""


def ways(given: Targets) -> dict[str, dict[str, Callable[[], object]]]:
    """Returns for each kind of isolation what must not be possible. Each raises OSError, MemoryError or ValueError if it is not, or returns False."""
    return {
        "network": {
            "open connections": _connect,
            "send to sockets of other processes": lambda: _send(given["inbox"]),
        },
        "filesystem": {
            "read files of the user": lambda: os.open(given["outside"], os.O_RDONLY),
            "write to them": lambda: os.open(given["outside"], os.O_WRONLY),
            "shorten them": lambda: os.truncate(given["outside"], 0),
            "change their modes and times": lambda: _change(given["outside"]),
        },
        "processes": {
            "start processes": _start,
            "send signals to others": lambda: os.kill(given["victim"], 0),
            "have signals sent to others": lambda: _own(given["victim"]),
            "hold others by a descriptor": lambda: os.pidfd_open(given["victim"]),
            "read the memory of others": lambda: _read_memory(given["victim"]),
        },
        "threads": {"start any number of threads": lambda: _threads(2 * given["threads"] + 8)},
        "memory": {
            "use memory without a limit": lambda: bytearray(given["memory"]),
            "use memory that no limit counts": lambda: os.memfd_create("trial"),
        },
        "cpu": {"compute without a limit": lambda: _compute(given["cpu_seconds"])},
    }


def _connect() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())


def _send(inbox: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"x", inbox)
    except OSError:
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
            with end:
                end.sendto(b"x", inbox)


def _change(path: str) -> None:
    try:
        os.chmod(path, _MODE)
    except OSError:
        os.utime(path, _TIMES)


def _start() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _own(victim: int) -> None:
    """The kernel would send the victim any signal when the pipe can be read."""
    reading, _ = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, victim)


def _read_memory(victim: int) -> bool:
    """Only the address is wrong where it is allowed."""
    room = ctypes.create_string_buffer(8)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(room), 8)
    there = (ctypes.c_size_t * 2)(8, 8)
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    return call(victim, *(here, 1), *(there, 1), 0) >= 0 or ctypes.get_errno() == errno.EFAULT


def _threads(count: int) -> bool:
    """Starts threads that wait until this process ends. Returns whether all could be started."""
    library = ctypes.CDLL(None)
    attributes, thread = ctypes.create_string_buffer(128), ctypes.c_size_t()
    library.pthread_attr_init(attributes)
    library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK))
    wait = ctypes.cast(library.pause, ctypes.c_void_p)
    return all(not library.pthread_create(ctypes.byref(thread), attributes, wait, None) for _ in range(count))


def _compute(limit: int) -> bool:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        return True
    resource.setrlimit(resource.RLIMIT_CPU, (hard + 1, hard + 1))
    return True


def could(work: Callable[[], object]) -> bool:
    try:
        return work() is not False
    except (OSError, MemoryError, ValueError, AttributeError):  # the last: this system has no such call
        return False


if __name__ == "__main__":
    given: Targets = json.load(sys.stdin)
    tried = ways(given)
    print(json.dumps({kind: [name for name, work in tried[kind].items() if could(work)] for kind in tried}))
    sys.stdout.flush()
    os._exit(0)
