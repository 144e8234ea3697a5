"""The filter as the kernel would read it, on both architectures: a small interpreter runs it on calls with arguments of all kinds."""

from __future__ import annotations

import errno
import functools
import re
import struct
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.episodes.sandbox.kernel import seccomp
from support.few import few

PID = 4242
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
OTHER_NAMES = {"newfstatat": "fstatat"}
"""In the generic header."""
MACHINES = ("x86_64", "aarch64")
LISTED = sorted({
    value for call in seccomp.checked(PID).values() for words in call.alternatives for word in words for value in word.values
})  # fmt: skip
WORDS = (
    st.sampled_from(LISTED)
    | st.tuples(st.sampled_from(LISTED), st.integers(0, 63)).map(lambda one: one[0] ^ 1 << one[1])
    | st.integers(0, (1 << 64) - 1)
)
ARGUMENTS = st.lists(WORDS, min_size=6, max_size=6)


def verdict(program: bytes, number: int, arguments: list[int], arch: int) -> int:
    """Runs classic BPF, and returns the action."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments)
    at, a = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        match code:
            case 0x20:
                (a,) = struct.unpack_from("=I", data, value)
            case 0x54:
                a &= value
            case 0x05:
                at += value
            case 0x15:
                at += yes if a == value else no
            case 0x25:
                at += yes if a > value else no
            case 0x06:
                return value
            case _:
                raise AssertionError(f"opcode {code:#x}")


@functools.cache
def program_for(machine: str) -> bytes:
    return seccomp.program(machine, PID, asks=False)


def allowed(machine: str, number: int, *arguments: int) -> bool:
    given = [*arguments, *[0] * (6 - len(arguments))]
    return verdict(program_for(machine), number, given, seccomp._AUDIT[machine]) == seccomp._ALLOW


def number(machine: str, name: str) -> int:
    numbers = seccomp.ALLOWED.get(name) or seccomp.checked(PID)[name].numbers
    return numbers[MACHINES.index(machine)]


def listed(machine: str) -> set[int]:
    every = [*seccomp.ALLOWED.values(), *(one.numbers for one in seccomp.checked(PID).values())]
    return {numbers[MACHINES.index(machine)] for numbers in every}


@pytest.mark.parametrize("machine", MACHINES)
@given(call=st.integers(0, 700) | st.integers(0, (1 << 32) - 1), arguments=ARGUMENTS)
@example(call=0x40000000 + 57, arguments=[0] * 6)
@example(call=435, arguments=[0x3D0F00, 0, 0, 0, 0, 0])
def test_a_call_that_is_not_listed_is_refused(machine, call, arguments):
    program = program_for(machine)
    action = verdict(program, call, arguments, seccomp._AUDIT[machine])
    if call not in listed(machine):
        newer = call > seccomp._LAST or call == 435
        assert action == seccomp._ERRNO | (errno.ENOSYS if newer else errno.EPERM)
    assert verdict(program, call, arguments, arch=0x40000003) == seccomp._KILL  # 32 bits


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", few([*seccomp.checked(PID)], keep=5))
@given(arguments=ARGUMENTS)
def test_a_call_is_allowed_only_with_the_arguments_that_are_listed(machine, name, arguments):
    """The words are compared here, one after the other, with what the program does of them."""
    call = seccomp.checked(PID)[name]
    data = b"\0" * 16 + struct.pack("=6Q", *arguments)
    fits = any(
        all(struct.unpack_from("=I", data, word.place)[0] & word.mask in word.values for word in words)
        for words in call.alternatives
    )
    if number(machine, name) >= 0:
        assert allowed(machine, number(machine, name), *arguments) == fits


STREAM, DGRAM, SEQPACKET, RAW = 1, 2, 5, 3
THREAD = 0x3D0F00
"""The flags of glibc's threads."""
USEFUL = [
    ("clone", THREAD), ("clone", 0x7D0F00), ("socketpair", 1, STREAM), ("socketpair", 1, STREAM | 0o2004000),
    ("sendto", 3, 1 << 33, 1, 0, 0, 0), ("fcntl", 1, 0), ("fcntl", 1, 1030, 3), ("fcntl", 1, 4, 0o4000), ("fcntl", 1, 6, 1 << 40),
    ("ioctl", 1, 0x5421), ("ioctl", 1, 0x5451), ("prctl", 15, 1 << 40), ("kill", PID, 9), ("tgkill", PID, 99, 9),
    ("prlimit64", 0, 7, 0, 1), ("prlimit64", PID, 7), ("futex", 1 << 40, 128), ("futex", 0, 9 | 256 | 128),
    ("madvise", 0, 0, 4), ("getsockopt", 3, 1, 4),
]  # fmt: skip
HARMFUL = [
    # processes, namespaces, threads of strange kinds
    ("clone", 17), ("clone", 0x4111), ("clone", THREAD & ~0x10000), ("clone", THREAD | 0x10000000),
    ("clone", THREAD | 0x20000000), ("clone", THREAD | 0x2000), ("clone", THREAD | 0x8000), ("clone", THREAD | 0x1000),
    # sockets of the machine
    *[("socketpair", family, kind) for family in (1, 2, 10, 16, 17, 40) for kind in (DGRAM, SEQPACKET, RAW, DGRAM | 0o2004000)],
    *[("socketpair", family, STREAM) for family in (0, 2, 10, 16, 30, 40)],
    ("sendto", 3, 0, 1, 0, 1 << 33, 110), ("sendto", 3, 0, 1, 0, 1, 110),
    ("getsockopt", 3, 1, 77), ("getsockopt", 3, 1, 17), ("getsockopt", 3, 6, 4), *[("setsockopt", 3, 1, option) for option in (15, 16, 26, 27, 32, 50, 51, 60, 76)],
    # signals by descriptors: owners and their signals, leases, notices of directories, larger pipes, seals
    *[("fcntl", 3, command) for command in (8, 9, 10, 11, 15, 16, 17, 1024, 1025, 1026, 1029, 1031, 1033, 1036)],
    ("fcntl", 3, 4, 0x2000), ("fcntl", 3, 4, 0x2800),
    *[("ioctl", 3, command) for command in (0x8901, 0x8902, 0x5452, 0x5412, 0x5410, 0x540E, 0x541C, 0x5402, 0x5420, 0x8946, 0xAA00)],
    *[("prctl", option) for option in (1, 4, 8, 14, 22, 26, 31, 33, 35, 36, 38, 53, 55, 59, 62, 0x59616D61)],
    # others
    *[(name, other) for name in ("kill", "tkill", "tgkill") for other in (0, 1, PID + 1, (1 << 64) - 1, (1 << 32) - PID)],
    ("prlimit64", 1), ("prlimit64", PID + 1),
    *[("futex", 0, operation) for operation in (6, 7, 8, 11, 12, 13, 6 | 128, 11 | 128 | 256)],
    *[("madvise", 0, 0, advice) for advice in (9, 10, 12, 20, 21, 25, 100, 101)],
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_of_ordinary_programs_are_allowed_and_those_of_attacks_are_not(machine):
    assert [one for one in USEFUL if not allowed(machine, number(machine, one[0]), *one[1:])] == []
    assert [one for one in HARMFUL if allowed(machine, number(machine, one[0]), *one[1:])] == []


def test_the_arguments_of_the_x86_call_are_checked_too():
    call = number("x86_64", "arch_prctl")
    assert (
        allowed("x86_64", call, 0x1023) and not allowed("x86_64", call, 0x1012) and not allowed("x86_64", call, 0x5001)
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_a_new_thread_is_a_request_where_there_is_a_listener(machine):
    program, call = seccomp.program(machine, PID, asks=True), number(machine, "clone")
    assert verdict(program, call, [THREAD, 0, 0, 0, 0, 0], seccomp._AUDIT[machine]) == seccomp._ASK
    assert verdict(program, call, [17, 0, 0, 0, 0, 0], seccomp._AUDIT[machine]) == seccomp._ERRNO | errno.EPERM
    assert len(program) // 8 <= 4096  # BPF_MAXINSNS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip("the headers of Linux are not installed")
    found = {
        name: int(value)
        for name, value in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    }
    for name in [*seccomp.ALLOWED, *seccomp.checked(PID)]:
        if number(machine, name) >= 0:
            assert found.get(name, found.get(OTHER_NAMES.get(name, ""))) == number(machine, name), name
