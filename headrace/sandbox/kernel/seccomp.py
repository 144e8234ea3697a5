"""A seccomp filter: what code under test cannot ask the kernel for, whoever the user is. Linux on x86-64 and AArch64.

It takes away processes, sockets, signals to others, other processes' memory, mounts, owners and modes of files, and memory that no limit
counts. It is a list of what is refused rather than of what is allowed: the code may import any library, and a list of all calls that
those need would break with each version of the C library. Numbers: asm/unistd_64.h and asm-generic/unistd.h of Linux; the program's
format: seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

from headrace.sandbox.kernel.syscalls import no_new_privileges, system_call

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
"""Opcodes of classic BPF: load a word of the call's description, compare it, end (linux/bpf_common.h)."""
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _FIRST = 0, 4, 16
"""Offsets in `struct seccomp_data`: the call's number, the architecture, the lower half of the first argument."""
_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_PR_SET_PDEATHSIG = 1
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NONE = -1
REFUSED: dict[str, tuple[int, int]] = {
    # processes: a call that cannot make another has no children to outlive it, and its limits are those of all that it does
    "fork": (57, _NONE), "vfork": (58, _NONE), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "process_mrelease": (448, 448),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # the network: socketpair stays, which asyncio needs
    "socket": (41, 198),
    # what other filters do not see, and what outlives a process or is memory that no limit counts
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # names of files that change elsewhere, which Landlock lets anyone watch
    "inotify_init": (253, _NONE), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # owners, modes, times and attributes of files, and truncation by path: Landlock does not know them, or only newer ones do
    "chmod": (90, _NONE), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, _NONE),
    "fchown": (93, 55), "lchown": (94, _NONE), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, _NONE), "utimes": (235, _NONE), "utimensat": (280, 88), "futimesat": (261, _NONE),
    "truncate": (76, 45),
}  # fmt: skip
"""The calls that are refused with EPERM: their numbers on x86-64 and AArch64."""
SELF_ONLY = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261),
}  # fmt: skip
"""The calls whose first argument is a process: only the caller's own number is allowed (and 0 for prlimit64)."""
_CLONE, _CLONE3, _PRCTL, _PRLIMIT = (56, 220), (435, 435), (157, 167), SELF_ONLY["prlimit64"]


def known() -> bool:
    """Whether this machine has filters whose numbers are known here."""
    return sys.platform == "linux" and platform.machine() in _AUDIT


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)


def program(machine: str, pid: int) -> bytes:
    """Returns the filter for the process `pid`."""
    column = 0 if machine == "x86_64" else 1
    refuse, allow = _instruction(_RET, _ERRNO | errno.EPERM), _instruction(_RET, _ALLOW)
    code = [
        _instruction(_LD, _ARCH),
        _instruction(_JEQ, _AUDIT[machine], 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_JGE, _X32, 0, 1), refuse]
    for numbers in REFUSED.values():
        if numbers[column] != _NONE:
            code += [_instruction(_JEQ, numbers[column], 0, 1), refuse]
    # The C library falls back to clone, whose flags can be read here; those of clone3 are behind a pointer.
    code += [_instruction(_JEQ, _CLONE3[column], 0, 1), _instruction(_RET, _ERRNO | errno.ENOSYS)]
    first = _instruction(_LD, _FIRST)
    code += [_instruction(_JEQ, _CLONE[column], 0, 4), first, _instruction(_JSET, _CLONE_THREAD, 0, 1), allow, refuse]
    code += [
        _instruction(_JEQ, _PRCTL[column], 0, 4),
        first,
        _instruction(_JEQ, _PR_SET_PDEATHSIG, 1, 0),
        allow,
        refuse,
    ]
    for numbers in SELF_ONLY.values():
        zero = _instruction(_JEQ, 0 if numbers is _PRLIMIT else pid, 1, 0)
        code += [_instruction(_JEQ, numbers[column], 0, 5), first]
        code += [_instruction(_JEQ, pid, 2, 0), zero, refuse, allow]
    return b"".join([*code, allow])


def install() -> None:
    """Puts the filter on this process for good. Raises OSError if the kernel does not take it."""
    body = program(platform.machine(), os.getpid())
    buffer = ctypes.create_string_buffer(body, len(body))
    header = struct.pack("=HxxxxxxQ", len(body) // 8, ctypes.addressof(buffer))
    no_new_privileges()
    system_call(_SECCOMP[platform.machine()], 1, 0, header)  # SECCOMP_SET_MODE_FILTER
