"""`python -m headrace.testing.faultsim.fuzz`: runs schedules of fresh seeds for as long as you like, and shrinks what fails.

--minutes 60            fresh seeds, one process
--first 0 --count 500   these seeds
--case '{"seed": ...}'  one case again, in the form in which it was printed
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.core.printing import echo
from headrace.core.types import Struct
from headrace.testing.faultsim.case import Case, case_of
from headrace.testing.faultsim.lives import trial

TRIES = 300
"""Trials that shrinking may take."""


class FailingCase(Struct, frozen=True):
    """A case that breaks a contract."""

    case: Case
    problem: str

    @property
    def command(self) -> str:
        return f"python -m headrace.testing.faultsim.fuzz --case '{msgspec.json.encode(self.case).decode()}'"


def problem_of(case: Case) -> str:
    """Runs a case and returns the problem; empty if every contract held."""
    try:
        trial(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(case: Case, problem: str, tries: int = TRIES) -> FailingCase:
    """Returns a simpler case with a problem of the same kind: fewer faults, steps, groups; simpler settings; earlier faults."""
    found, kind = FailingCase(case, problem), _kind(problem)
    while tries > 0:
        for simpler in _simpler(found.case):
            tries -= 1
            again = problem_of(simpler)
            if _kind(again) == kind:
                found = FailingCase(simpler, again)
                break
            if tries <= 0:
                return found
        else:
            return found
    return found


def _kind(problem: str) -> str:
    """Returns the class of the error and the contract."""
    return ":".join(problem.split(":")[:2])[:60] if problem.startswith("AssertionError: C") else problem.split(":")[0]


def _simpler(case: Case) -> Iterator[Case]:
    faults = case.faults
    for i in range(len(faults)):
        yield _with(case, faults=faults[:i] + faults[i + 1 :])
    plainer: list[dict[str, Any]] = [
        {"curriculum": "uniform"}, {"grows": False}, {"shared": ""}, {"mode": "inflight"}, {"overdue": "wait", "stored": 0}, {"order": "stalest"}, {"window": 1}, {"evaluate_every": 0},
        {"skips": False}, {"alternatives": 0}, {"alternatives": 0, "turns": 1}, {"group_size": 2}, {"checkpoint_every": 0}, {"max_lag": case.max_lag - 1, "window": 1},
        {"groups": case.groups - 1, "window": 1}, {"steps": case.steps // 2}, {"steps": case.steps - 1},
    ]  # fmt: skip
    for change in plainer:
        simpler = _with(case, **change)
        if simpler != case and min(simpler.groups, simpler.steps) > 0 and simpler.max_lag >= 0:
            yield simpler
    for i, fault in enumerate(faults):
        for earlier in (_with(fault, at=fault.at // 2), _with(fault, at=fault.at - 1), _with(fault, share=0.0)):
            if earlier != fault and earlier.at >= 0:
                yield _with(case, faults=(*faults[:i], earlier, *faults[i + 1 :]))


def _in_turns(case: Case) -> Case:
    """Gives a quarter of the cases several turns, and half of these forks."""
    if case.seed % 8 == 3:
        return _with(case, turns=2)
    return _with(case, turns=3, resumes="exported", alternatives=1 + case.seed % 3) if case.seed % 8 == 7 else case


def _with(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def fuzz(first: int, count: float, seconds: float) -> list[FailingCase]:
    """Runs schedules and prints each failing one at once."""
    began, seed, findings = time.monotonic(), first, []
    while seed - first < count and time.monotonic() - began < seconds:
        case = _in_turns(case_of(seed))
        if problem := problem_of(case):
            finding = shrunk(case, problem)
            findings.append(finding)
            echo(f"seed {seed}: {problem}\n  shrunk: {finding.problem}\n  {finding.command}")
        seed += 1
    echo(f"{seed - first} schedules from seed {first} on in {time.monotonic() - began:.0f} s: {len(findings)} problems")
    return findings


def _report_unraisable(hook_args: sys.UnraisableHookArgs) -> None:
    """Leaves out what a simulated kill leaves: coroutines whose clean-up fails when they are collected, since their loop is closed."""
    if "Event loop is closed" not in str(hook_args.exc_value):
        sys.__unraisablehook__(hook_args)


def main() -> int:
    sys.unraisablehook = _report_unraisable
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, help="the first seed; taken from the clock if not given")
    parser.add_argument("--count", type=float, default=float("inf"))
    parser.add_argument("--case", help="JSON")
    options = parser.parse_args()
    if options.case:
        trial(msgspec.json.decode(options.case, type=Case))
        echo("every contract held")
        return 0
    first = int(time.time()) * 1000 if options.first is None else options.first
    return 1 if fuzz(first, options.count, options.minutes * 60) else 0


if __name__ == "__main__":
    sys.exit(main())
