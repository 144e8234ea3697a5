"""Reward functions that come with headrace."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.episodes.sandbox.sandbox import Sandbox, SandboxLost, SandboxResult
from headrace.episodes.scoring.job import fail_raised
from headrace.settings.extras import absent


@cache
def _verifier(family: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(family)


def load_reasoning_gym() -> Callable[..., Any]:
    try:
        import reasoning_gym  # noqa: F401  at start, so that the first group does not wait for it
    except ImportError as error:
        asked = "the reward reasoning_gym"
        raise ConfigError(absent(asked, "reasoning-gym", "reasoning_gym", error, "tasks")) from None
    return reasoning_gym_reward


def reasoning_gym_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    answer: Sequence[Any],
    entry: Sequence[str | None] = (),
) -> list[float | Failure]:
    """Applies each family's own verifier (0 to 1) to the completion without surrounding white space.

    If a verifier raises, only that completion fails: it is not known to be wrong.
    """
    literals = entry or [None] * len(completions)
    rows = zip(prompts, completions, metadata, answer, literals, strict=True)
    return [
        _score(completion.strip(), _entry(prompt, meta, right, literal))
        for prompt, completion, meta, right, literal in rows
    ]


def _entry(prompt: str, metadata: dict[str, Any], answer: Any, literal: str | None) -> dict[str, Any]:
    return ast.literal_eval(literal) if literal else {"question": prompt, "answer": answer, "metadata": metadata}


def _score(completion: str, entry: dict[str, Any]) -> float | Failure:
    try:
        return float(_verifier(entry["metadata"]["source_dataset"])(answer=completion, entry=entry))
    except Exception as error:
        return fail_raised(error)


# --- The rewards `unit_tests` and `unit_tests_all`
# A completion is a program, and the row has its tests.


SLOW = ("cpu", "time")
"""Reasons for which the other tests of the completion are not run: a group has one deadline."""


class UnitTest(NamedTuple):
    """One test of a row."""

    code: str
    """Assert statements; empty for a program that is compared by what it prints."""
    stdin: str = ""
    stdout: str = ""


class BadTests(Exception):
    """Raised for a row whose tests cannot be read. The message says why."""


def read_tests(given: Any, setup: str) -> list[UnitTest]:
    """Reads the column `tests`: a text, or a list of texts, with assert statements (as MBPP's `test_list`); or pairs of standard input and
    output, as {"inputs": [...], "outputs": [...]} (APPS, TACO) or [{"input": ..., "output": ...}, ...], either of them perhaps as JSON.
    `setup` stands before each text. Raises BadTests."""
    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):
        try:
            given = json.loads(given)
        except ValueError:
            raise BadTests("the column tests begins like JSON and is none") from None
    match given:
        case str() if given.strip():
            return [UnitTest(f"{setup}\n{given}")]
        case {"inputs": list(inputs), "outputs": list(outputs)} if inputs and len(inputs) == len(outputs):
            return [_pair(*pair) for pair in zip(inputs, outputs, strict=True)]
        case list() if given and all(isinstance(test, str) and test.strip() for test in given):
            return [UnitTest(f"{setup}\n{test}") for test in given]
        case list() if given and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in given):
            return [_pair(test["input"], test["output"]) for test in given]
    raise BadTests(
        "the column tests is neither a list of texts with assert statements, nor {inputs, outputs} of equal length, nor a list of "
        f"{{input, output}}: {given!r:.80}"
    )


def _pair(stdin: Any, stdout: Any) -> UnitTest:
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise BadTests("the inputs and outputs of the column tests are not all texts")
    return UnitTest("", stdin, stdout)


def load_unit_tests(*, whole: bool) -> Callable[..., Any]:
    """Returns the reward. `whole`: 1 if all tests pass and else 0; otherwise the share of tests that pass."""
    from headrace.episodes.sandbox import (
        tool,  # here: its import says that this process runs code (`sandbox/sandbox_limits.py`)
    )

    def unit_tests(
        completions: Sequence[str],
        tests: Sequence[Any],
        test_setup: Sequence[str] = (),
        entry_point: Sequence[str] = (),
    ) -> list[float | Failure]:
        setups, points = test_setup or [""] * len(completions), entry_point or [""] * len(completions)
        rows = zip(completions, tests, setups, points, strict=True)
        sandbox = tool.sandbox_of_this_process("the reward unit_tests")
        return [
            _score_tests(sandbox, code, given, setup or "", point or "", whole=whole)
            for code, given, setup, point in rows
        ]

    return unit_tests


def _score_tests(
    sandbox: Sandbox, code: str, given: Any, setup: str, entry_point: str, *, whole: bool
) -> float | Failure:
    try:
        tests = read_tests(given, setup)
    except BadTests as error:
        return Failure("tests_unreadable", str(error))
    if not code.strip():
        return 0.0
    passed, first = 0, ""
    for number, test in enumerate(tests, 1):
        try:
            result = _run(sandbox, code, test, entry_point)
        except SandboxLost as error:
            return Failure("sandbox_died", str(error))
        if result.reason == "unsupported":
            return Failure("tests_unsupported", f"test {number}: {result.detail}")
        passed += not result.reason
        if result.reason and not first:
            first = f"; test {number}: {result.reason}: {' '.join(result.detail.split())}"
        if result.reason and (whole or result.reason in SLOW):
            break
    echo(f"unit_tests: {passed} of {len(tests)} passed{first}", err=True)
    return float(passed == len(tests)) if whole else passed / len(tests)


def _run(sandbox: Sandbox, code: str, test: UnitTest, entry_point: str) -> SandboxResult:
    if test.code:
        return sandbox.test(code, test.code, entry_point)
    result = sandbox.run(code, test.stdin)
    if result.reason or _words(result.out) == _words(test.stdout):
        return result
    return SandboxResult("failed", f"it printed {result.out!r:.100}", result.out, result.err, result.cpu_seconds)


def _words(text: str) -> list[list[str]]:
    """The lines without white space at their ends or between words, and without empty lines at the end."""
    return [line.split() for line in text.rstrip().splitlines()]
