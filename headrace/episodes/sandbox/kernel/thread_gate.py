"""Counts the threads of a confined process at each new one, which waits meanwhile: the filter asks (seccomp_unotify(2)).

It needs no privileges and no control group, and holds for root too, to whom RLIMIT_NPROC does not apply. That limit also counts all other
processes of the user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND (linux/seccomp.h)."""
_REQUEST_SIZE = 80
_ANSWER = struct.Struct("=QqiI")
"""`struct seccomp_notif_resp`: the request's number, a value, an error, flags."""
_CONTINUE = 1


class ThreadGate:
    """The gate of one process. `channel` is for that process, which hands over the listener of its filter by `hand_over`."""

    def __init__(self, most: int) -> None:
        """`most`: threads that it may have when it asks for another. Those that ask at once may all get one."""
        self._most, self._pid = most, 0
        self._watched: socket.socket | int
        self._watched, self.channel = socket.socketpair()

    def watch(self, pid: int) -> None:
        """The process was forked."""
        self._pid = pid
        self.channel.close()

    def fileno(self) -> int:
        """The descriptor at which something is to be done. It changes."""
        return self._watched if isinstance(self._watched, int) else self._watched.fileno()

    def turn(self) -> bool:
        """Does what there is to do. Returns whether more may come."""
        if isinstance(self._watched, int):
            return self._answer(self._watched)
        with self._watched as ours:
            _, listener, _, _ = socket.recv_fds(ours, 1, 1)
        self._watched = listener[0] if listener else -1
        return bool(listener)

    def close(self) -> None:
        if not isinstance(self._watched, int):
            self._watched.close()
        elif self._watched >= 0:
            os.close(self._watched)

    def _answer(self, listener: int) -> bool:
        request = bytearray(_REQUEST_SIZE)
        try:
            fcntl.ioctl(listener, _RECEIVE, request)
        except OSError as error:
            return error.errno == errno.ENOENT  # the thread that asked has been killed; otherwise all have
        (number,) = struct.unpack_from("=Q", request)
        refused = _ANSWER.pack(number, 0, -errno.EAGAIN, 0)
        with contextlib.suppress(OSError):
            if self._threads() < self._most:
                try:
                    fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, 0, _CONTINUE))
                    return True
                except OSError as error:
                    if error.errno != errno.EINVAL:  # Linux before 5.5
                        return True
            fcntl.ioctl(listener, _SEND, refused)
        return True

    def _threads(self) -> int:
        try:
            return int(Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[17])
        except (OSError, ValueError, IndexError):
            return self._most


def hand_over(listener: int, channel: int) -> None:
    """Gives the listener away and closes both, before any code runs that could answer itself. `listener`: -1 if there is none."""
    with socket.socket(fileno=channel) as ours:
        if listener >= 0:
            socket.send_fds(ours, [b"\0"], [listener])
            os.close(listener)
