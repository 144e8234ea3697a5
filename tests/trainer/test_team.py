"""The team of threads behind the kernels (`native/src/team.h`), under `team_stress.cpp`: more threads than cores, threads that fall
asleep at work, teams that come and go."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.native.build import COMPILERS, SHARED

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
STRESS = Path(__file__).parent / "team_stress.cpp"
TEAM, BELL = SHARED / "team.h", SHARED / "bell.h"
NOT_ONCE, STUCK = 1, 2

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


def compiled(to: Path, *flags: str, headers: Path = SHARED) -> Path:
    program = to / "stress"
    command = [COMPILER, "-std=c++17", "-O2", "-pthread", *flags, f"-I{headers}", str(STRESS), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode and "cannot find" in result.stderr and any("sanitize" in flag for flag in flags):
        pytest.skip("this compiler came without its sanitizers")
    assert not result.returncode, result.stderr
    return program


def stressed(program: Path, threads: int, runs: int, patience: int = 120) -> subprocess.CompletedProcess[str]:
    """`patience`: turns of a hundredth of a second at least, in hundreds, without an item that is done."""
    return subprocess.run([program, *map(str, (threads, runs, patience))], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DHEADRACE_NO_FUTEX",)], ids=["futex", "without"])
def test_every_item_is_done_once_and_phases_keep_their_order(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = compiled(tmp_path, *flags)
    for threads in (1, 2, 3, 16):
        result = stressed(program, threads, 100)
        assert result.returncode == 0, (threads, result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DHEADRACE_NO_FUTEX",)], ids=["futex", "without"])
def test_thread_sanitizer_finds_no_race(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = stressed(compiled(tmp_path, "-g", "-fsanitize=thread", *flags), 7, 100)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("the sanitizer cannot run under this kernel")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "header, right, wrong, status",
    [
        pytest.param(BELL, "if (asleep > 0) wake(most);", "(void)most;", STUCK, id="nobody is woken"),
        pytest.param(
            BELL,
            "asleep++;  // then the number is read once more: a thread that changes it after that sees a sleeper\n"
            "        wait(seen);\n        asleep--;",
            "wait(seen);",
            STUCK,
            id="a sleeper does not say that it sleeps",
        ),
        pytest.param(TEAM, "if (me) bell.ring(size);", "", STUCK, id="the caller is not woken at the end"),
        pytest.param(
            TEAM,
            "std::memory_order_acq_rel) == (int)some) open_next",
            "std::memory_order_acq_rel) <= (int)some + 1) open_next",
            NOT_ONCE,
            id="a phase begins one item too early",
        ),
        pytest.param(TEAM, ": state + some;", ": state + 1;", NOT_ONCE, id="items are done twice"),
        pytest.param(TEAM, "1 + (phase.n - 1) / MOST", "1", STUCK, id="very many items are counted one by one"),
    ],
)
def test_a_mistake_is_found(tmp_path: Path, header: Path, right: str, wrong: str, status: int) -> None:
    for name in (TEAM, BELL):
        shutil.copy(name, tmp_path)
    text = header.read_text()
    assert text.count(right) == 1, f"{header.name} has moved away from this test"
    (tmp_path / header.name).write_text(text.replace(right, wrong))
    program = compiled(tmp_path, headers=tmp_path)
    codes = {stressed(program, threads, 100, patience=3).returncode for threads in (3, 16)}
    assert status in codes, codes
