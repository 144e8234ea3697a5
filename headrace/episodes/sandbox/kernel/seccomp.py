"""A seccomp filter: what code under test may ask the kernel for, whoever the user is. Linux on x86-64 and AArch64.

It is a list of what is allowed. Everything else is refused: processes, sockets, signals to others, their memory, mounts, owners and modes of
files, memory that no limit counts, and whatever Linux learns later. Where a call does many things (`fcntl`, `ioctl`, `prctl`), what it may do
is listed too. What Python, its standard library and numeric packages ask for is here; `tests/attacks` has both sides. Numbers:
asm/unistd_64.h and asm-generic/unistd.h of Linux; the program's format: seccomp(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from headrace.episodes.sandbox.kernel.syscalls import no_new_privileges, system_call

_LD, _AND, _JA, _JEQ, _JGT, _RET = 0x20, 0x54, 0x05, 0x15, 0x25, 0x06
"""Opcodes of classic BPF: load a word of the call's description, mask it, jump, compare it, end (linux/bpf_common.h)."""
_ALLOW, _ERRNO, _KILL, _ASK = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
"""SECCOMP_RET_*; the last asks whoever holds the listener of the filter."""
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`: the call's number, the architecture, the first of six arguments of 64 bits."""
_LISTENER = 1 << 3
"""SECCOMP_FILTER_FLAG_NEW_LISTENER (Linux 5.0, used from 5.5)."""
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LAST = 469
"""file_setattr, the last call of Linux 6.17. What comes later does not exist for the code, so that libraries use what they used before."""

_NONE = -1
ALLOWED: dict[str, tuple[int, int]] = {
    # reading and writing what is open
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, _NONE),
    "dup3": (292, 24), "pipe": (22, _NONE), "pipe2": (293, 59), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83), "fadvise64": (221, 223),
    "fstat": (5, 80), "fstatfs": (138, 44), "getdents": (78, _NONE), "getdents64": (217, 61), "fchdir": (81, 50),
    # files by their names, which Landlock decides on
    "open": (2, _NONE), "openat": (257, 56), "openat2": (437, 437), "creat": (85, _NONE), "access": (21, _NONE),
    "faccessat": (269, 48), "faccessat2": (439, 439), "stat": (4, _NONE), "lstat": (6, _NONE),
    "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "readlink": (89, _NONE),
    "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "mkdir": (83, _NONE), "mkdirat": (258, 34),
    "rmdir": (84, _NONE), "unlink": (87, _NONE), "unlinkat": (263, 35), "rename": (82, _NONE), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, _NONE), "linkat": (265, 37), "symlink": (88, _NONE), "symlinkat": (266, 36),
    "umask": (95, 166),
    # waiting
    "poll": (7, _NONE), "ppoll": (271, 73), "select": (23, _NONE), "pselect6": (270, 72),
    "epoll_create": (213, _NONE), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, _NONE),
    "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "eventfd": (284, _NONE), "eventfd2": (290, 19),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "pause": (34, _NONE), "alarm": (37, _NONE), "setitimer": (38, 103),
    "getitimer": (36, 102), "restart_syscall": (219, 128),
    # the two ends of a socketpair
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "msync": (26, 227),
    # signals of its own, threads of its own
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "signalfd": (282, _NONE),
    "signalfd4": (289, 74), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260),
    "waitid": (247, 95),
    # what there is to know
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, _NONE), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getrusage": (98, 165), "times": (100, 153), "time": (201, _NONE),
    "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114), "getcpu": (309, 168),
    "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278),
}  # fmt: skip
"""The calls that are allowed whatever their arguments are: their numbers on x86-64 and AArch64."""


class Word(NamedTuple):
    """The values that a word of 32 bits of an argument may have."""

    place: int
    """Offset in `struct seccomp_data`."""
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    """The bits that are compared."""


class Checked(NamedTuple):
    """A call that is allowed if all words of one alternative are as they must be."""

    numbers: tuple[int, int]
    alternatives: tuple[tuple[Word, ...], ...]


def _word(argument: int, values: tuple[int, ...], *, mask: int = 0xFFFFFFFF, upper: bool = False) -> Word:
    """`argument`: counted from 0. The kernel reads the lower half of an integer; a pointer has an upper half too."""
    return Word(_ARGUMENTS + 8 * argument + 4 * upper, values, mask)


_THREAD, _OF_THREADS = 0x00010000, 0x007D0F00
"""CLONE_THREAD, and the flags of the C libraries' threads (glibc, and CLONE_DETACHED for musl). No others, such as namespaces."""
_SOL_SOCKET, _STREAM = 1, 1
_CLONE = (56, 220)


def checked(pid: int) -> dict[str, Checked]:
    """Returns the calls that are allowed with some arguments, for the process `pid`."""
    return {
        # waiting and waking, with or without a clock; not the locks that lend priorities
        "futex": Checked((202, 98), ((_word(1, (0, 1, 3, 4, 5, 9, 10), mask=~(128 | 256)),),)),
        # MADV_NORMAL to FREE, HUGEPAGE to DODUMP, POPULATE_*, GUARD_*: what malloc advises. None throws out pages that others use
        "madvise": Checked((28, 233), ((_word(2, (0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 18, 22, 23, 102, 103)),),)),
        # copies, flags, locks of ranges, the size of a pipe; neither owners, signals, leases and notices nor larger pipes. F_SETFL without O_ASYNC
        "fcntl": Checked(
            (72, 25),
            ((_word(1, (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032)),), (_word(1, (4,)), _word(2, (0,), mask=0x2000))),
        ),
        # FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, whether it is a terminal (TCGETS, TCGETS2, TIOCGWINSZ), FICLONE
        "ioctl": Checked(
            (16, 29), ((_word(1, (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x802C542A, 0x5413, 0x40049409)),),)
        ),
        # names of threads and of mappings, the slack of timers
        "prctl": Checked((157, 167), ((_word(0, (3, 15, 16, 29, 30, 39, 0x53564D41)),),)),
        # the segment registers, and the state of AMX, which matrix libraries ask for
        "arch_prctl": Checked((158, _NONE), ((_word(0, (0x1001, 0x1002, 0x1003, 0x1004, 0x1021, 0x1022, 0x1023)),),)),
        # threads
        "clone": Checked(_CLONE, ((_word(0, (0,), mask=~_OF_THREADS), _word(0, (_THREAD,), mask=_THREAD)),)),
        # asyncio needs a pair of streams. One end of a pair of datagrams could send to every socket of the machine that has a name
        "socketpair": Checked((53, 199), ((_word(0, (1,)), _word(1, (_STREAM,), mask=~0o2004000)),)),
        "sendto": Checked((44, 206), ((_word(4, (0,)), _word(4, (0,), upper=True)),)),
        # what a socket is, its error, its buffers, its time limits, SO_LINGER; neither filters nor handles of the process at its other end
        "getsockopt": Checked((55, 209), ((_word(1, (_SOL_SOCKET,)), _word(2, (3, 4, 7, 8, 13, 20, 21, 30, 38, 39))),)),
        "setsockopt": Checked((54, 208), ((_word(1, (_SOL_SOCKET,)), _word(2, (7, 8, 13, 20, 21))),)),
        # itself
        "kill": Checked((62, 129), ((_word(0, (pid,)),),)),
        "tkill": Checked((200, 130), ((_word(0, (pid,)),),)),
        "tgkill": Checked((234, 131), ((_word(0, (pid,)),),)),
        "prlimit64": Checked((302, 261), ((_word(0, (0, pid)),),)),
    }


_CLONE3 = (435, 435)


def known() -> bool:
    """Whether this machine has filters whose numbers are known here."""
    return sys.platform == "linux" and platform.machine() in _AUDIT


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)


_PERMIT = _instruction(_RET, _ALLOW)


def _if(number: int, then: list[bytes]) -> list[bytes]:
    """`then` ends in each of its ways. Expects the number to be loaded."""
    return [_instruction(_JEQ, number, 1, 0), _instruction(_JA, len(then)), *then]


def _if_all(words: tuple[Word, ...], then: bytes) -> list[bytes]:
    """Goes on behind itself if a word is another."""
    code = [then]
    for word in reversed(words):
        compared = [_instruction(_JEQ, value, len(word.values) - place, 0) for place, value in enumerate(word.values)]
        code = [
            _instruction(_LD, word.place), _instruction(_AND, word.mask), *compared, _instruction(_JA, len(code)), *code
        ]  # fmt: skip
    return code


def program(machine: str, pid: int, *, asks: bool) -> bytes:
    """Returns the filter for the process `pid`. `asks`: whether each new thread is a request to the listener."""
    column = 0 if machine == "x86_64" else 1
    refuse, missing = _instruction(_RET, _ERRNO | errno.EPERM), _instruction(_RET, _ERRNO | errno.ENOSYS)
    code = [
        _instruction(_LD, _ARCH),
        _instruction(_JEQ, _AUDIT[machine], 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LD, _NUMBER),
    ]
    for numbers, alternatives in checked(pid).values():
        if numbers[column] != _NONE:
            then = _instruction(_RET, _ASK) if asks and numbers == _CLONE else _PERMIT
            tests = [test for words in alternatives for test in _if_all(words, then)]
            code += _if(numbers[column], [*tests, refuse])
    for number in (numbers[column] for numbers in ALLOWED.values() if numbers[column] != _NONE):
        code += [_instruction(_JEQ, number, 0, 1), _PERMIT]
    # The C library falls back to clone, whose flags can be read here; those of clone3 are behind a pointer.
    code += [_instruction(_JEQ, _CLONE3[column], 0, 1), missing]
    # Among the numbers beyond the last are those of x32 (bit 30), another way to ask for everything.
    code += [_instruction(_JGT, _LAST, 0, 1), missing]
    return b"".join([*code, refuse])


def install() -> int:
    """Puts the filter on this process for good. Returns the descriptor of its listener; -1 if the kernel gives none, and the threads are not
    limited then. Raises OSError if the kernel takes no filter."""
    no_new_privileges()
    try:
        return _install(_LISTENER)
    except OSError:  # before Linux 5.0, or a filter around this process has a listener already: there is one at most
        _install(0)
        return -1


def _install(flags: int) -> int:
    body = program(platform.machine(), os.getpid(), asks=bool(flags))
    buffer = ctypes.create_string_buffer(body, len(body))
    header = struct.pack("=HxxxxxxQ", len(body) // 8, ctypes.addressof(buffer))
    return system_call(_SECCOMP[platform.machine()], 1, flags, header)  # SECCOMP_SET_MODE_FILTER


# --- Threads: counted at each new one, which waits meanwhile, because the filter asks (seccomp_unotify(2))
#
# That needs no privileges and no control group, and holds for root too, to whom RLIMIT_NPROC does not apply. RLIMIT_NPROC also counts all other
# processes of the user.


_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND (linux/seccomp.h)."""
_REQUEST_SIZE = 80
_REPLY = struct.Struct("=QqiI")
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
        refused = _REPLY.pack(number, 0, -errno.EAGAIN, 0)
        with contextlib.suppress(OSError):
            if self._threads() < self._most:
                try:
                    fcntl.ioctl(listener, _SEND, _REPLY.pack(number, 0, 0, _CONTINUE))
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
